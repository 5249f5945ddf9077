"""GPUs that a draft may be served on, with the numbers of their data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU's numbers. The first three are NVIDIA's (data sheets of A100, H100 and H200 SXM, and HGX B200); the others
    are assumptions."""

    flops: float  # dense products in bf16, per second
    bandwidth: float  # bytes per second from its memory
    memory: float  # bytes
    reached_flops: float = 0.6  # share of the peak
    reached_bandwidth: float = 0.75
    layer_seconds: float = 10e-6  # of launching and of short kernels, for each layer of a forward
    reduction_seconds: float = 10e-6  # for each of a layer's two reductions among several GPUs
    usable: float = 0.9  # share of the memory for weights and keys
    for_weights: float = 0.7  # share that weights may take, so that there is room for keys


GPUS = {
    "a100": Gpu(312e12, 2.039e12, 80e9),
    "h100": Gpu(989e12, 3.35e12, 80e9),
    "h200": Gpu(989e12, 4.8e12, 141e9),
    "b200": Gpu(2250e12, 7.7e12, 180e9),
}
DEFAULT_GPU = "h100"
