"""Names that torch 2.13 has and 2.11 lacks, so that gpu.sh runs on a machine with the older one. Python runs this file
when it starts if its folder is in PYTHONPATH."""

import torch.distributed as dist

for name, older in (
    ("all_gather_single", "all_gather_into_tensor"),
    ("reduce_scatter_single", "reduce_scatter_tensor"),
):
    if not hasattr(dist, name):
        setattr(dist, name, getattr(dist, older))
