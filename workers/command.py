"""The group to launch, and torchrun's command line and environment for one epoch of it; it starts no process."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workers.hosts import FrontEnd, Hosts, Meeting

TORCHRUN = "workers.agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What the launcher keeps alive. Times are in seconds."""

    model: str
    run_dir: Path
    ranks: int
    group: str = "0"
    model_name: str = ""  # what clients call the model by; "": its class's name
    device: str = "auto"
    max_batch_size: int = 0  # 0: the model's own
    step_timeout: float = 60.0
    process_group_timeout: float = 300.0
    start_timeout: float = 900.0
    max_restarts: int = 3
    drain_timeout: float = 30.0
    log_level: str = "info"
    hosts: Hosts | None = None  # where it has more than this one
    front_end: FrontEnd | None = None  # where that is on another host

    def epoch_dir(self, epoch: int) -> Path:
        return self.run_dir / "epochs" / f"{self.group}-{epoch}"


def torchrun_command(group: Group, epoch: int, meeting: Meeting | None = None) -> list[str]:
    """The command line of one epoch: torchrun, then the module that every rank runs, then that module's flags.

    `meeting` is where the hosts meet, for a group of several.
    """
    hosts = group.hosts
    torchrun: dict[str, object] = {
        "--nproc-per-node": group.ranks,
        "--max-restarts": 0,  # broken in place, see README; the launcher restarts the whole tree
        "--local-addr": meeting.local_address if meeting else "127.0.0.1",  # without a network --standalone alone hangs
        "--log-dir": group.epoch_dir(epoch) / "torchrun",  # else a directory is left in /tmp for every kill
    }
    rank: dict[str, object] = {
        "--model": group.model,
        "--model-name": group.model_name,
        "--run-dir": group.run_dir,
        "--group": group.group,
        "--epoch": epoch,
        "--device": group.device,
        "--max-batch-size": group.max_batch_size,
        "--step-timeout": f"{group.step_timeout:g}",
        "--process-group-timeout": f"{group.process_group_timeout:g}",
        "--start-timeout": f"{group.start_timeout:g}",
        "--log-level": group.log_level,
    }
    if (front_end := group.front_end) is not None:
        rank |= {"--queue": front_end.address, "--launcher": front_end.token}
        rank |= {"--cluster-key-file": front_end.key_file}
    if hosts is None or meeting is None:
        rendezvous = ["--standalone"]
    else:
        # static: the node rank is then what was given, and nobody can come to a rendezvous that is over
        rendezvous = ["--rdzv-backend", "static", "--rdzv-endpoint", f"{meeting.address}:{meeting.port}"]
        rendezvous += ["--rdzv-conf", f"timeout={group.start_timeout:.0f}", "--rdzv-id", f"{group.group}-{epoch}"]
        torchrun |= {"--nnodes": hosts.nodes, "--node-rank": hosts.node}
        rank |= {"--local-address": meeting.local_address, "--interface": meeting.interface}
        rank |= {"--cluster-key-file": hosts.key_file}
    return [
        *(sys.executable, "-m", TORCHRUN, *rendezvous, *_flags(torchrun)),
        *("-m", "workers.rank", *_flags(rank)),
    ]


def torchrun_environment(ranks: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited` with what torchrun and the ranks need."""
    return {
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),  # torchrun would say 1; the user's own goes before both
        **inherited,
        "PYTHONSAFEPATH": "1",  # else `workers` in the user's current directory would be run
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # torchrun says 1, which waits for the process group's timeout
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",  # 15 s by default, four times, before NCCL's watchdog dies
    }


def visible_gpus() -> int:
    """How many GPUs a rank could take, as CUDA counts them, found without torch."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in Path("/dev").iterdir())
    count = 0
    for entry in listed.split(","):
        if not entry.strip() or entry.strip().startswith("-"):  # CUDA stops at the first that is none
            break
        count += 1
    return count


def cores() -> int:
    """How many cores this process may use: its affinity, and its container's quota."""
    count = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no cgroup v2, or no quota ("max")
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        count = min(count, math.ceil(quota / period))
    return count


def _flags(values: Mapping[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (name, str(value))]
