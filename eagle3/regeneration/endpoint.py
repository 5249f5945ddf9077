"""OpenAI-compatible endpoints (SGLang, vLLM): find their model, request answers, and classify failures."""

import asyncio
import ipaddress
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import httpx2
from pydantic import AfterValidator, AliasPath, BeforeValidator, Field

from eagle3.errors import UserError, refuse
from eagle3.servers import Client, Count, Declined, ListOf, MalformedAnswer, Name, NoAnswer, Typed, ask_once

PROBE_SECONDS = 10.0
MESSAGE = ("choices", 0, "message")
Text = Annotated[str, BeforeValidator(lambda text: "" if text is None else text)]  # null is empty
ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(?::(\d{1,5}))?(/[^?#\s]*)?")
PATIENCE = (1.0, 2.0, 4.0, 8.0)  # seconds before each check whether a silent endpoint is back


class LeftOut(Exception):
    """Raised for a conversation that gives no row.

    reason: the same for all conversations with this problem
    detail: specific to this conversation
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(": ".join(filter(None, (reason, detail))))
        self.reason, self.detail = reason, detail


class Refused(LeftOut):
    """Raised if the server refuses a request because of the request itself.

    detail: the server's reason
    """

    def __init__(self, detail: str) -> None:
        super().__init__("refused by the server", detail)


class Unfit(Exception):
    """Raised if the endpoint cannot answer any of our requests: wrong key, no such route, a redirect."""


class _Model(Typed):
    id: Name


class _Models(Typed):
    """An answer to /v1/models."""

    data: ListOf[_Model]


def _as_json(arguments: Any) -> str:
    """A call's arguments in OpenAI's form, a JSON string. Some servers send an object, or null if there are none."""
    if isinstance(arguments, str):
        return arguments
    return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)


class _Function(Typed):
    name: Text
    arguments: Annotated[str, BeforeValidator(_as_json)] = "{}"


class _Call(Typed):
    id: Text = ""
    function: _Function


class Answer(Typed):
    """One answer, as the target gave it."""

    content: Text = Field("", validation_alias=AliasPath(*MESSAGE, "content"))
    # Servers name the reasoning either way; both are empty if there is none.
    reasoning_content: Text = Field("", validation_alias=AliasPath(*MESSAGE, "reasoning_content"))
    plain_reasoning: Text = Field("", validation_alias=AliasPath(*MESSAGE, "reasoning"))
    tool_calls: Annotated[
        ListOf[_Call] | None,
        AfterValidator(lambda calls: [each.model_dump() | {"type": "function"} for each in calls or ()]),
    ] = Field([], validation_alias=AliasPath(*MESSAGE, "tool_calls"))
    finish_reason: Name = Field(validation_alias=AliasPath("choices", 0, "finish_reason"))
    tokens: Annotated[Count, BeforeValidator(lambda count: count or 0)] = Field(
        0, validation_alias=AliasPath("usage", "completion_tokens")
    )


def endpoint_urls(addresses: Sequence[str]) -> list[str]:
    """Each endpoint as `http://host:port/v1`, whether or not `/v1` was given. Raises UserError for invalid ones."""
    urls = []
    for number, text in enumerate(addresses, 1):
        url = text.strip().rstrip("/").removesuffix("/v1")
        address = ADDRESS.fullmatch(url)
        right = address and 0 < int(address[2] or 80) < 65536 and not url.endswith("/chat/completions")
        with_password = f"address {number} holds an @, and so a user or password"  # which no message may show
        refuse(
            "--endpoint",
            ("@" in text, f"{with_password}; write http://host:port and use --api-key-file"),
            (not right, f"{text!r} is not an address of the form http://host:port; write it like that"),
        )
        urls.append(f"{url}/v1")
    [(url, count)] = Counter(urls).most_common(1)
    if count > 1:
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


def find_model(
    urls: Sequence[str], model_name: str | None, key: str | None, report: Callable[[str], None]
) -> tuple[str, list[str]]:
    """Ask each endpoint what it serves, and return the model's name and the endpoints that can be used. The others are
    reported.

    model_name: the one to use; None for the only one served

    Raises UserError if no endpoint can be used, if one does not serve `model_name`, if one serves several models and
    `model_name` is None, or if they serve different models.
    """
    served: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for url in urls:
        try:
            served[url] = _model_names(url, key)
        except (NoAnswer, Unfit) as error:
            left_out[url] = str(error)
    if not served:
        details = "; ".join(f"{url}: {reason}" for url, reason in left_out.items())
        raise UserError(
            f"--endpoint: no endpoint can be used ({details}); start a server, or fix the address or the key"
        )
    for url, reason in left_out.items():
        report(f"{url} is left out: {reason}")
    for url, names in served.items():
        listing = ", ".join(names) or "no model"
        refuse(
            "--model",
            (model_name is None and len(names) != 1, f"{url} serves {listing}; name one"),
            (model_name not in (None, *names), f"{url} does not serve {model_name!r} but {listing}; name that"),
        )
    models = {model_name or name for [name, *_] in served.values()}
    if len(models) > 1:
        details = ", ".join(f"{url} {name}" for url, [name] in served.items())
        raise UserError(f"--endpoint: the endpoints serve different models ({details}); name endpoints of one target")
    return models.pop(), list(served)


def _model_names(url: str, key: str | None) -> list[str]:
    try:
        return [model.id for model in ask_once(f"{url}/models", _Models, PROBE_SECONDS, key=key).data]
    except MalformedAnswer as error:
        raise Unfit(f"/v1/models is not answered as OpenAI does ({error})") from error
    except Declined as error:
        raise Unfit(str(_failure(error))) from error


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
        self.url, self.key, self.model, self.concurrency = url, key, model, concurrency
        self.timeout, self.patience = timeout, patience
        self.dead: str | None = None
        self.failures = 0  # requests given up since the last answer
        self._last_seen, self._looking = time.monotonic(), asyncio.Lock()
        self.client = Client(key, concurrency)

    async def chat(self, body: dict[str, Any]) -> Answer:
        """Request one answer. Raises Refused, NoAnswer or Unfit."""
        try:
            answer = await self.client.ask(f"{self.url}/chat/completions", Answer, self.timeout, body)
        except Declined as error:
            raise _failure(error) from error
        self._last_seen = time.monotonic()
        return answer

    async def aclose(self) -> None:
        await self.client.aclose()

    async def require_alive(self, since: float) -> None:
        """Return once the endpoint has answered after monotonic time `since`. One caller checks for all callers. Raises
        NoAnswer if it stays silent, and Unfit if it is left out, or serves a different model now."""
        async with self._looking:
            waits = iter(self.patience)
            while self._last_seen <= since:
                try:
                    names = await asyncio.to_thread(_model_names, self.url, self.key)
                except NoAnswer:
                    if (seconds := next(waits, None)) is None:
                        raise
                    await asyncio.sleep(seconds)
                    continue
                if self.dead or self.model not in names:
                    raise Unfit(self.dead or f"it now serves {', '.join(names) or 'no model'}")
                self._last_seen = time.monotonic()


def _failure(declined: Declined) -> Refused | Unfit:
    status, message = declined.status, str(declined)
    if status in (401, 403):
        message += "; give its key with --api-key-file or OPENAI_API_KEY"
    return (Unfit if status < 400 or status in (401, 403, 404, 405) else Refused)(message)
