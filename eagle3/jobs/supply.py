"""Supply a job's hidden states: from a target in these processes, SGLang servers, or a store; and fill such a
store, where each process captures its share of the missing samples, check it and repair it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eagle3.attention.block import BlockKernels
from eagle3.console import Console, Say, waiting
from eagle3.durable import writing
from eagle3.errors import UserError
from eagle3.jobs.derived import store_encoding, stored_reach
from eagle3.jobs.job import Job, capture_record, provenance, spans_of, start_target, store_provenance
from eagle3.jobs.sglang_engine import SGLangEngine
from eagle3.jobs.sglang_probe import own_probe
from eagle3.kernels.choice import choose_kernels
from eagle3.kernels.proof import KernelDemand
from eagle3.parallel.topology import Topology, agreed, gathered
from eagle3.parallel.watchdog import Watchdog
from eagle3.recipe.schema import Recipe
from eagle3.states.capture import ShareCourse, Wanted, capture, capture_arriving, prefill_batches, require_disk
from eagle3.states.loader import HiddenStateSource, LiveSource, StoredSource
from eagle3.states.rows import CapturePart
from eagle3.states.store.check import check_store, remove_flawed
from eagle3.states.store.folder import MANIFEST
from eagle3.states.store.reader import HiddenStateStore
from eagle3.states.store.writer import StoreWriter
from eagle3.targets.head import load_target_head
from eagle3.targets.logits import TargetHead
from eagle3.targets.long_prefill import ChooseKernels, LongPrefill, require_one_rank
from eagle3.targets.transformers import TransformersTarget
from eagle3.text.samples import Spans, Split
from eagle3.training.watched import watched

MOST_LINES = 20  # about what is wrong with a store


@dataclass(frozen=True)
class HiddenStateSupply:
    """The samples and hidden states that training reads."""

    samples: Split  # with the ids and loss masks by which the source knows them
    spans: Spans | None  # which parts of the samples to supervise; None for their whole masks
    source: HiddenStateSource
    held_out_source: HiddenStateSource  # a source of its own, because training reads ahead during measurements
    head: TargetHead  # the target's embedding and lm_head
    target: TransformersTarget | None  # None unless it runs in this process


@contextmanager
def hidden_state_supply(job: Job, topology: Topology, say: Say) -> Iterator[HiddenStateSupply]:
    """Start the target, contact servers, or open the store, and load the target's embedding and lm_head. Collective."""
    recipe, model, spans = job.recipe, job.recipe.model, spans_of(job.recipe)
    samples = Split(job.inputs.train.sorted_by_id(), job.inputs.held_out.sorted_by_id())
    stored = recipe.hidden_states.mode == "stored"
    if stored:
        with waiting(say, f"opening {recipe.hidden_states.path}"):
            store, samples, spans = agreed(lambda: _open_store(job, samples, spans))
        if store.record.get("draft_vocabulary") != job.vocabulary.digest:
            say(f"{store.where}: was captured for another draft vocabulary, which changes none of its hidden states")
    if recipe_spans := spans_of(recipe):  # on the first rank only, because describing spans reads all samples
        agreed(lambda: say(recipe_spans.describe(job.inputs.train, anew=spans is not None)), topology.is_first)
    if not stored and recipe.target.backend == "transformers":
        with waiting(say, f"loading {job.known.target}"):
            target = start_target(job.known, topology.device, job.vocabulary)
        keep_on = torch.device("cpu") if recipe.memory.inputs == "host" else topology.device
        source = LiveSource(target, topology.stream, topology.device, keep_on)
        yield HiddenStateSupply(samples, spans, source, source, target.head, target)
        return
    head = load_target_head(
        job.known.target,
        revision=model.revision,
        trust_remote_code=model.trust_model_code,
        dtype=model.target_dtype,
        required=recipe.target.teacher == "hidden",
    )
    if stored:
        source = StoredSource(store)
        yield HiddenStateSupply(samples, spans, source, source, head, None)
    else:
        with SGLangEngine(job, say).live(stored_reach(recipe), head, topology) as source:
            yield HiddenStateSupply(samples, spans, source, source.beside(1), head, None)


def _open_store(job: Job, samples: Split, spans: Spans | None) -> tuple[HiddenStateStore, Split, Spans | None]:
    """The store, and the samples and spans that it can serve (see `HiddenStateSupply`).

    Samples that were captured whole serve any spans, drawn anew in every epoch. Samples captured with spans serve only
    those.
    """
    store = HiddenStateStore.open(job.recipe.hidden_states.path, store_provenance(job), job.known.config.vocab_size)
    captured, original, detail = store.record.get("spans"), spans, ""
    missing = _missing(store, samples)
    if missing and spans is not None:
        # A store has the spans of the first epoch.
        samples, spans = Split(*map(spans.fixed, samples)), None
        missing = _missing(store, samples)
    if not missing:
        return store, samples, spans
    if original is not None or captured is not None:  # samples captured with different spans count as different samples
        detail = f", which was captured with {captured or 'no data.spans'}; this run has {original or 'no data.spans'}"
    raise UserError(
        f"{store.where}: {len(missing)} samples of this recipe are not in the store (first: {missing[0]}){detail}; "
        "run launchers/capture.py with this recipe, which adds them"
    )


def _missing(store: HiddenStateStore, samples: Split) -> list[str]:
    return store.missing([*samples.train.sample_ids, *samples.held_out.sample_ids])


# A store --------------------------------------------------------------------------------------------------------------


def verify(job: Job, samples: dict[str, Wanted], console: Console, repair: bool) -> bool:
    """Report everything that is wrong with the store. Returns whether it is whole. repair: delete whatever is wrong"""
    path = job.recipe.hidden_states.path
    findings = check_store(path, store_provenance(job), samples, console, job.known.config.vocab_size)
    for problem in findings.problems[:MOST_LINES]:
        console.result(str(problem))
    if len(findings.problems) > MOST_LINES:
        console.result(f"and {len(findings.problems) - MOST_LINES:,} more")
    kinds = Counter(problem.kind for problem in findings.problems)
    console.result(
        f"{path}: {findings.samples:,} samples whole, {findings.tokens:,} tokens; "
        + (", ".join(f"{count:,} {kind}" for kind, count in kinds.items()) or "nothing wrong")
    )
    if kinds["foreign"] and not findings.shards:
        console.result(f"{path}: all shards are foreign; if {MANIFEST} was replaced, restore it: --repair deletes them")
    if repair:
        with writing(Path(path), "free space, and run the same again"):
            remove_flawed(Path(path), findings.problems)
    return not findings.problems


def watched_capture(recipe: Recipe, topology: Topology) -> AbstractContextManager[Watchdog]:
    """The watchdog for a capture. Collective."""
    return watched(
        topology,
        # SGLang's client has time limits of its own, which allow for servers that are busy with other jobs.
        hang_minutes=None if recipe.target.backend == "sglang" else recipe.training.hang_minutes,
        advice="run capture.py again, which continues",
        less_memory="lower hidden_states.prefill_tokens",
    )


def fill(
    job: Job, samples: dict[str, Wanted], part: CapturePart, topology: Topology, console: Console, watchdog: Watchdog
) -> None:
    """Capture the samples in this job's part that the store lacks. Returns when every rank has finished its share."""
    path, sequence = job.recipe.hidden_states.path, topology.sequence
    together = part.split(topology.data.rank(), topology.data.size())
    alone = together.split(sequence.rank(), sequence.size())
    watchdog.at("opening the store")
    with waiting(console, f"opening {path}"):
        store = agreed(
            lambda: StoreWriter(
                path,
                provenance(job),
                store_encoding(job.recipe, job.shape),
                record=capture_record(job),
                part=alone,
                shard_tokens=job.recipe.hidden_states.shard_tokens,
            )
        )
    with store as writer:
        missing = {sample_id: one for sample_id, one in samples.items() if sample_id not in writer.known}
        need = agreed(lambda: require_disk(Path(path), list(missing.values()), writer.encoding))
        console(f"{path}: {len(samples)} samples, {len(samples) - len(missing)} already stored; {need}")
        if job.recipe.target.backend == "sglang":
            # What the servers should compute of the probe document, if that is known here: the first rank finds it for
            # all, if samples are missing on any.
            expected = None
            if any(gathered(bool(missing))):
                expected = gathered(agreed(lambda: own_probe(job, console), topology.is_first))[0]
            own = [missing[sample_id] for sample_id in alone.of(samples) if sample_id in missing]
            if own:
                watchdog.at("starting SGLang")
                engine = SGLangEngine(job, console).capturing(writer.encoding.reach, expected, topology.batch.size())
                with engine as target, watchdog.watching():
                    course = ShareCourse(len(own), sum(one.tokens for one in own), console, watchdog.at)
                    capture_arriving(target, own, writer, course)
        else:
            _capture_here(job, samples, writer, (alone, together), topology, console, watchdog)
    watchdog.at("the end of its share")
    dist.barrier()
    console.result(f"{path}: {'complete' if part.count == 1 else f'this share of {part.count} is complete'}")


def _capture_here(
    job: Job,
    samples: dict[str, Wanted],
    writer: StoreWriter,
    parts: tuple[CapturePart, CapturePart],
    topology: Topology,
    console: Console,
    watchdog: Watchdog,
) -> None:
    """Capture with the target in these processes.

    Each rank prefills batches of short samples by itself; the ranks of a sequence group prefill long samples together.
    `parts` are this rank's part of the short samples and its group's part of the long ones. All samples are dealt out,
    stored or not, so that ranks agree even if they look at the store at different times.
    """
    (alone, together), most, sequence = parts, job.recipe.hidden_states.prefill_tokens, topology.sequence
    missing = samples.keys() - writer.known
    batches = [batch for batch in alone.of(prefill_batches(samples, most)) if not missing.isdisjoint(batch)]
    long = together.of(sample_id for sample_id, one in samples.items() if one.tokens > most)
    # A rank may see a sample in the store that another rank, looking a moment earlier, did not.
    long = gathered([sample_id for sample_id in long if sample_id in missing], sequence)[0]
    if long:
        require_one_rank(job.known.target, job.known.config, sequence.size())
    if not batches and not long:
        return
    own = [*chain(*batches), *(long if sequence.rank() == 0 else ())]
    tokens = sum(samples[sample_id].tokens for sample_id in own if sample_id in missing)
    watchdog.at("loading the target")
    with waiting(console, f"loading {job.known.target}"):
        target = start_target(job.known, topology.device, job.vocabulary)
    course = ShareCourse(len(own), tokens, console, watchdog.at)
    with watchdog.watching():
        capture(target, [[samples[sample_id] for sample_id in batch] for batch in batches], writer, course)
    if not long:
        return
    watchdog.at("the end of its short samples")
    dist.barrier(sequence)  # may take hours, so the watchdog does not count waiting here as a hang
    with watchdog.watching():
        choose = _chooser(job, topology, console)
        long_target = LongPrefill(target, topology.ulysses, topology.ring, sequence, most, choose)
        capture_arriving(long_target, [samples[sample_id] for sample_id in long], writer, course)


def _chooser(job: Job, topology: Topology, console: Console) -> ChooseKernels:
    """Chooses kernels for the attention of long prompts, on CUDA by trying them on this GPU. Collective over the ranks
    of a sequence."""

    @cache
    def chosen(**shape: Any) -> BlockKernels:
        cache_dir = job.recipe.data.cache_dir.expanduser()
        choice = choose_kernels(KernelDemand(**shape), topology, cache_dir, among=topology.sequence)
        choice.tell(console, "long prompts: ")
        return choice.kernels.blocks

    return chosen
