"""Measure a training step on one process: against a plain dense implementation, and as documents grow longer.

    python benchmarks/step_time.py          tables in Markdown
    python benchmarks/step_time.py --json   one JSON document

Part `marks` times this project's step and the dense step of tests/support/definition.py in turn, at one length, with
each number of threads. Part `lengths` follows both as the document grows, until the dense step no longer fits. Peak
memory is that of tensors alive at once, in a separate step that is not timed. Ends with an assertion error if a loss or
a gradient differs from the dense step's. Progress and logs go to stderr. Takes some minutes; times need an otherwise
idle machine.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from reporting import headline, positive, report_parts, table

from eagle3.errors import run_command

PARTS = ("marks", "lengths")
# The hidden size is heads x head_dim, and the MLP twice that; the target has the draft's vocabulary. Long documents get
# a smaller draft.
DRAFTS = {
    "marks": {"heads": 4, "kv_heads": 2, "head_dim": 64, "vocabulary": 32000},
    "lengths": {"heads": 2, "kv_heads": 1, "head_dim": 32, "vocabulary": 4000},
}


def main() -> int:
    options = _options()
    stdout = os.dup(1)  # kept for the result: DeepSpeed logs to the stdout that it finds when imported
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))  # the definition is there
    import step_time_measures as measures  # only now, because DeepSpeed logs

    parts = {part: partial(getattr(measures, f"measure_{part}"), DRAFTS[part], options) for part in options.only}
    report_parts(parts, options, DRAFTS, _markdown, stdout)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--steps", type=positive, default=7, help="K, the training-time-test steps")
    parser.add_argument("--threads", nargs="+", type=positive, default=[1, 2], help="lengths take the most of them")
    parser.add_argument("--block-mib", type=positive, default=64, help="of the loss's blocks and the chunks of tokens")
    parser.add_argument("--marks-tokens", type=positive, default=2048, help="of the document beside the dense step")
    parser.add_argument("--lengths", nargs="+", type=positive, default=[2**n for n in range(10, 16)], help="in tokens")
    parser.add_argument("--dense-gib", type=positive, default=8, help="that the dense step may take, by estimate")
    parser.add_argument(
        "--repeats", type=positive, default=3, help="timed steps after one to warm up; the median counts"
    )
    parser.add_argument("--repeat-up-to", type=positive, default=4096, help="tokens; longer documents are timed once")
    return parser.parse_args()


def _markdown(document: dict[str, Any]) -> str:
    settings = document["settings"]
    about = f"{headline(document)}; K = {settings['steps']}, fp32, blocks of {settings['block_mib']} MiB."
    titles = {
        "marks": "Beside the dense step; losses agree to 1e-5, gradients to 1e-4",
        "lengths": f"Growth with length; the dense step up to {settings['dense_gib']} GiB by estimate",
    }
    return "\n\n".join(
        [about, *(_steps_table(titles[part], part, rows, document) for part, rows in document["results"].items())]
    )


def _steps_table(title: str, part: str, rows: list[dict[str, Any]], document: dict[str, Any]) -> str:
    def to_dense(row: dict[str, Any], what: str) -> str:
        return f"{row[f'{what}_to_dense']:.3f}" if f"{what}_to_dense" in row else ""

    shape = ", ".join(f"{name} {size}" for name, size in DRAFTS[part].items())
    return table(
        f"{title} (draft with {shape}). Peak: megabytes of tensors alive at once, of which weights and inputs are "
        f"`held`. "
        f"Load average before: {document['machine']['load_before'][part]:.1f}.",
        ["supervised", "tokens", "threads", "step", "seconds", "processor", "of dense", "peak", "held", "of dense"]
        + ["seconds of its parts"],
        [
            [row["mask"], row["tokens"], row["threads"], row["contender"], f"{row['seconds']:.2f}"]
            + [f"{row['cpu_seconds']:.2f}", to_dense(row, "seconds"), f"{row['peak'] / 1e6:.0f}"]
            + [f"{row['held'] / 1e6:.0f}", to_dense(row, "peak")]
            + [", ".join(f"{name} {seconds:.2f}" for name, seconds in row["split"].items())]
            for row in rows
        ],
    )


if __name__ == "__main__":
    run_command(main)
