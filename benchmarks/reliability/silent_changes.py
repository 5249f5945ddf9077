"""Files that change between two commands, each as valid as before: a draft's config, cached sets, downloads, results,
metrics, weights."""

import json
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ground import Ground, contents, loss_of, require, run_difference
from launching import Ended
from tries import Case, Verdict, judge, warned

DRAFT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 300, "max_position_embeddings": 256, "rms_norm_eps": 1e-6},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGS = {
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "eps": {"rms_norm_eps": 1e-2},
    "rope_parameters": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
}
ENTRIES = ("renamed", "exchanged", "a link", "its record alone")
COPIES = ("a flipped bit", "rows cut off")
RESULTS = ("another draft's evaluation", "a changed number", "another draft's acceptance by context")
METRICS = ("a broken line", "a duplicate", "renumbered", "a missing line")
WEIGHTS = ("init_from", "evaluate.py")
DATASET = "ann/talks"


def cases(ground: Ground, dice: random.Random) -> Iterator[Case]:
    for name in CONFIGS:
        yield Case(f"model.draft.config: {name}, resumed", lambda name=name: _config(ground, name))
    for manner in ENTRIES:
        yield Case(f"cache entry: {manner}", lambda manner=manner: _entry(ground, manner))
    for damage in COPIES:
        place = dice.random()
        yield Case(f"download: {damage}", lambda damage=damage, place=place: _copy(ground, damage, place))
    for change in RESULTS:
        yield Case(f"result: {change}", lambda change=change: _result(ground, change))
    for fault in METRICS:
        yield Case(f"metrics.jsonl: {fault}, resumed", lambda fault=fault: _metrics(ground, fault))
    for use in WEIGHTS:
        yield Case(f"NaN: {use}", lambda use=use: _not_finite(ground, use))
    yield Case("diagnosis: quarters that print alike", lambda: _quarters(ground))


def _rebuilt(ended: Ended) -> str:
    return "rebuilt" if warned(ended) else "right"


def _run(ground: Ground) -> Path:
    """A run with a draft config, judged also by context."""

    def make(folder: Path) -> None:
        _make_run(ground, folder, seed=0)

    return ground.once(ground.undisturbed / "silent_changes", make)


def _make_run(ground: Ground, folder: Path, seed: int) -> None:
    config = folder / "draft.json"
    config.write_text(json.dumps(DRAFT), encoding="utf-8")
    model = {"draft": {"vocab_size": 200, "config": str(config)}}
    evaluation = {"conversations": 2, "draft_tokens": 2, "new_tokens": 16}
    recipe = ground.recipe(folder, rows=24, model=model, evaluation=evaluation)
    require(ground.train(recipe, f"training.seed={seed}"))
    words = ("--recipe", str(recipe), "--by-context", "--contexts", "64,128")
    require(ground.launchers.run("launchers/evaluate.py", *words))


def _other_run(ground: Ground) -> Path:
    """The same with another draft."""
    return ground.once(ground.undisturbed / "another draft", lambda folder: _make_run(ground, folder, seed=1)) / "run"


def _half(ground: Ground, folder: Path) -> Path:
    """A copy of that run that has lost its last steps, and the recipe that goes on with it."""
    whole = _run(ground)
    shutil.copytree(whole / "run", folder / "run")
    shutil.rmtree(folder / "run" / "export")
    steps = sorted((folder / "run" / "checkpoints").glob("step-*"))
    for step in steps[1:]:
        shutil.rmtree(step)
    text = (whole / "recipe.yaml").read_text(encoding="utf-8")
    for name in ("draft.json", "run"):
        text = text.replace(str(whole / name), str(folder / name))
    shutil.copy(whole / "draft.json", folder)
    for name in ("recipe.yaml", "run/recipe.yaml"):
        own = text if name == "recipe.yaml" else (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(own.replace(str(whole / "draft.json"), str(folder / "draft.json")), encoding="utf-8")
    return folder / "recipe.yaml"


def _config(ground: Ground, name: str) -> Verdict:
    folder = ground.empty("silent_changes")
    recipe = _half(ground, folder)
    (folder / "draft.json").write_text(json.dumps(DRAFT | CONFIGS[name]), encoding="utf-8")
    before = contents(folder / "run")
    ended = ground.train(recipe, "--resume", "auto")
    return judge(ended, lambda: "goes on with another model", loss_of(folder / "run", before))


# Cache ----------------------------------------------------------------------------------------------------------------


def _entry(ground: Ground, manner: str) -> Verdict:
    def make(folder: Path) -> None:
        require(ground.train(ground.recipe(folder, rows=24)))
        require(ground.launchers.run("launchers/prepare.py", "--recipe", str(ground.recipe(folder, rows=20))))
        ground.recipe(folder, rows=24)

    whole, folder = ground.once(ground.undisturbed / "two sets", make), ground.empty("silent_changes")
    shutil.copytree(whole / "cache", folder / "cache")
    sizes = {entry: (entry / "ids").stat().st_size for entry in (folder / "cache" / "tokenized").iterdir()}
    other, own = sorted(sizes, key=sizes.get)
    if manner == "its record alone":
        shutil.copy(other / "record.json", own / "record.json")
    else:
        own.rename(folder / "away")
        own.symlink_to(other) if manner == "a link" else other.rename(own)
    if manner == "exchanged":
        (folder / "away").rename(other)
    ended = ground.train(whole / "recipe.yaml", f"data.cache_dir={folder / 'cache'}", f"output.dir={folder / 'run'}")
    return judge(ended, lambda: run_difference(folder / "run", whole / "run"), good=_rebuilt(ended))


def _copy(ground: Ground, damage: str, place: float) -> Verdict:
    """Of a dataset that a hub on this machine has."""
    sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
    from local_hub import local_hub

    folder = ground.empty("silent_changes")
    with local_hub(folder / "hub") as hub:
        rows = [json.dumps({"text": f"Row number {number} of a set of talks."}) + "\n" for number in range(40)]
        (hub.folder(DATASET) / "train.jsonl").write_text("".join(rows), encoding="utf-8")
        data = {"train": [DATASET], "held_out_fraction": 0.0, "cache_dir": str(folder / "cache"), "workers": 1}
        recipe = ground.recipe(folder, data=data)
        home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}

        def prepare() -> Ended:
            fresh, ground.launchers.fresh = ground.launchers.fresh, True  # the hub's address is read once a process
            words = ("launchers/prepare.py", "--recipe", str(recipe))
            process = ground.launchers.start(*words, variables=home | {"HF_HUB_DISABLE_XET": "1"})
            ground.launchers.fresh = fresh
            return ground.launchers.finish([process], 300)

        require(prepare())
        tokens = _tokens(folder)
        [copy] = (folder / "cache" / "downloads").glob("*/rows.jsonl")
        content = bytearray(copy.read_bytes())
        if damage == "rows cut off":
            content = content[: content.index(b"\n", int(place * len(content) * 0.9)) + 1]
        else:
            digits = [at for at, byte in enumerate(content) if content[at - 7 : at] == b"number "]
            content[digits[int(place * len(digits))]] ^= 1  # another digit: a row as valid as before
        copy.write_bytes(content)
        ended = prepare()
    return judge(ended, lambda: None if _tokens(folder) == tokens else "other samples", good=_rebuilt(ended))


def _tokens(folder: Path) -> bytes:
    """Of the set that was prepared last."""
    sets = (folder / "cache" / "tokenized").glob("*/ids")
    return max(sets, key=lambda path: path.stat().st_mtime_ns).read_bytes()


# Results --------------------------------------------------------------------------------------------------------------


def _result(ground: Ground, change: str) -> Verdict:
    whole, other, folder = _run(ground), _other_run(ground), ground.empty("silent_changes")
    run = folder / "run"
    shutil.copytree(whole / "run", run)
    if change == "another draft's acceptance by context":
        shutil.copy(other / "by_context.json", run)
        words = ("--compare", str(run), "--out", str(folder / "out"))
        ended = ground.launchers.run("launchers/report.py", *words)
        table = folder / "out" / "acceptance-by-context.md"
        return judge(ended, lambda: "shown as this run's" if table.exists() else None)
    if change == "a changed number":
        record = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
        record["acceptance_length"] = 9.87
        (run / "evaluation.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
    else:
        shutil.copy(other / "evaluation.json", run)
    (run / "export" / "README.md").unlink()
    shutil.rmtree(run / "report")
    speed = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["speed"]["speculative"]
    ended = ground.launchers.run("launchers/report.py", str(run))

    def shown() -> str | None:
        summary = (run / "report" / "summary.md").read_text(encoding="utf-8")
        return "shown as this run's" if "9.87" in summary or f"{speed:.1f} tokens/s" in summary else None

    return judge(ended, shown)


# Metrics and weights --------------------------------------------------------------------------------------------------


def _metrics(ground: Ground, fault: str) -> Verdict:
    """What the fault took is gone; every other record must be there, and a word about it."""
    whole, folder = _run(ground), ground.empty("silent_changes")
    recipe, path = _half(ground, folder), folder / "run" / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    broken = {
        "a broken line": [lines[0][:-9], *lines[1:]],
        "a duplicate": [lines[0], lines[0], *lines[1:]],
        "renumbered": [json.dumps(json.loads(lines[0]) | {"step": 7}), *lines[1:]],
        "a missing line": lines[1:],
    }[fault]
    path.write_text("".join(f"{line}\n" for line in broken), encoding="utf-8")
    ended = ground.train(recipe, "--resume", "auto")
    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if ended.well else []

    def difference() -> str | None:
        right = [json.loads(line) for line in lines]
        names = [(record["kind"], record["step"]) for record in kept]
        wanted = [(record["kind"], record["step"]) for record in right[fault != "a duplicate" :]]
        if missing := [name for name in wanted if name not in names]:
            return f"{len(missing)} records that were whole are gone"
        if not warned(ended):
            return "not a word about the fault"
        path.write_text((whole / "run" / "metrics.jsonl").read_text(encoding="utf-8"), encoding="utf-8")
        return run_difference(folder / "run", whole / "run")

    return judge(ended, difference, good="continued")


def _not_finite(ground: Ground, use: str) -> Verdict:
    from safetensors.numpy import load_file, save_file

    whole, folder = _run(ground), ground.empty("silent_changes")
    shutil.copytree(whole / "run" / "export", folder / "export")
    tensors = load_file(folder / "export" / "model.safetensors")
    tensors["midlayer.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"] * float("nan")
    save_file(tensors, folder / "export" / "model.safetensors")
    recipe = whole / "recipe.yaml"
    if use == "evaluate.py":
        words = ("--recipe", str(recipe), "--draft", str(folder / "export"))
        return judge(ground.launchers.run("launchers/evaluate.py", *words), lambda: "a draft of NaN is judged")
    words = [f"model.draft.init_from={folder / 'export'}", "training.max_steps=2", f"output.dir={folder / 'run'}"]
    return judge(ground.train(recipe, *words), lambda: "a draft of NaN is exported")


def _quarters(ground: Ground) -> Verdict:
    """The target's logits are nearly all alike, and so are the entropies that make the quarters."""
    from safetensors.numpy import load_file, save_file

    def flatten(folder: Path) -> None:
        shutil.copytree(ground.target(), folder, dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * 1e-3
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    flat, folder = ground.once(ground.targets / "flat", flatten), ground.empty("silent_changes")
    model = {"target": str(flat)}
    evaluation = {"conversations": 3, "draft_tokens": 2, "new_tokens": 16}
    recipe = ground.recipe(folder, rows=24, model=model, evaluation=evaluation)
    require(ground.train(recipe, "evaluation.conversations=0"))
    words = ("--recipe", str(recipe), "--out", str(folder / "diagnosis.json"))
    ended = ground.launchers.run("launchers/diagnose.py", *words)
    ended = ended._replace(codes=tuple(0 if code == 1 else code for code in ended.codes))  # 1: a fault is named

    def difference() -> str | None:
        evidence = json.loads((folder / "diagnosis.json").read_text(encoding="utf-8"))["evidence"]
        counts = {name: sum(share["places"] for share in evidence[name]) for name in ("by_token", "by_entropy")}
        return None if len({*counts.values()}) == 1 else f"places by group: {counts}"

    return judge(ended, difference)
