"""Write a recipe's hidden-state store by running the target once over its samples, for train.py in stored mode."""

import argparse
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.command_line import RecipeParser, slow_imports
from eagle3.console import Console, is_first_rank, printable, tell, waiting
from eagle3.errors import SharedUserError, run_command
from eagle3.jobs.gate import Gate
from eagle3.parallel.sizes import check_sizes, launched
from eagle3.preflight.inputs import require_inputs, require_servers, require_store_place
from eagle3.recipe.loading import load_recipe
from eagle3.recipe.schema import Recipe
from eagle3.states.store.files import is_url, open_files
from eagle3.targets.sglang.asking import require_sglang
from eagle3.training.stopping import RunStopped, StopSignals

if TYPE_CHECKING:
    from eagle3.parallel.topology import Topology
    from eagle3.parallel.watchdog import Watchdog


def main() -> int:
    parser = RecipeParser(__doc__)
    parser.add_argument("--part", metavar="I/N", help="capture share I (from 0) of N of the samples, beside other jobs")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--verify", action="store_true", help="read the whole store, compare checksums, report what is wrong"
    )
    modes.add_argument("--repair", action="store_true", help="the same, then capture again what is wrong or missing")
    modes.add_argument(
        "--print-server", action="store_true", help="print the command line of an SGLang server for target.servers"
    )
    parser.add_argument("--check", action="store_true", help="check recipe, files and folders, and stop")
    parser.add_argument(
        "--quiet", action="store_true", help="print only the outcome, what is wrong with the store, and warnings"
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse()
    recipe = load_recipe(options.recipe, options.overrides)
    part = parse_part("0/1" if options.part is None else options.part)
    check(options, recipe)
    if options.check:
        Console(is_first_rank(), options.quiet)(f"{options.recipe}: recipe, files and folders are fit for a capture")
        return 0
    with StopSignals():
        try:
            return run(recipe, options, part)
        except RunStopped as stopped:
            if is_first_rank():
                tell(f"stopped by {signal.Signals(stopped.number).name}; run capture.py again to continue")
            return 128 + stopped.number


def run(recipe: Recipe, options: argparse.Namespace, part: tuple[int, int]) -> int:
    console = Console(is_first_rank(), options.quiet)
    console(f"recipe: {options.recipe}; store: {recipe.hidden_states.path}")
    with waiting(console, "loading PyTorch and DeepSpeed"), slow_imports(options.quiet):
        from eagle3.jobs.supply import watched_capture
        from eagle3.parallel.topology import start_distributed, stop_distributed

    hidden = recipe.hidden_states
    topology = start_distributed(1, hidden.ulysses, hidden.ring)
    with watched_capture(recipe, topology) as watchdog:
        code = work(recipe, options, part, topology, console, watchdog)
    stop_distributed()
    return code


def work(
    recipe: Recipe,
    options: argparse.Namespace,
    part: tuple[int, int],
    topology: "Topology",
    console: Console,
    watchdog: "Watchdog",
) -> int:
    """Carries out what the options ask for. Returns this rank's exit code."""
    from eagle3.jobs.job import choose_draft, find_target, gather_inputs, spans_of
    from eagle3.jobs.sglang_engine import SGLangEngine
    from eagle3.jobs.supply import fill, verify
    from eagle3.parallel.topology import agreed
    from eagle3.states.capture import wanted_samples
    from eagle3.states.rows import CapturePart
    from eagle3.states.store.folder import has_shards

    gate, path, stored = Gate(recipe, console.warn, training=False), recipe.hidden_states.path, None
    if topology.is_first and not options.print_server and (is_url(path) or Path(path, "store.json").exists()):
        stored = open_files(path)
    # a manifest alone was left by a capture that was refused, or gave up
    agreed(lambda: gate.know(store=stored), stored is not None and has_shards(stored))
    watchdog.at("gathering the data")
    known = find_target(recipe, topology.device, console)
    agreed(lambda: gate.know(known=known), topology.is_first)
    job = choose_draft(gather_inputs(known, console), console)
    gate.know(draft=job.shape, longest=job.inputs.longest)
    if options.print_server:
        line = agreed(lambda: SGLangEngine(job, console).line())
        if topology.is_first:
            print(printable(line), flush=True)
        return 0
    sets, spans = (job.inputs.train, job.inputs.held_out), spans_of(recipe)
    if spans:
        console(spans.describe(job.inputs.train, anew=False))
    samples = wanted_samples(map(spans.fixed, sets) if spans else sets)
    if options.verify or options.repair:
        watchdog.at("checking the store")
        whole = agreed(lambda: verify(job, samples, console, options.repair), topology.is_first)
        if options.verify:
            return 1 if topology.is_first and not whole else 0
    fill(job, samples, CapturePart(*part), topology, console, watchdog)
    return 0


def check(options: argparse.Namespace, recipe: Recipe) -> None:
    """Raises UserError for every mistake that can be found before anything is loaded."""
    if options.part is not None and (options.verify or options.print_server):
        reason = "--verify checks the whole store" if options.verify else "--print-server captures nothing"
        raise SharedUserError(f"--part: {options.part}, but {reason}; leave it out")
    hidden, path = recipe.hidden_states, recipe.hidden_states.path
    if path is None and not options.print_server:
        raise SharedUserError(f"{options.recipe}: hidden_states.path is not set; name the folder of the store")
    if (options.verify or options.repair) and not (is_url(path) or Path(path).is_dir()):
        raise SharedUserError(
            f"hidden_states.path: {path}: no hidden-state store here to check; capture.py without --verify and "
            "--repair writes one"
        )
    captures = not (options.verify or options.print_server)
    require_inputs(recipe, weights=captures)
    here = captures and not options.check  # after --check, the capture may run on other machines
    if recipe.target.backend == "sglang" and here and not recipe.target.servers:
        require_sglang("let transformers run the target: target.backend=transformers", recipe.target.allow_untested)
    if is_url(path or "") and not options.verify:
        raise SharedUserError(
            f"hidden_states.path: {path}: a store is written to a folder; name one, and copy it to the URL once it is "
            "whole"
        )
    if captures:
        require_store_place(path)
    if recipe.target.backend == "sglang" and max(hidden.ulysses, hidden.ring) > 1:
        raise SharedUserError(
            f"hidden_states: ulysses {hidden.ulysses} and ring {hidden.ring}, but SGLang prefills long samples by "
            "itself; set both to 1, and target.tensor to the GPUs of an engine"
        )
    check_sizes("hidden_states", 1, hidden.ulysses, hidden.ring, launched("WORLD_SIZE", 1))
    if here and is_first_rank() and not Path(path).exists():  # a store that exists may be complete and need no server
        require_servers(recipe.target.servers)


def parse_part(text: str) -> tuple[int, int]:
    """Parses I/N into an index and a count."""
    index, slash, count = text.partition("/")
    if not (slash and text.isascii() and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise SharedUserError(f"--part: {text!r} is not a share; write I/N with I from 0 to N-1, as in 0/4")
    return int(index), int(count)


if __name__ == "__main__":
    run_command(main)
