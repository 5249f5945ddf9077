"""Runs a job's work under a watchdog that sees which rank dies or hangs, so that collectives can have a long
timeout."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eagle3.console import tell_error
from eagle3.errors import UserError, first_sentence
from eagle3.parallel.sizes import launched
from eagle3.parallel.topology import Topology, is_broken, patient
from eagle3.parallel.watchdog import Watchdog
from eagle3.training.stopping import RunStopped

# The others wait in a collective while a rank works alone, perhaps for hours: it prepares data, judges a draft, or has
# the longest share of a capture. The watchdog notices those that will never come.
PATIENCE = datetime.timedelta(days=7)


@contextmanager
def watched(
    topology: Topology,
    *,
    hang_minutes: float | None,
    advice: str,
    less_memory: str,
) -> Iterator[Watchdog]:
    """Inside the block, a rank that dies or hangs ends the job with a line that names it. Errors that follow from a
    different rank's death wait for that line. Collective.

    advice: the end of that line.
    less_memory: the end of the UserError for a device that runs out of memory.
    """
    watchdog = Watchdog(
        local_rank=launched("LOCAL_RANK", 0),
        hang_seconds=hang_minutes and 60 * hang_minutes,
        report=lambda verdict: tell_error(f"{verdict}; see what it printed last, and {advice}"),
    )
    ended = None
    with watchdog, patient(topology, PATIENCE):
        try:
            yield watchdog
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{topology.device}: out of memory at {watchdog.place} ({first_sentence(error)}); {less_memory}"
            ) from error
        except RuntimeError as error:
            if is_broken(error):
                watchdog.await_verdict()
            raise
        except RunStopped as stopped:
            if not stopped.together:  # the signal may have come from a launcher, because another rank died
                watchdog.end_if_broken()
                raise
            ended = stopped
    if ended:
        raise ended  # only now, so that the watchdog sees this rank leave in good order
