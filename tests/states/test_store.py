"""The hidden-state store: what comes out is what went in, and nothing else is read."""

import dataclasses
import re

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load_file
from store_cases import (
    HIDDEN,
    PLAIN,
    PROVENANCE,
    assert_holds,
    check,
    open_store,
    provenance_of,
    read_rows,
    read_whole,
    same_rows,
    sample,
    sample_id,
    write,
    write_one,
)

from eagle3.errors import UserError
from eagle3.parallel.sequence import Reach, SequenceSharding, Stream, plan_sequence
from eagle3.states.loader import SampleReading, StoredSource
from eagle3.states.rows import CapturePart, DraftLogits, LastHidden, Rows
from eagle3.states.store.codecs import Fp8
from eagle3.states.store.files import DamagedStore
from eagle3.states.store.reader import HiddenStateStore
from eagle3.states.store.shard import Encoding, taught_rows
from eagle3.states.store.writer import StoreWriter
from eagle3.text.samples import Sample

FP8, BFLOAT16 = Encoding("fp8", "float32", HIDDEN), Encoding("none", "bfloat16", HIDDEN)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", ["none", "lossless"])
@pytest.mark.parametrize("shard_tokens", [1, 100, 10_000])
def test_whole_samples_come_back_exactly_or_rounded_to_bf16(tmp_path, codec, dtype, shard_tokens):
    encoding = Encoding(codec, dtype, HIDDEN)
    write(tmp_path, range(12), encoding, shard_tokens)
    assert_holds(tmp_path, range(12), encoding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", ["none", "lossless", "fp8"])
def test_logits_in_place_of_last_hidden_states_come_back_exactly_whatever_the_codec(tmp_path, codec, dtype):
    """Rounded to 8 bits, logits would give different probabilities. 37 is no multiple of any codec's block size."""
    encoding = Encoding(codec, dtype, HIDDEN, teacher_width=37)
    originals = {}
    with StoreWriter(tmp_path, PROVENANCE, encoding, shard_tokens=100) as writer:
        for number in range(8):
            name, ids, loss_mask, states = sample(number)
            logits = 10 * torch.randn(len(ids), 37, generator=torch.Generator().manual_seed(number))
            originals[number] = logits[taught_rows(loss_mask)].to(encoding.number_format)
            teacher = DraftLogits(logits, states.teacher.argmax, states.teacher.logsumexp)
            writer.add(name, ids, loss_mask, Rows(states.aux, teacher))
    store = open_store(tmp_path, encoding)
    assert all(torch.equal(read_whole(store, number).teacher.values, logits) for number, logits in originals.items())
    assert check(tmp_path, range(8), encoding).problems == []


def fp8_bound(values: torch.Tensor, hidden: int) -> torch.Tensor:
    """The largest error: max(|x| / 16, s / 1024), where s is at most 1/224 of the largest number of its run, by the
    definition of float8_e4m3fn."""
    block = max(size for size in range(1, 129) if hidden % size == 0)
    largest = values.view(len(values), -1, block).abs().amax(-1).repeat_interleave(block, 1)
    return torch.maximum(values.abs() / 16, largest / 224 / 1024)


@pytest.mark.parametrize("hidden", [16, 96, 128, 200, 2880])
def test_fp8_stays_within_its_stated_error(tmp_path, hidden):
    encoding = Encoding("fp8", "bfloat16", hidden)
    name, ids, loss_mask, states = sample(3, tokens=33, hidden=hidden)
    states.aux[:, 5] *= 3000.0  # a massive activation, as trained models have
    states.aux[2], states.aux[3] = 0.0, 1e-30
    write_one(tmp_path, encoding, name, ids, loss_mask, states)
    stored = read_whole(open_store(tmp_path, encoding), 3, tokens=33)
    taught = states.teacher.values[taught_rows(loss_mask)]
    for actual, original in ((stored.aux, states.aux.bfloat16()), (stored.teacher.values, taught.bfloat16())):
        assert actual.dtype == torch.bfloat16
        error = (actual.double() - original.double()).abs()
        assert (error <= fp8_bound(original.double(), hidden)).all() and error.max() > 0
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    raw = 2 * hidden * (3 * len(ids) + int(taught_rows(loss_mask).sum()))
    assert hidden < 128 or size - 4096 < (0.51 if hidden != 200 else 0.52) * raw + 40 * len(ids)


def test_every_fp8_number_survives_being_stored_again():
    codec = Fp8(64, torch.float32, 64)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(200, 64, generator=generator) * torch.logspace(-20, 20, 200)[:, None]
    rows[0, 0] = 440.0  # comes back as 448, the largest number of its scale
    once, twice = torch.empty_like(rows), torch.empty_like(rows)
    for numbers, out in ((rows, once), (once, twice)):
        (data,) = codec.encode(numbers, len(numbers))
        codec.decode(data, [len(data)], out)
    assert torch.equal(once, twice)


def test_a_sample_in_parts_is_the_sample_at_once(tmp_path):
    """Chunks do not end where parts end, and samples are longer than a shard."""
    encoding = Encoding("lossless", "float32", 512)
    _, ids, loss_mask, states = sample(1, tokens=301, hidden=512)
    assert 1 < encoding.chunk_rows("aux") < 50
    for name, cuts in (("whole", [301]), ("parts", [1, 2, 50, 97, 151])):
        assert sum(cuts) == 301
        ends = torch.tensor(cuts).cumsum(0).tolist()
        parts = [states[end - cut : end] for cut, end in zip(cuts, ends, strict=True)]
        with StoreWriter(tmp_path / name, PROVENANCE, encoding, shard_tokens=100) as writer:
            writer.add(*sample(0, hidden=512))
            writer.add(sample_id(1), ids, loss_mask, parts)
    whole, parts = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("whole", "parts"))
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in parts] and len(whole) == 2


def test_shards_are_plain_safetensors_with_the_names_of_the_field(tmp_path):
    write(tmp_path, range(6), Encoding("none", "bfloat16", HIDDEN), shard_tokens=10_000)
    tensors = load_file(next(tmp_path.glob("*.safetensors")))
    _, ids, masks, states = zip(*(sample(number) for number in range(6)), strict=True)
    assert torch.equal(tensors["ids"], torch.cat(ids).int()) and torch.equal(tensors["loss_mask"], torch.cat(masks))
    assert torch.equal(tensors["aux"], torch.cat([state.aux for state in states]).bfloat16())
    taught = [state.teacher.values[taught_rows(mask)] for state, mask in zip(states, masks, strict=True)]
    assert torch.equal(tensors["last"], torch.cat(taught).bfloat16())
    predicted = [
        torch.where(taught_rows(mask), each.teacher.logsumexp, 0) for each, mask in zip(states, masks, strict=True)
    ]
    assert torch.equal(tensors["logsumexp"], torch.cat(predicted))


def test_shards_stay_within_their_tokens(tmp_path):
    write(tmp_path, range(30), shard_tokens=100)
    sizes = [len(load_file(shard)["ids"]) for shard in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 3 and max(sizes) <= 100 and sum(sizes) == sum(len(sample(number)[1]) for number in range(30))


@pytest.mark.parametrize("codec", ["none", "lossless"])
@pytest.mark.parametrize(
    ("aux_rows", "taught"),
    [([0], [3]), ([], [3, 4, 5]), (list(range(10, 20)), []), ([5, 4, 3, 3, 20, 21, 49], [7, 0, 1])],
)
def test_ranged_rows_equal_those_of_the_whole_sample(tmp_path, codec, aux_rows, taught):
    encoding = Encoding(codec, "float32", 1024)  # several chunks a sample
    write(tmp_path, (6, 7, 8), encoding, tokens=50, hidden=1024)
    _, _, loss_mask, states = sample(7, tokens=50, hidden=1024)
    aux = torch.tensor(aux_rows, dtype=torch.int64)
    teacher = taught_rows(loss_mask).nonzero().flatten()[torch.tensor(taught, dtype=torch.int64)]
    for place in (tmp_path, f"file://{tmp_path}"):
        store = open_store(place, encoding)
        rows = [(aux, teacher), (torch.arange(50), teacher[:0])]
        stored, whole = store.read_at(2 * [store.locations[sample_id(7, tokens=50)]], rows)
        assert same_rows(stored, Rows(states.aux[aux], states.teacher[teacher])) and torch.equal(whole.aux, states.aux)


@pytest.mark.parametrize(("aux", "teacher"), [([50], []), ([-1], []), ([], [0])])
def test_rows_of_the_neighbouring_sample_and_rows_that_teach_nobody_are_out_of_reach(tmp_path, aux, teacher):
    write(tmp_path, (6, 7, 8), tokens=50)
    rows = [torch.tensor(each, dtype=torch.int64) for each in (aux, teacher)]
    with pytest.raises(
        (AssertionError, IndexError), match="rows of (aux|last) that are not stored|index 50 is out of bounds"
    ):
        read_rows(open_store(tmp_path), sample_id(7, tokens=50), *rows)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda ids, mask: (ids + (torch.arange(50) == 7), mask), "ids"),
        (lambda ids, mask: (ids, mask ^ (torch.arange(50) == 9)), "loss mask"),
        (lambda ids, mask: (torch.cat((ids, ids[:1])), mask), "ids"),
    ],
)
def test_hidden_states_of_other_tokens_are_refused(tmp_path, change, part):
    write(tmp_path, (6, 7, 8), tokens=50)
    source = StoredSource(open_store(tmp_path))
    nothing = torch.tensor([], dtype=torch.int64)
    samples = [Sample(one, ids, mask) for one, ids, mask, _ in (sample(number, tokens=50) for number in (6, 7, 8))]
    beginning = dataclasses.replace(samples[2], ids=samples[2].ids[:1], loss_mask=samples[2].loss_mask[:1])

    def first_rows(*samples: Sample) -> list[SampleReading]:
        return [SampleReading(one, one.loss_mask, torch.arange(1), nothing) for one in samples]

    assert len(source.rows(first_rows(*samples, beginning))) == 4
    ids, mask = change(samples[1].ids, samples[1].loss_mask)
    shard = r"shard-\w+-\d+"
    with pytest.raises(
        UserError,
        match=rf"{shard}.safetensors: sample {samples[1].id}: .* other tokens \({part}\); "
        rf"delete {shard}.safetensors, and run capture.py",
    ):
        source.rows(first_rows(samples[0], dataclasses.replace(samples[1], ids=ids, loss_mask=mask)))


class CountingFileSystem(LocalFileSystem):
    """fsspec's local file system, which counts the bytes requested from it."""

    protocol = "counting"
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.bytes_read = 0

    def cat_ranges(self, paths, starts, ends, **options):
        self.bytes_read += sum(end - start for start, end in zip(starts, ends, strict=True))
        return super().cat_ranges(paths, starts, ends, **options)


LAYOUTS = [
    (1, 1, "zigzag"),
    (2, 1, "zigzag"),
    (8, 1, "zigzag"),
    (1, 4, "contiguous"),
    (1, 2, "zigzag"),
    (2, 4, "zigzag"),
]


@pytest.mark.parametrize("codec", ["none", "lossless", "fp8"])
def test_a_rank_reads_the_chunks_of_its_plan_and_so_one_share_of_the_bytes(tmp_path, codec):
    """Bytes are counted at the file system, for every kind of layout, including the short runs of a zigzag ring."""
    fsspec.register_implementation("counting", CountingFileSystem, clobber=True)
    hidden, tokens, encoding = 2048, 1024, Encoding(codec, "bfloat16", 2048)
    _, ids, _, states = sample(5, tokens=tokens, hidden=hidden)
    write_one(tmp_path, encoding, sample_id(5), ids, torch.ones(tokens, dtype=torch.bool), states)
    tables = load_file(next(tmp_path.glob("*.safetensors")))
    sizes = {name: tables[f"{name}_edges"].long().diff() for name in ("aux", "last")}
    small = 13 * tokens + 16 * (len(sizes["aux"]) + len(sizes["last"]) + 1)
    whole = float(sizes["aux"].sum() + sizes["last"].sum())
    stream = Stream.pack([ids], [torch.ones(tokens, dtype=torch.bool)], "reference")
    for ulysses, ring, layout in LAYOUTS:
        store, ranks = open_store(f"counting://{tmp_path}", encoding), ulysses * ring
        read_rows(store, sample_id(5), *2 * [torch.tensor([], dtype=torch.int64)])
        for rank in range(ranks):
            plan = plan_sequence(stream, Reach(7), SequenceSharding(ulysses, ring, layout), rank)
            before = store.files.files.bytes_read
            stored = read_rows(store, sample_id(5), plan.rows, plan.teacher)
            read = store.files.files.bytes_read - before
            if codec != "fp8":
                assert torch.equal(stored.aux, states.aux[plan.rows].bfloat16())
                assert torch.equal(stored.teacher.values, states.teacher.values[plan.teacher].bfloat16())
            aux = plan.rows // encoding.chunk_rows("aux")
            last = (plan.teacher - 1) // encoding.chunk_rows("last")  # row 0 teaches nothing
            assert read == small + sizes["aux"][aux.unique()].sum() + sizes["last"][last.unique()].sum()
            if ring == 1:
                assert read < small + 1.1 * whole / ranks
            else:  # keys and queries are different rows, and runs of rows end inside chunks
                assert read < small + 1.35 * whole * len(plan.rows) / tokens


def test_reading_from_a_folder_maps_it_and_touches_little_of_it(tmp_path, monkeypatch):
    """What was mapped is kept here, so that it can be measured."""
    tokens, hidden = 4096, 4096
    aux, last = (torch.zeros(tokens, width, dtype=torch.bfloat16) for width in (3 * hidden, hidden))
    states = Rows(aux, LastHidden(last, torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens)))
    encoding = Encoding("none", "bfloat16", hidden)
    write_one(tmp_path, encoding, sample_id(1), torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens), states)
    store, rows, kept = open_store(tmp_path, encoding), torch.arange(1000, 1010), []
    fetch = store.files.fetch
    monkeypatch.setattr(store.files, "fetch", lambda ranges: kept.append(fetch(ranges)) or kept[-1])
    read_rows(store, sample_id(1), rows, rows)
    assert 10 * 4 * hidden * 2 < resident(tmp_path) < 3e6
    read_rows(store, sample_id(1), torch.arange(tokens), rows)
    assert resident(tmp_path) > 90e6


def resident(folder) -> int:
    """Bytes that this process has touched in mapped files of the folder. (The kernel maps 64 KB around each access.)"""
    total, inside = 0, False
    for line in open("/proc/self/smaps", encoding="utf-8"):  # noqa: SIM115
        if "-" in line.split()[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_a_store_is_read_from_any_file_system_that_fsspec_knows(tmp_path):
    encoding = Encoding("lossless", "bfloat16", HIDDEN)
    write(tmp_path, range(20), encoding)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/states", recursive=True)
    for url in ("memory://states", f"file://{tmp_path}", f"file://{tmp_path}/"):
        assert_holds(url, range(20), encoding)
    memory.pipe_file("/states/store.json", b"{")
    with pytest.raises(UserError, match="memory://states/store.json: not a store's description"):
        open_store("memory://states", encoding)
    memory.pipe_file("/states/store.json", (tmp_path / "store.json").read_bytes())
    shard = next(tmp_path.glob("*.safetensors"))
    for size in (shard.stat().st_size - 1, 100):
        memory.pipe_file(f"/states/{shard.name}", shard.read_bytes()[:size])
        with pytest.raises(DamagedStore, match=f"{shard.name}: is shorter than its index says"):
            open_store("memory://states", encoding)
    with pytest.raises(UserError, match="nosuch://x: cannot be opened .*fix hidden_states.path"):
        open_store("nosuch://x")


def test_membership_and_missing_name_what_is_not_there(tmp_path):
    write(tmp_path, [1, 2, 3])
    store = open_store(tmp_path)
    assert len(store.locations) == 3 and sample_id(2) in store.locations and sample_id(4) not in store.locations
    assert store.missing([sample_id(9), sample_id(1), sample_id(4)]) == [sample_id(9), sample_id(4)]
    with pytest.raises(UserError, match=f"'{sample_id(4)}' is not in the store; run capture.py"):
        store.read([Sample(*sample(4)[:3])], [2 * (torch.arange(1),)])


def test_a_known_sample_is_ignored_and_add_says_so(tmp_path):
    with StoreWriter(tmp_path, PROVENANCE, PLAIN) as writer:
        assert writer.add(*sample(1)) and not writer.add(*sample(1))
    with StoreWriter(tmp_path, PROVENANCE, PLAIN) as writer:
        assert writer.known == {sample_id(1)}
        assert not writer.add(*sample(1)) and writer.add(*sample(2))
    assert_holds(tmp_path, [1, 2])


@pytest.mark.parametrize(
    ("encoding", "changes", "values"),
    [
        (PLAIN, {"target": "ffff"}, "target='a1b2', this run has 'ffff'; name"),
        (PLAIN, {"aux_layers": [1, 3, 7]}, "aux_layers=[1, 3, 6], this run has [1, 3, 7]; name"),
        (PLAIN, {"seed": 4}, "seed=None, this run has 4; name"),
        (PLAIN, {"tokenizer": None}, "tokenizer='c3d4', this run has None; name"),
        (FP8, {}, "codec='none', this run has 'fp8'; set hidden_states.codec to that, or name"),
        (BFLOAT16, {}, "dtype='float32', this run has 'bfloat16'; set hidden_states.dtype to that, or name"),
    ],
)
def test_different_provenance_is_refused_with_field_both_values_and_the_key(tmp_path, encoding, changes, values):
    write(tmp_path, [1])
    for use in (
        lambda: HiddenStateStore.open(str(tmp_path), provenance_of(encoding, **changes)),
        lambda: StoreWriter(tmp_path, {**PROVENANCE, **changes}, encoding),
    ):
        with pytest.raises(UserError, match=f"{re.escape(values)} another folder in hidden_states.path"):
            use()
    assert_holds(tmp_path, [1])


def test_tuples_in_provenance_equal_the_lists_they_become(tmp_path):
    with StoreWriter(tmp_path, {**PROVENANCE, "aux_layers": (1, 3, 6)}, PLAIN) as writer:
        writer.add(*sample(1))
    assert_holds(tmp_path, [1])


def test_hidden_states_that_are_not_finite_are_refused_with_their_sample_and_leave_nothing(tmp_path):
    name, ids, mask, states = sample(4, tokens=30)
    states.aux[20, 3] = 3.4e38  # finite in float32 alone
    with pytest.raises(UserError, match=f"sample {name}: its aux hidden states are not finite in bfloat16"):
        write_one(tmp_path, BFLOAT16, name, ids, mask, [states[:12], states[12:]])
    assert not list(tmp_path.glob("shard-*"))


@pytest.mark.parametrize("counts", [(1,), (3,), (2, 3), (2, 2, 2)])
def test_parts_share_the_samples_out_and_so_do_parts_of_parts(counts):
    parts = [CapturePart()]
    for count in counts:
        parts = [part.split(index, count) for part in parts for index in range(count)]
    everything = {sample_id(number) for number in range(601)}
    shares = [part.of(everything) for part in parts]
    assert set().union(*shares) == everything and sum(map(len, shares)) == len(everything)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    batches = [[one, "another"] for one in everything]
    assert [[first for first, _ in part.of(batches)] for part in parts] == shares
