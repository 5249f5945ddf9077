"""The spool: readers read what a hook in SGLang writes. Nothing is lost silently, and nothing stays behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from limits import HANG_SECONDS, wait_until
from places import ROOT
from store_cases import sample

from eagle3.errors import UserError
from eagle3.parallel.sequence import SequenceSharding
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
from eagle3.targets.sglang.client import Producer, Request, Servers
from eagle3.targets.sglang.hook import HookSettings
from eagle3.targets.sglang.installed import require_supported
from eagle3.targets.sglang.version import require_captured
from eagle3.text.samples import Sample, SampleSet, Spans

HIDDEN = 16


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


ENCODING = HookSettings("spool", "float32", "target", HIDDEN).encoding


def hook_writer(spool: Spool) -> SpoolWriter:
    return SpoolWriter(spool.folder, ENCODING)


def share_of(ticket: Ticket, start: int, stop: int, rows: WantedRows | None = None) -> RequestRows:
    """Rows [start, stop) of a sample, of which the job wants these `rows`."""
    return RequestRows(ticket, 0, 0, slice(start, stop), rows or WantedRows.all(ticket.tokens))


def feed(writer: SpoolWriter, ticket: Ticket, one: Sample, states: Rows, cuts: list[int]) -> None:
    """Writes like a chunked prefill: rows up to each cut, one forward after the other."""
    for start, stop in zip([0, *cuts], [*cuts, len(one.ids)], strict=True):
        writer.take(share_of(ticket, start, stop), one.ids[start:stop], states[start:stop])


@pytest.mark.parametrize("cuts", [[], [1], [7, 8, 30]])
def test_every_row_of_a_sample_comes_back_bit_for_bit_however_prefill_was_cut(tmp_path, cuts):
    one, states = a_sample(3, 40)
    with Spool(tmp_path) as spool:
        ticket = requested(spool, one)
        feed(hook_writer(spool), ticket, one, states, cuts)
        reader = SpoolReader(spool.path, 0)
        location = reader.wait(ticket, one.ids)
        every = torch.arange(40)
        got = reader.read(location, every, every)
        for name, kind in states.named().items():
            assert torch.equal(got.named()[name], kind), name
        some = torch.tensor([5, 0, 39])
        assert torch.equal(reader.read(location, some[:0], some).teacher.values, states.teacher.values[some])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cuts", [[], [1, 7, 30]])
def test_of_a_request_for_some_rows_those_alone_come_back(tmp_path, window, cuts):
    one, states = a_sample(3, 40)
    mask = torch.zeros(40, dtype=torch.bool)
    mask[20:24] = mask[37] = True
    wanted = WantedRows(mask, window, 3 if window else None)
    with Spool(tmp_path) as spool:
        ticket, writer = requested(spool, one, wanted), hook_writer(spool)
        found = wanted_rows(spool.path, ticket)
        assert torch.equal(found.loss_mask, mask) and (found.window, found.ttt_steps) == (window, wanted.ttt_steps)
        for start, stop in zip([0, *cuts], [*cuts, 40], strict=True):
            share = share_of(ticket, start, stop, found)
            rows = Rows(states.aux[start:stop][share.seen], states.teacher[start:stop][share.taught])
            writer.take(share, one.ids[start:stop], rows)
        reader = SpoolReader(spool.path, 0)
        location = reader.wait(ticket, one.ids)
        seen, taught = (rows.nonzero().flatten() for rows in reader.kept(location))
        assert taught.tolist() == [20, 21, 22, 23, 24, 38]
        # a query sees 5 keys; queries of 3 steps begin 2 rows before a supervised row; row 0 is always there
        assert seen.tolist() == ([0, *range(14, 24), *range(31, 38)] if window else [*range(40)])
        got = reader.read(location, seen, taught)
        for name, kind in states.named().items():
            assert torch.equal(got.named()[name], kind[seen if name == "aux" else taught]), name
        needed = 4096 + 40 * 13 + 4 * HIDDEN * (3 * len(seen) + 6)
        assert 0 <= spool_bytes(ENCODING, wanted) - needed < 8, "but for checksums"
        spool.remove(ticket, 0)
        assert sorted(os.listdir(spool.path)) == [LOCK, RESERVE]


def test_a_request_id_says_all_and_other_requests_are_none_of_ours(tmp_path):
    one, _ = a_sample(1, 9)
    job = "0123456789abcdef"
    ticket = ticket_of(job, one, 7)
    assert Ticket.parse(ticket.text) == ticket
    for text in ("9f3c", "HEALTH_CHECK_1", ticket.text.replace(job, "../../../../../etc"), ticket.text + "x"):
        assert Ticket.parse(text) is None, text
    other = ticket_of(job, replace(one, ids=one.ids[:4]), 7)
    assert other.shard != ticket.shard, "two lengths of one sample must not meet in one file"


def test_rows_that_a_cache_swallowed_fail_the_sample_and_not_the_job(tmp_path):
    one, states = a_sample(3, 40)
    another, its_states = a_sample(4, 5)
    with Spool(tmp_path) as spool:
        writer, reader = hook_writer(spool), SpoolReader(spool.path, 0)
        lost, whole = requested(spool, one), requested(spool, another)
        writer.take(share_of(lost, 8, 40), one.ids[8:], states[8:])
        feed(writer, whole, another, its_states, [])
        with pytest.raises(UserError, match="row 8 of a sample came first.*--disable-radix-cache"):
            reader.wait(lost, one.ids)
        reader.wait(whole, another.ids)


def test_a_gap_between_chunks_fails_the_sample(tmp_path):
    one, states = a_sample(3, 40)
    with Spool(tmp_path) as spool:
        writer, ticket = hook_writer(spool), requested(spool, one)
        for start, stop in ((0, 8), (16, 40)):
            writer.take(share_of(ticket, start, stop), one.ids[start:stop], states[start:stop])
        with pytest.raises(UserError, match="rows 8 to 16 of a sample never came"):
            SpoolReader(spool.path, 0).wait(ticket, one.ids)


def test_a_request_that_begins_again_replaces_what_it_had(tmp_path):
    one, states = a_sample(3, 40)
    with Spool(tmp_path) as spool:
        writer, ticket = hook_writer(spool), requested(spool, one)
        writer.take(share_of(ticket, 0, 8), one.ids[:8], states.map(lambda kind: kind[:8] + 1))
        feed(writer, ticket, one, states, [20])
        reader = SpoolReader(spool.path, 0)
        every = torch.arange(40)
        assert torch.equal(reader.read(reader.wait(ticket, one.ids), every, every).aux, states.aux)


def overtaken(spool: Spool, one: Sample, states: Rows) -> tuple[Ticket, SpoolWriter]:
    """The ticket of a sample that one server has written, and the writer of another one that has its first 8 rows."""
    ticket, slow = requested(spool, one), hook_writer(spool)
    slow.take(share_of(ticket, 0, 8), one.ids[:8], states[:8])
    feed(hook_writer(spool), ticket, one, states, [])
    return ticket, slow


def test_two_servers_with_the_same_request_do_not_disturb_each_other(tmp_path):
    one, states = a_sample(3, 40)
    with Spool(tmp_path) as spool:
        ticket, slow = overtaken(spool, one, states)
        reader, every = SpoolReader(spool.path, 0), torch.arange(40)
        location = reader.wait(ticket, one.ids)
        slow.take(share_of(ticket, 8, 40), one.ids[8:], states[8:])
        time.sleep(0.3)
        assert torch.equal(
            reader.read(reader.wait(ticket, one.ids), every, every).teacher.values, states.teacher.values
        )
        assert torch.equal(reader.read(location, every, every).aux, states.aux)


@pytest.mark.parametrize("reason", ["", "a reason"])
def test_a_sample_that_comes_after_its_release_is_dropped(tmp_path, reason):
    one, states = a_sample(3, 40)
    with Spool(tmp_path) as spool:
        ticket, slow = overtaken(spool, one, states)
        SpoolReader(spool.path, 0).wait(ticket, one.ids)
        spool.remove(ticket, 0)
        if reason:
            slow.refuse(ticket, reason)
        else:
            slow.take(share_of(ticket, 8, 40), one.ids[8:], states[8:])
        slow.thread.shutdown()
        assert sorted(os.listdir(spool.path)) == [LOCK, RESERVE]


def test_a_sample_that_is_not_finite_is_told_to_the_job(tmp_path):
    one, states = a_sample(3, 12)
    states.teacher.values[4, 2] = float("nan")
    with Spool(tmp_path) as spool:
        ticket = requested(spool, one)
        feed(hook_writer(spool), ticket, one, states, [6])
        with pytest.raises(UserError, match="last hidden states are not finite"):
            SpoolReader(spool.path, 0).wait(ticket, one.ids)
        assert not list(spool.path.glob("writing-*"))


@pytest.mark.parametrize(
    ("column", "value"), [("argmax", 300), ("argmax", -1), ("logsumexp", float("nan")), ("logsumexp", float("inf"))]
)
def test_predictions_that_no_target_makes_are_refused_where_they_are_read(tmp_path, column, value):
    one, states = a_sample(3, 12)
    states.teacher.argmax.remainder_(300)
    getattr(states.teacher, column)[7] = value
    with Spool(tmp_path) as spool:
        ticket = requested(spool, one)
        feed(hook_writer(spool), ticket, one, states, [])
        reader, rows = SpoolReader(spool.path, 0, vocab_size=300), torch.arange(12)
        location = reader.wait(ticket, one.ids)
        assert len(reader.read(location, rows, rows[:7]).aux) == 12
        with pytest.raises(UserError, match="a server of target.servers left a sample of 12 tokens that has"):
            reader.read(location, rows, rows)


def test_a_reader_of_a_sample_whose_job_ends_meanwhile_says_so(tmp_path):
    one, states = a_sample(3, 12)
    with Spool(tmp_path) as spool:
        ticket, rows = requested(spool, one), torch.arange(12)
        feed(hook_writer(spool), ticket, one, states, [])
        reader = SpoolReader(spool.path, 0)
        location = reader.wait(ticket, one.ids)
    with pytest.raises(UserError, match="has ended.*--resume"):
        reader.read(location, rows, rows)


def test_hidden_states_of_other_tokens_are_refused(tmp_path):
    one, states = a_sample(3, 12)
    with Spool(tmp_path) as spool:
        ticket = requested(spool, one)
        feed(hook_writer(spool), ticket, replace(one, ids=one.ids + 1), states, [])
        reader = SpoolReader(spool.path, 0)
        with pytest.raises(UserError, match="belong to other tokens"):
            reader.wait(ticket, one.ids)


def test_a_server_whose_job_is_gone_writes_nothing(tmp_path):
    one, states = a_sample(3, 40)
    with Spool(tmp_path) as spool:
        writer, ticket = hook_writer(spool), requested(spool, one)
        writer.take(share_of(ticket, 0, 8), one.ids[:8], states[:8])
        SpoolReader(spool.path, 0)
        time.sleep(0.2)
    writer.take(share_of(ticket, 8, 40), one.ids[8:], states[8:])
    time.sleep(0.3)
    assert not list(tmp_path.iterdir())


HOLDER = """
import sys
sys.path.insert(0, sys.argv[2])
from eagle3.states.spool import Spool
spool = Spool(sys.argv[1])
(spool.path / "shard-00000000-00000.safetensors").write_bytes(b"rows")
print(spool.job, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_job_left_is_swept_by_the_next_and_a_live_job_is_left_alone(tmp_path):
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, tmp_path, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        dead, live = (holder.stdout.readline().strip() for holder in holders)
        reader = SpoolReader(tmp_path / dead, 1)
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait()
        one, _ = a_sample(1, 4)
        with pytest.raises(UserError, match="has ended.*--resume"):
            reader.wait(ticket_of(dead, one), one.ids)
        (tmp_path / f"{GONE}0123456789abcdef").mkdir()
        lines = []
        with Spool(tmp_path, lines.append) as spool:
            assert sorted(os.listdir(tmp_path)) == sorted([live, spool.job])
        assert lines == [f"{tmp_path}: removed what 1 ended job had left"]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            holder.stdin.close()
            holder.stdout.close()


def test_a_sweep_takes_only_what_is_recognisably_a_dead_job_of_this_user(tmp_path):
    spool, elsewhere, dead = tmp_path / "spool", tmp_path / "elsewhere", "0123456789abcdef"
    for folder in (
        elsewhere,
        spool / dead,
        spool / "precious",
        spool / ("a" * 16),
        spool / ("b" * 16),
        spool / ".gone-x",
    ):
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
    job = folder / "0123456789abcdef"
    job.mkdir()
    writer = SpoolWriter(folder, ENCODING)
    ticket = ticket_of(job.name, one)
    want(job, ticket, WantedRows.all(4))
    feed(writer, ticket, one, states, [])
    writer.refuse(ticket, "a reason")
    writer.thread.shutdown()
    assert os.listdir(job) == [ticket.mark("wanted")]


def test_readers_of_a_stream_get_samples_in_their_own_order_and_the_last_one_frees_them(tmp_path):
    """Samples are written in reverse order. Each of two ranks reads its own rows, and then the folder is empty."""
    pairs = [a_sample(number, 6 + number) for number in range(5)]
    samples = [one for one, _ in pairs]
    with Spool(tmp_path) as spool:
        writer = hook_writer(spool)
        sources = [SpooledSource(SpoolReader(spool.path, rank), spool.job, None) for rank in range(2)]
        rows = [[torch.arange(len(one.ids))[rank::2] for one in samples] for rank in range(2)]
        readings = [
            [SampleReading(one, one.loss_mask, each, each) for one, each in zip(samples, of_rank, strict=True)]
            for of_rank in rows
        ]
        results: dict[int, list] = {}
        threads = [
            threading.Thread(target=lambda r=rank: results.update({r: sources[r].rows(readings[r])}))
            for rank in range(2)
        ]
        for thread in threads:
            thread.start()
        for one, states in reversed(pairs):
            feed(writer, requested(spool, one), one, states, [])
        for thread in threads:
            thread.join(HANG_SECONDS)
        for rank, selection in enumerate(rows):
            for (_, states), got, each in zip(pairs, results[rank], selection, strict=True):
                assert torch.equal(got.aux, states.aux[each]) and torch.equal(
                    got.teacher.values, states.teacher.values[each]
                )
                assert torch.equal(got.teacher.argmax, states.teacher.argmax[each])
        for one in samples:
            ticket = ticket_of(spool.job, one)
            assert spool.readers(ticket, 2) == 2
            spool.remove(ticket, 2)
        assert sorted(os.listdir(spool.path)) == [LOCK, RESERVE]


def test_a_folder_without_room_for_what_may_wait_is_refused(tmp_path):
    with pytest.raises(UserError, match="GiB free, .* may wait there; lower target.spool_gib"):
        Spool(tmp_path, most_bytes=2**60)
    assert not list(tmp_path.iterdir())


def test_training_and_held_out_samples_never_meet_in_one_file(tmp_path):
    """Both sets have the same sample, which is requested in either order."""
    one, states = a_sample(3, 12)
    with Spool(tmp_path) as spool:
        writer, shards = hook_writer(spool), []

        def ask(ticket, asked) -> None:
            shards.append(ticket.shard)
            want(spool.path, ticket, WantedRows.all(12))
            feed(writer, ticket, one, states, [])

        train = SpooledSource(SpoolReader(spool.path, 0), spool.job, ask)
        held_out, rows = train.beside(1), torch.arange(3)
        for source in (held_out, train, train, held_out):
            assert torch.equal(source.rows([SampleReading(one, one.loss_mask, rows, rows)])[0].aux, states.aux[:3])
        assert len(set(shards)) == 4


class Alone:
    """A group of one rank."""

    rank, size = (lambda self: 0), (lambda self: 1)


def test_of_a_sample_whose_spans_are_drawn_anew_only_the_drawn_ones_are_asked_for(tmp_path):
    _, ids, _, states = sample(3, 60, HIDDEN)
    samples = SampleSet.pack([(ids.numpy(), np.arange(60) >= 20)])
    spans, masks = Spans(4, 1, seed=0), []
    with Spool(tmp_path) as spool:
        writer = hook_writer(spool)

        def ask(ticket: Ticket, reading: SampleReading) -> None:
            masks.append(reading.supervised)
            rows = WantedRows(reading.supervised, 5, 3)
            want(spool.path, ticket, rows)
            kept = Rows(states.aux[rows.seen], states.teacher[rows.taught])
            writer.take(share_of(ticket, 0, 60, rows), ids, kept)

        loader = StreamLoader(
            samples,
            SpooledSource(SpoolReader(spool.path, 0), spool.job, ask),
            lambda _stream, plan, rows: (plan, rows),
            steps=3,
            rule="served",
            sharding=SequenceSharding(),
            data=Alone(),
            sequence=Alone(),
            window=5,
            spans=spans,
        )
        for epoch in range(3):
            ((_, _, (plan, rows)),) = [vars(each).values() for each in loader.load([DrawnSample(0, epoch)], 1)]
            assert torch.equal(masks[-1], spans.draw(samples[0], epoch)) and int(masks[-1].sum()) <= 4
            assert torch.equal(rows.aux, states.aux[plan.rows])
            assert torch.equal(rows.teacher.values, states.teacher.values[plan.teacher])
    assert len({tuple(mask.tolist()) for mask in masks}) > 1


def test_a_sample_that_never_fits_the_spool_is_refused_with_the_size_it_needs(tmp_path):
    one, _ = a_sample(1, 4000)
    wanted = WantedRows.all(4000)
    with Spool(tmp_path) as spool:
        servers = Servers(["http://127.0.0.1:9"], spool.path, 1)
        producer = Producer(servers, spool, most_bytes=2**20, readers=0)
        with pytest.raises(
            UserError, match=r"target.spool_gib: leaves this process 0.000977 GiB, but a sample of 4,000 tokens takes"
        ):
            producer.ask(ticket_of(spool.job, one), one.ids, wanted, spool_bytes(ENCODING, wanted))
        producer.close()


def test_with_no_server_left_every_request_fails_with_the_remedy(tmp_path):
    one, _ = a_sample(1, 4)
    lines = []
    with Spool(tmp_path) as spool:
        # So many that a request could be blamed for what its servers' other requests met, too.
        servers = Servers(["http://127.0.0.1:9", "http://127.0.0.1:10"], spool.path, 16, lines.append)
        producer = Producer(servers, spool, most_bytes=2**30, readers=1)
        futures = [
            producer.ask(ticket_of(spool.job, one, time), one.ids, WantedRows.all(4), 10_000) for time in range(3)
        ]
        for future in futures:
            with pytest.raises(UserError, match="no server is left.*--resume"):
                future.result(60)
        with pytest.raises(UserError, match="no server is left"):
            SpoolReader(spool.path, 0).wait(ticket_of(spool.job, one, 0), one.ids)
        producer.close()
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


def test_a_sample_that_is_read_before_its_server_answers_does_not_hold_up_the_next(tmp_path):
    """The answer may come late, and the thread that asked looks for the sample only now and then: a reader on the same
    machine can be done before."""
    (one, states), (other, _) = a_sample(1, 4), a_sample(2, 4)
    with Spool(tmp_path) as spool:
        reader, writer = SpoolReader(spool.path, 0), hook_writer(spool)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                ticket = Ticket.parse(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["rid"])
                feed(writer, ticket, one, states, [])
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
            servers = Servers([f"http://127.0.0.1:{server.server_port}"], spool.path, 1)
            producer = Producer(servers, spool, most_bytes=2**30, readers=1)
            for each in (one, other):
                producer.ask(ticket_of(spool.job, each), each.ids, WantedRows.all(4), 10_000).result(HANG_SECONDS)
            wait_until(lambda: not producer.samples)
            assert sorted(path.name for path in spool.path.iterdir()) == [LOCK, RESERVE]
            producer.close()
            server.shutdown()


def test_a_mistake_in_the_thread_that_asks_ends_the_wait_of_who_asked(tmp_path):
    """The ids are not a tensor, so the request cannot even be written."""
    one, _ = a_sample(1, 4)
    with Spool(tmp_path) as spool:
        producer = Producer(Servers(["http://127.0.0.1:9"], spool.path, 1), spool, most_bytes=2**30, readers=1)
        with pytest.raises(UserError, match="AttributeError.*this is a bug"):
            producer.ask(ticket_of(spool.job, one), [1, 2, 3, 4], WantedRows.all(4), 10_000).result(HANG_SECONDS)
        with pytest.raises(UserError, match="this is a bug"):
            SpoolReader(spool.path, 0).wait(ticket_of(spool.job, one), one.ids)
        producer.close()


@pytest.mark.parametrize("version", ["0.5.22", "0.6.0", "unknown"])
def test_an_sglang_that_was_not_proven_is_refused_with_the_range(version):
    with pytest.raises(UserError, match=r">=0.5.23.*install"):
        require_supported(version, "http://host:30000")


def test_the_proven_sglang_is_taken_and_a_newer_one_if_that_is_allowed():
    require_supported("0.5.23", "here")
    require_supported("0.6.0", "here", allow_untested=True)
    for version in ("0.5.22", "unknown"):
        with pytest.raises(UserError, match="for example pip install"):
            require_supported(version, "here", allow_untested=True)
    with pytest.raises(UserError, match="or try this one with target.allow_untested=true"):
        require_supported("0.6.0", "here")
    require_supported("0.5.23.post1", "here")


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
        feed(hook_writer(spool), ticket, one, states, [20])
        with pytest.raises(UserError, match=r"spool: cannot be written \(No space left.*free space, or .*target.spool"):
            SpoolReader(spool.path, 0).wait(ticket, one.ids)
        assert not list(spool.path.glob("writing-*"))
