"""SGLang as a job's engine: in the servers that the recipe names, or in one that this process starts."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from eagle3.console import Say
from eagle3.durable import writing
from eagle3.errors import SharedUserError, UserError
from eagle3.jobs.job import Job, KnownTarget
from eagle3.jobs.sglang_probe import (
    PROBE_TOKENS,
    own_probe,
    probe_document,
    read_probe,
    require_same_target,
    write_probe,
)
from eagle3.parallel.sequence import Reach
from eagle3.parallel.topology import Topology, agreed, gathered
from eagle3.states.loader import SampleReading, SpooledSource
from eagle3.states.rows import DraftLogits, Rows
from eagle3.states.spool import REMEDY, Spool, SpoolReader, Ticket, WantedRows, own_folder, spool_bytes
from eagle3.states.store.shard import Encoding
from eagle3.targets.logits import TargetHead, summarize_teacher
from eagle3.targets.sglang.asking import SUPPORTED, ServerInfo, is_tested, reported
from eagle3.targets.sglang.client import PROBE_SECONDS, Producer, Servers, require_spool_room
from eagle3.targets.sglang.hook import HookSettings
from eagle3.targets.sglang.server import EngineOptions, SGLangServer, as_typed, server_command
from eagle3.targets.sglang.target import SGLangTarget
from eagle3.targets.sglang.version import capture_flags, require_capture, require_captured
from eagle3.text.samples import Sample
from eagle3.text.vocabulary import save_vocabulary

SERVER_PORT = 30000  # SGLang's own default
HEAD_TOKENS = 16
PROBE_FILE = "probe.safetensors"


class SGLangEngine:
    """SGLang's part in a job: how its servers are started, held to the job's target, and asked for rows."""

    def __init__(self, job: Job, say: Say) -> None:
        self.job, self.known, self.say = job, job.known, say
        self.options, self.settings = engine_options(job.known), hook_settings(job)
        self.encoding, self.urls = self.settings.encoding, job.recipe.target.servers

    def line(self) -> str:
        """The command line, as a person would type it, that starts a capturing server."""
        options, flags = self._own_server()
        return as_typed(server_command(options, flags, SERVER_PORT), options.variables())

    @contextmanager
    def capturing(self, reach: Reach, expected: Rows | None, processes: int) -> Iterator[SGLangTarget]:
        """The target for one of a capture's `processes` processes: the recipe's servers, or this process's own engine
        on its own GPUs.

        reach: of the store, which keeps the rows in it
        expected: see `own_probe`
        """
        target, engine, urls = self.job.recipe.target, None, self.urls
        most = self._room(processes)
        with ExitStack() as stack:
            spool = stack.enter_context(Spool(self.settings.spool, self.say, most))
            if not urls:
                engine = SGLangServer(*self._own_server(), _devices(target.tensor), self.say)
                urls = [stack.enter_context(engine).url]
            probe = self._compare(urls, expected, Path(self.job.recipe.hidden_states.path) / PROBE_FILE)
            servers = Servers(
                urls,
                spool.path,
                target.in_flight,
                self.say,
                check=partial(self._require_unchanged, probe),
                remedy=f"delete the newer shards in {self.job.recipe.hidden_states.path}, and run capture.py again",
            )
            producer = stack.enter_context(closing(Producer(servers, spool, most, readers=0)))
            try:
                yield self._target(producer, replace(self.encoding, reach=reach))
                servers.compare_all()
            except UserError as error:
                if engine is None or not engine.ended():
                    raise
                raise UserError(
                    f"sglang: the engine ended: {engine.last_words()} (its whole log is {engine.log}); lower "
                    "target.memory_fraction or hidden_states.prefill_tokens, and run capture.py again, which "
                    "continues from here"
                ) from error

    @contextmanager
    def live(self, reach: Reach, head: TargetHead, topology: Topology) -> Iterator[SpooledSource]:
        """Source of this rank's rows from the recipe's servers. The first rank of each stream requests them.
        Collective. reach: see `capturing`"""

        def compared() -> Rows:
            for url in self.urls:
                self._require(url)  # in seconds, while transformers may have to load the whole target
            return self._compare(self.urls, own_probe(self.job, self.say))

        probe = agreed(compared, topology.is_first)
        most, asks = self._room(topology.data.size()), topology.stream.rank() == 0
        with ExitStack() as stack:
            spool = agreed(lambda: stack.enter_context(Spool(self.settings.spool, self.say, most)), asks)
            name = gathered(spool.job if asks else None, topology.stream)[0]
            ask = servers = None
            if asks:
                servers = Servers(
                    self.urls,
                    spool.path,
                    self.job.recipe.target.in_flight,
                    self.say,
                    check=partial(self._require_unchanged, probe) if topology.is_first else lambda url: None,
                    remedy="delete the newer checkpoints in output.dir, and continue with --resume",
                )
                producer = stack.enter_context(closing(Producer(servers, spool, most, topology.stream.size())))

                def ask(ticket: Ticket, reading: SampleReading) -> None:
                    wanted = WantedRows(reading.supervised, reach)
                    producer.ask(ticket, reading.sample.ids, wanted, spool_bytes(self.encoding, wanted))

            folder = Path(self.settings.spool) / name
            reader = SpoolReader(folder, topology.stream.rank(), self.known.config.vocab_size)
            source = SpooledSource(reader, name, ask)
            agreed(lambda: _check_head(source, head, topology))
            yield source
            agreed(lambda: servers.compare_all(), asks)

    def _target(self, producer: Producer, encoding: Encoding) -> SGLangTarget:
        return SGLangTarget(producer, encoding, self.known.config.vocab_size)

    def _room(self, jobs: int) -> int:
        """Bytes that each of so many users of the spool may fill. Raises UserError if a sample does not fit."""
        most, longest = round(self.job.recipe.target.spool_gib * 2**30 / jobs), self.job.inputs.longest
        require_spool_room(longest, spool_bytes(self.encoding, WantedRows.all(longest)), most)
        return most

    def _own_server(self) -> tuple[EngineOptions, list[str]]:
        """Options for a capturing server, and the further flags that load the hook, for which the draft vocabulary is
        written where it will look for it."""
        config, layers, options = self.known.config, self.known.aux_layers, self.options
        require_captured(layers, config.num_hidden_layers, config.model_type)
        longest, name = self.job.recipe.data.max_length, self.settings.draft_vocabulary
        if name is not None and not (file := Path(name)).exists():
            own_folder(file.parent)
            with writing(file.parent, REMEDY):
                save_vocabulary(self.job.vocabulary, file)
        if options.kv_tokens is None and not torch.cuda.is_available():  # otherwise SGLang takes nearly all host memory
            options = replace(options, kv_tokens=2 * longest + 2 * options.chunk_tokens)
        return replace(options, longest=longest), capture_flags(layers, self.settings._asdict())

    # What its servers compute

    def _compare(self, urls: Sequence[str], expected: Rows | None, file: Path | None = None) -> Rows:
        """What all servers compute of the probe document. Raises UserError unless that is what is expected or, if
        nothing is, what the store was captured from, whose `file` remembers it, and the servers' SGLang was tested."""
        origin = "transformers"
        if expected is None:
            for url in urls:
                if not is_tested(release := reported(url, ServerInfo).version):
                    raise SharedUserError(
                        f"target.allow_untested: {url} runs SGLang {release}, and this target cannot be computed with "
                        f"transformers here to check it; install {SUPPORTED}"
                    )
            expected, origin = file and read_probe(file, self.job), "what the store was captured from"
        rows = require_same_target(map(self._probe, urls), expected, origin)
        if file and not file.exists():
            write_probe(file, rows)
        return rows

    def _require_unchanged(self, probe: Rows, url: str) -> None:
        """Raises ServerDiffers if a server is no longer what it was at the job's start, when it computed `probe`."""
        require_same_target([self._probe(url)], probe, "this job's start")

    def _require(self, url: str) -> None:
        """Raises ServerDiffers unless a server, by what it says of itself, captures what this job needs."""
        require_capture(
            url,
            self.settings._asdict(),
            self.known.aux_layers,
            dtype=self.options.dtype,
            revision=self.options.revision,
            longest=self.job.inputs.longest,
            allow_untested=self.job.recipe.target.allow_untested,
        )

    def _probe(self, url: str) -> tuple[str, Rows]:
        """A server, and what it computes of the probe document, which passes through a spool of its own. Raises
        ServerDiffers if one of the recipe's servers does not capture what this job needs."""
        if self.urls:
            self._require(url)
        with Spool(self.settings.spool, self.say) as spool:
            servers = Servers([url], spool.path, 1, self.say, PROBE_SECONDS)
            room = 2 * spool_bytes(self.encoding, WantedRows.all(PROBE_TOKENS))
            with closing(Producer(servers, spool, room, readers=0)) as producer:
                (rows,) = self._target(producer, self.encoding).prefill([probe_document(self.known.config.vocab_size)])
                return f"target.servers: {url}" if self.urls else "SGLang", rows


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
    )


def hook_settings(job: Job) -> HookSettings:
    """Settings for a server's hook."""
    spool = Path(job.recipe.target.spool).expanduser().absolute()
    logits, vocabulary = job.recipe.target.teacher == "logits", job.vocabulary
    return HookSettings(
        spool=str(spool),
        dtype=job.recipe.hidden_states.dtype,
        target=job.known.fingerprint,
        hidden_size=job.known.config.hidden_size,
        aux_layers=len(job.known.aux_layers),
        draft_vocabulary=str(spool / f"vocabulary-{vocabulary.digest}.safetensors") if logits else None,
        vocabulary_size=vocabulary.size if logits else None,
    )


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


def _check_head(source: SpooledSource, head: TargetHead, topology: Topology) -> None:
    """Send a short document through the whole path to check that every rank sees the spool, and that training's lm_head
    gives the server's logits."""
    every = torch.arange(HEAD_TOKENS)
    ids = every % len(head.embedding)
    sample = Sample(f"{topology.data.rank():032x}", ids, torch.ones(len(ids), dtype=torch.bool))
    teacher = source.rows([SampleReading(sample, sample.loss_mask, every[:0], every[1:])])[0].teacher
    if isinstance(teacher, DraftLogits):
        return
    own = summarize_teacher(teacher.values.to(head.head.device, head.head.dtype), head.head, transform=head.transform)
    difference = (own.logsumexp.cpu() - teacher.logsumexp).abs().max()
    if difference > 0.02 * teacher.logsumexp.abs().max() + 0.02:
        raise UserError(
            "target.servers: their logits are not those of this target's lm_head (logsumexp differs by "
            f"{difference:.3g}); serve the checkpoint that model.target names, or set target.teacher=logits"
        )
