"""Time limits of tests. They end what hangs and judge nothing: the suite also passes on a machine that is ten times
slower, or busy with other work. Where a limit is what a test is about, the test waits for events, not for seconds."""

import subprocess
import time
from collections.abc import Callable

# For anything that a test waits for. The longest takes a few minutes on an idle machine.
HANG_SECONDS = 3600.0
# By when the ranks of a broken job must have ended. Those that do not notice would wait in a collective for days.
NOTICED_SECONDS = 900.0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    """Returns once the condition holds. Fails if the process, which is to bring it about, ends before."""
    limit = time.monotonic() + HANG_SECONDS
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit, "a hang"
        time.sleep(0.002)
