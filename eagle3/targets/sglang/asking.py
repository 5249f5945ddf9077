"""Asks a running SGLang server something; imports nothing large."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from eagle3.errors import SharedUserError, UserError
from eagle3.parsing import parse_json

# What SGLang says, for some seconds, of a request that it lost the connection of and is asked again.
DUPLICATE = "Duplicate request ID"


def ask(url: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = 30.0) -> Any:
    """GET, or POST where there is a body; the answer's JSON.

    Raises OSError where no answer comes (connection, time-out, an error of the server's own), UserError where the server
    refuses the request.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return parse_json(answer.read())
    except urllib.error.HTTPError as error:
        said = error.read(2000).decode(errors="replace")
        if error.code < 500 and DUPLICATE not in said:
            raise UserError(f"{url}{path}: refused the request ({error.code}: {said})") from error
        raise OSError(f"{error.code}: {said}") from error
    except (http.client.HTTPException, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise OSError(f"no whole answer: {error!r}") from error
    except ValueError as error:  # no URL
        raise UserError(f"{url}: is not a server's URL ({error}); write it as http://host:port") from error


def server_info(url: str, remedy: str, timeout: float = 30.0) -> dict[str, Any]:
    """What one of target.servers says of itself. Raises UserError, with the remedy, where it does not answer."""
    try:
        return ask(url, "/server_info", timeout=timeout)
    except OSError as error:
        raise SharedUserError(f"target.servers: {url} does not answer ({error}); {remedy}") from error
