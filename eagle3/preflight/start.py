"""Checks that a job's processes run the same thing (versions, code, recipe, DeepSpeed file) and may have enough files
open. Names what differs, and where."""

import hashlib
import platform
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

import eagle3
from eagle3.console import without_passwords
from eagle3.parallel.topology import gathered, node_name
from eagle3.preflight.cluster import Cluster, Finding, Flaw, owners
from eagle3.preflight.folders import ABSENT, check_shared
from eagle3.recipe.loading import leaves
from eagle3.recipe.schema import Recipe

PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers", "safetensors")  # whatever computes
# What one rank runs: name of a package, file or key -> its value in readable form.
Traits = dict[str, str]
DIGITS = 12  # hex digits of a digest that are shown: 48 bits
ENTRIES = {"code": "files", "recipe": "keys", "deepspeed file": "lines"}
REMEDIES = {
    "versions": "install one constraints/ file on every node",
    "code": "start every node from the same checkout (git status), or copy it again",
    "recipe": "pass the same --recipe and overrides on every node",
    "deepspeed file": "pass the same --deepspeed on every node",
}
# A rank opens sockets to all others, its shards, and pipes to its workers: hundreds on one node, thousands on many.
LEAST_OPEN_FILES = 4096


def require_sound_start(recipe: Recipe, deepspeed: Path) -> None:
    """Checks that a job has started properly; call it after start_distributed. Collective, with a few exchanges of
    small objects. Raises SharedUserError on every rank unless:
    - versions, code, recipe and DeepSpeed file are the same on all ranks;
    - enough files can be open (raises the soft limit if possible);
    - every node sees the run folder's location and can write there.

    launchers/doctor.py checks more, but takes longer.
    """
    cluster = Cluster(dist.get_rank(), tuple(gathered(node_name())), gathered)
    for name, traits in own_traits(recipe, deepspeed).items():
        compare(cluster, name, traits)
    check_open_files(cluster)
    check_shared(cluster, "output.dir", recipe.output.dir)


def running_code() -> Traits:
    """Digests of the package's modules and, if a script is running, of the scripts beside it. These are the modules
    that Python imports here. If the package is installed, they may differ from those beside the recipe."""
    package, program = Path(eagle3.__file__).parent, Path(sys.argv[0])
    files = {f"{package.name}/{path.relative_to(package)}": path for path in package.rglob("*.py")}
    if program.suffix == ".py":
        beside = program.resolve().parent
        files |= {f"{beside.name}/{path.name}": path for path in beside.glob("*.py")}
    return {name: _digest(path.read_bytes()) for name, path in sorted(files.items())}


def versions(packages: Sequence[str]) -> Traits:
    """The versions of Python, of those of these packages that are installed here and, on a machine with GPUs, of
    NCCL."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def own_traits(recipe: Recipe, deepspeed: Path) -> dict[str, Traits]:
    """Everything about this rank that must be the same on all ranks."""
    packages = (*PACKAGES, "sglang") if recipe.target.backend == "sglang" else PACKAGES
    settings = deepspeed.read_text(encoding="utf-8")
    return {
        "versions": versions(packages),
        "code": running_code(),
        "recipe": {key: repr(value) for key, value in leaves(recipe.model_dump(mode="json"))},
        "deepspeed file": {
            f"line {number}": repr(line.strip()) for number, line in enumerate(settings.splitlines(), 1)
        },
    }


def compare(cluster: Cluster, name: str, mine: Traits) -> Finding:
    """Compares traits across ranks. Collective. Ranks exchange digests, and the traits themselves only if the digests
    differ. The finding then names the first key that differs, its values, and the ranks or nodes with each value."""
    digests = cluster.gather(hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest())
    if len(set(digests)) == 1:
        if name == "versions":
            return Finding(name, "ok", ", ".join(f"{key} {value}" for key, value in mine.items()))
        return Finding(name, "ok", f"the same on all ranks ({len(mine)} {ENTRIES[name]}, sha256 {digests[0][:DIGITS]})")
    everyones = cluster.gather(mine)
    keys = dict.fromkeys(key for traits in everyones for key in traits)  # in the file's order
    differing = [key for key in keys if len({traits.get(key) for traits in everyones}) > 1]
    assert differing, f"{name}: digests differ and traits do not"
    holders = owners((rank, traits.get(differing[0], ABSENT)) for rank, traits in enumerate(everyones))
    values = "; ".join(f"{_shorten(value)} on {cluster.named(ranks)}" for value, ranks in holders.items())
    more = f" (and {len(differing) - 1} more differ)" if len(differing) > 1 else ""
    raise Flaw(name, f"{differing[0]}: {values}{more}", REMEDIES[name])


def open_files() -> int:
    """The number of files that this process may have open. Raises the soft limit to LEAST_OPEN_FILES if the hard limit
    allows; only an administrator can raise the hard limit. (Shells often start with a soft limit of 1024 and a hard
    limit of a million.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = LEAST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, LEAST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return LEAST_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def check_open_files(cluster: Cluster) -> Finding:
    """Checks that every rank may have enough files open. Collective."""
    least, low = min(owners(enumerate(cluster.gather(open_files()))).items())
    if least < LEAST_OPEN_FILES:
        raise Flaw(
            "open files",
            f"{least} allowed on {cluster.named(low)}, {LEAST_OPEN_FILES} needed",
            f"run ulimit -n {LEAST_OPEN_FILES} before the start; if that is refused, set LimitNOFILE= of the service, "
            "/etc/security/limits.conf, or --ulimit nofile= of the container",
        )
    return Finding("open files", "ok", f"{least} allowed")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def _shorten(value: str) -> str:
    """Shortens a long value to its beginning and a digest, since values may differ at the end. Masks passwords first,
    because they could no longer be recognised in a URL that was cut off."""
    value = without_passwords(value)
    return value if len(value) <= 60 else f"{value[:40]}... ({_digest(value.encode())})"
