"""Signals that ask a run to stop: the step in hand is finished and a checkpoint written first."""

import signal
from types import FrameType
from typing import Self

STOPPING = (signal.SIGTERM, signal.SIGUSR1)


class RunStopped(BaseException):
    """A signal ended the run before its end. (Not an Exception: it may be raised in the middle of anything.)

    together: every rank raises it, at the same place; else this rank alone does, at once, with nothing to save.
    """

    def __init__(self, number: int, where: str, together: bool) -> None:
        self.number, self.together = number, together
        super().__init__(f"stopped by {signal.Signals(number).name} {where}; continue with --resume auto")


class StopSignals:
    """While entered, SIGTERM and SIGUSR1 are noted in `received` where `stepping` is set, and elsewhere raise RunStopped."""

    def __init__(self) -> None:
        self.received, self.stepping = 0, False
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number
        if not self.stepping:
            raise RunStopped(number, "outside of the training steps: nothing is lost", together=False)
