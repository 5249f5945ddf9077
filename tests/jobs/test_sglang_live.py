"""Training beside running SGLang servers gives the same losses as from a store, whichever process is killed and however
small the spool."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path

import httpx2
import pytest
import torch
import yaml
from limits import HANG_SECONDS, wait_until
from places import ROOT
from safetensors.torch import load_file, save_file
from sglang_case import (
    capturing_server,
    cpu_environment,
    largest_errors,
    left_in,
    options,
    target_behind,
    whole,
)
from store_cases import read_rows
from tiny_run import deepspeed, finish, launch, make_target, metrics, write_recipe

from eagle3.errors import UserError
from eagle3.jobs.sglang_probe import probe_document, require_same_target
from eagle3.parallel.sequence import Reach, SequenceSharding, Stream, plan_sequence
from eagle3.states.loader import SampleReading, SpooledSource
from eagle3.states.rows import Rows
from eagle3.states.spool import Spool, SpoolReader, Ticket, WantedRows, spool_bytes
from eagle3.states.store.files import LocalFiles
from eagle3.states.store.folder import MANIFEST, find_indexes
from eagle3.states.store.reader import HiddenStateStore, Location
from eagle3.targets.sglang.asking import Generated, ModelInfo, ServerInfo, ask
from eagle3.targets.sglang.client import Producer, Servers
from eagle3.targets.sglang.hook import HookSettings
from eagle3.targets.sglang.server import SGLangServer, _free_port
from eagle3.targets.sglang.version import reported_settings
from eagle3.targets.transformers import load_target
from eagle3.text.samples import Sample

pytestmark = pytest.mark.sglang

LAYERS = (1, 2, 3)
VOCABULARY = 300
DEEPSPEED = ("--deepspeed", "ds_configs/zero2.json")


class Case:
    """A recipe with running servers. One of them was started by the line that capture.py prints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spool, self.url = folder, folder / "spool", ""
        make_target(folder / "target")
        self.recipe = write_recipe(folder, folder / "target")
        values = yaml.safe_load(self.recipe.read_text())
        values["data"]["max_length"] = 256
        values["hidden_states"] = values.get("hidden_states", {}) | {"prefill_tokens": 32}  # fewer than samples have
        values["output"]["check_export"] = False  # tests/draft/test_sglang_export.py does
        values["target"] = {
            **{"backend": "sglang", "attention": "intel_amx"},
            **{"memory_fraction": 0.2, "kv_tokens": 4096, "spool": str(self.spool), "tensor": 2},
        }
        self.recipe.write_text(yaml.safe_dump(values))

    def run(self, launcher: str, *words: str, code: int = 0) -> str:
        return finish(self.start(launcher, *words), code)

    def start(self, launcher: str, *words: str) -> subprocess.Popen:
        return launch(sys.executable, f"launchers/{launcher}.py", "--recipe", str(self.recipe), *words)

    @contextmanager
    def server(self, *words: str) -> Iterator[str]:
        """A server that is started as the line says which capture.py prints with these words. Yields its URL."""
        line = self.run("capture", "--print-server", *words).splitlines()[-1]
        typed, url = shlex.split(line), f"http://127.0.0.1:{_free_port()}"
        settings = dict(word.split("=", 1) for word in typed[: typed.index("python")])
        command = [sys.executable, *typed[typed.index("python") + 1 :]]
        command[command.index("--port") + 1] = url.rpartition(":")[2]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with cpu_environment(tensor=2):
            server = subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, **quiet, start_new_session=True)
        try:
            wait_until(lambda: answers(url), server)
            yield url
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()

    def settings(self) -> HookSettings:
        """The settings of the server's hook, as the server reports them."""
        return HookSettings(**reported_settings(ask(self.url, "/server_info", ServerInfo)))


def answers(url: str) -> bool:
    with suppress(OSError):
        return bool(ask(url, "/model_info", ModelInfo))
    return False


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    live = Case(tmp_path_factory.mktemp("live"))
    with live.server() as live.url:
        values = yaml.safe_load(live.recipe.read_text())
        values["target"]["servers"] = [live.url]
        live.recipe.write_text(yaml.safe_dump(values))
        yield live


@pytest.fixture(scope="module")
def stored(case):
    """Metrics of a run from a store that two processes captured from the server, in fp32."""
    words = ("launchers/capture.py", "--recipe", str(case.recipe), f"hidden_states.path={case.folder}/store")
    output = finish(launch(*deepspeed(2), *words))
    assert "complete" in output and left_in(case.spool) == []
    case.run("train", *DEEPSPEED, "hidden_states.mode=stored", f"hidden_states.path={case.folder}/store")
    return metrics(case.folder / "run")


def require_same_course(actual: list[dict], expected: list[dict]) -> None:
    assert [each["step"] for each in actual] == [each["step"] for each in expected]
    for mine, other in zip(actual, expected, strict=True):
        for name in ("loss", "gradient_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-5), (name, mine["step"])


def test_a_store_captured_from_a_server_has_the_rows_that_transformers_gives(case, stored):
    store = HiddenStateStore.open(str(case.folder / "store"), provenance_of(case.folder / "store"))
    target = load_target(case.folder / "target", aux_layers=LAYERS)
    for sample_id in list(store.locations)[:10]:
        (one,) = store.tokens_at([store.locations[sample_id]])
        ids, taught = one.ids, torch.arange(1, len(one.ids))[one.loss_mask[:-1]]
        actual = read_rows(store, sample_id, torch.arange(len(ids)), taught)
        (expected,) = target.prefill([ids])
        assert torch.allclose(actual.aux, expected.aux, atol=3e-6 * float(expected.aux.abs().max()))
        assert torch.allclose(
            actual.teacher.values,
            expected.teacher.values[taught],
            atol=3e-6 * float(expected.teacher.values.abs().max()),
        )
        assert torch.equal(actual.teacher.argmax, expected.teacher.argmax[taught])


def provenance_of(store: Path) -> dict:
    return json.loads((store / MANIFEST).read_text())["provenance"]


@pytest.mark.parametrize("layout", ["ulysses=2", "ring=2 tensor=2", ""], ids=["ulysses", "ring-tensor", "data"])
def test_live_training_in_any_layout_follows_a_run_from_a_store(case, stored, layout):
    """The target has two tensor-parallel ranks, whatever the draft has."""
    sizes, folder = layout.split(), case.folder / "-".join(["live", *layout.split()])
    process = launch(
        *deepspeed(4 if len(sizes) == 2 else 2),
        *("launchers/train.py", "--recipe", str(case.recipe), *DEEPSPEED),
        *(*(f"parallelism.{size}" for size in sizes), f"output.dir={folder}", "target.spool_gib=0.001"),
    )
    finish(process)
    require_same_course(metrics(folder), stored)
    assert left_in(case.spool) == []


def test_live_training_with_logits_a_window_and_spans_follows_a_run_from_a_store_of_hidden_states(case, stored):
    spans = ("data.spans={length: 8, per_document: 2}", "model.draft.window=16")
    store = ("hidden_states.mode=stored", f"hidden_states.path={case.folder}/store")
    case.run("train", *DEEPSPEED, *store, *spans, f"output.dir={case.folder}/stored-spans")
    expected = metrics(case.folder / "stored-spans")
    assert expected[0]["loss"] != stored[0]["loss"]
    logits = ("target.teacher=logits", f"target.spool={case.folder}/spool-of-logits")
    with case.server(*logits) as url:
        words = (*spans, *logits, f"target.servers=['{url}']", f"output.dir={case.folder}/logits-spans")
        case.run("train", *DEEPSPEED, *words)
    require_same_course(metrics(case.folder / "logits-spans"), expected)


def test_a_trainer_killed_in_the_middle_goes_on_to_the_same_end_and_its_rows_are_swept(case, stored):
    words = (*DEEPSPEED, f"output.dir={case.folder}/killed")
    process = case.start("train", *words)
    for line in process.stdout:
        if "step 5/8" in line:
            os.killpg(process.pid, signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    assert any(name.endswith("owner.lock") for name in left_in(case.spool)), "a kill leaves its folder"
    output = case.run("train", *words, "--resume")
    assert "removed what 1 ended job had left" in output and "resumed after step 4" in output
    require_same_course(metrics(case.folder / "killed"), stored)
    assert left_in(case.spool) == []


def test_without_a_server_training_and_capture_end_with_the_line_that_starts_one(case, stored):
    for launcher, words in (("train", DEEPSPEED), ("capture", (f"hidden_states.path={case.folder}/other",))):
        output = case.run(
            launcher, *words, f"output.dir={case.folder}/none", "target.servers=['http://127.0.0.1:9']", code=2
        )
        (line,) = [line for line in output.splitlines() if line.startswith("error:")]
        assert "target.servers: http://127.0.0.1:9 does not answer" in line and "capture.py --print-server" in line
        assert "Traceback" not in output
    output = case.run("train", *DEEPSPEED, f"output.dir={case.folder}/none", "target.servers=[]", code=2)
    assert "live training with SGLang needs running servers" in output and "Traceback" not in output


class KeepingReader(SpoolReader):
    """Links every sample into a folder before the sample may be deleted, so that it can be replayed."""

    def __init__(self, path: Path, keep: Path) -> None:
        super().__init__(path, 0)
        self.keep = keep

    def done(self, ticket) -> None:
        os.link(self.path / ticket.shard, self.keep / ticket.shard)
        super().done(ticket)


def test_rows_of_a_plan_are_bit_for_bit_those_of_a_store_of_the_spooled_samples(case):
    """Each rank requests the samples anew. Prefilled in chunks beside others, they then differ in their last bits."""
    settings, keep = case.settings(), case.folder / "kept"
    keep.mkdir()
    generator = torch.Generator().manual_seed(2)
    samples = []
    for number in range(6):
        ids = torch.randint(3, VOCABULARY, (20 + 9 * number,), generator=generator)
        samples.append(Sample(f"{number:032x}", ids, torch.rand(len(ids), generator=generator) < 0.4))
    stream = Stream.pack([one.ids for one in samples], [one.loss_mask for one in samples], "reference")
    with Spool(settings.spool) as spool:
        servers = Servers([case.url], spool.path, 4)
        producer = Producer(servers, spool, 2**30, readers=1)

        def ask(ticket: Ticket, reading: SampleReading) -> None:
            wanted = WantedRows.all(ticket.tokens)
            producer.ask(ticket, reading.sample.ids, wanted, spool_bytes(settings.encoding, wanted))

        source = SpooledSource(KeepingReader(spool.path, keep), spool.job, ask)
        plans = [plan_sequence(stream, Reach(3), SequenceSharding(ulysses=2), rank) for rank in range(2)]
        requested = [[by_document(stream, plan.rows), by_document(stream, plan.teacher)] for plan in plans]
        masks = [one.loss_mask for one in samples]
        live = [
            source.rows([SampleReading(*each) for each in zip(samples, masks, *rows, strict=True)])
            for rows in requested
        ]
        producer.close()
    stores = []
    for rank in range(2):
        folder = case.folder / f"kept-{rank}"
        folder.mkdir()
        for file in keep.glob(f"shard-{rank:08x}-*"):
            file.rename(folder / file.name)
        files = LocalFiles(folder)
        locations = {
            entry.id: Location(index, entry) for index in find_indexes(files, None)[0] for entry in index.samples
        }
        stores.append(HiddenStateStore(files, locations, {}))
    for (aux, teacher), rows_of_rank, store in zip(requested, live, stores, strict=True):
        read = store.read_at([store.locations[one.id] for one in samples], [*zip(aux, teacher, strict=True)])
        for mine, other in zip(rows_of_rank, read, strict=True):
            assert type(mine.teacher) is type(other.teacher)
            assert all(torch.equal(tensor, other.named()[name]) for name, tensor in mine.named().items())
    for one in samples:
        every = torch.arange(len(one.ids))
        first, second = (read_rows(store, one.id, every, every) for store in stores)
        errors = largest_errors(first, second)
        assert errors.pop("argmax") == 0 and max(errors.values()) < 3e-6, errors


def by_document(stream: Stream, rows: torch.Tensor) -> list[torch.Tensor]:
    return [stream.position[rows][stream.document[rows] == number] for number in range(len(stream.starts))]


def test_killed_servers_lose_nothing_while_one_is_left(case):
    settings = case.settings()
    generator = torch.Generator().manual_seed(4)
    documents = [torch.randint(3, VOCABULARY, (60 + number,), generator=generator) for number in range(120)]
    expected = load_target(case.folder / "target", aux_layers=LAYERS).prefill(documents)
    first = case.url
    # without the hook, it answers but leaves no rows, like a server that dies between the two
    with (
        cpu_environment(),
        SGLangServer(options(case.folder / "target")) as second,
        target_behind([first, second.url], settings, vocab_size=VOCABULARY) as target,
    ):
        arrived: dict[int, Rows] = {}
        for place, parts in target.arriving(map(whole, documents)):
            (arrived[place],) = (part.rows for part in parts)
            if len(arrived) == 5:
                os.killpg(second.process.pid, signal.SIGKILL)
        assert sorted(arrived) == list(range(120))
        for place, other in enumerate(expected):
            assert torch.allclose(arrived[place].aux, other.aux, atol=3e-6 * float(other.aux.abs().max()))
        wait_until(lambda: target.producer.servers.live == {first})  # it gets some more requests before it is left out
    assert left_in(Path(settings.spool)) == []


def changed_copy(target: Path, copy: Path) -> Path:
    """A copy of a target with the same config, in which two MLPs have other weights."""
    shutil.copytree(target, copy)
    (file,) = copy.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if ".mlp." in name and (".layers.1." in name or ".layers.2." in name)]:
        tensors[name] = tensors[name].flip(0)
    save_file(tensors, file, {"format": "pt"})
    return copy


def test_a_server_of_another_checkpoint_is_refused_and_one_that_has_replaced_its_weights(case):
    """The first has the line that capture.py prints, but for its path; the second's weights were replaced later."""
    other = changed_copy(case.folder / "target", case.folder / "other")
    words = f"hidden_states.path={case.folder}/foreign"
    with capturing_server(other, case.settings(), LAYERS) as server:
        output = case.run("capture", words, f"target.servers=['{server.url}']", code=2)
        assert f"this server loaded {other}, which is not the checkpoint that model.target names" in output
        assert "Traceback" not in output
    with capturing_server(case.folder / "target", case.settings(), LAYERS) as server:
        replacing = f"{server.url}/update_weights_from_disk"
        replaced = httpx2.post(replacing, json={"model_path": str(other)}, timeout=HANG_SECONDS)
        assert replaced.json()["success"]
        output = case.run("capture", words, f"target.servers=['{server.url}']", code=2)
        assert f"model_path (its weights were replaced) '{other}' (here: '{case.folder}/target')" in output
        with target_behind([server.url], case.settings(), vocab_size=VOCABULARY) as target:
            document = probe_document(VOCABULARY)
            (rows,), (own,) = target.prefill([document]), load_target(other, aux_layers=LAYERS).prefill([document])
            require_same_target([("it", rows)], own, "transformers")
            (expected,) = load_target(case.folder / "target", aux_layers=LAYERS).prefill([document])
            with pytest.raises(UserError, match="it: its hidden states are not those of transformers .aux is off by"):
                require_same_target([("it", rows)], expected, "transformers")


def test_servers_that_hang_hold_up_nothing_while_another_one_answers(case, monkeypatch):
    """First the scheduler of one, which goes on to say that it is well, then all its processes."""
    monkeypatch.setattr("eagle3.targets.sglang.client.WATCH_SECONDS", 0.2)
    monkeypatch.setattr("eagle3.targets.sglang.client.LEAST_PATIENCE", 1.0)
    monkeypatch.setattr("eagle3.targets.sglang.client.SILENT_SECONDS", 3.0)
    settings, generator = case.settings(), torch.Generator().manual_seed(6)
    documents = [torch.randint(3, VOCABULARY, (40 + number,), generator=generator) for number in range(60)]
    expected = load_target(case.folder / "target", aux_layers=LAYERS).prefill(documents)
    with (
        capturing_server(case.folder / "target", settings, LAYERS) as second,
        target_behind([case.url, second.url], settings, vocab_size=VOCABULARY) as target,
    ):
        children = subprocess.run(
            ["ps", "-o", "pid=,args=", "-s", str(os.getsid(second.process.pid))],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        (scheduler,) = [int(line.split()[0]) for line in children if "scheduler" in line]
        for stop in (lambda: os.kill(scheduler, signal.SIGSTOP), lambda: os.killpg(second.process.pid, signal.SIGSTOP)):
            arrived: dict[int, Rows] = {}
            for place, parts in target.arriving(map(whole, documents)):
                (arrived[place],) = (part.rows for part in parts)
                if len(arrived) == 5:
                    stop()
            for place, other in enumerate(expected):
                assert torch.allclose(arrived[place].aux, other.aux[: len(arrived[place].aux)], atol=1e-4)
        wait_until(lambda: target.producer.servers.live == {case.url})
        os.killpg(second.process.pid, signal.SIGCONT)
        # It does what it was asked before, then this, and writes.
        request = {"input_ids": [3], "sampling_params": {"max_new_tokens": 1}}
        ask(second.url, "/generate", Generated, request, timeout=HANG_SECONDS)
        time.sleep(1)
        assert left_in(target.producer.spool.path) == ["owner.lock", "reserve"]


def test_a_capture_whose_last_server_dies_keeps_every_whole_sample_and_goes_on_from_there(case):
    """The store is one shard, which is open when the server dies."""
    store = case.folder / "one_shard"
    one_shard = (f"hidden_states.path={store}", "hidden_states.shard_tokens=100000", "target.in_flight=1")
    with capturing_server(case.folder / "target", case.settings(), LAYERS) as only:
        process = case.start("capture", *one_shard, f"target.servers=['{only.url}']")
        arrived: set[str] = set()
        while len(arrived) < 8:
            assert process.poll() is None, finish(process)
            # not Path.glob, which fails where a folder goes while it looks
            arrived.update(map(os.path.basename, glob(f"{case.spool}/*/shard-*.safetensors")))
            time.sleep(0.001)
        os.killpg(only.process.pid, signal.SIGKILL)
        output = finish(process, code=2)
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert "no server is left" in line and "Traceback" not in output
    assert "capture.py goes on where it stopped, train.py does with --resume" in line
    kept = len(HiddenStateStore.open(str(store), provenance_of(store)).locations)
    assert 0 < kept < 40 and not list(store.glob("*.partial")) and left_in(case.spool) == []
    output = case.run("capture", *one_shard)
    assert f"40 samples, {kept} already stored" in output and "complete" in output
    assert len(HiddenStateStore.open(str(store), provenance_of(store)).locations) == 40
