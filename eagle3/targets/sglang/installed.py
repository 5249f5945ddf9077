"""Which SGLang versions are supported, and whether one is installed. Imports neither SGLang nor anything else heavy."""

from contextlib import suppress
from importlib.metadata import distributions, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from eagle3.errors import SharedUserError

# Tested by tests/*/test_sglang_*.py. Later releases may rename things that version.py uses.
SUPPORTED = SpecifierSet(">=0.5.23,<0.5.24")
INSTALL = 'pip install -e ".[sglang]" -c constraints/cuda.txt'


def is_installed() -> bool:
    return any(distributions(name="sglang"))


def require_sglang(alternative: str) -> None:
    """Raises UserError unless a supported SGLang is installed. alternative: advice for users who cannot install it."""
    if not is_installed():
        raise SharedUserError(f"SGLang is not installed: {INSTALL}, or {alternative}")
    require_supported(version("sglang"), "this environment")


def require_supported(version: str, where: str) -> None:
    """Raises UserError if this SGLang version is not supported. where: where it was found, for the message."""
    with suppress(InvalidVersion):
        if Version(version) in SUPPORTED:
            return
    raise SharedUserError(
        f"{where}: SGLang {version}, but this project was tested with {SUPPORTED}; install one of those, for example "
        f"{INSTALL}"
    )
