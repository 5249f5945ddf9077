"""Write a run's report again: report.html with its charts, and the model card beside the exported draft.

Every training run writes them at its end. With --compare: several runs on one page, with tables and with charts of
loss, held-out acceptance and acceptance by context.
"""

import argparse
from pathlib import Path

from eagle3.command_line import Parser, slow_imports
from eagle3.console import Console, waiting
from eagle3.errors import UserError, run_command


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="folder of a run (its output.dir)")
    parser.add_argument("--compare", action="store_true", help="compare several runs instead")
    parser.add_argument("--out", type=Path, help="with --compare: folder for page, charts and tables")
    parser.add_argument("--names", help="with --compare: one name per run, such as short,long (default: the folders')")
    parser.add_argument("--quiet", action="store_true", help="print only what was written, and warnings")
    options = parser.parse_args()
    check(options)
    write(options, Console(True, options.quiet))


def write(options: argparse.Namespace, console: Console) -> None:
    with slow_imports(options.quiet):
        from eagle3.reporting.record import read_run
        from eagle3.reporting.report import require_matplotlib, write_report

    require_matplotlib()
    if options.compare:
        with waiting(console, "drawing the comparison"):
            from eagle3.reporting.compare import PAGE, read_compared, write_comparison

            compared = read_compared(options.runs, options.names.split(",") if options.names else None)
            tables = write_comparison(compared, options.out)
        print(tables)  # without wrapping, so that they can be copied
        console.result(f"comparison: {options.out / PAGE}")
        return
    folder = options.runs[0]
    with waiting(console, "drawing the report"):
        report = write_report(folder)
        for line in read_run(folder).foreign:
            console.warn(f"{folder}: {line}")
    console.result(f"report: {report}")
    with waiting(console, "writing the model card"):
        written = write_model_card(folder)
    console.result(written)


def write_model_card(folder: Path) -> str:
    """Writes the card. Returns a line that says what happened."""
    from eagle3.reporting.report import NotWritten, write_card

    try:
        card = write_card(folder)
    except NotWritten as kept:
        return str(kept)
    return f"model card: {card}" if card else "model card: not written, since no draft has been exported yet"


def check(options: argparse.Namespace) -> None:
    """Raises UserError for options that contradict each other."""
    if options.compare and options.out is None:
        raise UserError("--compare: needs a folder to write to; add --out FOLDER")
    if not options.compare and (options.out or options.names):
        raise UserError("--out, --names: belong to --compare; the report of one run is written into its folder")
    if not options.compare and len(options.runs) > 1:
        raise UserError(f"{options.runs[1]}: a report covers one run; name one, or add --compare")


if __name__ == "__main__":
    run_command(main)
