"""A rank that is nothing but its lifeline, led by commands on stdin: `member.py RANK WORLD EPOCH_DIR`."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from workers.lifeline import Lifeline, Member

libc = ctypes.PyDLL(None)  # keeps the GIL over its calls


def hold_the_gil() -> None:
    print("holding", flush=True)
    libc.sleep(600)


def main() -> None:
    rank, world, epoch_dir = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    line = Lifeline(rank, epoch_dir)
    draft = epoch_dir / f"draft-{rank}"
    draft.write_text(Member.here(rank).to_json())
    draft.rename(epoch_dir / f"member-{rank}.json")
    files = [epoch_dir / f"member-{peer}.json" for peer in range(world)]
    while not all(file.exists() for file in files):
        time.sleep(0.005)
    line.watch([Member.from_json(file.read_text()) for file in files])
    print("watching", flush=True)
    for words in map(str.split, sys.stdin):
        match words:
            case ["begin", seconds, what]:
                line.begin(float(seconds), what)
            case ["end"]:
                line.end()
            case ["release"]:
                line.release()
            case ["hold"]:
                hold_the_gil()
            case ["exit", code]:
                os._exit(int(code))
            case ["break", peer, text]:  # the connection, by the peer's death, before the watching thread comes to run
                sys.setswitchinterval(60)
                libc.kill(int(peer), signal.SIGKILL)
                line.fell("collective", text)
            case ["fell", kind, text]:
                line.fell(kind, text)
        print("done", flush=True)


if __name__ == "__main__":
    main()
