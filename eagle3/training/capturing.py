"""From a recipe to a filled hidden-state store: each process captures its share of what is missing; what is damaged goes."""

import os
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from eagle3.console import Console, Progress, Say, counted, waiting
from eagle3.data.capture import Wanted, capture, capture_arriving, capture_long, require_disk
from eagle3.data.store.check import bind_shards, check_store, remove_flawed
from eagle3.data.store.folder import MANIFEST, unbound_notice
from eagle3.data.store.writer import Part, StoreWriter
from eagle3.data.vocabulary import DraftVocabulary
from eagle3.errors import UserError
from eagle3.parallel.topology import Topology
from eagle3.recipe import Recipe
from eagle3.target.long_prefill import LongPrefill
from eagle3.target.transformers import TransformersTarget
from eagle3.training.assemble import (
    Materials,
    capture_record,
    provenance,
    start_target,
    store_encoding,
    store_provenance,
)
from eagle3.training.serving import capture_target

MOST_LINES = 20


def verify(
    recipe: Recipe,
    materials: Materials,
    vocabulary: DraftVocabulary,
    wanted: dict[str, Wanted],
    console: Console,
    repair: bool,
    bind: bool,
) -> bool:
    """Say what is wrong with the store; where asked, take it out, or, where nothing is wrong, bind the shards of older
    versions to it. True where nothing is."""
    path = recipe.hidden_states.path
    findings = check_store(path, store_provenance(recipe, materials, vocabulary), wanted, console)
    for problem in findings.problems[:MOST_LINES]:
        console.result(str(problem))
    if len(findings.problems) > MOST_LINES:
        console.result(f"and {len(findings.problems) - MOST_LINES:,} more")
    kinds = Counter(problem.kind for problem in findings.problems)
    console.result(
        f"{path}: {findings.samples:,} samples whole, {findings.tokens:,} tokens; "
        + (", ".join(f"{count:,} {kind}" for kind, count in kinds.items()) or "nothing wrong")
    )
    whole = not findings.problems
    if kinds["foreign"] and kinds["foreign"] == len(findings.indexes):
        console.result(f"{path}: all shards are foreign; if {MANIFEST} was replaced, restore it: --repair deletes them")
    try:
        if repair:
            remove_flawed(Path(path), findings.problems)
        elif bind and whole:
            bound = bind_shards(Path(path), findings)
            console.result(f"{path}: {counted(bound, 'shard')} newly bound to {MANIFEST}")
        elif notice := unbound_notice(path, findings.indexes):
            console.result(notice)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error}); free space or change its rights, and run the same again"
        ) from error
    if bind and not whole:
        console.result(f"{path}: nothing was bound; run capture.py --repair first")
    return whole


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
    with waiting(console, f"opening {hidden.path}"):
        opened = StoreWriter(
            hidden.path,
            provenance(recipe, materials, vocabulary),
            encoding,
            record=capture_record(recipe, materials, vocabulary),
            part=alone,
            shard_tokens=hidden.shard_tokens,
            report=console,
        )
    with opened as writer:
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
                    capture_arriving(target, own, writer, _progress(own, console).advance)
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
            with waiting(console, f"loading {materials.target}"):
                target = start_target(recipe, materials, topology.device, vocabulary)
            _fill_here(
                recipe,
                target,
                short,
                [wanted[sample_id] for sample_id in chosen[0]],
                writer,
                topology,
                console,
            )
    shares = topology.batch.size() * part.count
    console.result(f"{hidden.path}: {'complete' if shares == 1 else f'this share of {shares} is complete'}")


def _fill_here(
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
    progress = _progress(short + (long if sequence.rank() == 0 else []), console)
    capture(target, short, prefill_tokens, writer, progress.advance)
    if long:
        long_target = LongPrefill(target, topology.ulysses, topology.ring, sequence, prefill_tokens)
        capture_long(long_target, long, writer, progress.advance)


def _progress(samples: list[Wanted], say: Say) -> Progress:
    """Of this process's share."""
    return Progress(say, "capturing this share", sum(one.tokens for one in samples), "tokens")
