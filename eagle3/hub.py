"""Checks that a target can be where its name says: in an existing folder, or on a hub that can be reached. Takes a few
seconds at most, where the hub's client would retry for more than half a minute."""

import functools
from pathlib import Path

import httpx2

from eagle3.errors import UserError, in_one_line

CONNECT_SECONDS, ANSWER_SECONDS = 5.0, 20.0
DRAFT_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json"]


def require_folder(
    name: str,
    kind: str = "target",
    slashes: tuple[int, ...] = (0, 1),
    remedy: str = "name a checkpoint's folder or a hub id in model.target",
) -> None:
    """Raises UserError if the name is the path of a missing folder, or of a file.

    kind: what is named, for the message.
    slashes: how many a hub id of this kind may have; a name with another number is a path.
    """
    if Path(name).is_file():
        raise UserError(f"{kind} {name!r}: is a file; {remedy}")
    if (name.startswith(("/", ".", "~")) or name.count("/") not in slashes) and not Path(name).is_dir():
        raise UserError(f"{kind} {name!r}: no such folder; {remedy}")


def require_no_draft(name: str, values: dict) -> None:
    """Raises UserError if a target's config.json, with these values, is that of a draft."""
    if "draft_vocab_size" in values or "eagle" in str(values.get("architectures")).lower():
        raise UserError(
            f"target {name!r}: is a draft, not a target; name the model that it drafts for in model.target, and the "
            "draft in model.draft.init_from to train it further, or with --draft to judge it"
        )


def draft_folder(name: str) -> Path:
    """The folder of a draft: the one that is named, or a download from the hub into its cache. Raises UserError if
    there is neither."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download  # imported here, because it takes long
    from huggingface_hub.errors import HfHubHTTPError

    try:
        try:
            require_hub()
            offline = False
        except OSError:
            offline = True
        return Path(snapshot_download(name, allow_patterns=DRAFT_FILES, local_files_only=offline))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UserError(
            f"draft {name!r}: no such folder in {Path.cwd()}, and the hub does not give it ({in_one_line(error)}); "
            "check the name, the connection and your access to it"
        ) from error


@functools.cache
def require_hub() -> None:
    """Raises OSError if the hub, or the proxy that leads to it, does not answer."""
    from huggingface_hub import constants  # imported here, because it takes long and most commands need no hub

    if constants.HF_HUB_OFFLINE:
        return  # the hub's client reports this at once
    try:
        httpx2.head(constants.ENDPOINT, timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS))
    except httpx2.TransportError as error:
        raise ConnectionError(f"{constants.ENDPOINT} cannot be reached: {error}") from error
