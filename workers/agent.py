"""torchrun, imported ahead of time: waits for its command line, a line of JSON, then is torchrun; knows no group."""

from __future__ import annotations

import json
import os
import sys

from torch.distributed.run import main as torchrun


def main() -> None:
    line = sys.stdin.readline()
    if line:  # else the launcher needs it no more
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, sys.stdin.fileno())  # the ranks inherit it
        torchrun(json.loads(line))


if __name__ == "__main__":
    main()
