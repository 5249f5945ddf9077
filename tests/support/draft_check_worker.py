"""Checks the drafts in several folders by SGLang's own class. One process checks all, because SGLang's import takes
long. Started by a test."""

import json
import sys
from pathlib import Path

from eagle3.errors import UserError
from eagle3.targets.sglang.draft_check import check_draft, start_runtime


def main(folders: list[Path]) -> None:
    start_runtime(folders[0])
    verdicts = {}
    for folder in folders:
        try:
            verdicts[folder.name] = [0, check_draft(folder)]
        except UserError as mistake:
            verdicts[folder.name] = [2, str(mistake)]
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
