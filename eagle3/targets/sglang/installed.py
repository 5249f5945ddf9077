"""Which SGLang versions are supported, and whether one is installed. Imports neither SGLang nor anything else heavy."""

from contextlib import suppress
from importlib.metadata import distributions, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from eagle3.errors import SharedUserError

# Tested by tests/*/test_sglang_*.py. Later releases may rename things that version.py uses.
SUPPORTED, TESTED = SpecifierSet(">=0.5.23,<0.5.24"), Version("0.5.23")
INSTALL = 'pip install -e ".[sglang]" -c constraints/cuda.txt'


def is_installed() -> bool:
    return any(distributions(name="sglang"))


def require_sglang(alternative: str, allow_untested: bool = False) -> None:
    """Raises UserError unless a supported SGLang is installed. alternative: advice for users who cannot install it."""
    if not is_installed():
        raise SharedUserError(f"SGLang is not installed: {INSTALL}, or {alternative}")
    require_supported(version("sglang"), "this environment", allow_untested)


def is_tested(version: str) -> bool:
    with suppress(InvalidVersion):
        return Version(version) in SUPPORTED
    return False


def require_supported(version: str, where: str, allow_untested: bool = False) -> None:
    """Raises UserError if this SGLang version is not supported. where: where it was found, for the message.
    allow_untested: whether a newer one will do."""
    newer = False
    with suppress(InvalidVersion):
        newer = Version(version) > TESTED
    if is_tested(version) or (newer and allow_untested):
        return
    remedy = f", or try this one with target.allow_untested=true ({INSTALL})" if newer else f", for example {INSTALL}"
    raise SharedUserError(
        f"{where}: SGLang {version}, but this project was tested with {SUPPORTED}; install one of those{remedy}"
    )
