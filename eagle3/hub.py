"""Checks that a target can be where its name says: in an existing folder, or on a hub that can be reached. Takes a few
seconds at most, where the hub's client would retry for more than half a minute."""

import functools
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from eagle3.errors import UserError

CONNECT_SECONDS = 5.0


def require_target_folder(name: str) -> None:
    """Raises UserError if the name is the path of a missing folder, or of a file."""
    if Path(name).is_file():
        raise UserError(f"target {name!r}: is a file; name its folder, or a hub id, in model.target")
    if (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise UserError(f"target {name!r}: no such folder; name a checkpoint's folder or a hub id in model.target")


@functools.cache
def require_hub() -> None:
    """Raises OSError if the hub does not accept a connection or, where a proxy leads to the hub, if the proxy does
    not."""
    from huggingface_hub import constants  # imported here, because it takes long and most commands need no hub

    if constants.HF_HUB_OFFLINE:
        return  # the hub's client reports this at once
    url = urlsplit(constants.ENDPOINT)
    proxy = getproxies().get(url.scheme)
    if proxy and url.hostname not in os.environ.get("no_proxy", "").split(","):
        url = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    port = url.port or {"http": 80}.get(url.scheme, 443)
    try:
        socket.create_connection((url.hostname, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"{url.hostname} cannot be reached: {error.strerror or error}") from error
