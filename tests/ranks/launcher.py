"""A launcher whose ranks are the stand-ins: `launcher.py JSON`, the fields of Group, and:

`torchrun`: run them under the real one; `constants`: values for those of `workers.epoch`.
"""

import json
import logging
import sys
from pathlib import Path

from workers import epoch as epochs
from workers import launch
from workers.errors import RunDirectoryError

HERE = Path(__file__).parent
torchrun_command = launch.torchrun_command


def with_stand_ins(group: launch.Group, epoch: int, meeting: None) -> list[str]:
    command = torchrun_command(group, epoch, meeting)
    module = command.index("workers.rank")
    return [*command[: module - 1], str(HERE / "standin.py"), *command[module + 1 :]]


def without_torch(group: launch.Group, epoch: int, meeting: None) -> list[str]:
    command = torchrun_command(group, epoch, meeting)
    flags = command[command.index("workers.rank") + 1 :]
    return [sys.executable, str(HERE / "agent.py"), str(group.ranks), sys.executable, str(HERE / "standin.py"), *flags]


def main() -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
    fields = json.loads(sys.argv[1])
    launch.torchrun_command = with_stand_ins if fields.pop("torchrun") else without_torch
    for name, value in fields.pop("constants").items():
        setattr(epochs, name, value)
    try:
        return launch.Launcher(launch.Group(**fields | {"run_dir": Path(fields["run_dir"])})).run()
    except RunDirectoryError as error:
        logging.getLogger("workers").critical("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
