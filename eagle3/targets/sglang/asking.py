"""Which SGLang is installed, requests to a running server, and the types of its answers. Imports nothing heavy."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions, version
from typing import Annotated, Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AliasPath, BeforeValidator, Field

from eagle3.errors import SharedUserError, UserError
from eagle3.servers import Answer, Count, Declined, ListOf, Name, NoAnswer, Typed, ask_once

# Tested by tests/*/test_sglang_*.py. Later releases may rename things that version.py uses.
SUPPORTED, TESTED = SpecifierSet(">=0.5.23,<0.5.24"), Version("0.5.23")
INSTALL = 'pip install -e ".[sglang]" -c constraints/cuda.txt'
# What SGLang answers for a few seconds if a request is repeated because its connection was lost.
DUPLICATE = "Duplicate request ID"
# The remedy for a server that does not answer, or captures something else.
START = "start it with the command that launchers/capture.py --print-server prints for this recipe"


def is_installed() -> bool:
    return any(distributions(name="sglang"))


def require_sglang(alternative: str, allow_untested: bool = False) -> None:
    """Raises UserError unless a supported SGLang is installed. alternative: advice for users who cannot install it."""
    if not is_installed():
        raise SharedUserError(f"SGLang is not installed: {INSTALL}, or {alternative}")
    require_supported(version("sglang"), "this environment", allow_untested)


def is_tested(version: str) -> bool:
    with suppress(InvalidVersion):
        return Version(version) in SUPPORTED
    return False


def require_supported(version: str, where: str, allow_untested: bool = False) -> None:
    """Raises UserError if this SGLang version is not supported. where: where it was found, for the message.
    allow_untested: whether a newer one will do."""
    newer = False
    with suppress(InvalidVersion):
        newer = Version(version) > TESTED
    if is_tested(version) or (newer and allow_untested):
        return
    remedy = f", or try this one with target.allow_untested=true ({INSTALL})" if newer else f", for example {INSTALL}"
    raise SharedUserError(
        f"{where}: SGLang {version}, but this project was tested with {SUPPORTED}; install one of those{remedy}"
    )


class Hook(Typed):
    """One of --forward-hooks."""

    name: str | None = None
    config: dict[str, Any] | None = None


class ServerInfo(Typed, extra="allow"):
    """An answer to /server_info: the settings. Those that are only compared may be of any type."""

    version: Name
    context_length: Count | None = None
    return_aux_hidden_state_layer_ids: ListOf[Count] | None = None
    forward_hooks: ListOf[Hook] | None = None
    # The words of its command line; if they are not known, a file named by --config may have set anything.
    launch_command: Annotated[list[str], BeforeValidator(lambda line: shlex.split(str(line or "--config")))] = [
        "--config"
    ]
    max_total_num_tokens: Count = 0  # room of the KV cache


class ModelInfo(Typed):
    """An answer to /model_info: what the server has loaded by now."""

    model_path: Name | None = None
    weight_version: Name | None = None


class Generated(Typed):
    """An answer to /generate."""

    tokens: ListOf[Count] = Field([], validation_alias="output_ids")  # including the token that stopped it
    ended_by: Name = Field(validation_alias=AliasPath("meta_info", "finish_reason", "type"))
    message: str | None = Field(None, validation_alias=AliasPath("meta_info", "finish_reason", "message"))
    prompt_tokens: Count | None = Field(None, validation_alias=AliasPath("meta_info", "prompt_tokens"))
    # histogram[a]: number of verifications that accepted `a` draft tokens, including any beyond the end of `tokens`
    histogram: Annotated[ListOf[Count], BeforeValidator(lambda counts: counts or [])] = Field(
        [], validation_alias=AliasPath("meta_info", "spec_correct_drafts_histogram")
    )
    # Log-probability, id and text of the tokens that were asked for, as the first new token; and of the likeliest.
    scores: ListOf[tuple[float, Count, str | None]] = Field(
        [], validation_alias=AliasPath("meta_info", "output_token_ids_logprobs", 0)
    )
    best: float = Field(0.0, validation_alias=AliasPath("meta_info", "output_top_logprobs", 0, 0, 0))


PATHS = {ServerInfo: "/server_info", ModelInfo: "/model_info"}


def ask(
    url: str, path: str, kind: type[Answer], body: Mapping[str, Any] | None = None, timeout: float = 30.0
) -> Answer:
    """Send a GET, or a POST if there is a body, and return the answer. timeout: seconds for the whole of it.

    Raises OSError if there is no such answer (see `NoAnswer`), and UserError if the server refuses the request.
    """
    try:
        return ask_once(url + path, kind, timeout, body)
    except Declined as error:
        mistake = NoAnswer if DUPLICATE in str(error) else UserError
        raise mistake(f"{url}{path}: refused the request ({error})") from error


def reported(url: str, kind: type[Answer]) -> Answer:
    """What one of target.servers says of itself: ServerInfo or ModelInfo. Raises UserError if it does not answer."""
    try:
        return ask(url, PATHS[kind], kind)
    except OSError as error:
        raise SharedUserError(f"target.servers: {url} does not answer {PATHS[kind]} ({error}); {START}") from error
