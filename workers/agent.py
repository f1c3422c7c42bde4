"""torchrun, which may be imported ahead of time: its command line comes in argv, or as a line of JSON on stdin.

It says nothing of its own about ranks that end: which was the first, how and why the launcher knows better.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(words: Sequence[str]) -> int:
    if not words:
        line = sys.stdin.readline()
        if not line:  # the launcher needs it no more
            return 0
        words = json.loads(line)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, sys.stdin.fileno())  # the ranks inherit it
    logging.disable(logging.ERROR)
    try:
        torchrun(list(words))
    except ChildFailedError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
