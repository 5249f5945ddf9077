"""The spool: readers read what a hook in SGLang writes. Nothing is lost silently, and nothing stays behind."""

import json
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from limits import HANG_SECONDS, wait_until
from store_cases import FORK, same_rows, sample

from eagle3.errors import UserError
from eagle3.parallel.sequence import Reach, SequenceSharding
from eagle3.states.loader import DrawnSample, SampleReading, SpooledSource, StreamLoader
from eagle3.states.rows import Rows
from eagle3.states.spool import (
    GONE,
    HELD,
    LOCK,
    RESERVE,
    Spool,
    SpoolReader,
    Ticket,
    WantedRows,
    spool_bytes,
    sweep,
    want,
    wanted_rows,
)
from eagle3.states.spool_writer import RequestRows, SpoolWriter
from eagle3.targets.sglang.asking import require_supported
from eagle3.targets.sglang.client import Producer, Request, Servers
from eagle3.targets.sglang.hook import HookSettings
from eagle3.targets.sglang.version import require_captured
from eagle3.text.samples import Sample, SampleSet, Spans

HIDDEN = 16
ENCODING = HookSettings("spool", "float32", "target", HIDDEN).encoding


@pytest.fixture
def spool(tmp_path):
    with Spool(tmp_path / "spool") as spool:
        yield spool


@pytest.fixture
def reader(spool):
    return SpoolReader(spool.path, 0)


@pytest.fixture
def writer(spool):
    return SpoolWriter(spool.folder, ENCODING)


def a_sample(number: int, tokens: int) -> tuple[Sample, Rows]:
    _, ids, mask, states = sample(number, tokens, HIDDEN)
    return Sample(f"{number:032x}", ids, mask), states


def ticket_of(job: str, one: Sample, time_asked: int = 0) -> Ticket:
    return Ticket.of(job, one.id, len(one.ids), time_asked)


def requested(spool: Spool, one: Sample, rows: WantedRows | None = None) -> Ticket:
    """The ticket of a sample that the spool's job waits for."""
    ticket = ticket_of(spool.job, one)
    want(spool.path, ticket, rows or WantedRows.all(len(one.ids)))
    return ticket


def feed(writer: SpoolWriter, ticket: Ticket, one: Sample, states: Rows, *pieces: tuple[int, int], rows=None) -> None:
    """Writes like a chunked prefill: rows [start, stop) of each piece (default: all rows), one forward after the other.
    rows: those that the job wants of the sample; default: all"""
    for start, stop in pieces or [(0, len(one.ids))]:
        share = RequestRows(ticket, 0, 0, slice(start, stop), rows or WantedRows.all(ticket.tokens))
        piece = states[start:stop]
        writer.take(share, one.ids[start:stop], Rows(piece.aux[share.seen], piece.teacher[share.taught]))


def left_in(spool: Spool) -> list[str]:
    return sorted({*os.listdir(spool.path)} - {LOCK, RESERVE})


@pytest.mark.parametrize("pieces", [[(0, 40)], [(0, 1), (1, 40)], [(0, 7), (7, 8), (8, 30), (30, 40)]])
def test_every_row_of_a_sample_comes_back_bit_for_bit_however_prefill_was_cut(spool, writer, reader, pieces):
    one, states = a_sample(3, 40)
    ticket = requested(spool, one)
    feed(writer, ticket, one, states, *pieces)
    location, every, some = reader.wait(ticket, one.ids), torch.arange(40), torch.tensor([5, 0, 39])
    assert same_rows(reader.read(location, every, every), states)
    assert torch.equal(reader.read(location, some[:0], some).teacher.values, states.teacher.values[some])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("pieces", [[(0, 40)], [(0, 1), (1, 7), (7, 30), (30, 40)]])
def test_of_a_request_for_some_rows_those_alone_come_back(spool, writer, reader, window, pieces):
    one, states = a_sample(3, 40)
    mask = torch.zeros(40, dtype=torch.bool)
    mask[20:24] = mask[37] = True
    wanted = WantedRows(mask, Reach(3, 5) if window else Reach())
    ticket = requested(spool, one, wanted)
    found = wanted_rows(spool.path, ticket)
    assert torch.equal(found.loss_mask, mask) and found.reach == wanted.reach
    feed(writer, ticket, one, states, *pieces, rows=found)
    location = reader.wait(ticket, one.ids)
    seen, taught = (rows.nonzero().flatten() for rows in reader.kept(location))
    assert taught.tolist() == [20, 21, 22, 23, 24, 38]
    # a query sees 5 keys; queries of 3 steps begin 2 rows before a supervised row; row 0 is always there
    assert seen.tolist() == ([0, *range(14, 24), *range(31, 38)] if window else [*range(40)])
    assert same_rows(reader.read(location, seen, taught), Rows(states.aux[seen], states.teacher[taught]))
    needed = 4096 + 40 * 13 + 4 * HIDDEN * (3 * len(seen) + 6)
    assert 0 <= spool_bytes(ENCODING, wanted) - needed < 8, "but for checksums"
    spool.remove(ticket, 0)
    assert left_in(spool) == []


def test_a_request_id_says_all_and_other_requests_are_none_of_ours():
    one, _ = a_sample(1, 9)
    job = "0123456789abcdef"
    ticket = ticket_of(job, one, 7)
    assert Ticket.parse(ticket.text) == ticket
    for text in ("9f3c", "HEALTH_CHECK_1", ticket.text.replace(job, "../../../../../etc"), ticket.text + "x"):
        assert Ticket.parse(text) is None, text
    other = ticket_of(job, replace(one, ids=one.ids[:4]), 7)
    assert other.shard != ticket.shard, "two lengths of one sample must not meet in one file"


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([(8, 40)], "row 8 of a sample came first.*--disable-radix-cache"),
        ([(0, 8), (16, 40)], "rows 8 to 16 of a sample never came"),
    ],
)
def test_rows_that_a_cache_swallowed_fail_the_sample_and_not_the_job(spool, writer, reader, pieces, reason):
    (one, states), (another, its_states) = a_sample(3, 40), a_sample(4, 5)
    lost, whole = requested(spool, one), requested(spool, another)
    feed(writer, lost, one, states, *pieces)
    feed(writer, whole, another, its_states)
    with pytest.raises(UserError, match=reason):
        reader.wait(lost, one.ids)
    reader.wait(whole, another.ids)


def test_a_request_that_begins_again_replaces_what_it_had(spool, writer, reader):
    one, states = a_sample(3, 40)
    ticket, every = requested(spool, one), torch.arange(40)
    feed(writer, ticket, one, states.map(lambda kind: kind + 1), (0, 8))
    feed(writer, ticket, one, states, (0, 20), (20, 40))
    assert torch.equal(reader.read(reader.wait(ticket, one.ids), every, every).aux, states.aux)


def overtaken(spool: Spool, slow: SpoolWriter, one: Sample, states: Rows) -> Ticket:
    """The ticket of a sample that another server has written, while the slow one has its first 8 rows."""
    ticket = requested(spool, one)
    feed(slow, ticket, one, states, (0, 8))
    feed(SpoolWriter(spool.folder, ENCODING), ticket, one, states)
    return ticket


def test_two_servers_with_the_same_request_do_not_disturb_each_other(spool, writer, reader):
    one, states = a_sample(3, 40)
    ticket, every = overtaken(spool, writer, one, states), torch.arange(40)
    before = reader.wait(ticket, one.ids)
    feed(writer, ticket, one, states, (8, 40))
    writer.thread.shutdown()
    for location in (before, reader.wait(ticket, one.ids)):
        assert same_rows(reader.read(location, every, every), states)


@pytest.mark.parametrize("reason", ["", "a reason"])
def test_a_sample_that_comes_after_its_release_is_dropped(spool, writer, reader, reason):
    one, states = a_sample(3, 40)
    ticket = overtaken(spool, writer, one, states)
    reader.wait(ticket, one.ids)
    spool.remove(ticket, 0)
    if reason:
        writer.refuse(ticket, reason)
    else:
        feed(writer, ticket, one, states, (8, 40))
    writer.thread.shutdown()
    assert left_in(spool) == []


def test_a_sample_that_is_not_finite_is_told_to_the_job(spool, writer, reader):
    one, states = a_sample(3, 12)
    states.teacher.values[4, 2] = float("nan")
    ticket = requested(spool, one)
    feed(writer, ticket, one, states, (0, 6), (6, 12))
    with pytest.raises(UserError, match="last hidden states are not finite"):
        reader.wait(ticket, one.ids)
    assert not list(spool.path.glob("writing-*"))


@pytest.mark.parametrize(
    ("column", "value"), [("argmax", 300), ("argmax", -1), ("logsumexp", float("nan")), ("logsumexp", float("inf"))]
)
def test_predictions_that_no_target_makes_are_refused_where_they_are_read(spool, writer, column, value):
    one, states = a_sample(3, 12)
    states.teacher.argmax.remainder_(300)
    getattr(states.teacher, column)[7] = value
    ticket, rows = requested(spool, one), torch.arange(12)
    feed(writer, ticket, one, states)
    reader = SpoolReader(spool.path, 0, vocab_size=300)
    location = reader.wait(ticket, one.ids)
    assert len(reader.read(location, rows, rows[:7]).aux) == 12
    with pytest.raises(UserError, match="SGLang left a bad sample of 12 tokens .has"):
        reader.read(location, rows, rows)


def test_a_reader_of_a_sample_whose_job_ends_meanwhile_says_so(spool, writer, reader):
    one, states = a_sample(3, 12)
    ticket, rows = requested(spool, one), torch.arange(12)
    feed(writer, ticket, one, states)
    location = reader.wait(ticket, one.ids)
    spool.close()
    with pytest.raises(UserError, match="has ended.*--resume"):
        reader.read(location, rows, rows)


def test_hidden_states_of_other_tokens_are_refused(spool, writer, reader):
    one, states = a_sample(3, 12)
    ticket = requested(spool, one)
    feed(writer, ticket, replace(one, ids=one.ids + 1), states)
    with pytest.raises(UserError, match="belong to other tokens"):
        reader.wait(ticket, one.ids)


def test_a_server_whose_job_is_gone_writes_nothing(spool, writer):
    one, states = a_sample(3, 40)
    ticket = requested(spool, one)
    feed(writer, ticket, one, states, (0, 8))
    wait_until(lambda: list(spool.path.glob("writing-*")))
    spool.close()
    feed(writer, ticket, one, states, (8, 40))
    writer.thread.shutdown()
    assert not list(spool.folder.iterdir())


def test_what_a_killed_job_left_is_swept_by_the_next_and_a_live_job_is_left_alone(tmp_path):
    jobs, lines = FORK.SimpleQueue(), []

    def hold() -> None:
        spool = Spool(tmp_path)
        (spool.path / "shard-00000000-00000.safetensors").write_bytes(b"rows")
        jobs.put(spool.job)
        signal.pause()

    holders = [FORK.Process(target=hold, daemon=True) for _ in range(2)]
    try:
        dead, live = [holder.start() or jobs.get() for holder in holders]
        reader = SpoolReader(tmp_path / dead, 1)
        holders[0].kill()
        holders[0].join()
        one, _ = a_sample(1, 4)
        with pytest.raises(UserError, match="has ended.*--resume"):
            reader.wait(ticket_of(dead, one), one.ids)
        (tmp_path / f"{GONE}0123456789abcdef").mkdir()
        with Spool(tmp_path, lines.append) as spool:
            assert {*os.listdir(tmp_path)} == {live, spool.job}
        assert lines == [f"{tmp_path}: removed what 1 ended job had left"]
    finally:
        holders[1].kill()


def test_a_sweep_takes_only_what_is_recognisably_a_dead_job_of_this_user(tmp_path):
    spool, elsewhere, dead = tmp_path / "spool", tmp_path / "elsewhere", "0123456789abcdef"
    for folder in (elsewhere, *(spool / name for name in (dead, "precious", "a" * 16, "b" * 16, ".gone-x"))):
        folder.mkdir(parents=True)
        (folder / "kept").write_bytes(b"kept")
    for folder in (elsewhere, spool / dead, spool / "precious"):
        (folder / LOCK).write_bytes(HELD)
    (spool / ("a" * 16) / LOCK).write_bytes(b"of another program")
    (spool / ("b" * 16) / LOCK).symlink_to(elsewhere / LOCK)
    (spool / ("c" * 16)).symlink_to(elsewhere)
    (spool / f"{GONE}{'d' * 16}").symlink_to(elsewhere)
    (spool / dead / "link").symlink_to(elsewhere)
    before = set(os.listdir(spool))
    assert sweep(spool) == 1
    assert set(os.listdir(spool)) == before - {dead}
    assert sorted(os.listdir(elsewhere)) == ["kept", LOCK]


def test_a_sweep_leaves_another_users_job_alone(tmp_path):
    if os.geteuid():
        pytest.skip("only root makes folders of others")
    folder = tmp_path / "0123456789abcdef"
    folder.mkdir()
    (folder / LOCK).write_bytes(HELD)
    os.chown(folder, 12345, -1)
    assert sweep(tmp_path) == 0 and folder.is_dir()


def test_a_spool_and_its_jobs_are_for_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        with Spool(tmp_path / "above" / "spool") as spool:
            assert [folder.stat().st_mode & 0o777 for folder in (spool.folder, spool.path)] == [0o700, 0o700]
    finally:
        os.umask(before)


def foreign(folder):
    folder.mkdir()
    os.chown(folder, 12345, -1)


def writable_by_all(folder):
    folder.mkdir()
    folder.chmod(0o777)


def link(folder):
    folder.with_name("real").mkdir()
    folder.symlink_to(folder.with_name("real"))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (foreign, "belongs to user 12345, not to"),
        (writable_by_all, r"may be written by others \(mode 777\)"),
        (link, "is a symbolic link"),
    ],
)
def test_a_folder_that_others_may_write_is_refused_by_jobs_and_servers(tmp_path, make, problem):
    if make is foreign and os.geteuid():
        pytest.skip("only root makes folders of others")
    folder, (one, states) = tmp_path / "spool", a_sample(3, 4)
    make(folder)
    with pytest.raises(UserError, match=f"target.spool: {folder} {problem}.*; name a folder that does not exist yet"):
        Spool(folder)
    assert not list(folder.iterdir())
    job, writer = folder / "0123456789abcdef", SpoolWriter(folder, ENCODING)
    job.mkdir()
    ticket = ticket_of(job.name, one)
    want(job, ticket, WantedRows.all(4))
    feed(writer, ticket, one, states)
    writer.refuse(ticket, "a reason")
    writer.thread.shutdown()
    assert os.listdir(job) == [ticket.mark("wanted")]


def test_readers_of_a_stream_get_samples_in_their_own_order_and_the_last_one_frees_them(spool, writer):
    """Samples are written in reverse order. Each of two ranks reads its own rows, and then the folder is empty."""
    pairs = [a_sample(number, 6 + number) for number in range(5)]

    def rows_of(one: Sample, rank: int) -> torch.Tensor:
        return torch.arange(len(one.ids))[rank::2]

    def read(rank: int) -> list[Rows]:
        source = SpooledSource(SpoolReader(spool.path, rank), spool.job, None)
        return source.rows([SampleReading(one, one.loss_mask, *2 * [rows_of(one, rank)]) for one, _ in pairs])

    with ThreadPoolExecutor(2) as ranks:
        reading = ranks.map(read, range(2))
        for one, states in reversed(pairs):
            feed(writer, requested(spool, one), one, states)
        for rank, results in enumerate(reading):
            for (one, states), got in zip(pairs, results, strict=True):
                assert same_rows(got, states.map(lambda kind, rows=rows_of(one, rank): kind[rows]))
    for one, _ in pairs:
        ticket = ticket_of(spool.job, one)
        assert spool.readers(ticket, 2) == 2
        spool.remove(ticket, 2)
    assert left_in(spool) == []


def test_a_folder_without_room_for_what_may_wait_is_refused(tmp_path):
    with pytest.raises(UserError, match="GiB free, .* may wait there; lower target.spool_gib"):
        Spool(tmp_path, most_bytes=2**60)
    assert not list(tmp_path.iterdir())


def test_training_and_held_out_samples_never_meet_in_one_file(spool, writer, reader):
    """Both sets have the same sample, which is requested in either order."""
    (one, states), shards = a_sample(3, 12), []

    def ask(ticket: Ticket, _reading: SampleReading) -> None:
        shards.append(ticket.shard)
        want(spool.path, ticket, WantedRows.all(12))
        feed(writer, ticket, one, states)

    train = SpooledSource(reader, spool.job, ask)
    held_out, rows = train.beside(1), torch.arange(3)
    for source in (held_out, train, train, held_out):
        assert torch.equal(source.rows([SampleReading(one, one.loss_mask, rows, rows)])[0].aux, states.aux[:3])
    assert len(set(shards)) == 4


class Alone:
    """A group of one rank."""

    rank, size = (lambda self: 0), (lambda self: 1)


def test_of_a_sample_whose_spans_are_drawn_anew_only_the_drawn_ones_are_asked_for(spool, writer, reader):
    one, states = a_sample(3, 60)
    samples = SampleSet.pack([(one.ids.numpy(), np.arange(60) >= 20)])
    spans, masks = Spans(4, 1, seed=0), []

    def ask(ticket: Ticket, reading: SampleReading) -> None:
        masks.append(reading.supervised)
        rows = WantedRows(reading.supervised, Reach(3, 5))
        want(spool.path, ticket, rows)
        feed(writer, ticket, one, states, rows=rows)

    loader = StreamLoader(
        samples,
        SpooledSource(reader, spool.job, ask),
        lambda _stream, plan, rows: (plan, rows),
        reach=Reach(3, 5),
        rule="served",
        sharding=SequenceSharding(),
        data=Alone(),
        sequence=Alone(),
        spans=spans,
    )
    for epoch in range(3):
        (loaded,) = loader.load([DrawnSample(0, epoch)], 1)
        plan, rows = loaded.batch
        assert torch.equal(masks[-1], spans.draw(samples[0], epoch)) and int(masks[-1].sum()) <= 4
        assert same_rows(rows, Rows(states.aux[plan.rows], states.teacher[plan.teacher]))
    assert len({tuple(mask.tolist()) for mask in masks}) > 1


def producer_of(spool: Spool, *urls: str, in_flight: int = 1, most_bytes: int = 2**30, report=print) -> Producer:
    """Asks these servers for samples that one reader reads."""
    servers = Servers(urls or ["http://127.0.0.1:9"], spool.path, in_flight, report)
    return Producer(servers, spool, most_bytes, readers=1)


def test_a_sample_that_never_fits_the_spool_is_refused_with_the_size_it_needs(spool):
    (one, _), wanted = a_sample(1, 4000), WantedRows.all(4000)
    needs = r"target.spool_gib: leaves this process 0.000977 GiB, but a sample of 4,000 tokens takes"
    with closing(producer_of(spool, most_bytes=2**20)) as producer, pytest.raises(UserError, match=needs):
        producer.ask(ticket_of(spool.job, one), one.ids, wanted, spool_bytes(ENCODING, wanted))


def test_with_no_server_left_every_request_fails_with_the_remedy(spool, reader, monkeypatch):
    monkeypatch.setattr("eagle3.targets.sglang.client.RETRY_SECONDS", 4 * [0.01])
    (one, _), lines = a_sample(1, 4), []
    tickets = [ticket_of(spool.job, one, time) for time in range(3)]
    # So many that a request could be blamed for what its servers' other requests met, too.
    urls = "http://127.0.0.1:9", "http://127.0.0.1:10"
    with closing(producer_of(spool, *urls, in_flight=16, report=lines.append)) as producer:
        for future in [producer.ask(ticket, one.ids, WantedRows.all(4), 10_000) for ticket in tickets]:
            with pytest.raises(UserError, match="no server is left.*--resume"):
                future.result(HANG_SECONDS)
        with pytest.raises(UserError, match="no server is left"):
            reader.wait(tickets[0], one.ids)
    assert len(lines) == 1 and "left out; 1 server left" in lines[0]


def test_a_sample_outlives_every_server_but_the_last(tmp_path):
    one, _ = a_sample(1, 4)
    first, second, third = urls = ["http://127.0.0.1:9", "http://127.0.0.1:10", "http://127.0.0.1:11"]
    ticket, death = ticket_of("job", one), OSError("died")
    for slow in (False, True):
        servers = Servers(urls, tmp_path, 0, lambda line: None)  # asks nothing by itself
        servers.request(Request(ticket, one.ids, WantedRows.all(4), Future()))
        taken = servers._next(first)
        if slow:  # the second is asked, too, and dies, while the first is still at work
            servers.asked[first, ticket] = taken._replace(slow=first), 0.0
            servers.request(taken._replace(slow=first))
            assert servers._next(second).ticket == ticket
            servers._leave_out(second, death)
            assert not servers.waiting
            servers._leave_out(first, death)
        else:
            servers._leave_out(first, death)
            assert servers._next(second).ticket == ticket
            servers._leave_out(second, death)
        assert servers._next(third).ticket == ticket
        servers.close()


def test_a_sample_that_is_read_before_its_server_answers_does_not_hold_up_the_next(spool, writer, reader):
    """The answer may come late, and the thread that asked looks for the sample only now and then: a reader on the same
    machine can be done before."""
    (one, states), (other, _) = a_sample(1, 4), a_sample(2, 4)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            ticket = Ticket.parse(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rid"])
            feed(writer, ticket, one, states)
            reader.wait(ticket, one.ids)
            reader.done(ticket)
            time.sleep(0.2)  # many rounds of what releases samples that have been read
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"meta_info": {"finish_reason": {"type": "length"}}}')

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with closing(producer_of(spool, f"http://127.0.0.1:{server.server_port}")) as producer:
            for each in (one, other):
                producer.ask(ticket_of(spool.job, each), each.ids, WantedRows.all(4), 10_000).result(HANG_SECONDS)
            wait_until(lambda: not producer.samples)
            assert left_in(spool) == []
        server.shutdown()


def test_a_mistake_in_the_thread_that_asks_ends_the_wait_of_who_asked(spool, reader):
    """The ids are not a tensor, so the request cannot even be written."""
    (one, _), bug = a_sample(1, 4), pytest.raises(UserError, match="AttributeError.*this is a bug")
    with closing(producer_of(spool)) as producer:
        with bug:
            producer.ask(ticket_of(spool.job, one), [1, 2, 3, 4], WantedRows.all(4), 10_000).result(HANG_SECONDS)
        with bug:
            reader.wait(ticket_of(spool.job, one), one.ids)


def test_the_proven_sglang_is_taken_and_a_newer_one_if_that_is_allowed():
    for version in ("0.5.23", "0.5.23.post1"):
        require_supported(version, "here")
    require_supported("0.6.0", "here", allow_untested=True)
    with pytest.raises(UserError, match=r">=0.5.23.*install.*or try this one with target.allow_untested=true"):
        require_supported("0.6.0", "here")
    for version in ("0.5.22", "unknown"):
        for allowed in (False, True):
            with pytest.raises(UserError, match=r">=0.5.23.*for example pip install"):
                require_supported(version, "here", allow_untested=allowed)


def test_layers_that_sglang_does_not_capture_are_refused():
    require_captured((1, 2, 3), 5, "deepseek_v3")
    require_captured((2, 3), 5, "llama")
    with pytest.raises(UserError, match=r"model.aux_layers: \[1, 2, 4\] has the last of the target's 5 layers"):
        require_captured((1, 2, 4), 5, "llama")
    with pytest.raises(UserError, match=r"\[2, 3\]: for a deepseek_v3, SGLang takes each layer for the one before"):
        require_captured((2, 3), 5, "deepseek_v3")


def test_on_a_disk_that_a_neighbour_fills_the_job_is_told_at_once_with_folder_and_remedy(small_disk):
    """Before rows are copied, and although no other byte could be written."""
    one, states = a_sample(3, 40)
    with Spool(small_disk / "spool") as spool:
        ticket = requested(spool, one)
        with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
            while True:
                filler.write(bytes(4096))
        feed(SpoolWriter(spool.folder, ENCODING), ticket, one, states, (0, 20), (20, 40))
        with pytest.raises(UserError, match=r"spool: cannot be written \(No space left.*free space, or .*target.spool"):
            SpoolReader(spool.path, 0).wait(ticket, one.ids)
        assert not list(spool.path.glob("writing-*"))
