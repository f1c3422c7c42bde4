"""What `phalanx doctor` asks of the ranks: whether torch sees their devices, and all_gathers; it runs no model.

The ranks meet and make their group by the service's own code. Rank 0 leaves what was found in the epoch's directory:
`torch.json` as soon as it is known, `gathers.json` at the end. What goes wrong fells the group.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from workers import model
from workers.errors import GroupError
from workers.loop import WARMUP_FACTOR, Rank
from workers.rounds import all_gather

SMALL, LARGE = 1 << 10, 16 << 20  # bytes of each rank: what a collective costs at least; what the ranks can move
WARM_UP, ROUNDS = 2, 8
PERIOD = 251  # of the content, in bytes: as a prime it shows parts that are shifted or swapped


class Probe(Rank):
    """One rank of a group that only gathers."""

    def run(self) -> None:
        self._meet()
        if self.rank == 0:
            self._note("torch", self._of_torch())
        self.device = model.device(self.flags.device, self.local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
        self._set_device()
        self.store.set(f"device/{self.rank}", json.dumps(self._of_device()))
        # as long as the service's own first step may take
        self.lifeline.begin(self.flags.step_timeout * WARMUP_FACTOR, "the first all_gathers")
        self._join()
        gathers = []
        for backend, device, size in self._plan():
            seconds = timed_gather(all_gather, device, self.rank, self.world, size)
            gathers.append({"backend": backend, "bytes": size, "seconds": seconds})
        self._wait_for_all("gathered")
        self.lifeline.end()
        if self.rank == 0:
            devices = [json.loads(device) for device in self._everyone("device")]
            self._note("gathers", {"devices": devices, "gathers": gathers})
        self.lifeline.release()
        self._leave()

    def _plan(self) -> list[tuple[str, torch.device, int]]:
        """Both sizes where the results are gathered; with GPUs also gloo, which has the small ones."""
        if self.device.type == "cpu":
            return [("gloo", self.device, size) for size in (SMALL, LARGE)]
        return [("gloo", torch.device("cpu"), SMALL), *(("nccl", self.device, size) for size in (SMALL, LARGE))]

    def _of_torch(self) -> dict[str, object]:
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        why = ""
        if seen == 0 and self.flags.device != "cpu":
            try:
                torch.cuda.init()  # type: ignore[no-untyped-call]
            except Exception as error:  # RuntimeError of the driver, AssertionError of a CPU build
                why = model.said(error, kind=False)
        built = torch.version.cuda
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if built else None  # type: ignore[no-untyped-call]
        return {"cuda": built, "nccl": nccl, "seen": seen, "why": why}

    def _of_device(self) -> dict[str, object]:
        if self.device.type == "cpu":
            return {"name": "cpu", "free": 0, "total": 0}
        free, total = torch.cuda.mem_get_info(self.device)
        return {"name": torch.cuda.get_device_name(self.device), "free": free, "total": total}

    def _note(self, name: str, fields: dict[str, object]) -> None:
        (self.epoch_dir / f"{name}.json").write_text(json.dumps(fields))


def timed_gather(
    gather: Callable[..., Any], device: torch.device, rank: int, world: int, size: int, rounds: int = ROUNDS
) -> float:
    """Median seconds of an all_gather of `size` bytes a rank, seen from this one; GroupError for a wrong byte.

    Each round has another content, so that what the last one left behind is no right answer.
    """
    base = (torch.arange(size, device=device) % PERIOD).to(torch.uint8)
    everyone = torch.empty(size * world, dtype=torch.uint8, device=device)
    seconds = []
    for n in range(WARM_UP + rounds):
        mine = base + (rank + 7 * n) % 256
        _synchronize(device)
        started = time.perf_counter()
        gather(everyone, mine)
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
        for r in range(world):
            if not torch.equal(everyone[r * size : (r + 1) * size], base + (r + 7 * n) % 256):
                raise GroupError(f"rank {rank} got wrong bytes for those of rank {r}, of {size} each")
    return statistics.median(seconds[WARM_UP:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
