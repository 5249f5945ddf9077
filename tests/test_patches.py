"""Private parts of other libraries are checked before a job relies on them."""

from importlib.metadata import version

import pytest

from eagle3.errors import UserError
from eagle3.parallel import topology
from eagle3.patches import OPERATIONS, RELIED, require_relied


def test_the_installed_libraries_have_all_that_is_patched():
    require_relied(RELIED | OPERATIONS)


@pytest.mark.parametrize(
    ("place", "shape", "reason"),
    [
        ("torch.distributed.distributed_c10d:_no_such", (), "is missing"),
        ("torch.no_such_module:anything", (), "is missing"),
        ("torch.distributed.distributed_c10d:_set_pg_timeout", ("group",), r"has another shape \(.*'timeout'"),
        ("torch:float32", dict, r"has another shape \(<class 'torch.dtype'>, not <class 'dict'>\)"),
    ],
)
def test_another_version_is_refused_by_library_version_and_attribute(place, shape, reason):
    named = f"torch {version('torch')}: {place.replace(':', '.')} {reason}".replace("+", r"\+")
    with pytest.raises(UserError, match=f"^{named}.*constraints/"):
        require_relied({place: shape})


def test_a_job_looks_before_it_begins(monkeypatch):
    monkeypatch.setattr(topology, "require_relied", lambda: require_relied({"torch:gone": ()}))
    with pytest.raises(UserError, match="torch.gone is missing"):
        topology.start_distributed()
