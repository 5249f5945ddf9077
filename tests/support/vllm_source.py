"""Reads single functions from vLLM's files and runs them, without an installed vLLM."""

import __future__

import ast
import importlib.util
import zipfile
from pathlib import Path
from typing import Any


class VLLMSource:
    """root: vLLM's wheel, or the folder that contains `vllm`."""

    def __init__(self, root: Path) -> None:
        self.root = zipfile.Path(root) if root.suffix == ".whl" else root

    def definition(self, file: str, name: str, **names: Any) -> Any:
        """The function or class of that name (`Class.method` for a method) in `file`, unchanged but without decorators
        and annotations. It sees only `names`; any other name that it uses is a NameError."""
        source = (self.root / "vllm" / file).read_text(encoding="utf-8")
        body = ast.parse(source).body
        for part in name.split("."):
            (item,) = (node for node in body if getattr(node, "name", None) == part)
            body = item.body
        item.decorator_list.clear()
        code = compile(
            ast.Module([item], []),
            f"vllm/{file}",
            "exec",
            flags=__future__.annotations.compiler_flag,
            dont_inherit=True,
        )
        exec(code, names)
        return names[item.name]


def installed() -> Path | None:
    """The folder where vLLM is installed; None if it is not. Does not import vLLM."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent.parent if spec and spec.origin else None
