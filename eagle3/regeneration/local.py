"""The target by transformers in this process, in place of an endpoint."""

import asyncio
import copy
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, StoppingCriteriaList
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from eagle3.regeneration.endpoint import Answer, Refused
from eagle3.targets.checkpoint import load_causal_lm, load_tokenizer

CONCURRENCY = 256  # requests among which those of similar length are found
TURNS = 32  # of the event loop in which whoever is about to ask asks
GROUPED = "sdpa_of_groups"


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **given: Any) -> Any:
    """transformers' attention, which copies keys and values for each query head of a group before it reads them. For
    one new token, the heads of a group [B, H, 1, D] are as well queries of one head [B, H_kv, H / H_kv, D]."""
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, mask, **given)
    batch, heads, _, size = query.shape
    queries = query.reshape(batch, key.shape[1], -1, size)
    out = scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=given.get("scaling"))
    return out.reshape(batch, 1, heads, size), None


AttentionInterface.register(GROUPED, _attend)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


class _Request(NamedTuple):
    prompt: list[int]
    body: dict[str, Any]
    answer: asyncio.Future[Answer]


class LocalTarget:
    """A target in this process, with an Endpoint's interface. A batch is the request that has waited longest, and
    those whose prompts are closest to it in length. Which those are does not depend on time.

    name: the checkpoint, which is also what `url` says. On a CPU it computes in float32, on a GPU in its own format.
    batch_tokens: the most tokens of a batch of several requests: padded prompts and the room for their answers
    """

    def __init__(self, name: str, batch_tokens: int, device: torch.device) -> None:
        dtype = "auto" if device.type == "cuda" else torch.float32
        self.model = load_causal_lm(name, None, False, dtype).to(device).eval()
        if self.model.config._attn_implementation == "sdpa":
            self.model.set_attn_implementation(GROUPED)
        self.tokenizer = load_tokenizer(name)
        self.url, self.batch_tokens, self.concurrency = name, batch_tokens, CONCURRENCY
        self.dead, self.failures, self.closed = None, 0, False
        self.waiting: list[_Request] = []
        self.serving: asyncio.Task[None] | None = None

    async def chat(self, body: dict[str, Any]) -> Answer:
        """Request one answer. Raises Refused."""
        request = _Request(self._prompt(body), body, asyncio.get_running_loop().create_future())
        self.waiting.append(request)
        if self.serving is None or self.serving.done():
            self.serving = asyncio.create_task(self._serve())
        return await request.answer

    async def aclose(self) -> None:
        """Ends what is being generated after its next token."""
        self.closed = True
        if self.serving is not None:
            await asyncio.gather(self.serving, return_exceptions=True)

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        if body.get("tools") or any("tool_calls" in message for message in body["messages"]):
            raise Refused("tools, whose calls only a server parses; ask one with --endpoint")
        options = {"add_generation_prompt": True, "return_dict": True, **body.get("chat_template_kwargs", {})}
        try:
            encoded = self.tokenizer.apply_chat_template(body["messages"], **options)
        except (TemplateError, ValueError) as error:
            raise Refused(f"the chat template does not take it ({error})") from error
        room = self.model.config.get_text_config(decoder=True).max_position_embeddings - len(encoded["input_ids"])
        if room < body["max_tokens"]:
            raise Refused(f"{len(encoded['input_ids'])} tokens, after which there is room for {max(room, 0)}")
        return encoded["input_ids"]

    async def _serve(self) -> None:
        while self.waiting and not self.closed:
            asked = 0
            while asked != (asked := len(self.waiting)):
                for _ in range(TURNS):
                    await asyncio.sleep(0)
            batch = self._batch()
            self.waiting = [request for request in self.waiting if request not in batch]
            try:
                answers = await asyncio.to_thread(self._generate, batch)
            except Exception as error:
                answers = [error] * len(batch)
            for request, answer in zip(batch, answers, strict=True):
                settle = request.answer.set_exception if isinstance(answer, Exception) else request.answer.set_result
                if not request.answer.done():  # whoever asked may have been cancelled
                    settle(answer)

    def _batch(self) -> list[_Request]:
        first = self.waiting[0]
        batch = sorted(self.waiting, key=lambda request: abs(len(request.prompt) - len(first.prompt)))
        answers = first.body["max_tokens"]
        while len(batch) > 1 and len(batch) * (max(len(each.prompt) for each in batch) + answers) > self.batch_tokens:
            batch.pop()
        return batch

    @torch.inference_mode()
    def _generate(self, batch: Sequence[_Request]) -> list[Answer | Refused]:
        body, longest = batch[0].body, max(len(request.prompt) for request in batch)
        config = copy.deepcopy(self.model.generation_config)
        config.update(
            max_new_tokens=body["max_tokens"],
            max_length=None,
            pad_token_id=self.tokenizer.pad_token_id or 0,
            top_p=body.get("top_p", config.top_p),
        )
        if "temperature" in body:
            config.update(do_sample=body["temperature"] > 0, temperature=body["temperature"] or None)
        ids = torch.tensor([[0] * (longest - len(request.prompt)) + request.prompt for request in batch])
        mask = torch.tensor([[0] * (longest - len(request.prompt)) + [1] * len(request.prompt) for request in batch])
        if "seed" in body:
            torch.manual_seed(zlib.crc32(ids.numpy().tobytes(), body["seed"]))
        try:
            out = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList(
                    [lambda ids, _: ids.new_full(ids.shape[:1], self.closed).bool()]
                ),
            )
        except torch.OutOfMemoryError:
            out = None  # what follows is outside of this block, in which the error keeps the attempt's memory
        if out is None:
            if len(batch) == 1:
                return [Refused(f"{longest} tokens, for which the GPU's memory does not suffice")]
            half = len(batch) // 2
            return self._generate(batch[:half]) + self._generate(batch[half:])
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        return [self._answer(row, ends) for row in out[:, longest:].tolist()]

    def _answer(self, tokens: list[int], ends: list[int]) -> Answer:
        end = next((place for place, token in enumerate(tokens) if token in ends), None)
        reason, count = ("length", len(tokens)) if end is None else ("stop", end + 1)
        message = {"content": self.tokenizer.decode(tokens[:end], skip_special_tokens=True)}
        return Answer.model_validate(
            {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": count}}
        )
