"""Signals that ask a run to stop. The run first finishes the current step and writes a checkpoint."""

import os
import signal
import time
from types import FrameType
from typing import Self

from eagle3.console import is_first_rank

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Printed at the first Ctrl-C, since the second one leaves no time to print.
STOPS = (
    b"stopping after this step, with a checkpoint; Ctrl-C again ends at once: --resume then takes the last checkpoint\n"
)
ECHO = 1.0  # within this many seconds, torchrun passes on a Ctrl-C that its processes already got from the terminal


class RunStopped(BaseException):
    """A signal ended the run early. (Not an Exception, because it may be raised in the middle of anything.)

    together: whether every rank raises it at the same place. If not, only this rank raises it, at once and without
        saving.
    """

    def __init__(self, number: int, where: str, together: bool) -> None:
        self.number, self.together = number, together
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        super().__init__(f"stopped by {name} {where}")

    @property
    def exit_code(self) -> int:
        """0 if a batch system sent the signal and nothing was lost; otherwise 128 + the signal, as in shells."""
        return 0 if self.together and self.number != signal.SIGINT else 128 + self.number


class StopSignals:
    """Handles SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) inside a `with` block: records them in `received` if `stepping` is
    set, and raises RunStopped otherwise. A second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.received, self.stepping, self._interrupted = 0, False, 0.0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.stepping and not self.received and is_first_rank():
                os.write(2, STOPS)
            self._end_at_next_interrupt()
        self.received = number
        if not self.stepping:
            raise RunStopped(
                number,
                "outside the training steps: every checkpoint that was written is whole, and what was in progress "
                "starts over, or goes on where it was last saved",
                together=False,
            )

    def _end_at_next_interrupt(self) -> None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # under torchrun, the next one may be the same Ctrl-C
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        elif not self._interrupted:
            self._interrupted = time.monotonic()
        elif time.monotonic() - self._interrupted > ECHO:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
