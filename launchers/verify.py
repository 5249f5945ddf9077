"""Check the training code against a golden case: loss, every step, every gradient. Exit code 1 if any is beyond its
tolerance."""

import argparse
from dataclasses import replace
from pathlib import Path

from eagle3.command_line import Parser, from_to, slow_imports
from eagle3.console import Console, tell, waiting
from eagle3.errors import SharedUserError, run_command
from eagle3.parallel.sizes import check_sizes, launched
from eagle3.training.deepspeed_file import ZERO2

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("case", type=Path, help="folder with config.json and draft, inputs, expected .safetensors")
    parser.add_argument("--out", type=Path, help="folder for actual.safetensors (default: the case's)")
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=from_to(1), help="TTT steps K (default: those of the case)")
    parser.add_argument("--window", type=from_to(1), help="keys that a query sees, in place of the case's own window")
    parser.add_argument("--tp", type=from_to(1), default=1, help="tensor-parallel ranks")
    parser.add_argument("--ulysses", type=from_to(1), default=1, help="Ulysses ranks of a sequence")
    parser.add_argument(
        "--ring", type=from_to(1), default=1, help="ring ranks of a sequence; what is left is data-parallel"
    )
    parser.add_argument("--ring-mode", choices=["gather", "p2p"], default="gather")
    parser.add_argument("--layout", choices=["contiguous", "zigzag"], default="zigzag", help=argparse.SUPPRESS)
    parser.add_argument(
        "--query-selection", choices=["supervised", "all"], default="supervised", help=argparse.SUPPRESS
    )
    parser.add_argument("--recompute", choices=["none", "attention_kept", "full"], default="full")
    parser.add_argument(
        "--block-mib", type=from_to(1), default=1024, help="MiB of a block of the loss and a chunk of tokens"
    )
    parser.add_argument("--quiet", action="store_true", help="print only what is beyond its tolerance, and the verdict")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    options = parser.parse_args()
    if options.out and options.out.exists() and not options.out.is_dir():
        raise SharedUserError(f"--out {options.out}: is a file; name a folder")
    if not (options.case / "expected.safetensors").is_file():
        raise SharedUserError(
            f"{options.case}: holds no golden case; name a folder such as {ROOT / 'tests' / 'golden' / 'ragged'}"
        )
    check_sizes("--tp, --ulysses, --ring", options.tp, options.ulysses, options.ring, launched("WORLD_SIZE", 1))
    with slow_imports(options.quiet):
        import torch
        from safetensors.torch import save_file

        from eagle3.jobs.gate import require_chain
        from eagle3.jobs.verify import read_case, read_tensors, relative_errors, run_case, tolerance
        from eagle3.objective.model import MemoryPlan
        from eagle3.parallel.sequence import SequenceSharding
        from eagle3.parallel.topology import start_distributed, stop_distributed

    case, expected = read_case(options.case), read_tensors(options.case / "expected.safetensors")
    steps = options.steps or len(expected["ploss"])
    if steps != len(expected["ploss"]):
        raise SharedUserError(f"--steps {steps}: the case was made with {len(expected['ploss'])} steps; leave it out")
    if options.window is not None:
        case = replace(case, draft=replace(case.draft, config=replace(case.draft.config, window=options.window)))
    origin = options.case / "config.json" if options.window is None else f"--window {options.window}"
    require_chain(case.draft.config, steps, "TTT steps of the case", str(origin))
    topology = start_distributed(options.tp, options.ulysses, options.ring)
    dtype = getattr(torch, options.dtype)
    sharding = SequenceSharding(options.ulysses, options.ring, options.layout, options.query_selection)
    memory = MemoryPlan(options.recompute, options.block_mib * 2**20)
    with waiting(Console(topology.is_first, quiet=options.quiet), "computing loss and gradients"):
        actual = run_case(case, topology, steps, dtype, ZERO2, sharding, options.ring_mode, memory)
    errors = relative_errors(actual, expected)
    allowed = {name: tolerance(name, dtype) for name in errors}
    if topology.is_first:
        folder = options.out or options.case
        folder.mkdir(parents=True, exist_ok=True)
        save_file(actual, folder / "actual.safetensors")
        report(options.case, errors, allowed, options.dtype, options.quiet)
    stop_distributed()
    return int(any(error > allowed[name] for name, error in errors.items()))


def report(case: Path, errors: dict[str, float], allowed: dict[str, float], dtype: str, quiet: bool) -> None:
    failures = [name for name, error in errors.items() if error > allowed[name]]
    for name, error in errors.items():
        if name in failures or not quiet:
            tell(f"  {name:48s} {error:.1e}  allowed {allowed[name]:.0e}{'  BEYOND' if name in failures else ''}")
    worst = max(errors, key=lambda name: errors[name] / allowed[name])
    verdict = "failed" if failures else "passed"
    tell(f"{case}: {verdict}, worst relative error {errors[worst]:.1e} ({worst}), {dtype}")


if __name__ == "__main__":
    run_command(main)
