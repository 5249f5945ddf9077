"""OpenAI-compatible endpoints (SGLang, vLLM): find their model, request answers, and classify failures."""

import asyncio
import ipaddress
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx2

from eagle3.errors import UserError
from eagle3.parsing import parse_json

CONNECT_SECONDS = 10.0
PROBE_SECONDS = 10.0
REASON_CHARACTERS = 300
PATIENCE = (1.0, 2.0, 4.0, 8.0)  # seconds before each check whether a silent endpoint is back


class Refused(Exception):
    """Raised if the server refuses a request because of the request itself. The message is the server's reason."""


class NoAnswer(Exception):
    """Raised if there is no answer this time: connection lost, time-out, overload, or an error in the server."""


class Unfit(Exception):
    """Raised if the endpoint cannot answer any of our requests: wrong key, no such route, a redirect."""


class Answer(NamedTuple):
    """One answer, as the target gave it."""

    content: str
    reasoning: str | None
    tool_calls: list[dict]  # in OpenAI's form, with arguments as a JSON string
    finish_reason: str
    tokens: int  # number of generated tokens


class Served(NamedTuple):
    """The model that the endpoints serve, and the endpoints that can be used."""

    model: str
    urls: list[str]  # the endpoints to use
    left_out: dict[str, str]  # why the others are not used


def endpoint_urls(addresses: Sequence[str]) -> list[str]:
    """Each endpoint as `http://host:port/v1`, whether or not `/v1` was given. Raises UserError for invalid ones."""
    urls = []
    for number, text in enumerate(addresses, 1):
        if "@" in text:  # what precedes it may be a password, which no message may show
            raise UserError(
                f"--endpoint: address {number} holds an @, and so a user or password; write http://host:port and use "
                "--api-key-file"
            )
        try:
            url = httpx2.URL(text.strip().rstrip("/"))
            port_is_right = url.port is None or 0 < url.port < 65536
        except (httpx2.InvalidURL, ValueError) as error:
            raise UserError(f"--endpoint: {text!r} is not a URL ({error}); write http://host:port") from error
        if url.scheme not in ("http", "https") or not url.host or not port_is_right or url.query or url.fragment:
            raise UserError(f"--endpoint: {text!r} is not an address of the form http://host:port; write it like that")
        if url.path.endswith("/chat/completions"):
            raise UserError(f"--endpoint: {text!r} names the route; leave /chat/completions out")
        base = str(url).rstrip("/")
        urls.append(base if url.path.endswith("/v1") else f"{base}/v1")
    for position, url in enumerate(urls):
        if url in urls[:position]:
            raise UserError(f"--endpoint: {url} is named twice; name it once and raise --concurrency")
    return urls


def exposed(url: str) -> bool:
    """Whether others may read what is sent to `url`, because it is neither https nor on this machine."""
    address = httpx2.URL(url)
    try:
        local = ipaddress.ip_address(address.host).is_loopback
    except ValueError:
        local = address.host == "localhost"
    return address.scheme != "https" and not local


def find_model(urls: Sequence[str], model_name: str | None, key: str | None) -> Served:
    """Ask each endpoint what it serves. model_name: the one to use; None for the only one served.

    Raises UserError if no endpoint can be used, if one does not serve `model_name`, if one serves several models and
    `model_name` is None, or if they serve different models.
    """
    models: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for url in urls:
        try:
            names = _model_names(url, key)
        except (NoAnswer, Unfit) as error:
            left_out[url] = str(error)
            continue
        if model_name is None and len(names) != 1:
            raise UserError(f"--model: {url} serves {', '.join(names) or 'no model'}; name one")
        if model_name is not None and model_name not in names:
            raise UserError(
                f"--model: {url} does not serve {model_name!r} but {', '.join(names) or 'no model'}; name that"
            )
        models[url] = model_name or names[0]
    if not models:
        details = "; ".join(f"{url}: {reason}" for url, reason in left_out.items())
        raise UserError(
            f"--endpoint: no endpoint can be used ({details}); start a server, or fix the address or the key"
        )
    if len(set(models.values())) > 1:
        details = ", ".join(f"{url} {name}" for url, name in models.items())
        raise UserError(f"--endpoint: the endpoints serve different models ({details}); name endpoints of one target")
    return Served(next(iter(models.values())), list(models), left_out)


def _model_names(url: str, key: str | None) -> list[str]:
    try:
        response = httpx2.get(f"{url}/models", headers=_headers(key), timeout=PROBE_SECONDS)
        _require_answer(response, key)
        return [model["id"] for model in parse_json(response.content)["data"]]
    except (httpx2.TransportError, httpx2.DecodingError) as error:
        raise NoAnswer(_words(error)) from error
    except Refused as error:
        raise Unfit(str(error)) from error
    except (ValueError, TypeError, LookupError) as error:
        raise Unfit("/v1/models is not answered as OpenAI does") from error


class Endpoint:
    """One endpoint that serves `model`, with up to `concurrency` requests at a time.

    timeout: seconds for one answer
    patience: seconds to wait before each further check whether a silent endpoint is back
    dead: why the endpoint is left out, or None
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        model: str,
        *,
        concurrency: int,
        timeout: float,
        patience: Sequence[float] = PATIENCE,
    ) -> None:
        self.url, self.key, self.model, self.concurrency, self.patience = url, key, model, concurrency, patience
        self.dead: str | None = None
        self.failures = 0  # requests given up since the last answer
        self._last_seen = time.monotonic()
        self._looking = asyncio.Lock()
        self._client = httpx2.AsyncClient(
            headers=_headers(key),
            timeout=httpx2.Timeout(timeout, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=concurrency + 1, max_keepalive_connections=concurrency),
        )

    async def chat(self, body: dict[str, Any]) -> Answer:
        """Request one answer. Raises Refused, NoAnswer or Unfit."""
        content = json.dumps(body, ensure_ascii=False).encode()
        try:
            response = await self._client.post(
                f"{self.url}/chat/completions", content=content, headers={"Content-Type": "application/json"}
            )
            _require_answer(response, self.key)
            answer = _answer(parse_json(response.content))
        except (httpx2.TransportError, httpx2.DecodingError) as error:
            raise NoAnswer(_words(error)) from error
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise NoAnswer(f"the answer is not of the OpenAI form ({type(error).__name__}: {error!s:.200})") from error
        self._last_seen = time.monotonic()
        return answer

    async def comes_back(self, failure_time: float) -> bool:
        """Whether the endpoint answers again after a request failed at monotonic time `failure_time`. One caller checks
        for all callers. Raises Unfit if the endpoint now serves a different model."""
        async with self._looking:
            if self.dead is not None or self._last_seen > failure_time:
                return self.dead is None
            for seconds in (0.0, *self.patience):
                await asyncio.sleep(seconds)
                try:
                    names = await asyncio.to_thread(_model_names, self.url, self.key)
                except NoAnswer:
                    continue
                if self.model not in names:
                    raise Unfit(f"it now serves {', '.join(names) or 'no model'}")
                self._last_seen = time.monotonic()
                return True
            return False

    async def close(self) -> None:
        await self._client.aclose()


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _require_answer(response: httpx2.Response, key: str | None) -> None:
    status = response.status_code
    if status == 200:
        return
    message = f"{status}: {_reason(response, key)}"
    if status in (408, 425, 429) or status >= 500:
        raise NoAnswer(message)
    if status in (401, 403):
        message += "; give its key with --api-key-file or OPENAI_API_KEY"
    raise (Unfit if status < 400 or status in (401, 403, 404, 405) else Refused)(message)


def _reason(response: httpx2.Response, key: str | None) -> str:
    """The server's message, on one line and without the key, which some servers repeat."""
    if response.is_redirect:
        return f"it redirects to {response.headers['location']}"
    try:
        body = parse_json(response.content)
        for name in ("error", "message", "detail"):  # vLLM nests the message, SGLang does not, FastAPI says detail
            if isinstance(body, dict):
                body = body.get(name, body)
    except ValueError:
        body = response.text
    line = " ".join((body if isinstance(body, str) else json.dumps(body)).split()) or response.reason_phrase
    return (line if key is None else line.replace(key, "[key]"))[:REASON_CHARACTERS]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _answer(response: dict) -> Answer:
    """Get the answer from a response. Raises TypeError, ValueError, LookupError or AttributeError if malformed."""
    (choice,) = response["choices"]
    message = choice["message"]
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": _text(call["function"]["name"]), "arguments": _arguments(call["function"])},
        }
        for call in message.get("tool_calls") or ()
    ]
    return Answer(
        content=_text(message.get("content")),
        reasoning=_text(message.get("reasoning_content")) or _text(message.get("reasoning")) or None,
        tool_calls=calls,
        finish_reason=str(choice["finish_reason"]),
        tokens=int((response.get("usage") or {}).get("completion_tokens") or 0),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str | None):
        raise TypeError(f"a {type(value).__name__} instead of a text")
    return value or ""


def _arguments(function: dict) -> str:
    """The arguments as a JSON string, OpenAI's form. Some servers send an object, or nothing if there are none."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return arguments
    return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
