"""Sum up a run of run.py: python benchmarks/real_model/tables.py OUT

Writes OUT/results.json, without paths, OUT/tables.md and two charts, and prints the tables.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from prompts import KINDS
from run import CURVE, TEMPERATURES

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from reporting import headline, origin, table  # noqa: E402

WIDE = 7.0  # inches of a chart


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def collect(out: Path) -> dict[str, Any]:
    """All that the run's files say, without its paths."""
    runs = {folder.name: folder for folder in sorted((out / "runs").iterdir())}
    answers = {name: read(out / "answers" / f"{name}.jsonl.record" / "summary.json") for name in TEMPERATURES}
    return origin() | {
        "stages": {path.stem: read(path) for path in sorted((out / "stages").glob("*.json"), key=_written)},
        "answers": {name: {key: each[key] for key in ("rows", "tokens", "seconds")} for name, each in answers.items()},
        "drafts": {name: _draft(folder) for name, folder in runs.items()},
        "diagnoses": {path.stem: _diagnosis(read(path)) for path in sorted((out / "diagnoses").glob("*.json"))},
    }


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _draft(folder: Path) -> dict[str, Any]:
    measured = lines(folder / "metrics.jsonl")
    steps = [each for each in measured if each["kind"] == "train"]
    held_out = [each for each in measured if each["kind"] == "held_out"]
    found: dict[str, Any] = {
        "steps": len(steps),
        "supervised": sum(each["supervised"] for each in steps),
        "peak_gib": max((each["memory_gib"] for each in steps), default=None),
        "started": {key: (read(folder / "run.json") or {}).get(key) for key in ("data", "memory", "draft")},
        "held_out": [{key: each[key] for key in ("step", "loss", "acceptance_length")} for each in held_out],
        "by_context": _by_context(read(folder / "by_context.json")),
        "batches": read(folder / "batches.json"),
    }
    for name in ("evaluation", "sampled", "served"):
        judged = read(folder / f"{name}.json")
        found[name] = judged and {
            **{key: judged[key] for key in ("acceptance_length", "conversations", "identical", "speed", "engine")},
            "sets": [{key: value for key, value in each.items() if key != "of_each"} for each in judged["sets"]],
        }
    return found


def _by_context(judged: dict[str, Any] | None) -> list[dict[str, Any]] | None:
    if judged is None:
        return None
    promised = {
        cell["context"]: cell["length"] / cell["break_even"]
        for pay_off in judged["pay_off"]
        if pay_off["source"].startswith("measured")
        for cell in pay_off["cells"]
        if cell["drafts"] == judged["draft_tokens"]
    }
    rates = {each["context"]: each["fixed"] / each["plain"] for each in judged["best"]}
    keys = ("context", "conversations", "verifications", "acceptance_length", "interval", "position_acceptance")
    return [
        {key: each[key] for key in keys}
        | {"promised": promised.get(each["context"]), "measured": rates.get(each["context"])}
        for each in judged["contexts"]
    ]


def _diagnosis(found: dict[str, Any]) -> dict[str, Any]:
    faults = [{key: fault[key] for key in ("name", "accepted")} for fault in found["faults"]]
    return {"accepted": found["accepted_drafts"], "faults": faults, "notes": found["notes"]}


def tables(document: dict[str, Any]) -> str:
    drafts = document["drafts"]
    parts = [_stages(document), _plan(document), _curve(drafts), _by_kind(drafts), _contexts(drafts)]
    parts += [_batches(drafts["full"]["batches"]), _diagnoses(document["diagnoses"])]
    return "\n\n".join([f"{headline(document)}.", *filter(None, parts)]) + "\n"


def _stages(document: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{stage['seconds'] / 60:.1f}",
            f"{sum(each['processor_seconds'] for each in stage['commands']) / 60:.1f}",
            f"{max((each['peak_bytes'] for each in stage['commands']), default=0) / 1e9:.1f} GB",
        ]
        for name, stage in document["stages"].items()
    ]
    return table("Stages.", ["stage", "minutes", "processor minutes", "peak memory"], rows)


def _plan(document: dict[str, Any]) -> str:
    stages, drafts = document["stages"], document["drafts"]
    token, full = stages["plan"]["plan"]["hidden_states_per_token"], drafts["full"]["started"]
    stored = [full["data"]["train"], full["data"]["held_out"]]
    if "foreign" in drafts:
        stored.append(drafts["foreign"]["started"]["data"]["train"])
    planned = sum(
        token["supervised"] * each["supervised"] + token["prompt"] * (each["tokens"] - each["supervised"])
        for each in stored
    )
    memory = full["memory"]["before_gib"] + full["memory"]["estimate_gib"]
    rows = [
        ["hidden states on disk", f"{planned / 1e9:.3f} GB", f"{stages['capture']['bytes'] / 1e9:.3f} GB"],
        ["training, memory at its peak", f"{memory:.1f} GiB", f"{drafts['full']['peak_gib']:.1f} GiB"],
    ]
    return table("What the planner said, and what was taken.", ["", "planned", "taken"], rows)


def _curve(drafts: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{drafts[name]['supervised']:,}",
            f"{drafts[name]['steps']:,}",
            f"{drafts[name]['held_out'][-1]['acceptance_length']:.2f}",
            _length(drafts[name]["evaluation"]),
        ]
        for name in drafts
    ]
    head = ["draft", "answer tokens, epochs included", "steps", "held out, greedy", "judged, greedy"]
    return table("Drafts.", head, rows)


def _length(judged: dict[str, Any] | None) -> str:
    return f"{judged['acceptance_length']:.2f}" if judged else "-"


def _by_kind(drafts: dict[str, Any]) -> str:
    columns = {
        f"{name}{label}": {each["name"]: each for each in judged["sets"]}
        for name, draft in drafts.items()
        for key, label in (("evaluation", ""), ("sampled", ", T = 1"), ("served", ", SGLang"))
        if (judged := draft[key]) and judged["sets"]
    }
    every = {kind for sets in columns.values() for kind in sets}
    kinds = [kind for kind in KINDS if kind in every]
    rows = [[kind, *(_cell(sets.get(kind)) for sets in columns.values())] for kind in kinds]
    return table("Acceptance length by kind of text.", ["kind", *columns], rows)


def _cell(judged: dict[str, Any] | None) -> str:
    if judged is None:
        return "-"
    low_high = " to ".join(f"{end:.2f}" for end in judged["interval"] or ())
    return f"{judged['acceptance_length']:.2f} ({low_high})" if low_high else f"{judged['acceptance_length']:.2f}"


def _contexts(drafts: dict[str, Any]) -> str:
    judged = {name: draft["by_context"] for name, draft in drafts.items() if draft["by_context"]}
    rows = [
        [
            f"{each['context']:,}",
            name,
            each["conversations"],
            _cell(each),
            *("-" if each[key] is None else f"{each[key]:.2f}" for key in ("promised", "measured")),
        ]
        for name, contexts in judged.items()
        for each in contexts
    ]
    head = ["context", "draft", "conversations", "acceptance length", "speed-up promised", "measured"]
    return table("By context.", head, rows)


def _batches(measured: list[dict[str, Any]] | None) -> str:
    def rate(draft: str, at_a_time: int) -> float:
        passes = [each for each in measured if (each["draft"], each["at_a_time"]) == (draft, at_a_time)]
        return sum(each["tokens"] for each in passes) / sum(each["seconds"] for each in passes)

    rows = []
    for at_a_time in sorted({each["at_a_time"] for each in measured or ()}):
        drafted, plain = rate("with", at_a_time), rate("without", at_a_time)
        rows.append([at_a_time, f"{drafted:.1f}", f"{plain:.1f}", f"{drafted / plain:.2f}"])
    head = ["requests at a time", "tokens/s with the draft", "without", "speed-up"]
    return table("SGLang, greedy.", head, rows) if rows else ""


def _diagnoses(found: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{each['accepted']:.2f}",
            "; ".join(f"{fault['name']} ({fault['accepted']:.2f})" for fault in each["faults"]),
        ]
        for name, each in found.items()
    ]
    head = ["draft", "accepted drafts", "what diagnose.py names (accepted drafts without it)"]
    return table("Diagnosis.", head, rows) if rows else ""


def charts(drafts: dict[str, Any]) -> dict[str, bytes]:
    from eagle3.reporting.plot import BLUE, ORANGE, Plot, Series, context_axis, count_axis, image, number_axis

    curve = sorted((drafts[name]["supervised"], name) for name in CURVE if name in drafts)
    tokens = np.array([count for count, _ in curve], dtype=float)
    lengths = np.array([drafts[name]["held_out"][-1]["acceptance_length"] for _, name in curve])
    plots = {
        "learning-curve": Plot(
            *("learning-curve", "Acceptance and training tokens", "Held out, greedy, from hidden states."),
            ", ".join(f"{length:.2f} after {int(count):,}" for count, length in zip(tokens, lengths, strict=True)),
            count_axis("answer tokens seen"),
            number_axis("acceptance length"),
            [Series("full attention", tokens, lengths, BLUE, dotted=True)],
        )
    }
    shown = [(name, drafts[name]["by_context"]) for name in ("full", "window-512") if drafts[name]["by_context"]]
    if shown:
        series = [
            Series(
                name,
                np.array([float(each["context"]) for each in contexts]),
                np.array([each["acceptance_length"] for each in contexts]),
                colour,
                dotted=True,
            )
            for (name, contexts), colour in zip(shown, (BLUE, ORANGE), strict=False)
        ]
        plots["acceptance-by-context"] = Plot(
            *("acceptance-by-context", "Acceptance by context", "Judged greedily with 4 draft tokens."),
            "; ".join(f"{each.label}: {', '.join(f'{length:.2f}' for length in each.y)}" for each in series),
            context_axis("context, tokens", series[0].x),
            number_axis("acceptance length"),
            series,
        )
    return {name: image(plot, "png", WIDE) for name, plot in plots.items()}


def main() -> None:
    out = Path(sys.argv[1])
    document = collect(out)
    (out / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = tables(document)
    (out / "tables.md").write_text(text, encoding="utf-8")
    print(text)
    if importlib.util.find_spec("matplotlib") is None:
        print("no charts, because matplotlib is not installed")
        return
    for name, chart in charts(document["drafts"]).items():
        (out / f"{name}.png").write_bytes(chart)


if __name__ == "__main__":
    main()
