"""Which SGLang this project works with, and whether it is installed; without importing it, or anything else that is large."""

from contextlib import suppress
from importlib.metadata import distributions, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from eagle3.errors import SharedUserError

# Proven by tests/test_sglang_*.py; a later release may rename what version.py names.
SUPPORTED = SpecifierSet(">=0.5.23,<0.5.24")
INSTALL = 'pip install -e ".[sglang]" -c constraints/cuda.txt'


def is_installed() -> bool:
    return any(distributions(name="sglang"))


def require_sglang(instead: str) -> None:
    """UserError unless a supported SGLang is installed here. instead: what else the user could do."""
    if not is_installed():
        raise SharedUserError(f"SGLang is not installed: {INSTALL}, or {instead}")
    require_supported(version("sglang"), "this environment")


def require_supported(version: str, where: str) -> None:
    """Raises UserError. where: what has that version."""
    with suppress(InvalidVersion):
        if Version(version) in SUPPORTED:
            return
    raise SharedUserError(
        f"{where}: SGLang {version}, this project was proven with {SUPPORTED}; install one of those, for example {INSTALL}"
    )
