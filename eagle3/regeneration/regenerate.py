"""Get the target's own answers to the prompts of a data set, from several endpoints, some of which may die."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eagle3.console import Progress
from eagle3.errors import UserError
from eagle3.regeneration.answers import AnswerFile
from eagle3.regeneration.endpoint import Endpoint, Refused, Unfit
from eagle3.regeneration.turns import Generation, LeftOut, Plan, Work, plan_of
from eagle3.servers import NoAnswer
from eagle3.text.conversations import Conversation

if TYPE_CHECKING:  # asking a server must not wait for transformers to load
    from eagle3.regeneration.local import LocalTarget

MOST_TRIES = 4  # for one conversation, before this run gives it up
MOST_FAILED = 16  # conversations in a row that are given up at an endpoint before the endpoint is left out
MOST_REFUSED = 32  # conversations left out before the first row; so many mean wrong settings or a wrong server


@dataclass
class Summary:
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
        self.examples.setdefault(reason.reason, f"{origin}{': ' if reason.detail else ''}{reason.detail}")

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


class Queue:
    """Plans that nobody has taken yet, and work that was put back. That work comes first, as it may be partly done."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        self.new, self.again, self.taken = map(Work, plans), deque[Work](), 0
        self.changed = asyncio.Condition()

    async def take(self) -> Work | None:
        """Take the next piece of work; None when all is done. While others work, wait: they may put some back."""
        async with self.changed:
            while (work := self.left()) is None and self.taken:
                await self.changed.wait()
            self.taken += work is not None
            return work

    def left(self) -> Work | None:
        """Remove and return the next piece of work that nobody is doing; None if there is none."""
        return self.again.popleft() if self.again else next(self.new, None)

    async def end(self, work: Work, *, again: bool) -> None:
        async with self.changed:
            self.taken -= 1
            if again:
                self.again.append(work)
            self.changed.notify_all()


class Regeneration:
    """One run, which asks the endpoints for the answers that the file lacks."""

    def __init__(
        self,
        conversations: Iterable[Conversation],
        total: int,
        file: AnswerFile,
        generation: Generation,
        report: Callable[[str], None],
        progress: Callable[[str], None],
    ) -> None:
        self.conversations, self.file, self.generation = conversations, file, generation
        self.report, self.progress = report, Progress(progress, "regenerating", total, "conversations")
        self.summary = Summary(read=total)
        self.start = time.monotonic()
        self.passed = self.new = 0  # conversations that need no request, and those done by this run
        self.seen: set[str] = set()
        self.unrecorded: list[tuple[Plan, LeftOut]] = []  # left out before a row shows that the settings are fine

    def plans(self) -> Iterator[Plan]:
        """Yield the plans that need requests, in the order of the input."""
        for conversation in self.conversations:
            try:
                plan = plan_of(conversation, self.generation)
            except LeftOut as reason:
                self.summary.leave_out(conversation.origin, reason)
                self.passed += 1
                continue
            repeated, known = plan.id in self.seen, plan.id in self.file.answered or plan.id in self.file.left_out
            self.seen.add(plan.id)
            if not (repeated or known):
                yield plan
                continue
            self.passed += 1
            self.summary.repeated += repeated
            self.summary.earlier += not repeated
            if plan.id in self.file.left_out and not repeated:
                self.summary.leave_out(plan.origin, self.file.left_out[plan.id])

    async def run(self, endpoints: "Sequence[Endpoint | LocalTarget]") -> None:
        self.queue = Queue(self.plans())
        slots = (endpoint for endpoint in endpoints for _ in range(endpoint.concurrency))
        tasks = [asyncio.create_task(self.work(endpoint)) for endpoint in slots]
        try:
            with self.progress.also_between():
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for endpoint in endpoints:
                await endpoint.aclose()
        if self.queue.left():
            causes = "; ".join(f"{endpoint.url}: {endpoint.dead}" for endpoint in endpoints)
            raise UserError(
                f"--endpoint: no endpoint is left ({causes}); {self.file.path} keeps {len(self.file.answered):,} rows: "
                "start one and run the same command again"
            )

    async def work(self, endpoint: Endpoint) -> None:
        while endpoint.dead is None and (work := await self.queue.take()):
            if endpoint.dead is not None:  # it died while waiting for work
                await self.queue.end(work, again=True)
                return
            again = False
            try:
                await work.ask(endpoint, self.generation)
                endpoint.failures = 0
                self.keep(work)
            except LeftOut as reason:
                endpoint.failures = 0
                self.leave_out(work, reason, answered=len(self.file.answered))
            except Refused as refusal:
                endpoint.failures = 0
                # Rows of earlier runs do not show that this run's server is fine.
                self.leave_out(work, LeftOut("refused by the server", str(refusal)), answered=self.summary.answered)
            except Unfit as error:
                again = True
                self.set_aside(endpoint, str(error))
            except NoAnswer as error:
                again = await self.failed(endpoint, work, str(error))
            finally:
                self.new += not again
                rate = f"{self.summary.tokens / (time.monotonic() - self.start):,.0f} tokens/s"
                self.progress.at(self.passed + self.new, free=self.passed, extra=rate)
                await self.queue.end(work, again=again)

    def keep(self, work: Work) -> None:
        self.file.add(work.row())
        self.summary.answered += 1
        self.summary.tokens += work.tokens
        self.summary.unparsed_reasoning += work.think_tags
        if work.cut:
            self.summary.cut[work.cut] = self.summary.cut.get(work.cut, 0) + 1
        for plan, reason in self.unrecorded:
            self.file.leave_out(plan, reason)
        self.unrecorded.clear()

    def leave_out(self, work: Work, reason: LeftOut, *, answered: int) -> None:
        """Leave a conversation out. Record it only if answered rows show that the conversation itself is at fault.

        answered: number of these rows

        Raises UserError once MOST_REFUSED conversations were left out without being recorded.
        """
        self.summary.tokens += work.tokens
        self.summary.leave_out(work.plan.origin, reason)
        if answered:
            self.file.leave_out(work.plan, reason)
            return
        self.unrecorded.append((work.plan, reason))
        if len(self.unrecorded) == MOST_REFUSED:
            raise UserError(
                f"{work.plan.origin}: the first {MOST_REFUSED} conversations asked for gave no row ({reason.reason}"
                f"{': ' if reason.detail else ''}{reason.detail}); fix the settings or the server, or remove these "
                "conversations"
            )

    async def failed(self, endpoint: Endpoint, work: Work, reason: str) -> bool:
        """Handle a request that got no answer. Returns whether to ask again."""
        failure_time = time.monotonic()
        work.failures += 1
        again = work.failures < MOST_TRIES
        if again:  # wait without taking other work, so that an overloaded server gets fewer requests
            await asyncio.sleep(endpoint.patience[min(work.failures, len(endpoint.patience)) - 1])
        else:
            endpoint.failures += 1
        try:
            back = await endpoint.comes_back(failure_time)
        except Unfit as error:
            back, reason = False, str(error)
        if not back:
            self.set_aside(endpoint, reason)
            return True
        if endpoint.failures >= MOST_FAILED:
            self.set_aside(endpoint, f"it answers none of {MOST_FAILED} conversations: {reason}")
        if not again:
            self.summary.failed += 1
            self.summary.examples.setdefault("failed", f"{work.plan.origin}: {reason}")
        return again

    def set_aside(self, endpoint: Endpoint, reason: str) -> None:
        if endpoint.dead is None:
            endpoint.dead = reason
            self.report(f"{endpoint.url} is left out: {reason}")


def regenerate(
    conversations: Iterable[Conversation],
    total: int,
    file: AnswerFile,
    endpoints: "Sequence[Endpoint | LocalTarget]",
    generation: Generation,
    report: Callable[[str], None],
    progress: Callable[[str], None],
) -> Summary:
    """Ask the endpoints for every conversation that `file` lacks, keeping each endpoint as busy as it allows.

    Only the conversations in progress are held in memory.

    total: how many conversations there are, to estimate the time left
    report: gets a line for each endpoint that is left out
    progress: gets a line now and then

    Raises UserError if no endpoint is left, or if the first MOST_REFUSED conversations give no row; answers received
    until then are in the file. If fewer conversations give no row, but no other gives one either, they are counted but
    not recorded, so that the next run asks again.
    """
    run = Regeneration(conversations, total, file, generation, report, progress)
    asyncio.run(run.run(endpoints))
    run.summary.seconds = time.monotonic() - run.start
    run.summary.rows, run.summary.unrecorded = len(file.answered), len(run.unrecorded)
    return run.summary
