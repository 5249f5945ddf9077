"""Write the hidden-state store of a recipe: run the target once over its samples, for train.py in stored mode."""

import argparse
import datetime
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from eagle3.data.capture import Wanted, capture, capture_arriving, capture_long, require_disk, wanted_samples
from eagle3.data.store.check import check_store, remove_flawed
from eagle3.data.store.files import is_url
from eagle3.data.store.writer import Part, StoreWriter
from eagle3.data.vocabulary import DraftVocabulary
from eagle3.errors import SharedUserError, run_command
from eagle3.parallel.topology import Topology, agreed, start_distributed, stop_distributed
from eagle3.recipe import Recipe, load_recipe
from eagle3.target.long_prefill import LongPrefill
from eagle3.target.transformers import TransformersTarget
from eagle3.training.assemble import (
    Materials,
    capture_record,
    config_of,
    draft_config,
    gather_materials,
    pick_vocabulary,
    provenance,
    start_target,
    store_encoding,
    store_provenance,
)
from eagle3.training.serving import capture_target, server_line
from eagle3.training.tracking import Console, duration

ROOT = Path(__file__).parent.parent
REPORT_SECONDS = 5.0
MOST_LINES = 20
# Processes end their shares hours apart and then wait for one another.
PATIENCE = datetime.timedelta(days=7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--part", metavar="I/N", help="capture share I (from 0) of N of the samples, beside other jobs")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--verify", action="store_true", help="read the whole store, compare checksums, say what is wrong"
    )
    what.add_argument("--repair", action="store_true", help="the same, then capture again what is wrong or missing")
    what.add_argument(
        "--print-server", action="store_true", help="print the command line of an SGLang server for target.servers"
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change single keys of the recipe")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides)
    part = parse_part(options.part or "0/1")
    if options.part and options.verify:
        raise SharedUserError(f"--part: {options.part}, but --verify checks the whole store; leave it out")
    path = recipe.hidden_states.path
    if path is None and not options.print_server:
        raise SharedUserError(f"{options.recipe}: hidden_states.path is not set; name the folder of the store")
    if is_url(path or "") and not options.verify:
        raise SharedUserError(
            f"hidden_states.path: {path}: a store is written to a folder; name one, and copy it to the URL when it is whole"
        )
    hidden = recipe.hidden_states
    if recipe.target.backend == "sglang" and max(hidden.ulysses, hidden.ring) > 1:
        raise SharedUserError(
            f"hidden_states: ulysses {hidden.ulysses} and ring {hidden.ring}, but SGLang prefills long samples by itself; "
            "set both to 1, and target.tensor to the GPUs of an engine"
        )
    topology = start_distributed(1, hidden.ulysses, hidden.ring, timeout=PATIENCE, section="hidden_states")
    console = Console(topology.is_first)
    materials = gather_materials(recipe, topology.device, console)
    config = config_of(recipe, materials)
    vocabulary = pick_vocabulary(recipe, materials, config.vocab_size, console)
    draft_config(recipe, materials, vocabulary).check_context(
        int(materials.train.lengths.max())
    )  # as training will ask
    if options.print_server:
        line = agreed(lambda: server_line(recipe, materials, vocabulary))
        if topology.is_first:
            print(line, flush=True)
        stop_distributed()
        return 0
    wanted = wanted_samples((materials.train, materials.held_out))
    if options.verify or options.repair:
        whole = agreed(
            (lambda: verify(recipe, materials, vocabulary, wanted, console, options.repair))
            if topology.is_first
            else None
        )
        if options.verify:
            code = 1 if topology.is_first and not whole else 0
            stop_distributed()
            return code
    fill(recipe, materials, vocabulary, config.hidden_size, wanted, part, topology, console)
    stop_distributed()
    return 0


def parse_part(text: str) -> Part:
    index, slash, count = text.partition("/")
    if not (slash and text.isascii() and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise SharedUserError(f"--part: {text!r} is not a share; write I/N with I from 0 to N-1, as in 0/4")
    return Part(int(index), int(count))


def verify(
    recipe: Recipe,
    materials: Materials,
    vocabulary: DraftVocabulary,
    wanted: dict[str, Wanted],
    console: Console,
    repair: bool,
) -> bool:
    """Say what is wrong with the store; where asked, take it out. True where nothing is."""
    path, told = recipe.hidden_states.path, time.monotonic()

    def progress(done: int, shards: int) -> None:
        nonlocal told
        if time.monotonic() - told > REPORT_SECONDS:
            told = time.monotonic()
            console(f"checked {done:,} of {shards:,} shards")

    findings = check_store(path, store_provenance(recipe, materials, vocabulary), wanted, progress)
    for problem in findings.problems[:MOST_LINES]:
        console(str(problem))
    if len(findings.problems) > MOST_LINES:
        console(f"and {len(findings.problems) - MOST_LINES:,} more")
    kinds = Counter(problem.kind for problem in findings.problems)
    console(
        f"{path}: {findings.samples:,} samples whole, {findings.tokens:,} tokens; "
        + (", ".join(f"{count:,} {kind}" for kind, count in kinds.items()) or "nothing wrong")
    )
    if repair:
        remove_flawed(Path(path), findings.problems)
    return not findings.problems


def fill(
    recipe: Recipe,
    materials: Materials,
    vocabulary: DraftVocabulary,
    hidden_size: int,
    wanted: dict[str, Wanted],
    part: Part,
    topology: Topology,
    console: Console,
) -> None:
    """Capture what the store lacks of this job's part."""
    hidden, sequence = recipe.hidden_states, topology.sequence
    together = part.split(topology.data.rank(), topology.data.size())
    alone = together.split(sequence.rank(), sequence.size())
    encoding = store_encoding(recipe, hidden_size, vocabulary.size)
    with StoreWriter(
        hidden.path,
        provenance(recipe, materials, vocabulary),
        encoding,
        record=capture_record(recipe, materials, vocabulary),
        part=alone,
        shard_tokens=hidden.shard_tokens,
        report=console,
    ) as writer:
        missing = {sample_id: one for sample_id, one in wanted.items() if sample_id not in writer.known}
        need = require_disk(Path(hidden.path), list(missing.values()), encoding)
        console(f"{hidden.path}: {len(wanted)} samples, {len(wanted) - len(missing)} already stored; {need}")
        if recipe.target.backend == "sglang":
            own = [one for sample_id, one in missing.items() if alone.has(sample_id)]
            if own:
                local_rank = int(os.environ.get("LOCAL_RANK", "0"))
                with capture_target(
                    recipe, materials, vocabulary, local_rank, topology.batch.size(), console
                ) as target:
                    capture_arriving(target, own, writer, Progress(own, console).captured)
        else:
            short = [
                one
                for sample_id, one in missing.items()
                if alone.has(sample_id) and one.tokens <= hidden.prefill_tokens
            ]
            # What one rank found stored another may have looked for a moment earlier.
            long = [
                sample_id
                for sample_id, one in missing.items()
                if together.has(sample_id) and one.tokens > hidden.prefill_tokens
            ]
            chosen = [long]
            dist.broadcast_object_list(chosen, group=sequence, group_src=0)
            fill_here(
                recipe,
                start_target(recipe, materials, topology.device, vocabulary),
                short,
                [wanted[sample_id] for sample_id in chosen[0]],
                writer,
                topology,
                console,
            )
    shares = topology.batch.size() * part.count
    console(f"{hidden.path}: {'complete' if shares == 1 else f'this share of {shares} is complete'}")


def fill_here(
    recipe: Recipe,
    target: TransformersTarget,
    short: list[Wanted],
    long: list[Wanted],
    writer: StoreWriter,
    topology: Topology,
    console: Console,
) -> None:
    """With the target in these processes: short samples by this rank alone, long ones by the ranks of a sequence group
    together."""
    sequence, prefill_tokens = topology.sequence, recipe.hidden_states.prefill_tokens
    progress = Progress(short + (long if sequence.rank() == 0 else []), console)
    capture(target, short, prefill_tokens, writer, progress.captured)
    if long:
        long_target = LongPrefill(target, topology.ulysses, topology.ring, sequence, prefill_tokens)
        capture_long(long_target, long, writer, progress.captured)


class Progress:
    """Says how far this process is, every few seconds: tokens of its share, rate, time left."""

    def __init__(self, samples: Sequence[Wanted], say: Console) -> None:
        self.tokens, self.say, self.done = sum(one.tokens for one in samples), say, 0
        self.began = self.told = time.monotonic()

    def captured(self, tokens: int) -> None:
        self.done += tokens
        now = time.monotonic()
        if now - self.told > REPORT_SECONDS:
            self.told, rate = now, self.done / (now - self.began)
            left = duration((self.tokens - self.done) / rate)
            self.say(f"captured {self.done:,} of {self.tokens:,} tokens of this share, {rate:,.0f}/s, {left} left")


if __name__ == "__main__":
    run_command(main)
