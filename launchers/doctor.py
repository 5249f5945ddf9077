"""Check a job before it costs anything: the nodes' GPUs, links, disks and shared folders, and whether all run
the same thing. Start it like train.py, on the same nodes with the same options. Exit code 1 if a check failed."""

import datetime
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.command_line import RecipeParser, slow_imports
from eagle3.console import GREEN, RED, YELLOW, Console, tell, waiting
from eagle3.errors import UserError, run_command
from eagle3.preflight.inputs import inputs_of
from eagle3.recipe.loading import load_recipe
from eagle3.recipe.schema import Recipe
from eagle3.training.deepspeed_file import ZERO2

if TYPE_CHECKING:
    from eagle3.parallel.topology import Topology
    from eagle3.preflight.cluster import Cluster, Finding

ROOT = Path(__file__).parent.parent
COLOURS = {"ok": GREEN, "note": YELLOW, "failed": RED}
PATIENCE = datetime.timedelta(minutes=2)  # for processes that start late, or not at all


def main() -> int:
    parser = RecipeParser(__doc__)
    parser.add_argument("--deepspeed", type=Path, default=ZERO2, help="the DeepSpeed file")
    parser.add_argument(
        "--quiet", action="store_true", help="print only failures, what you have to judge, and the verdict"
    )
    parser.add_argument("--local_rank", type=int, default=0, help="set by the deepspeed launcher")
    options = parser.parse()
    for file in (options.recipe, options.deepspeed):
        if not file.is_file():  # every process reports this, because the file may be missing on some nodes only
            raise UserError(f"{file}: no such file on {socket.gethostname()}; copy it there, or fix the command line")
    recipe = load_recipe(options.recipe, options.overrides)
    with slow_imports(options.quiet):
        import torch.distributed as dist

        from eagle3.parallel.topology import job_store, node_name, start_distributed, stop_distributed
        from eagle3.preflight.cluster import Cluster, StoreGather

    topology = start_distributed(timeout=PATIENCE)
    store = dist.PrefixStore("preflight", job_store(PATIENCE))
    gather = StoreGather(store, dist.get_rank(), dist.get_world_size())
    cluster, states = Cluster(gather.rank, tuple(gather(node_name())), gather), []
    console, speaks = Console(topology.is_first, quiet=options.quiet), topology.is_first
    if speaks and not options.quiet:
        tell(f"processes: {len(cluster.nodes)}, nodes: {len(cluster.ranks)} ({', '.join(cluster.ranks)})")
    checks = findings(cluster, topology, recipe, options.deepspeed, states)
    while True:
        with waiting(console, f"check {len(states) + 1}"):
            finding = next(checks, None)
        if finding is None:
            break
        states.append(finding.state)
        if speaks and not (options.quiet and finding.state == "ok"):
            show(finding)
    failed = states.count("failed")
    if speaks:
        verdict = f"{failed} of {len(states)} checks failed" if failed else f"sound: {len(states)} checks, none failed"
        tell(f"{verdict}, {states.count('note')} for you to judge")
    gather.leave()
    if not failed:
        stop_distributed()  # not after a failure, because the links needed for that may be down
    return int(failed > 0)


def show(finding: "Finding") -> None:
    label = finding.state.upper() if finding.state == "failed" else finding.state
    tell(f"{finding.name}: {finding.found}", lead=f"{label:6s} ", colour=COLOURS[finding.state])
    if finding.remedy:
        tell(f"remedy: {finding.remedy}", lead=" " * 7)


def findings(
    cluster: "Cluster", topology: "Topology", recipe: Recipe, deepspeed: Path, states: list[str]
) -> Iterator["Finding"]:
    """Runs the checks and yields their findings. Collective: every rank goes through all of them, in this order. Checks
    that may leave a link broken come last; golden cases, which need all links, only if none has failed (`states`)."""
    from eagle3.jobs import doctor
    from eagle3.preflight import bandwidth, folders, start

    for name, traits in start.own_traits(recipe, deepspeed).items():
        yield from outcomes(start.compare, cluster, name, traits)
    # From here on all ranks use the first rank's recipe, so that they make the same checks.
    recipe = Recipe.model_validate(cluster.gather(recipe.model_dump(mode="json") if topology.is_first else None)[0])
    yield from outcomes(doctor.check_gpus, cluster, topology.device)
    yield from outcomes(start.check_open_files, cluster)
    yield from outcomes(folders.check_shared, cluster, "output.dir", recipe.output.dir)
    if recipe.hidden_states.mode == "live" and recipe.target.backend == "sglang" and len(cluster.ranks) > 1:
        yield from outcomes(folders.check_shared, cluster, "target.spool", Path(recipe.target.spool))
    yield from outcomes(folders.check_cache, cluster, "data.cache_dir", recipe.data.cache_dir)
    yield from outcomes(folders.check_inputs, cluster, inputs_of(recipe))
    checkpoint = cluster.gather(doctor.checkpoint_of(recipe) if topology.is_first else None)[0]
    count = recipe.training.keep_checkpoints + 2  # plus the best one, and the one being written
    yield from outcomes(folders.check_space, cluster, recipe.output.dir, checkpoint, count)
    yield from outcomes(doctor.check_kernels, cluster, topology, recipe)
    yield from outcomes(bandwidth.check_all_reduce, cluster, topology.device, 2 * PATIENCE)
    if "failed" not in states:
        yield from outcomes(doctor.check_golden, cluster, ROOT / "tests" / "golden", deepspeed, recipe.parallelism)


def outcomes(check: Callable[..., "Finding | Iterator[Finding]"], *arguments: Any) -> Iterator["Finding"]:
    """What a check finds, and the flaw that ends it."""
    from eagle3.preflight.cluster import Finding, Flaw

    try:
        found = check(*arguments)
        yield from [found] if isinstance(found, Finding) else found
    except Flaw as flaw:
        yield flaw.finding


if __name__ == "__main__":
    run_command(main)
