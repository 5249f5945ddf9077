"""Requests to HTTP servers, which may hang, send without end, or answer nonsense: each request has a deadline for its
whole answer, a limit on the answer's size, and a type that the answer must have."""

import asyncio
import json
import ssl
from contextlib import aclosing
from functools import cache
from typing import Annotated, Any, TypeVar

import httpx2
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from eagle3.errors import shown
from eagle3.parsing import parse_json

CONNECT_SECONDS = 10.0
MOST_BYTES = 8 << 20  # of an answer; its parsed form may take about 45 times as much while it is checked
REASON_CHARACTERS = 300

Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]  # a list of nonsense has one error, not one for each item
Name = Annotated[str, StringConstraints(min_length=1, max_length=1000, pattern=r"^[^\r\n]+$")]  # one line
Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class Typed(BaseModel):
    """An answer, or a part of one. Keys that it does not name are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())


Answer = TypeVar("Answer", bound=Typed)


class NoAnswer(OSError):
    """Raised if no answer comes this time: connection lost, answer too long, overload, or an error in the server."""


class TooSlow(NoAnswer):
    """Raised if the answer is not complete at its deadline."""


class MalformedAnswer(NoAnswer):
    """Raised if an answer is not of the type that was asked for. The message names the place and the value."""


class Declined(Exception):
    """Raised if a server answers with a status other than 200 that is not about its own state. The message is the
    status and the server's reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status


class Client:
    """Sends requests, and follows no redirect.

    key: sent as bearer token; no message shows it
    connections: most at a time
    """

    def __init__(self, key: str | None = None, connections: int = 1) -> None:
        self.key = key
        # Not compressed, because a small answer could then expand without end.
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        self._http = httpx2.AsyncClient(
            headers=headers if key is None else {**headers, "Authorization": f"Bearer {key}"},
            verify=_certificates(),
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    async def ask(self, url: str, kind: type[Answer], seconds: float, body: dict[str, Any] | None = None) -> Answer:
        """Send a GET, or a POST if there is a body, and return the answer, which must be complete after `seconds`.

        Raises NoAnswer and Declined.
        """
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body, ensure_ascii=False).encode())
        try:
            async with asyncio.timeout(seconds), self._http.stream(method, url, content=content) as response:
                text = await _body(response)
        except TimeoutError as error:
            raise TooSlow(f"no whole answer within {seconds:g} s") from error
        except (httpx2.TransportError, httpx2.InvalidURL, OverflowError) as error:  # the last for a port of 99999
            raise NoAnswer(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        if (status := response.status_code) != 200:
            declined = Declined(status, self._reason(response, text))
            raise NoAnswer(str(declined)) if status in (408, 425, 429) or status >= 500 else declined
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            flaw = error.errors(include_url=False, include_context=False)[0]
            value = "" if self.key else f", not {shown(flaw['input'])}"  # which may repeat the key
            place = ".".join(map(str, flaw["loc"])) or "the answer"
            raise MalformedAnswer(f"an answer of another form ({place}: {flaw['msg']}{value})") from error

    def _reason(self, response: httpx2.Response, text: bytes) -> str:
        """The server's message, on one line and without the key, which some servers repeat."""
        if response.is_redirect:
            return f"it redirects to {response.headers['location']:.{REASON_CHARACTERS}}"
        try:
            body = parse_json(text)
            for name in ("error", "message", "detail"):  # vLLM nests the message, SGLang does not, FastAPI says detail
                if isinstance(body, dict):
                    body = body.get(name, body)
        except ValueError:
            body = text.decode(errors="replace")
        line = " ".join((body if isinstance(body, str) else json.dumps(body)).split()) or response.reason_phrase
        return (line if self.key is None else line.replace(self.key, "[key]"))[:REASON_CHARACTERS]

    async def aclose(self) -> None:
        await self._http.aclose()


def ask_once(
    url: str, kind: type[Answer], seconds: float, body: dict[str, Any] | None = None, key: str | None = None
) -> Answer:
    """`Client.ask` for threads without an event loop."""

    async def ask() -> Answer:
        async with aclosing(Client(key)) as client:
            return await client.ask(url, kind, seconds, body)

    return asyncio.run(ask())


async def _body(response: httpx2.Response) -> bytes:
    """The body. Raises NoAnswer if it is too long, or compressed although that was not asked for."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise NoAnswer(f"a compressed answer ({response.headers['content-encoding']:.40})")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MOST_BYTES:
            raise NoAnswer(f"an answer of more than {MOST_BYTES >> 20} MiB")
    return bytes(body)


@cache
def _certificates() -> ssl.SSLContext:
    """Reading these takes much longer than a request."""
    return httpx2.create_ssl_context()
