"""What the tests share: the process groups of a job of one process, and one thread for tensors that are all tiny."""

import pytest
import torch


@pytest.fixture(scope="session")
def topology():
    """Started once and left running: Megatron-core's groups cannot be formed twice in one process."""
    # here, for DeepSpeed takes seconds to import
    from eagle3.parallel.topology import start_distributed

    return start_distributed()


@pytest.fixture(autouse=True)
def one_thread(request):
    """Threads would only wait for one another; on a busy machine that takes many times the work itself."""
    if "topology" in request.fixturenames:
        request.getfixturevalue("topology")  # which sets the number of threads
    torch.set_num_threads(1)
