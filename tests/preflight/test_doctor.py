"""The preflight: a sound job passes, and every flaw is found and named with its node and a remedy."""

import os
import pickle
import re
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from places import SUPPORT
from tiny_run import deepspeed, finish, launch, make_target, write_recipe

from eagle3.errors import SharedUserError
from eagle3.parallel.topology import node_name
from eagle3.preflight import bandwidth, start
from eagle3.preflight.cluster import Cluster, Flaw, StoreGather
from eagle3.preflight.folders import check_inputs, check_shared, check_space, free_bytes, judge_space


def as_ranks(work, nodes=("a", "b"), timeout=10.0):
    """What `work(cluster)` returns or finds on each rank of a job of threads that share one real store."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout))

    def rank(number):
        try:
            return work(Cluster(number, tuple(nodes), StoreGather(store, number, len(nodes))))
        except Flaw as flaw:
            return flaw.finding

    with ThreadPoolExecutor(len(nodes)) as ranks:
        return list(ranks.map(rank, range(len(nodes))))


def only(findings):
    """The one finding, which must be the same on every rank."""
    assert len(set(findings)) == 1
    return findings[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write_recipe(folder, make_target(folder / "target"))
    return folder


@pytest.fixture(scope="module")
def started(folder):
    """Starts both at once, because they mostly import."""
    options = ("--recipe", str(folder / "recipe.yaml"))
    sound = launch(*deepspeed(2), "launchers/doctor.py", *options)
    worker = str(SUPPORT / "doctor_worker.py")
    flawed = launch("env", "CUDA_VISIBLE_DEVICES=", sys.executable, worker, str(folder))
    yield sound, flawed
    for process in (sound, flawed):
        process.kill()


@pytest.fixture(scope="module")
def outputs(started):
    """What each act of the flawed job printed, by title."""
    acts = re.split(r"^== (.*)\n", finish(started[1]), flags=re.MULTILINE)
    return dict(zip(acts[1::2], acts[2::2], strict=True))


def test_a_sound_job_passes_and_no_job_leaves_anything_behind(started, outputs, folder):
    output = finish(started[0])
    lines = re.findall(r"^(ok|note|FAILED) +([^:]+): (.*)$", output, re.MULTILINE)
    checks = {name: (state, text) for state, name, text in lines}
    assert [name for name, (state, _) in checks.items() if state == "FAILED"] == []
    assert {"versions", "code", "recipe", "output.dir", "disk space"} <= checks.keys()
    assert checks["gpus"][0] in ("note", "ok")
    assert "sums are exact" in checks["all-reduce inside a node"][1]
    for kind in ("full blocks of attention", "masked blocks of attention", "the loss"):
        assert "plain is right (error " in checks[f"kernels for {kind}"][1]
    assert "cpu is right" in checks["kernels for causal blocks of attention"][1]
    for precision, cases in (("float32", "dense|ragged|windowed"), ("bfloat16", "dense|ragged")):
        found = re.findall(rf"({cases}) \d+\.\d%", checks[f"golden cases in {precision}"][1])
        assert len(found) == cases.count("|") + 1
    assert "model.target, data.train[0]: the same on every node" in checks["inputs"][1]
    assert f"sound: {len(checks)} checks, none failed" in output
    # the flawed job, which `outputs` has waited for, writes its probes below the same folder
    assert not (folder / "run").exists() and not list(folder.glob("**/.preflight*"))


def test_the_doctor_names_the_node_and_the_first_thing_that_differs(outputs):
    output = outputs["doctor"]
    assert "processes: 2, nodes: 2" in output
    assert re.search(r"^FAILED recipe: training.ttt_steps: 3 on node a\S*; 2 on node b\S*$", output, re.MULTILINE)
    assert re.search(r"^FAILED code: launchers/doctor.py: \w+ on node a\S*; \w+ on node b", output, re.MULTILINE)
    assert re.search(
        r"^FAILED open files: 512 allowed on node b\S*, 4096 needed\n +remedy: run ulimit -n 4096", output, re.MULTILINE
    )
    assert re.search(r"^(ok|note) +all-reduce between nodes: .* exact$", output, re.MULTILINE)  # they all continued
    assert set(re.findall(r"^FAILED ([^:]+):", output, re.MULTILINE)) == {"recipe", "code", "open files"}
    assert "exit codes [1, 1]" in output


def test_a_sound_start_is_no_error(outputs):
    assert outputs["sound start"].endswith("exit codes [0, 0]\n") and "error:" not in outputs["sound start"]


@pytest.mark.parametrize(
    ("act", "line"),
    [
        ("start, other recipe", r"recipe: training.ttt_steps: 3 on node a\S*; 4 on node b\S*; pass the same --recipe"),
        ("start, other deepspeed file", r"deepspeed file: line 2: .* on node a\S*; '' on node b\S* .*; pass the same"),
        ("start, other code", r"code: launchers/train.py: \w+ on node a\S*; absent on node b\S*; start every node"),
        ("start, few files", r"open files: 512 allowed on node b\S*, 4096 needed; run ulimit -n 4096"),
        ("start, nowhere to write", r"output.dir: node a\S*: /proc/\S+: .*; set output.dir"),
        ("start, a file in the way", r"output.dir: node a\S*: \S+: a file is in the way; set output.dir"),
        (
            "start, not shared",
            r"output.dir: node b\S*: \S+ is not the first node's folder .*; set output",
        ),
    ],
)
def test_training_refuses_an_unsound_start_in_one_line_on_every_rank(outputs, act, line):
    output = outputs[act]
    assert len(re.findall(rf"^error: {line}.*$", output, re.MULTILINE)) == 1, output
    assert output.count("error:") == 1 and "Traceback" not in output and "exit codes [2, 2]" in output


def test_a_rank_that_does_not_come_is_named():
    def work(cluster):
        if cluster.rank == 2:
            return None
        with pytest.raises(SharedUserError) as raised:
            cluster.gather("here")
        return str(raised.value)

    message, *_ = as_ranks(work, nodes=("a", "a", "b"), timeout=0.5)
    assert "rank 2 did not answer within" in message


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize(("rank", "key"), [(0, "round 0 of 1"), (1, "round 0")])
def test_what_somebody_puts_into_the_jobs_store_runs_nothing(tmp_path, rank, key):
    store = dist.HashStore()
    store.set(key, pickle.dumps(Payload(tmp_path / "it-ran"), protocol=0))
    with pytest.raises(SharedUserError, match="job: its store holds what none of its processes wrote"):
        StoreGather(store, rank, 2)("here")
    assert not list(tmp_path.iterdir())


def test_nodes_and_parts_of_nodes_are_named():
    cluster = Cluster(0, ("a", "a", "b", "b", "c"), list)
    assert cluster.named([4]) == "node c"
    assert cluster.named([0, 1, 4]) == "nodes a, c"
    assert cluster.named([1, 4]) == "node c, rank 1 on a"
    assert cluster.named(range(5)) == "every node"
    assert cluster.leaders == [0, 2, 4] and cluster.where([2]) == "node b"


def test_slurm_tells_two_nodes_of_one_host_apart(monkeypatch):
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    host = node_name()
    monkeypatch.setenv("SLURMD_NODENAME", host)
    assert node_name() == host
    monkeypatch.setenv("SLURMD_NODENAME", "lab-1")
    assert node_name() == f"lab-1@{host}"


def test_a_version_that_one_node_lacks_is_named():
    here = start.versions(["torch", "no-such-package"])
    assert "no-such-package" not in here and here["python"] == ".".join(map(str, sys.version_info[:3]))
    without = {name: number for name, number in here.items() if name != "torch"}
    unequal, equal = (
        only(as_ranks(lambda cluster, traits=traits: start.compare(cluster, "versions", traits[cluster.rank])))
        for traits in ((here, without), (here, here))
    )
    assert unequal.state == "failed" and unequal.found == f"torch: {here['torch']} on node a; absent on node b"
    assert equal.state == "ok"


def test_a_folder_of_the_same_name_on_another_disk_is_not_shared(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()

    def shared(folders):
        runs = [folder / "x" / "run" for folder in folders]
        return as_ranks(lambda cluster: check_shared(cluster, "output.dir", runs[cluster.rank], patience=0.3))

    assert only(shared([tmp_path / "a"] * 2))._replace(found="") == ("output.dir", "ok", "", "")
    apart = shared([tmp_path / "a", tmp_path / "b"])[0]
    assert apart.state == "failed" and re.match("node b: .* is not the first node's folder", apart.found)
    missing = shared([tmp_path / "a", tmp_path / "c" / "d"])[0]
    assert missing.state == "failed" and f"no folder {tmp_path / 'c'}" in missing.found
    assert not list(tmp_path.glob("**/.preflight*"))


def test_an_input_that_differs_between_nodes_is_named(tmp_path):
    for name, text in (("a", "one"), ("b", "three")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.jsonl").write_text(text, encoding="utf-8")

    def check(folders, **more):
        return as_ranks(lambda cluster: check_inputs(cluster, {"data.train[0]": str(folders[cluster.rank]), **more}))

    same = only(check([tmp_path / "a"] * 2, target="owner/model"))
    assert same.state == "ok" and same.found.startswith("data.train[0]:")
    other = check([tmp_path / "a", tmp_path / "b"])[0]
    assert other.state == "failed" and re.search(r"3 bytes .* on node a; 1 files, 5 bytes .* on node b$", other.found)
    absent = check([tmp_path / "a", tmp_path / "nothing"])[0]
    assert absent.state == "failed" and "absent on node b" in absent.found
    assert only(check([tmp_path / "nothing"] * 2)).state == "failed"


def test_a_refusal_on_one_node_is_a_finding_and_nobody_waits(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    folders = [tmp_path, tmp_path / "file"]
    finding = as_ranks(lambda cluster: check_space(cluster, folders[cluster.rank] / "run", None, 1))[0]
    assert finding.state == "failed" and "file is in the way" in finding.found and "node b" in finding.found


def test_a_disk_that_checkpoints_would_fill_is_found_before_they_do(small_disk):
    run = small_disk / "run"
    finding = only(as_ranks(lambda cluster: check_space(cluster, run, 300_000, 4)))
    assert finding.state == "failed" and "training.keep_checkpoints" in finding.remedy
    assert only(as_ranks(lambda cluster: check_space(cluster, run, 250_000, 4))).state == "ok"
    judge_space(run, free_bytes(run), 1_000_000, "a checkpoint")
    with pytest.raises(SharedUserError, match="disk space: .* free, 1.1 MB for a checkpoint; free some"):
        judge_space(run, free_bytes(run), 1_100_000, "a checkpoint")
    assert list(small_disk.iterdir()) == []


def test_a_wrong_sum_and_a_detour_fail_and_a_fast_link_does_not():
    cluster, spec = Cluster(0, ("a", "b"), list), bandwidth.link_speed("NVIDIA H100 80GB HBM3")

    def judged(speed, exact, spec):
        measured = {0: (400.0, True), 1: (speed, exact)}
        return bandwidth.judge_reduction(cluster, "all-reduce", measured, spec)

    assert judged(300.0, True, spec).state == "ok"
    slow = judged(12.0, True, spec)
    assert slow.state == "failed" and "node b" in slow.found and "NCCL_DEBUG=INFO" in slow.remedy
    assert "NCCL_SOCKET_IFNAME" in slow.remedy and "NCCL_IB_HCA" in slow.remedy
    assert judged(12.0, True, bandwidth.link_speed("NVIDIA H100 PCIe")).state == "ok"
    assert judged(0.01, True, None).state == "note"
    assert "corrupts" in judged(400.0, False, None).found


def test_a_port_that_is_up_gives_its_speed(tmp_path):
    for card, rate, state in (("mlx5_0", "400 Gb/sec (4X NDR)", "4: ACTIVE"), ("mlx5_1", "800 Gb/sec", "1: DOWN")):
        port = tmp_path / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text(f"{rate}\n", encoding="utf-8")
        (port / "state").write_text(f"{state}\n", encoding="utf-8")
    assert bandwidth.port_speed(tmp_path) == 50.0
    assert bandwidth.port_speed(tmp_path / "nothing") == 0.0


def test_a_soft_limit_of_open_files_is_raised_where_it_may_be():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < start.LEAST_OPEN_FILES:
        pytest.skip("the hard limit is too low here")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        assert start.open_files() == start.LEAST_OPEN_FILES
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (start.LEAST_OPEN_FILES, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
