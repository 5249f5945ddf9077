"""Get the target's own answers to the prompts of a data set, from several endpoints, some of which may die."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eagle3.console import Progress, Say
from eagle3.errors import UserError
from eagle3.regeneration.answers import AnswerFile
from eagle3.regeneration.endpoint import Endpoint, LeftOut, Refused, Unfit
from eagle3.regeneration.turns import Generation, Work, plan_of
from eagle3.servers import NoAnswer
from eagle3.text.conversations import Conversation

if TYPE_CHECKING:  # asking a server must not wait for transformers to load
    from eagle3.regeneration.local import LocalTarget

MOST_TRIES = 4  # for one conversation, before this run gives it up
MOST_FAILED = 16  # conversations in a row that are given up at an endpoint before the endpoint is left out
MOST_REFUSED = 32  # conversations left out before the first row; so many mean wrong settings or a wrong server


@dataclass
class RegenerationSummary:
    """Counts of what became of the conversations."""

    # For this input, whichever run did it:
    read: int = 0  # conversations
    repeated: int = 0  # duplicates
    earlier: int = 0  # done by earlier runs
    # Of this run:
    answered: int = 0  # rows
    failed: int = 0  # given up; the next run asks again
    unrecorded: int = 0  # left out before any answer came; the next run asks again
    # For this input, by reason:
    left_out: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)  # origin and detail of the first one
    # Of this run:
    cut: dict[str, int] = field(default_factory=dict)  # rows that end early, by reason
    unparsed_reasoning: int = 0  # answers with a think tag in the content
    tokens: int = 0  # generated
    seconds: float = 0.0
    rows: int = 0  # in the whole file

    def leave_out(self, origin: str, reason: LeftOut) -> None:
        self.left_out[reason.reason] = self.left_out.get(reason.reason, 0) + 1
        self.examples.setdefault(reason.reason, ": ".join(filter(None, (origin, reason.detail))))

    def __str__(self) -> str:
        entries = [
            (self.earlier, "done earlier"),
            (self.repeated, "repeated"),
            *((count, f"cut short ({reason})") for reason, count in self.cut.items()),
            *(
                (count, f"left out: {reason} (first {self.examples[reason]})")
                for reason, count in self.left_out.items()
            ),
            (self.unrecorded, "of those left out are asked again by the next run"),
            (self.failed, f"failed (first {self.examples.get('failed')}); run again to ask for them"),
            (self.unparsed_reasoning, "answers hold a think tag, so the server has no reasoning parser; see the docs"),
        ]
        parts = [f"{self.rows:,} rows of {self.read:,} conversations", f"{self.answered:,} answered now"]
        return "; ".join(parts + [f"{count:,} {label}" for count, label in entries if count])


class Regeneration:
    """One run, which asks the endpoints for every answer that `file` lacks, keeping each as busy as it allows. Only the
    conversations in progress are held in memory.

    total: how many conversations there are, to estimate the time left
    report: gets a line for each endpoint that is left out
    progress: gets a line now and then
    """

    def __init__(
        self,
        conversations: Iterable[Conversation],
        total: int,
        file: AnswerFile,
        generation: Generation,
        report: Say,
        progress: Say,
    ) -> None:
        self.conversations, self.file, self.generation = conversations, file, generation
        self.report, self.progress = report, Progress(progress, "regenerating", total, "conversations")
        self.summary = RegenerationSummary(read=total)
        self.start = time.monotonic()
        self.passed = self.new = 0  # conversations that need no request, and those done by this run
        self.unrecorded: list[tuple[Work, LeftOut]] = []  # left out before a row shows that the settings are fine

    def run(self, endpoints: "Sequence[Endpoint | LocalTarget]") -> RegenerationSummary:
        """Raises UserError if no endpoint is left, or if the first MOST_REFUSED conversations give no row; answers
        received until then are in the file. If fewer conversations give no row, but no other gives one either, they are
        counted but not recorded, so that the next run asks again."""
        asyncio.run(self.ask(endpoints))
        self.summary.seconds = time.monotonic() - self.start
        self.summary.rows, self.summary.unrecorded = self.file.answered, len(self.unrecorded)
        return self.summary

    def plans(self) -> Iterator[Work]:
        """Yield what needs requests, in the order of the input."""
        seen: set[str] = set()
        for conversation in self.conversations:
            try:
                work = plan_of(conversation, self.generation)
                repeated = work.id in seen
                seen.add(work.id)
                if not repeated and work.id not in self.file.done:
                    yield work
                    continue
                self.summary.repeated += repeated
                self.summary.earlier += not repeated
                if not repeated and (reason := self.file.done[work.id]):
                    raise reason
            except LeftOut as reason:
                self.summary.leave_out(conversation.origin, reason)
            self.passed += 1

    async def ask(self, endpoints: "Sequence[Endpoint | LocalTarget]") -> None:
        self.endpoints, self.free = endpoints, asyncio.Queue()
        for endpoint in endpoints:
            for _ in range(endpoint.concurrency):
                self.free.put_nowait(endpoint)
        plans = self.plans()
        tasks = [asyncio.create_task(self.work(plans)) for _ in range(self.free.qsize())]
        try:
            with self.progress.also_between():
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for endpoint in endpoints:
                await endpoint.aclose()

    async def work(self, plans: Iterator[Work]) -> None:
        for work in plans:
            while not await self.is_settled(work, await self.free_endpoint()):
                pass
            self.new += 1
            rate = f"{self.summary.tokens / (time.monotonic() - self.start):,.0f} tokens/s"
            self.progress.at(self.passed + self.new, free=self.passed, extra=rate)

    async def free_endpoint(self) -> "Endpoint | LocalTarget":
        """An endpoint with room for a request, which is put back into `free` after it. Raises UserError if all are left
        out."""
        while (endpoint := await self.free.get()).dead:
            if all(each.dead for each in self.endpoints):
                causes = "; ".join(f"{each.url}: {each.dead}" for each in self.endpoints)
                raise UserError(
                    f"--endpoint: no endpoint is left ({causes}); {self.file.path} keeps {self.file.answered:,} rows: "
                    "start one and run the same command again"
                )
        return endpoint

    async def is_settled(self, work: Work, endpoint: "Endpoint | LocalTarget") -> bool:
        """Ask an endpoint for the answers that are missing. Returns whether nothing is left to do in this run."""
        try:
            await work.ask(endpoint, self.generation)
            self.keep(work)
        except LeftOut as reason:
            self.leave_out(work, reason)
        except Unfit as error:
            self.set_aside(endpoint, str(error))
            return False
        except NoAnswer as error:
            return await self.is_given_up(work, endpoint, str(error))
        finally:
            self.free.put_nowait(endpoint)
        endpoint.failures = 0
        return True

    def keep(self, work: Work) -> None:
        tools = {"tools": work.tools} if work.tools else {}
        self.file.add({"id": work.id, "messages": work.messages, **tools})
        self.summary.answered += 1
        self.summary.tokens += work.tokens
        self.summary.unparsed_reasoning += work.think_tags
        if work.cut:
            self.summary.cut[work.cut] = self.summary.cut.get(work.cut, 0) + 1
        for other, reason in self.unrecorded:
            self.file.leave_out(other, reason)
        self.unrecorded.clear()

    def leave_out(self, work: Work, reason: LeftOut) -> None:
        """Leave a conversation out. Record it only if answered rows show that the conversation itself is at fault. Rows
        of earlier runs do not show that if this run's server refuses it.

        Raises UserError once MOST_REFUSED conversations were left out without being recorded.
        """
        self.summary.tokens += work.tokens
        self.summary.leave_out(work.origin, reason)
        if self.summary.answered or (self.file.answered and not isinstance(reason, Refused)):
            self.file.leave_out(work, reason)
            return
        self.unrecorded.append((work, reason))
        if len(self.unrecorded) == MOST_REFUSED:
            raise UserError(
                f"{work.origin}: the first {MOST_REFUSED} conversations asked for gave no row ({reason}); fix the "
                "settings or the server, or remove these conversations"
            )

    async def is_given_up(self, work: Work, endpoint: Endpoint, reason: str) -> bool:
        """After a request without an answer: wait for the endpoint to come back, or set it aside. Returns whether this
        run gives the conversation up."""
        since = time.monotonic()
        work.failures += 1
        given_up = work.failures >= MOST_TRIES
        endpoint.failures += given_up
        if not given_up:  # wait without taking other work, so that an overloaded server gets fewer requests
            await asyncio.sleep(endpoint.patience[min(work.failures, len(endpoint.patience)) - 1])
        try:
            await endpoint.require_alive(since)
        except (NoAnswer, Unfit) as absence:
            self.set_aside(endpoint, str(absence))
            return False
        if endpoint.failures >= MOST_FAILED:
            self.set_aside(endpoint, f"it answers none of {MOST_FAILED} conversations: {reason}")
        if given_up:
            self.summary.failed += 1
            self.summary.examples.setdefault("failed", f"{work.origin}: {reason}")
        return given_up

    def set_aside(self, endpoint: Endpoint, reason: str) -> None:
        if endpoint.dead is None:
            endpoint.dead = reason
            self.report(f"{endpoint.url} is left out: {reason}")
