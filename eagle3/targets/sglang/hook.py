"""Runs inside SGLang, on every tensor-parallel rank: takes hidden states of a job's requests into its spool.

A server is started with this module's `make` as a forward hook on its logits processor (`version.capture_flags`). Each
prefill forward shows it some rows of several requests. What the teacher says after each row is summed up over the ranks'
parts of the vocabulary; then the rank that a request falls to writes its rows, in the store's format, from a thread of its
own, while the next forward runs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eagle3.errors import UserError
from eagle3.states.rows import Rows
from eagle3.states.spool import Ticket
from eagle3.states.store.codecs import StoreDtype
from eagle3.states.store.shard import Encoding
from eagle3.targets.sglang.spool_writer import SpoolWriter
from eagle3.targets.sglang.teacher import ServedTeacher, make_teacher
from eagle3.targets.sglang.version import HookCall, hook_call

# Threads that write samples beside each other; one writes about 0.5 GB/s.
WRITERS = 4


class HookSettings(NamedTuple):
    """What a server's hook is told; all of a server's jobs share it.

    spool: folder of the jobs' folders. dtype: number format of the rows. target: fingerprint of the checkpoint, which jobs
    compare. hidden_size: of the target. draft_vocabulary: where logits are kept, a safetensors file with d2t, with its
    digest and size.
    """

    spool: str
    dtype: StoreDtype
    target: str
    hidden_size: int
    draft_vocabulary: str | None = None
    vocabulary_digest: str | None = None
    vocabulary_size: int | None = None

    @property
    def encoding(self) -> Encoding:
        """Of the rows in the spool."""
        return Encoding("none", self.dtype, self.hidden_size, teacher_width=self.vocabulary_size)


def make(settings: Mapping[str, Any]) -> "CaptureHook":
    """What SGLang calls to make the hook. settings: HookSettings, as JSON."""
    return CaptureHook(HookSettings(**settings))


class CaptureHook:
    def __init__(self, settings: HookSettings) -> None:
        self.settings = settings
        self.teacher: ServedTeacher | None = None
        self.writers = [SpoolWriter(Path(settings.spool), settings.encoding) for _ in range(WRITERS)]

    def writer(self, ticket: Ticket, ranks: int = 1) -> "SpoolWriter":
        """Who writes a sample on its rank; always the same."""
        return self.writers[_number(ticket) // ranks % WRITERS]

    @torch.no_grad()
    def __call__(self, processor: nn.Module, arguments: tuple[Any, ...], _output: object) -> None:
        """On every rank with the same requests: what is decided here is decided alike on all."""
        call = hook_call(arguments)
        asked = [Ticket.parse(request) for request, _, _ in call.requests] if call else []
        if not any(asked):
            return
        flaw = self._flaw(processor, call)
        if flaw:  # an exception would end the server, and say nothing to the job
            for ticket in filter(None, asked):
                self.writer(ticket).give_up(ticket, flaw)
            return
        ranks, me = self.teacher.group.size(), self.teacher.group.rank()
        rows: list[list[Tensor]] = [[] for _ in range(ranks)]
        mine: list[tuple[Ticket, int]] = []
        start = 0
        for ticket, (_, tokens, before) in zip(asked, call.requests, strict=True):
            if ticket:
                owner = _number(ticket) % ranks  # who writes; every rank has the hidden states of all
                rows[owner].append(torch.arange(start, start + tokens))
                mine += [(ticket, before)] if owner == me else []
            start += tokens
        nothing = torch.empty(0, dtype=torch.int64)
        said = self.teacher.says(call.last, [torch.cat([nothing, *each]) for each in rows])
        aux = call.aux if isinstance(call.aux, Tensor) else torch.cat(list(call.aux), dim=-1)
        done = 0
        for (ticket, before), at in zip(mine, rows[me], strict=True):
            part = slice(int(at[0]), int(at[-1]) + 1)
            kept = said.kept[done : done + len(at)]
            done += len(at)
            teacher = self.settings.encoding.teacher(kept, said.argmax[part], said.logsumexp[part])
            self.writer(ticket, ranks).take(ticket, before, call.ids[part], Rows(aux[part], teacher))

    def _flaw(self, processor: nn.Module, call: HookCall) -> str | None:
        """Why nothing can be captured from this call, if so. Makes the teacher at the first call."""
        if call.aux is None:
            return "sglang: its class for this target shows the hook no auxiliary hidden states; set target.backend=transformers"
        counted = sum(tokens for _, tokens, _ in call.requests)
        if not counted == len(call.ids) == len(call.last):
            return (
                f"sglang: a batch of {counted} tokens has {len(call.ids)} ids and {len(call.last)} hidden states here; start "
                "the server as launchers/capture.py --print-server says"
            )
        if self.teacher is None:
            try:
                self.teacher = make_teacher(processor, call.head, self.settings.draft_vocabulary)
            except UserError as error:
                return str(error)
        return None


def _number(ticket: Ticket) -> int:
    """By which samples are dealt out, the same on every rank."""
    return int(ticket.sample_id[-8:], 16)
