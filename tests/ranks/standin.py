"""A rank without torch and queue, in the place of `workers.rank`: takes its flags, and behaves as `--model` says."""

import argparse
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from workers.lifeline import Lifeline, Member, die_with_parent


def wait_for(*files: Path) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--run-dir", "--group", "--epoch"):
        parser.add_argument(name, required=True)
    flags, _ = parser.parse_known_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    epoch_dir = Path(flags.run_dir) / "epochs" / f"{flags.group}-{flags.epoch}"
    (epoch_dir / f"pid-{rank}").write_text(str(os.getpid()))
    if flags.model == "deaf":  # a rank that its parent's death finds before its first line
        wait_for(epoch_dir / "never")
    die_with_parent()
    line = Lifeline(rank, epoch_dir)
    match flags.model, flags.epoch, rank:
        case "broken", _, 1:
            line.fell("model", "no module named 'broken'")
        case "homeless", _, 1:
            line.fell("start", "no device is left")
        case "dies-silently", _, 1:
            os._exit(3)
        case "fails-first", "1", 1:
            line.fell("start", "no device is left")
        case "stopped-beside-a-failure", "1", 0:
            wait_for(epoch_dir / "pid-1")
            line.fell("start", "no device is left")
        case "stopped-beside-a-failure", "1", 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stuck-at-start", _, _:
            wait_for(epoch_dir / "never")
    draft = epoch_dir / f"draft-{rank}"
    draft.write_text(Member.here(rank).to_json())
    draft.rename(epoch_dir / f"member-{rank}.json")
    members = [epoch_dir / f"member-{peer}.json" for peer in range(world)]
    wait_for(*members)
    line.watch([Member.from_json(file.read_text()) for file in members])
    (epoch_dir / f"watching-{rank}").touch()
    wait_for(*(epoch_dir / f"watching-{peer}" for peer in range(world)))
    if rank == 0:
        socket.socket(socket.AF_UNIX).bind(str(epoch_dir / "rank-0.sock"))
    if flags.model == "litters":
        subprocess.run(["sh", "-c", f"sleep 0.1 & echo $! > {epoch_dir}/orphan-{rank}"], check=True)
    (epoch_dir / f"ready-{rank}").touch()
    if flags.model == "deaf-to-leave":
        wait_for(epoch_dir / "never")
    while not (epoch_dir / "leave").exists() and not (epoch_dir / "walk-out").exists():
        time.sleep(0.005)
    line.release()


if __name__ == "__main__":
    main()
