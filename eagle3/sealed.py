"""Sealed records: JSON objects that reveal damage, and that they were taken from another place.

A record carries the key that it is stored under, and a digest of everything in it.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from eagle3.parsing import parse_json

KEY, DIGEST = "sealed_as", "digest"
# Exceptions that reading a record that is damaged, missing, or another's may raise.
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def sealed(record: dict[str, Any], key: str) -> dict[str, Any]:
    """The record, with its key and digest."""
    whole = {**record, KEY: key}
    return {**whole, DIGEST: _digest(whole)}


def unsealed(record: dict[str, Any], key: str) -> dict[str, Any]:
    """A record as it was before it was sealed. Raises one of DAMAGE if it is not that one."""
    whole = {name: value for name, value in record.items() if name != DIGEST}
    if record.get(DIGEST) != _digest(whole):
        raise ValueError("its digest does not fit")
    if whole.pop(KEY, None) != key:
        raise ValueError(f"it is that of {record.get(KEY)}")
    return whole


def read_sealed(path: Path, key: str) -> dict[str, Any]:
    """The record in a file. Raises one of DAMAGE like `unsealed`."""
    return unsealed(parse_json(path.read_text(encoding="utf-8")), key)


def _digest(record: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(record))  # as it is read back, with lists for tuples and texts for keys
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]
