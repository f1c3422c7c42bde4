"""What torchrun runs, once a rank: its flags, and how its failure becomes the whole group's; `loop` has the rest."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from workers.errors import ModelLoadError
from workers.lifeline import Lifeline, die_with_parent
from workers.memory import keep_freed_blocks

log = logging.getLogger("workers")


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="workers.rank", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-name", default="", help="what clients call it by; empty = its class's name")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--group", default="0")
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--max-batch-size", type=int, default=0, help="items; 0 = the model's own")
    parser.add_argument("--step-timeout", type=float, default=30.0, help="seconds")
    parser.add_argument("--process-group-timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds")
    parser.add_argument("--local-address", help="of this host, where the group has several")
    parser.add_argument("--interface", help="of gloo and NCCL, likewise")
    parser.add_argument("--cluster-key-file", type=Path, help="likewise")
    parser.add_argument(
        "--queue", help="of a front end on another host, which has the key too; else the run directory's"
    )
    parser.add_argument("--launcher", default="", help="its name there")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--check", action="store_true", help="run the example once, say what came out, and end")
    parser.add_argument("--probe", action="store_true", help="load no model: gather, note what was found, and end")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    die_with_parent()
    keep_freed_blocks()
    flags = _flags(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        stream=sys.stdout,
        level=flags.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {flags.group}/{flags.epoch} rank {os.environ['RANK']}: %(message)s",
    )
    lifeline = Lifeline(int(os.environ["RANK"]), flags.run_dir / "epochs" / f"{flags.group}-{flags.epoch}")
    try:
        # torch takes seconds to import: only now that the rank dies with its parent
        if flags.probe:
            from workers.probe import Probe

            Probe(flags, lifeline).run()
        else:
            from workers.loop import Rank

            Rank(flags, lifeline).run()
    except ModelLoadError as error:
        log.error("%s", error, exc_info=error.__cause__)  # where in the user's code
        lifeline.fell("model", str(error))
    except Exception as error:
        log.exception("the rank fells its group")
        lifeline.fell("exception", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
