"""Supply a job's hidden states: from a target in these processes, SGLang servers, or a store."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from eagle3.console import Say, waiting
from eagle3.durable import writing
from eagle3.errors import SharedUserError, UserError
from eagle3.jobs.derived import store_encoding
from eagle3.jobs.job import Job, KnownTarget, start_target
from eagle3.jobs.provenance import spans_of, store_provenance
from eagle3.jobs.target_probe import (
    FILE,
    PROBE_TOKENS,
    own_probe,
    probe_document,
    read_probe,
    require_same_target,
    write_probe,
)
from eagle3.parallel.topology import Topology, agreed
from eagle3.states.loader import HiddenStateSource, LiveSource, Reading, SpooledSource, StoredSource
from eagle3.states.rows import DraftLogits, Rows
from eagle3.states.spool import REMEDY, Spool, SpoolReader, Ticket, WantedRows, own_folder, spool_bytes
from eagle3.states.store.reader import HiddenStateStore
from eagle3.states.store.shard import Encoding
from eagle3.targets.head import load_target_head
from eagle3.targets.logits import TargetHead, summarize_teacher
from eagle3.targets.sglang.asking import START, ServerInfo, reported
from eagle3.targets.sglang.client import (
    PROBE_SECONDS,
    Producer,
    Servers,
    SGLangTarget,
    require_spool_room,
)
from eagle3.targets.sglang.fitness import require_capture
from eagle3.targets.sglang.hook import HookSettings
from eagle3.targets.sglang.installed import SUPPORTED, is_tested
from eagle3.targets.sglang.server import EngineOptions, SGLangServer, as_typed, server_command
from eagle3.targets.sglang.version import capture_flags, require_captured
from eagle3.targets.transformers import TransformersTarget
from eagle3.text.samples import Sample, Spans, Split
from eagle3.text.vocabulary import DraftVocabulary, save_vocabulary

SERVER_PORT = 30000  # SGLang's own default
HEAD_TOKENS = 16


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
    samples, stored = (
        Split(job.inputs.train.sorted_by_id(), job.inputs.held_out.sorted_by_id()),
        recipe.hidden_states.mode == "stored",
    )
    if stored:
        with waiting(say, f"opening {recipe.hidden_states.path}"):
            store, samples, spans = agreed(lambda: _open_store(job, samples, spans))
        if store.record.get("draft_vocabulary") != job.vocabulary.digest:
            say(f"{store.where}: was captured for another draft vocabulary, which changes none of its hidden states")
    if recipe_spans := spans_of(recipe):  # on the first rank only, because describing spans reads all samples
        anew = spans is not None
        agreed(lambda: say(recipe_spans.describe(job.inputs.train, anew)), topology.is_first)
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
        with live_source(job, head, topology, say) as source:
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
        samples, spans = Split(*(part.masked(lambda sample: spans.draw(sample, 0)) for part in samples)), None
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


# SGLang ---------------------------------------------------------------------------------------------------------------


def engine_options(known: KnownTarget) -> EngineOptions:
    """Options for starting a server with this recipe's target, whatever it is used for."""
    recipe, model, target = known.recipe, known.recipe.model, known.recipe.target
    dtype = model.target_dtype
    if dtype == "auto":  # as transformers understands it; SGLang's own "auto" runs a float32 target in half precision
        dtype = str(known.config.dtype or torch.float32).removeprefix("torch.")
    return EngineOptions(
        model=known.target,
        revision=model.revision,
        trust_remote_code=bool(model.trust_remote_code),
        dtype=dtype,
        tensor=target.tensor,
        memory_fraction=target.memory_fraction,
        kv_tokens=target.kv_tokens,
        attention=target.attention,
        chunk_tokens=recipe.hidden_states.prefill_tokens,
        allow_untested=target.allow_untested,
    )


def hook_settings(job: Job) -> HookSettings:
    """Settings for a server's hook."""
    spool, vocabulary = Path(job.recipe.target.spool).expanduser().absolute(), job.vocabulary
    settings = HookSettings(
        spool=str(spool),
        dtype=job.recipe.hidden_states.dtype,
        target=job.known.fingerprint,
        hidden_size=job.known.config.hidden_size,
        aux_layers=len(job.known.aux_layers),
    )
    if job.recipe.target.teacher == "hidden":
        return settings
    return settings._replace(
        draft_vocabulary=str(spool / f"vocabulary-{vocabulary.digest}.safetensors"),
        vocabulary_digest=vocabulary.digest,
        vocabulary_size=vocabulary.size,
    )


def _publish_vocabulary(settings: HookSettings, vocabulary: DraftVocabulary) -> None:
    """Write the draft vocabulary where a server's hook will look for it, if the teacher is logits."""
    if settings.draft_vocabulary is None or (file := Path(settings.draft_vocabulary)).exists():
        return
    own_folder(file.parent)
    with writing(file.parent, REMEDY):
        save_vocabulary(vocabulary, file)


def server_line(job: Job) -> str:
    """The command line, as a person would type it, that starts a capturing server for this job."""
    options, flags = _capture_engine(job)
    return as_typed(server_command(options, flags, SERVER_PORT), options.variables())


def _capture_engine(job: Job) -> tuple[EngineOptions, list[str]]:
    """Options for a capturing server, and the further flags that load the hook."""
    require_captured(job.known.aux_layers, job.known.config.num_hidden_layers, job.known.config.model_type)
    options, longest, settings = engine_options(job.known), job.recipe.data.max_length, hook_settings(job)
    _publish_vocabulary(settings, job.vocabulary)
    if options.kv_tokens is None and not torch.cuda.is_available():  # otherwise SGLang takes nearly all host memory
        options = replace(options, kv_tokens=2 * longest + 2 * options.chunk_tokens)
    return replace(options, longest=longest), capture_flags(job.known.aux_layers, settings._asdict())


def _require_servers(job: Job, urls: Sequence[str]) -> None:
    """See `require_capture`."""
    options = engine_options(job.known)
    for url in urls:
        require_capture(
            url,
            hook_settings(job),
            job.known.aux_layers,
            dtype=options.dtype,
            revision=options.revision,
            longest=job.inputs.longest,
            allow_untested=options.allow_untested,
        )


@contextmanager
def capture_target(job: Job, kept: Encoding, expected: Rows | None, processes: int, say: Say) -> Iterator[SGLangTarget]:
    """The target for one of a capture's `processes` processes: the recipe's servers, or this process's own engine on
    its own GPUs.

    kept: of the store, whose window and steps say which rows it keeps
    expected: see `own_probe`
    """
    settings, target, engine = hook_settings(job), job.recipe.target, None
    most = round(target.spool_gib * 2**30 / processes)
    longest = job.inputs.longest
    require_spool_room(longest, spool_bytes(settings.encoding, WantedRows.all(longest)), most)
    with ExitStack() as stack:
        spool = stack.enter_context(Spool(settings.spool, say, most))
        urls = target.servers
        if urls:
            _require_servers(job, urls)
        else:
            engine = SGLangServer(*_capture_engine(job), _devices(target.tensor), say)
            urls = [stack.enter_context(engine).url]
        probe = _compare_with_store(job, _probes(job, urls, expected, say), expected)
        servers = Servers(urls, spool.path, target.in_flight, say)
        servers.check = partial(_require_unchanged, job, probe, say)
        servers.remedy = f"delete the newer shards in {job.recipe.hidden_states.path}, and run capture.py again"
        producer = stack.enter_context(closing(Producer(servers, spool, most, readers=0)))
        try:
            encoding = replace(settings.encoding, window=kept.window, ttt_steps=kept.ttt_steps)
            known = job.known
            yield SGLangTarget(producer, encoding, vocab_size=known.config.vocab_size, aux_layers=known.aux_layers)
            servers.compare_all()
        except UserError as error:
            if engine is None or not engine.ended():
                raise
            raise UserError(
                f"sglang: the engine ended: {engine.last_words()} (its whole log is {engine.log}); lower "
                "target.memory_fraction or hidden_states.prefill_tokens, and run capture.py again, which continues "
                "from here"
            ) from error


def _devices(tensor: int) -> str | None:
    """CUDA_VISIBLE_DEVICES for this process's engine; None on a machine without GPUs."""
    if not torch.cuda.is_available():
        return None
    count, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    own = visible[local_rank * tensor :][:tensor]
    if len(own) < tensor:
        raise UserError(
            f"target.tensor: {tensor} GPUs for each of {local_rank + 1} or more engines, but this machine has "
            f"{count}; start at most {count // tensor} processes"
        )
    return ",".join(own)


def _probes(job: Job, urls: Sequence[str], expected: Rows | None, say: Say) -> Iterator[tuple[str, Rows]]:
    """Each server, and what it computes of the probe document. Raises UserError if there is nothing to compare that
    with, and the server's SGLang was not tested."""
    for url in urls:
        release = reported(url, ServerInfo).version
        if expected is None and not is_tested(release):
            raise SharedUserError(
                f"target.allow_untested: {url} runs SGLang {release}, and this target cannot be computed with "
                f"transformers here to check it; install {SUPPORTED}"
            )
        yield _probe(job, url, say)


def _probe(job: Job, url: str, say: Say) -> tuple[str, Rows]:
    """A server, and what it computes of the probe document, which passes through a spool of its own."""
    settings, vocab_size = hook_settings(job), job.known.config.vocab_size
    with Spool(settings.spool, say) as spool:
        servers = Servers([url], spool.path, 1, say, PROBE_SECONDS)
        room = 2 * spool_bytes(settings.encoding, WantedRows.all(PROBE_TOKENS))
        with closing(Producer(servers, spool, room, readers=0)) as producer:
            target = SGLangTarget(producer, settings.encoding, vocab_size=vocab_size, aux_layers=job.known.aux_layers)
            (rows,) = target.prefill([probe_document(vocab_size)])
            return f"target.servers: {url}" if job.recipe.target.servers else "SGLang", rows


def _require_unchanged(job: Job, probe: Rows, say: Say, url: str) -> None:
    """Raises ServerDiffers if a server is no longer what it was at the job's start, when it computed `probe`."""
    require_same_target([_probe(job, url, say)], probe, "this job's start")
    _require_servers(job, [url] if job.recipe.target.servers else [])


def _compare_with_store(job: Job, probes: Iterable[tuple[str, Rows]], expected: Rows | None) -> Rows:
    """Raises UserError unless all servers compute what is expected or, if that is not known, what the store was
    captured from, which a new store remembers. Returns that."""
    file, origin = Path(job.recipe.hidden_states.path) / FILE, "transformers"
    if expected is None:
        expected, origin = read_probe(file, job), "what the store was captured from"
    agreed_rows = require_same_target(probes, expected, origin)
    if not file.exists():
        write_probe(file, agreed_rows)
    return agreed_rows


def _compare_servers(job: Job, say: Say) -> Rows:
    """Raises UserError unless the recipe's servers capture what this job needs, and compute the target's hidden states.
    Returns those of the probe document."""
    urls = job.recipe.target.servers
    _require_servers(job, urls)
    expected = own_probe(job, say)
    return require_same_target(_probes(job, urls, expected, say), expected, "transformers")


@contextmanager
def live_source(job: Job, head: TargetHead, topology: Topology, say: Say) -> Iterator[SpooledSource]:
    """Source of this rank's rows from the recipe's servers. The first rank of each stream requests them. Collective."""
    target = job.recipe.target
    if not target.servers:
        raise SharedUserError(
            f"target.servers: live training with SGLang needs running servers; for each, {START}, and name its URL"
        )
    probe = agreed(lambda: _compare_servers(job, say), topology.is_first)
    settings, kept = hook_settings(job), store_encoding(job.recipe, job.shape)
    most = round(target.spool_gib * 2**30 / topology.data.size())
    longest = job.inputs.longest
    require_spool_room(longest, spool_bytes(settings.encoding, WantedRows.all(longest)), most)
    with ExitStack() as stack:
        asks = topology.stream.rank() == 0
        spool = agreed(lambda: stack.enter_context(Spool(settings.spool, say, most)), asks)
        message = [spool.job if asks else None]
        dist.broadcast_object_list(message, group=topology.stream, group_src=0)
        ask = servers = None
        if asks:
            servers = Servers(target.servers, spool.path, target.in_flight, say)
            producer = stack.enter_context(closing(Producer(servers, spool, most, topology.stream.size())))
            servers.remedy = "delete the newer checkpoints in output.dir, and continue with --resume"
            if topology.is_first:
                servers.check = partial(_require_unchanged, job, probe, say)

            def ask(ticket: Ticket, reading: Reading) -> None:
                ids, wanted = reading.sample.ids, WantedRows(reading.supervised, kept.window, kept.ttt_steps)
                producer.ask(ticket, ids, wanted, spool_bytes(settings.encoding, wanted))

        reader = SpoolReader(Path(settings.spool) / message[0], topology.stream.rank(), job.known.config.vocab_size)
        source = SpooledSource(reader, message[0], ask)
        agreed(lambda: _check_head(source, head, topology))
        yield source
        agreed(lambda: servers.compare_all(), asks)


def _check_head(source: SpooledSource, head: TargetHead, topology: Topology) -> None:
    """Send a short document through the whole path to check that every rank sees the spool, and that training's lm_head
    gives the server's logits."""
    every = torch.arange(HEAD_TOKENS)
    ids = every % len(head.embedding)
    sample = Sample(f"{topology.data.rank():032x}", ids, torch.ones(len(ids), dtype=torch.bool))
    teacher = source.rows([Reading(sample, sample.loss_mask, every[:0], every[1:])])[0].teacher
    if isinstance(teacher, DraftLogits):
        return
    own = summarize_teacher(teacher.values.to(head.head.device, head.head.dtype), head.head, transform=head.transform)
    difference = (own.logsumexp.cpu() - teacher.logsumexp).abs().max()
    if difference > 0.02 * teacher.logsumexp.abs().max() + 0.02:
        raise UserError(
            "target.servers: their logits are not those of this target's lm_head (logsumexp differs by "
            f"{difference:.3g}); serve the checkpoint that model.target names, or set target.teacher=logits"
        )
