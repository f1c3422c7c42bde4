"""A torchrun without torch, for speed: starts the ranks in their own sessions, ends the others when one fails."""

import os
import signal
import subprocess
import sys
import time

GRACE = 0.5  # seconds in which ranks may fell one another and say why; torchrun gives them between none and 0.1
TIMEOUT = 30  # seconds that a rank has after SIGTERM, as in torchrun


def main() -> int:
    world, command = int(sys.argv[1]), sys.argv[2:]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)}, start_new_session=True
        )
        for rank in range(world)
    ]
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.01)
    if not any(rank.poll() for rank in ranks):
        return 0
    patience = time.monotonic() + GRACE
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < patience:
        time.sleep(0.01)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    for rank in ranks:
        rank.wait(TIMEOUT)
    return 1


if __name__ == "__main__":
    sys.exit(main())
