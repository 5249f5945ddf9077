"""Send requests to a running SGLang server. Imports nothing heavy."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from eagle3.errors import SharedUserError, UserError
from eagle3.parsing import parse_json

# What SGLang answers for a few seconds if a request is repeated because its connection was lost.
DUPLICATE = "Duplicate request ID"
# The remedy for a server that does not answer, or captures something else.
START = "start it with the command that launchers/capture.py --print-server prints for this recipe"


def ask(url: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = 30.0) -> Any:
    """Send a GET, or a POST if there is a body, and return the answer's JSON.

    Raises OSError if there is no answer (connection, timeout, an error in the server), and UserError if the server
    refuses the request.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return parse_json(answer.read())
    except urllib.error.HTTPError as error:
        message = error.read(2000).decode(errors="replace")
        if error.code < 500 and DUPLICATE not in message:
            raise UserError(f"{url}{path}: refused the request ({error.code}: {message})") from error
        raise OSError(f"{error.code}: {message}") from error
    except (http.client.HTTPException, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise OSError(f"no whole answer: {error!r}") from error
    except ValueError as error:  # not a URL
        raise UserError(f"{url}: is not a server's URL ({error}); write it as http://host:port") from error


def server_info(url: str, path: str = "/server_info") -> dict[str, Any]:
    """What one of target.servers reports: its settings, or what is at another path. Raises UserError if it does not
    answer."""
    try:
        return ask(url, path)
    except OSError as error:
        raise SharedUserError(f"target.servers: {url} does not answer ({error}); {START}") from error
