"""Real captures: killed, split over jobs and ranks, checked and repaired; and the disk space that they take."""

import json
import os
import re
import signal
import sys
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from jobs import job_of
from limits import wait_until
from store_cases import HIDDEN, PROVENANCE, indexes, read_rows, sample
from tiny_run import capture, deepspeed, finish, launch, make_target, run_script, write_recipe

from eagle3.console import Console
from eagle3.durable import create_text
from eagle3.errors import UserError
from eagle3.jobs.job import provenance, store_provenance
from eagle3.jobs.supply import verify
from eagle3.recipe.loading import load_recipe
from eagle3.states.capture import ROUND_BATCHES, Wanted, disk_need, prefill_batches, require_disk, wanted_samples
from eagle3.states.store.check import check_store
from eagle3.states.store.folder import MANIFEST, StoreManifest
from eagle3.states.store.reader import HiddenStateStore
from eagle3.states.store.shard import Encoding, taught_rows
from eagle3.states.store.writer import StoreWriter
from eagle3.text.samples import SampleSet


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    return write_recipe(folder, make_target(folder / "target"))


def words(store: Path, *more: str) -> tuple[str, ...]:
    return (f"hidden_states.path={store}", "hidden_states.shard_tokens=60", "hidden_states.prefill_tokens=64", *more)


def test_a_store_in_which_nothing_was_captured_binds_to_no_settings(tmp_path, recipe):
    """A capture that was refused may have left its manifest."""
    create_text(tmp_path / MANIFEST, StoreManifest({"dtype": "bfloat16", "codec": "none"}, {}).dump())
    capture(recipe, *words(tmp_path))
    output = capture(recipe, *words(tmp_path, "hidden_states.codec=fp8"), code=2)
    assert "was captured with codec='none', this run has 'fp8'" in output and "Traceback" not in output


def checked(recipe: Path, store: Path, topology, *overrides: str):
    """What a check finds in a store that should hold all samples of the recipe."""
    job = job_of(load_recipe(recipe, list(overrides)), topology)
    samples = wanted_samples((job.inputs.train, job.inputs.held_out))
    assert len(samples) == 40
    return check_store(str(store), store_provenance(job), samples, lambda count, shards: None)


@pytest.mark.slow
def test_a_capture_split_killed_damaged_and_repaired_ends_complete_without_duplicates(tmp_path, recipe, topology):
    store = tmp_path / "store"
    launcher = (sys.executable, "launchers/capture.py", str(recipe), *words(store))
    victim, other = (launch(*launcher, "--part", f"{index}/2") for index in range(2))
    wait_until(lambda: any(store.glob("*.safetensors")) or victim.poll() == 0, victim)
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
    finish(other)
    before = {path: path.read_bytes() for path in store.glob("*.safetensors")}
    output = capture(recipe, *words(store, "--part", "0/2"))
    assert "this share of 2 is complete" in output and "already stored" in output
    assert checked(recipe, store, topology).problems == []
    assert all(path.read_bytes() == text for path, text in before.items())

    first, second, third, *_ = sorted(store.glob("*.safetensors"))
    content = bytearray(first.read_bytes())
    content[5000] ^= 1
    first.write_bytes(content)
    second.unlink()
    os.truncate(third, third.stat().st_size // 2)
    output = capture(recipe, *words(store, "--verify"), code=1)
    assert "damaged: sample " in output and f"damaged: {third.name}" in output
    assert "missing: sample " in output and "damaged, " in output and "Traceback" not in output
    output = capture(recipe, *words(store, "--repair"))
    assert "complete" in output and " 0 already stored" not in output
    assert checked(recipe, store, topology).problems == []


def test_a_verify_finds_values_that_no_target_computes_and_a_repair_removes_those_samples_alone(
    tmp_path, recipe, topology, capsys
):
    """The writer does not know the vocabulary, so it takes whatever a server that is not ours computes."""
    loaded = load_recipe(recipe, [f"hidden_states.path={tmp_path}"])
    job = job_of(loaded, topology)
    samples = wanted_samples((job.inputs.train, job.inputs.held_out))
    encoding = Encoding(loaded.hidden_states.codec, loaded.hidden_states.dtype, HIDDEN)
    size, none = job.known.config.vocab_size, float("nan")
    bad = dict(zip(samples, [("argmax", size), ("argmax", -1), ("logsumexp", none)], strict=False))
    with StoreWriter(tmp_path, provenance(job), encoding, shard_tokens=500) as writer:
        for name, one in samples.items():
            rows = sample(1, tokens=one.tokens)[3]
            rows.teacher.argmax.remainder_(size)
            column, value = bad.get(name, ("logsumexp", 0.0))
            getattr(rows.teacher, column)[taught_rows(one.load().loss_mask).nonzero()[-1]] = value
            writer.add(name, one.load().ids, one.load().loss_mask, rows)
    verified = partial(verify, job, samples, Console(True))
    assert not verified(repair=False)
    assert sorted(re.findall(r"out of range: sample (\w+): ", capsys.readouterr().out)) == sorted(bad)
    store = HiddenStateStore.open(str(tmp_path), store_provenance(job), size)
    for name in bad:
        taught = taught_rows(samples[name].load().loss_mask).nonzero().flatten()
        with pytest.raises(UserError, match=f"sample {name}: has .*capture.py --repair"):
            read_rows(store, name, taught[:0], taught)
    assert not verified(repair=True)
    assert HiddenStateStore.open(str(tmp_path), store_provenance(job), size).missing(samples) == list(bad)
    described = json.loads((tmp_path / "store.json").read_text())
    described["provenance"]["target"] = "another"
    (tmp_path / "store.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="store.json: says target='another'.*restore the store.json"):
        verified(repair=True)


def test_what_is_stored_is_the_same_bit_for_bit_whoever_captures_it_and_whatever_was_killed(tmp_path, recipe):
    """Batches have 400 tokens and several samples each: the last bits reveal in which batch a sample was prefilled. The
    capture that is stopped by signals has not filled a shard yet."""
    output = run_script("tests/support/capture_worker.py", "same", recipe, tmp_path)
    result = json.loads(output.splitlines()[-1])
    assert all(0 < stored < 40 for stored in result["stored before"].values())
    undisturbed = result["stores"].pop("undisturbed")
    assert len(undisturbed) == 40 and set(result["stores"]) == {"three ranks", "two parts", "killed", "stopped"}
    for name, content in result["stores"].items():
        differ = [sample_id for sample_id in undisturbed if content.get(sample_id) != undisturbed[sample_id]]
        assert not differ and len(content) == 40, (name, len(differ))


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_ends_the_others_and_one_that_is_slow_does_not(tmp_path, recipe):
    """As under srun, where nothing else would end the ranks: in a capture they wait for one another for days. The slow
    rank is late by more than hang_minutes."""
    output = run_script("tests/support/capture_worker.py", "killed", recipe, tmp_path)
    codes = dict(re.findall(r"^(.+): ended with (\[.*\])$", output, re.MULTILINE))
    assert codes.pop("unequal") == "[0, 0]", output
    assert sorted(codes.values()) == ["[-9, 1]", "[-9, 1]", "[1, -9]", "[1, -9]"], output
    sample = r"capturing sample \d+ of \d+"
    for rank, place, advice in (
        (1, "loading the target", "run capture.py again, which continues"),
        (1, sample, "run capture.py again, which continues"),
        (0, rf"{sample}(, with rank 1 at .+)?", "run capture.py again, which continues"),
        (0, "step 2, .+", "continue with --resume auto"),
    ):
        ended = rf"^error: rank {rank} \(process \d+ on .+\) has ended, at {place}; see what .* last, and {advice}$"
        assert len(re.findall(ended, output, re.MULTILINE)) == 1, (rank, place, output)


@pytest.mark.parametrize("prefill_tokens", [24, 60, 1000])
def test_batches_hold_each_short_sample_once_and_more_data_change_the_last_ones_alone(prefill_tokens):
    generator = np.random.default_rng(5)
    encoded = [
        (generator.integers(0, 99, length, np.int32), np.ones(length, bool))
        for length in generator.integers(8, 60, 400)
    ]
    train, more, held_out = (SampleSet.pack(part) for part in (encoded[:200], encoded[:300], encoded[300:]))
    first, grown = wanted_samples((train, held_out)), wanted_samples((more, held_out))
    batches, after = (prefill_batches(samples, prefill_tokens) for samples in (first, grown))
    assert sorted(chain(*batches)) == sorted(name for name, one in first.items() if one.tokens <= prefill_tokens)
    for batch in batches:
        assert len(batch) * max(first[sample_id].tokens for sample_id in batch) <= prefill_tokens
    gone = [batch for batch in batches if batch not in after]
    tokens = sum(first[sample_id].tokens for sample_id in chain(*gone))
    assert tokens <= (ROUND_BATCHES + 1) * prefill_tokens and not set(chain(*gone)) & set(held_out.sample_ids)


@pytest.mark.slow
def test_ranks_that_prefill_long_samples_together_capture_what_one_process_does(tmp_path, recipe, topology):
    """Samples have up to 150 tokens. Two ranks in a ring prefill long ones in chunks of 16; either rank alone prefills
    short ones."""
    one, two = tmp_path / "one", tmp_path / "two"
    capture(recipe, *words(one, "hidden_states.prefill_tokens=1000"))
    keys = ("hidden_states.ring=2", "hidden_states.prefill_tokens=40", "hidden_states.codec=lossless")
    output = finish(launch(*deepspeed(2), "launchers/capture.py", str(recipe), *words(two, *keys)))
    assert "two: complete" in output
    assert checked(recipe, two, topology, "hidden_states.codec=lossless").problems == []
    needed = store_provenance(job_of(load_recipe(recipe), topology))
    stores = [
        HiddenStateStore.open(str(path), {**needed, "codec": codec})
        for path, codec in ((one, "none"), (two, "lossless"))
    ]
    samples = dict(zip(stores[0].locations, stores[0].tokens_at([*stores[0].locations.values()]), strict=True))
    lengths = [len(tokens.ids) for tokens in samples.values()]
    assert min(lengths) <= 40 < max(lengths)
    for sample_id, tokens in samples.items():
        teacher = taught_rows(tokens.loss_mask).nonzero().flatten()
        alone, together = (read_rows(store, sample_id, torch.arange(len(tokens.ids)), teacher) for store in stores)
        assert torch.equal(alone.teacher.argmax, together.teacher.argmax)
        for name in ("aux", "values", "logsumexp"):
            expected, actual = alone.named()[name], together.named()[name]
            assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("codec", ["none", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_disk_need_is_what_a_store_takes(tmp_path, codec, dtype):
    encoding, samples = Encoding(codec, dtype, HIDDEN), [sample(number, tokens=300) for number in range(5)]
    with StoreWriter(tmp_path, PROVENANCE, encoding) as writer:
        for one in samples:
            writer.add(*one)
    packed = SampleSet.pack([(ids.numpy().astype(np.int32), mask.numpy()) for _, ids, mask, _ in samples])
    need = disk_need(wanted_samples([packed, packed]).values(), encoding)
    (index,) = indexes(tmp_path)
    assert need == pytest.approx(index.starts["index"] - 4096, rel=0.01)


def test_a_disk_that_cannot_hold_the_samples_is_refused_before_the_first(tmp_path):
    one = SampleSet.pack([(np.zeros(2, np.int32), np.ones(2, bool))])
    huge = [Wanted(one, 0, 10**12)] * 3
    for codec, message in (
        ("none", "3 samples take .* TB more, but the disk has .*hidden_states.codec to lossless"),
        ("lossless", "take about .* TB more, .*set hidden_states.path to another disk"),
    ):
        with pytest.raises(UserError, match=message):
            require_disk(tmp_path, huge, Encoding(codec, "bfloat16", 4096))
    assert "free" in require_disk(tmp_path, huge[:0], Encoding("none", "bfloat16", 4096))
