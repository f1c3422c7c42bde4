"""The collect against what torch has, and against bare bytes: `torchrun --nproc-per-node 2 tests/bench/collect.py`.

Times are medians on rank 0, the methods taking turns within one run. Absolute times wander on a shared machine:
the ratios are what counts. `x` columns say how many times as long as ours the other method takes; `!` marks one that
misses its target, which is for two ranks.
"""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from workers.collect import Collector, Part, shares

KB, MB = 1 << 10, 1 << 20
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
ITEMS = 64  # a rank's share of a step; a dict is small, so there are as many as fill the bytes
TARGETS: dict[str, dict[int, float | None]] = {  # of 2 ranks, against all_gather_object
    "dicts of floats": {KB: 2.5, 16 * KB: 2.5, 256 * KB: 2.5, 4 * MB: 2.5, 64 * MB: 2.0},
    "float32 arrays": {KB: 2.2, 16 * KB: 2.2, 256 * KB: 2.2, 4 * MB: 3.5, 64 * MB: 12.0},
    "list of tensors": {KB: 6.0, 16 * KB: 6.0, 256 * KB: 5.0, 4 * MB: 4.0, 64 * MB: 3.0},
    "rows of a batch": {KB: 10.0, 16 * KB: 10.0, MB: 50.0},
    "encoded bytes": {KB: None, 16 * KB: None, 256 * KB: None, 4 * MB: None, 64 * MB: None},
}


def dicts(n: int) -> Any:
    return [{"label": i % 10 + 0.0, "score": i / 7, "low": i / 11, "high": i / 3} for i in range(max(1, n // 46))]


def arrays(n: int) -> Any:
    return [np.full(n // ITEMS // 4, i, np.float32) for i in range(ITEMS)]


def tensors(n: int) -> Any:
    return [torch.full((n // ITEMS // 4,), i, dtype=torch.float32) for i in range(ITEMS)]


def rows(n: int) -> Any:
    return list(torch.arange(n // 4, dtype=torch.float32).view(ITEMS, -1))


def encoded(n: int) -> Any:
    """What a rank of the service gives: one frame of all results, their lengths, failures, row forms, statistics."""
    return (
        memoryview(os.urandom(n)),
        [n // ITEMS] * ITEMS,
        [(3, "invalid-item", "not a number")],
        [],
        (0, ITEMS, 0.01, 0),
    )


KINDS: dict[str, Callable[[int], Any]] = {
    "dicts of floats": dicts,
    "float32 arrays": arrays,
    "list of tensors": tensors,
    "rows of a batch": rows,
    "encoded bytes": encoded,
}


class Methods:
    """Each takes (value, start, size) on every rank and gives rank 0 the parts in order."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.collector = Collector()
        self.step = 0
        self.bare: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def ours(self, value: Any, start: int, items: int) -> Any:
        self.step += 1
        return self.collector.collect(value, step=self.step, start=start, items=items, size=items * self.world)

    def all_gather_object(self, value: Any, start: int, items: int) -> Any:
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, Part(start, items, plain(value), None))
        return sorted(parts, key=lambda part: part.start)

    def gather_object(self, value: Any, start: int, items: int) -> Any:
        parts: list[Any] | None = None if self.rank else [None] * self.world
        dist.gather_object(Part(start, items, plain(value), None), parts)
        return parts and sorted(parts, key=lambda part: part.start)

    def seed(self, value: Any, start: int, items: int) -> Any:
        """The well-known `collect_results_gpu`, its faults repaired but not its form: lengths, padding, two rounds."""
        mine = torch.frombuffer(bytearray(pickle.dumps(Part(start, items, plain(value), None), 5)), dtype=torch.uint8)
        lengths = torch.zeros(self.world, dtype=torch.int64)
        all_gather(lengths, torch.tensor([len(mine)]))
        longest = int(lengths.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        everything = torch.empty(longest * self.world, dtype=torch.uint8)
        all_gather(everything, padded)
        if self.rank:
            return None
        data = everything.numpy().data
        parts = [pickle.loads(data[r * longest : r * longest + int(n)]) for r, n in enumerate(lengths)]
        return sorted(parts, key=lambda part: part.start)

    def bare_all_gather(self, n: int) -> None:
        all_gather(*self.buffers(n))

    def bare_send(self, n: int) -> None:
        everything, mine = self.buffers(n)
        if self.rank:
            dist.send(mine, 0)
            return
        for work in [dist.irecv(everything[r * n : (r + 1) * n], r) for r in range(1, self.world)]:
            work.wait()

    def buffers(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        if n not in self.bare:
            self.bare = {n: (torch.zeros(n * self.world, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8))}
        return self.bare[n]


def plain(value: Any) -> Any:
    """For methods that cannot send a memoryview."""
    if isinstance(value, tuple) and isinstance(value[0], memoryview):
        return (value[0].obj, *value[1:])
    return value


def median(calls: dict[str, Callable[[], Any]], seconds: float, most: int) -> dict[str, float]:
    """Seconds on rank 0 of each call, all ranks taking turns through the calls for about `seconds`."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.monotonic() + seconds
    go = torch.ones(1)
    for turn in range(-1, most):
        for name, call in calls.items():
            dist.barrier()
            started = time.perf_counter()
            result = call()
            took = time.perf_counter() - started
            del result
            if turn >= 0:
                times[name].append(took)
        go[0] = turn < 2 or time.monotonic() < deadline
        dist.broadcast(go, 0)
        if not go[0]:
            break
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--most", type=int, default=64 * MB, help="bytes a rank, the largest size")
    parser.add_argument("--seconds", type=float, default=6.0, help="a row")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    methods = Methods()
    rank, world = dist.get_rank(), dist.get_world_size()
    share = shares(ITEMS * world, world)[rank]
    if rank == 0:
        print(f"{world} ranks, torch {torch.__version__}; ms on rank 0; x = times as long as ours")
        print(f"{'':16} {'bytes':>8} {'ours':>9} | {'all_gather':>11} {'':6} {'gather':>9} {'repaired':>9} |", end="")
        print(f" {'ours / all_gather':>18} {'ours / send':>14}")
        print(
            f"{'kind':16} {'a rank':>8} {'ms':>9} | {'_object x':>11} {'target':>6} {'_object x':>9} {'seed x':>9} |",
            end="",
        )
        print(f" {'of bare bytes':>18} {'of bare bytes':>14}", flush=True)
    for kind in flags.kinds:
        for n, target in TARGETS[kind].items():
            if n > flags.most:
                continue
            value = KINDS[kind](n)
            gc.collect()

            def of(method: Callable[..., Any], value: Any = value) -> Callable[[], Any]:
                return lambda: method(value, share.start, len(share))

            calls = {
                name: of(getattr(methods, name)) for name in ("ours", "all_gather_object", "gather_object", "seed")
            }
            calls["bare_all_gather"] = lambda n=n: methods.bare_all_gather(n)
            calls["bare_send"] = lambda n=n: methods.bare_send(n)
            ms = {name: 1e3 * s for name, s in median(calls, flags.seconds, 300).items()}
            if rank == 0:
                print(row(kind, n, target if world == 2 else None, ms), flush=True)
            del value, calls
    dist.destroy_process_group()


def row(kind: str, n: int, target: float | None, ms: dict[str, float]) -> str:
    ours = ms["ours"]
    x, gather, seed = (ms[name] / ours for name in ("all_gather_object", "gather_object", "seed"))
    wanted = "" if target is None else f"{target:.1f}{'!' if x < target else ' '}"
    send = ours / ms["bare_send"]
    mark = "!" if (kind, n, target) == ("float32 arrays", 64 * MB, 12.0) and send > 1.2 else " "
    start = f"{kind:16} {human(n):>8} {ours:9.3f} | {x:11.1f} {wanted:>6} {gather:9.1f} {seed:9.1f} |"
    return f"{start} {ours / ms['bare_all_gather']:18.2f} {send:13.2f}{mark}"


def human(n: int) -> str:
    return f"{n // MB} MB" if n >= MB else f"{n // KB} KB"


if __name__ == "__main__":
    main()
