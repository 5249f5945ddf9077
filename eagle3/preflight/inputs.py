"""Checks the files that a recipe and options name, before any import that takes seconds; and writes a result file."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eagle3.console import Console
from eagle3.draft.config import DraftConfig, read_draft_config
from eagle3.durable import KEY, require_access, write_bytes, writing
from eagle3.errors import SharedUserError, UserError
from eagle3.hub import require_folder, require_no_draft
from eagle3.parsing import read_json_object
from eagle3.recipe.loading import leaves
from eagle3.recipe.schema import Recipe
from eagle3.states.store.files import is_url
from eagle3.targets.sglang.asking import ServerInfo, reported
from eagle3.text.conversations import dataset_of
from eagle3.text.rows import KINDS
from eagle3.text.template import check_variables, read_template

OUTPUTS = ("output.dir", "data.cache_dir")  # paths that a run writes
# Every checkpoint with a tokenizer has one of these; without, transformers would create one that has no tokens.
TOKENIZER_FILES = ("*token*", "vocab*", "*.model")
# Includes pickled weights, which are refused later, when they are read.
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl")
RESULT_REMEDY = "free space and judge again, or name another file with --out"
ABSENT = "copy it there from where the rest comes from, or name another folder in model.target"


def files_of(recipe: Recipe) -> dict[str, Path]:
    """The files and folders that the recipe reads, by key: those of every key whose type is a path."""
    return {key: path for key, path in leaves(recipe.model_dump()) if isinstance(path, Path) and key not in OUTPUTS}


def inputs_of(recipe: Recipe) -> dict[str, str]:
    """Everything that the recipe reads and that may be a local path, by key."""
    data = recipe.data
    paths = {"model.target": recipe.model.target, **files_of(recipe)}
    for key, sources in (("data.train", data.train_paths), ("data.held_out", data.held_out or [])):
        paths |= {f"{key}[{number}]": source for number, source in enumerate(sources)}
    store = recipe.hidden_states
    if store.mode == "stored" and not is_url(store.path):  # a store at a URL is not local
        paths["hidden_states.path"] = store.path
    return {key: str(path) for key, path in paths.items()}


def require_inputs(recipe: Recipe, *, weights: bool = True) -> None:
    """Raises UserError if data, files or a target folder that the recipe names are missing, or if the draft's config or
    chat template cannot be valid. Names that may be on the hub, and the contents of a target, are checked later by the
    code that reads them.

    weights: whether the target's weights are needed; then its weight files must be there, and open
    """
    if recipe.model.target != "demo":
        _require_target(recipe.model.target, weights)
    for key, name in inputs_of(recipe).items():
        if key.startswith(("data.train", "data.held_out")) and not name.startswith("demo_answers"):
            try:
                dataset_of(name)
            except UserError as error:
                raise SharedUserError(f"{key}: {error}") from error
    for key, path in files_of(recipe).items():
        if key != "model.draft.init_from" and not path.is_file():
            raise SharedUserError(f"{key}: {path}: no such file; fix the path")
    draft, data = recipe.model.draft, recipe.data
    if draft.config:
        read_draft_config(draft.config)
    if draft.init_from:
        require_export(draft.init_from, "model.draft.init_from=")
    if data.chat_template:
        check_variables(read_template(data.chat_template), data.template_variables)


def _require_target(target: str, weights: bool) -> None:
    require_folder(target)
    folder = Path(target)
    if not folder.is_dir():
        return
    require_no_draft(target, read_json_object(folder / "config.json", ABSENT, ABSENT, SharedUserError))
    needed = {"tokenizer (tokenizer.json, for example)": TOKENIZER_FILES}
    if weights:
        needed["weights (model.safetensors, or several with an index)"] = WEIGHT_FILES
    for part, patterns in needed.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise SharedUserError(f"target '{folder}': no {part} in this folder; {ABSENT}")
    for file in sorted(folder.glob("*.safetensors")) if weights else ():
        require_access(file)
        try:
            with safe_open(file, "np"):
                pass
        except SafetensorError as error:
            raise SharedUserError(f"{file}: {error} (cut off, or a git-lfs pointer); download it again") from error


def require_store_place(path: str) -> None:
    """Raises UserError for a local path at which a store cannot be begun or continued without mixing it with other
    files."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise SharedUserError(f"hidden_states.path: {path}: is a file; name a folder")
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if not name.startswith((".", "shard-", "store.json"))]
    if foreign and "store.json" not in names:
        raise SharedUserError(
            f"hidden_states.path: {path}: holds other files ({foreign[0]}) and no store; name a new or empty folder"
        )


def require_servers(urls: list[str]) -> None:
    """Raises UserError if one of target.servers does not answer. Whether it captures the right thing is checked once
    the data are known."""
    for url in urls:
        reported(url, ServerInfo)


def require_export(draft: Path, option: str = "--draft ") -> DraftConfig:
    """Returns an exported draft's config. Raises UserError if config.json does not describe an exported draft. option:
    the option that the user wrote before the folder, for messages."""
    if (draft / "config.json").is_file():
        return read_draft_config(draft / "config.json")
    if (draft / "export" / "config.json").is_file():
        raise UserError(f"{draft}: is a run's folder; its draft is in there: {option}{draft / 'export'}")
    raise UserError(f"{draft}: no exported draft here; train first, or name one with {option}FOLDER")


def prompt_files(values: Sequence[str]) -> dict[str, Path]:
    """The file of each prompt set, by the set's name: from [NAME=]FILE each, where NAME defaults to the file's stem. A
    value that is the path of a file is no NAME=FILE. Raises UserError for a name that is taken, and like
    `require_prompts_file`."""
    files: dict[str, Path] = {}
    for value in values:
        name, equals, path = value.partition("=")
        if not equals or Path(value).exists():
            name, path = Path(value).stem, value
        name = name.strip() or Path(path).stem
        require_prompts_file(Path(path), value)
        if name in files:
            raise UserError(
                f"--prompts {value}: {files[name]} is called {name!r} too; give it another name: --prompts NAME={path}"
            )
        files[name] = Path(path)
    return files


def require_prompts_file(file: Path, value: str | None = None) -> None:
    """Raises UserError unless the file is of a kind that holds prompts. value: what the user wrote (default: the
    file)."""
    if not (file.is_file() and file.suffix in (*KINDS, ".txt")):
        problem = "is not a file of such a kind" if file.exists() else "no such file"
        raise UserError(f"--prompts {value or file}: {problem}; name a .jsonl, .json, .parquet or .txt file")


# The JSON file that a judgement or a diagnosis is written to ----------------------------------------------------------


def require_result_place(out: Path) -> None:
    """Raises UserError before anything is decoded if the result could not be written, or would overwrite something
    else."""
    if out.exists() and not out.is_file():
        raise UserError(f"--out {out}: exists, but is not a file; name a file for the result")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; create it, or name another file")
    with writing(out, RESULT_REMEDY), tempfile.TemporaryFile(dir=out.parent):
        pass
    if out.exists() and out.stat().st_size and KEY not in out.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"--out {out}: holds something other than an evaluation; name another file")


def write_result(out: Path, result: dict[str, Any], console: Console) -> None:
    with writing(out, RESULT_REMEDY):
        aside = write_bytes(out, f"{json.dumps(result, indent=2)}\n".encode(), aside=True)
    if aside:
        console.result(f"{out} held an earlier result: moved to {aside}")
    console.result(f"written to {out}")
