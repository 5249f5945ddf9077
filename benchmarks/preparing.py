"""Memory and time of preparing data, by the number of rows: whether memory grows with it.

    python benchmarks/preparing.py --rows 10000 100000

Each number of rows is prepared by a process of its own, from a file of generated answers (about 300 words each), with
a byte tokenizer that is made here. Prints peak memory of the process without its workers, and seconds.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests")]
WORDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--of-file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of_file:
        print(json.dumps(measured(options.of_file, options.workers)))
        return
    print(f"{date.today()}, {options.workers} process(es) tokenise")
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            data = write_rows(Path(folder) / "rows.jsonl", rows)
            command = [sys.executable, __file__, "--of-file", str(data), "--workers", str(options.workers)]
            run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(run.stdout.splitlines()[-1])
        print(
            f"{rows:>9,} rows, {found['tokens']:>13,} tokens: {found['peak'] / 2**20:6.0f} MiB, "
            f"{found['seconds']:6.0f} s"
        )


def write_rows(path: Path, rows: int) -> Path:
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randint(2, 9))) for _ in range(2000)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            answer = " ".join(generator.choices(words, k=WORDS))
            messages = [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def measured(data: Path, workers: int) -> dict[str, float]:
    from prepare_cases import OPTIONS, byte_tokenizer, prepare

    begun = time.perf_counter()
    rules = OPTIONS | {"max_length": 8192, "workers": workers, "report": lambda line: None}
    prepared = prepare([str(data)], byte_tokenizer(), cache_dir=data.parent / "cache", **rules)
    prepared.samples.split_held_out(0.02, seed=0)
    return {
        "tokens": prepared.summary.tokens,
        "seconds": time.perf_counter() - begun,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
