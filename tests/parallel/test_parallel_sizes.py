"""Group sizes that cannot work are refused in one line, with the nearest ones that can."""

import datetime

import psutil
import pytest
import torch
import torch.distributed as dist
from definition import random_case
from places import GOLDEN, TESTS

from eagle3.draft.config import DraftConfig
from eagle3.draft.model import Eagle3Draft
from eagle3.errors import UserError
from eagle3.jobs.gate import require_divisible
from eagle3.jobs.verify import read_case, run_case
from eagle3.parallel.sequence import SequenceSharding
from eagle3.parallel.topology import every_core, job_store, start_distributed, usable_cores

SHAPE = {"hidden_size": 96, "target_hidden_size": 96, "intermediate_size": 240, "max_position_embeddings": 64}
SHAPE |= {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 4, "vocab_size": 101, "draft_vocab_size": 64}


@pytest.mark.parametrize(("tensor", "ulysses"), [(1, 1), (2, 1), (8, 3), (4, 6), (1, 24)])
def test_sizes_that_divide_are_taken(tensor, ulysses):
    require_divisible(DraftConfig(**SHAPE), tensor, ulysses)


@pytest.mark.parametrize(
    ("changes", "tensor", "ulysses", "refusal"),
    [
        (
            {},
            16,
            1,
            "tensor: 16 does not divide the draft's num_key_value_heads 8; use 2 or 4 or 8, or change",
        ),
        ({}, 3, 1, "tensor: 3 does not divide the draft's num_key_value_heads 8; use 1 or 2, or"),
        ({"num_key_value_heads": 1}, 2, 1, "tensor: 2 does not divide the draft's num_key_value_heads 1; use 1, or"),
        (
            {"intermediate_size": 250},
            4,
            1,
            "tensor: 4 does not divide the draft's intermediate_size 250; use 1 or 2",
        ),
        ({"draft_vocab_size": 50}, 4, 1, "tensor: 4 does not divide the draft's draft_vocab_size 50; use 1 or 2, or"),
        ({}, 1, 5, "ulysses: 5 does not divide the 24 attention heads .*; use 4 or 6, and"),
        ({}, 4, 4, "ulysses: 4 does not divide the 6 attention heads .*; use 3 or 6, and"),
        ({}, 8, 8, "ulysses: 8 does not divide the 3 attention heads .*; use 3, and"),
    ],
)
def test_a_size_that_does_not_divide_the_draft_is_refused(changes, tensor, ulysses, refusal):
    with pytest.raises(UserError, match=f"^parallelism.{refusal}"):
        require_divisible(DraftConfig(**SHAPE | changes), tensor, ulysses)


@pytest.mark.parametrize(
    ("world", "sizes", "remedy"),
    [(4, (2, 4, 1), "8"), (6, (1, 2, 2), "4 or 8"), (12, (2, 2, 2), "8 or 16"), (1, (1, 1, 3), "3")],
)
def test_a_job_whose_processes_are_no_multiple_of_the_sizes_is_refused(monkeypatch, topology, world, sizes, remedy):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(UserError, match=f"this job has {world}; start {remedy}, or choose"):
        start_distributed(*sizes)


def test_verify_refuses_a_degree_that_the_cases_heads_cannot_have(topology):
    """It refuses before it builds anything, so that no rank is left waiting."""
    with pytest.raises(UserError, match=r"parallelism\.ulysses: 3 does not divide the 4 attention heads"):
        run_case(read_case(GOLDEN / "dense"), topology, 7, torch.float64, TESTS, SequenceSharding(ulysses=3))


def test_an_embedding_that_does_not_divide_is_padded_not_refused(topology):
    config = random_case([[1]], vocab_size=41).config
    assert Eagle3Draft(config, topology.modules, torch.float32).embedding.weight.shape[0] == 41
    require_divisible(config, 2, 1)


def test_work_that_other_processes_wait_for_gets_every_core_and_gives_them_back(topology):
    share = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.raises(KeyError), every_core():
            assert torch.get_num_threads() == usable_cores()
            raise KeyError
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(share)


def test_a_job_of_one_process_listens_to_this_machine_alone(topology):
    """The ports of its own store and of Gloo."""
    addresses = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    assert addresses <= {"127.0.0.1", "::1"}, addresses
    assert isinstance(job_store(datetime.timedelta(seconds=5)), dist.HashStore)
