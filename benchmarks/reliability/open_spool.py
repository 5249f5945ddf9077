"""Open the spool of a job and leave it again, as train.py does beside servers (which takes SGLang): open_spool.py
FOLDER."""

import sys

from eagle3.errors import run_command
from eagle3.states.spool import Spool


def main() -> None:
    with Spool(sys.argv[1]):
        pass


if __name__ == "__main__":
    run_command(main)
