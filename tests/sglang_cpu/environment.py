"""The environment in which SGLang runs on a CPU: for every process of a test that imports or starts it."""

import os


def sglang_environment(tensor_parallel: int = 1) -> dict[str, str]:
    """This process's environment, with what SGLang's CPU engine of `tensor_parallel` ranks needs.

    It must be given to a new process: SGLang reads it when it is imported.
    """
    cores = sorted(os.sched_getaffinity(0))
    environment = os.environ | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # compiling gpt-oss's activation takes longer than the tests
        "TORCH_COMPILE_DISABLE": "1",
        # two kernels of the Qwen3.5 and Qwen3-Next families exist in Triton alone
        "TRITON_INTERPRET": "1",
    }
    if tensor_parallel > 1:
        # one core per rank; otherwise SGLang would count NUMA nodes, and refuse more ranks than these
        bound = [str(cores[rank % len(cores)]) for rank in range(tensor_parallel)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    return environment
