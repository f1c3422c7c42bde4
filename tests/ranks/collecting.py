"""Ranks that do nothing but collect: `collecting.py "SCENE ARGUMENT..." ...` under torchrun plays the scenes in turn.

Rank 0 prints a line for a scene that holds; in one that does not, the rank that saw it raises.
"""

import os
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from workers.collect import Collector, Desynchronised, Part, shares
from workers.errors import GroupError
from workers.lifeline import die_with_parent
from workers.rounds import Gloo, Nccl

KB, MB = 1 << 10, 1 << 20
CAP = 12 * MB
EVERY_SIZE = [0, 1, 100, 5_000, 31 * KB, 32 * KB - 40, 32 * KB, 33 * KB, 100_000, MB - 1, MB, MB + 1, 3 * MB, 5 * MB]


class Raises:
    """Cannot be encoded: its own `__reduce__` raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text either")


class Unreadable:
    """Is encoded, and raises where it is decoded."""

    def __init__(self, filling: Any = None) -> None:
        self.filling = filling

    def __reduce__(self) -> Any:
        return no_reading, (self.filling,)


def no_reading(filling: Any) -> None:
    raise ValueError("not to be read")


def deep() -> Any:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    return value


def much() -> Any:
    """So long to encode that the first of it is sent before the last is made."""
    return [i / 3 for i in range(150_000)]


BAD = {  # what goes wrong: the value, and what its part says; rank 0's own value is never encoded, so never wrong
    "a lambda": (lambda rng: lambda: 0, "annot be sent: "),
    "a lambda after much": (lambda rng: (much(), np.zeros(MB), lambda: 0), "cannot be sent: "),
    "raises": (lambda rng: [1, Raises(ValueError("no"))], "the result cannot be sent: ValueError: no"),
    "exits": (lambda rng: Raises(SystemExit(3)), "the result cannot be sent: SystemExit: 3"),
    "unspeakable": (lambda rng: Raises(Unspeakable()), "the result cannot be sent: Unspeakable: (its text cannot be"),
    "too deep": (lambda rng: deep(), "the result cannot be sent: RecursionError"),
    "over the cap": (lambda rng: bytes(CAP + 1), f"more than the {CAP} bytes"),
    "arrays over the cap": (lambda rng: [np.zeros(MB, np.uint8) for _ in range(13)], f"more than the {CAP} bytes"),
    "floats over the cap": (lambda rng: [i / 7 for i in range(CAP // 9)], f"more than the {CAP} bytes"),
    "unreadable after much": (lambda rng: (much(), Unreadable()), "the result cannot be read: ValueError: not to"),
    "unreadable": (lambda rng: Unreadable(), "the result cannot be read: ValueError: not to be read"),
    "unreadable, large": (lambda rng: Unreadable(np.zeros(2 * MB, np.uint8)), "cannot be read: ValueError"),
}


def good(rng: random.Random) -> Any:
    """Any value a model might give, of any size; the same on every rank for the same state of `rng`."""
    n = rng.choice(EVERY_SIZE)
    noise = np.random.default_rng(rng.getrandbits(32))
    array = noise.integers(0, 256, n, np.uint8)
    kinds = {
        "none": lambda: None,
        "nones": lambda: [None] * (n // 10),
        "dicts": lambda: [{"score": i / 3, "label": str(i), "none": None} for i in range(n // 40)],
        "bytes": lambda: array.tobytes(),
        "bytearray": lambda: bytearray(array.tobytes()),
        "memoryview": lambda: (memoryview(array.tobytes()), [n], [(0, "kind", "detail")], (0, n, 0.5, 0)),
        "array": lambda: array,
        "arrays": lambda: [array[i::3] for i in range(3)] + [array.astype(np.float32)[: n // 8].reshape(-1, 1)],
        "strided": lambda: array[: n // 2 * 2].reshape(-1, 2).T,
        "tensors": lambda: [torch.from_numpy(array), torch.from_numpy(array[: n // 8]).to(torch.bfloat16)],
        "rows": lambda: list(torch.arange(n // 4, dtype=torch.float32)[: n // 32 * 8].view(8, -1)),
        "much": lambda: (much(), array, [{"n": i} for i in range(n // 40)], array[: n // 2], None),
        "text": lambda: "é" * (n // 2),
        "mixed": lambda: {"a": array, 1: (torch.from_numpy(array)[: n // 2], None, [array.tobytes()[: n // 3]])},
    }
    return kinds[rng.choice(list(kinds))]()


class Plan(NamedTuple):
    """What every rank does in a step: its share, what goes wrong with it, and what its value is made of."""

    size: int
    shares: list[range]
    bad: list[str | None]
    seeds: list[int]
    lie: bool  # a rank says another share than it has


def plan(seed: int, step: int, world: int) -> Plan:
    rng = random.Random(f"{seed}/{step}")
    failing = rng.randrange(world) if rng.random() < 0.2 else None
    lie = failing is not None and rng.random() < 0.2
    if failing == 0 and not lie and world > 1 and rng.random() < 0.8:
        failing = rng.randrange(1, world)  # rank 0 sends nothing, so hardly anything goes wrong with it
    size = rng.choice([0, 1, world, 7, 64])
    ranges = shares(size, world)
    if lie and failing is not None:
        mine = ranges[failing]
        ranges[failing] = rng.choice([range(mine.start, mine.stop + 1), range(mine.start + 1, mine.stop + 1)])
    bad = [rng.choice(list(BAD)) if r == failing and not lie else None for r in range(world)]
    return Plan(size, ranges, bad, [rng.getrandbits(32) for _ in range(world)], lie)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return type(a) is type(b) and bool(a == b)


def value_of(bad: str | None, seed: int) -> Any:
    rng = random.Random(seed)
    return BAD[bad][0](rng) if bad else good(rng)


def check(parts: list[Part], planned: Plan) -> int:
    """Raises if a part is not what its rank gave; returns how many parts are errors."""
    for r, (part, mine, bad, seed) in enumerate(zip(parts, *planned[1:4], strict=True)):
        assert (part.start, part.items) == (mine.start, len(mine))
        if planned.lie:
            expect("do not tile" in str(part.error) and part.value is None, planned, r, part)
        elif bad and r:
            expect(BAD[bad][1] in str(part.error) and part.value is None, planned, r, part)
        elif not bad:
            expect(part.error is None and same(part.value, value_of(None, seed)), planned, r, part)
    return sum(part.error is not None for part in parts)


def expect(holds: bool, *what: Any) -> None:
    if not holds:
        raise AssertionError(f"{what}"[:1000])


def chaos(steps: str, seed: str, kind: str = "gloo") -> str:
    """Random steps, a fifth of them failing somewhere; the results of the last five are kept and looked at again."""
    collector, rank = Collector(cap=CAP, transport=transport(kind)), dist.get_rank()
    kept: deque[tuple[Plan, list[Part]]] = deque()
    errors = 0
    for step in range(int(steps)):
        planned = plan(int(seed), step, dist.get_world_size())
        mine, value = planned.shares[rank], value_of(planned.bad[rank], planned.seeds[rank])
        parts = collector.collect(value, step=step, start=mine.start, items=len(mine), size=planned.size)
        expect((parts is None) == (rank != 0), rank, parts)
        if parts is not None:
            errors += check(parts, planned)
            kept.append((planned, parts))
        if len(kept) > 5:
            old, parts = kept.popleft()
            check(parts, old)
    return f"{steps} steps, {errors} errors"


def transport(kind: str) -> Gloo:
    """Nccl's way without a GPU, in chunks so small that most parts need several."""
    return Gloo() if kind == "gloo" else Nccl(torch.device("cpu"), chunk=300_000)


def skipped() -> str:
    """Rank 1 misses a step, as if it had failed before the collect: nobody gets the wrong step's results."""
    collector, rank = Collector(), dist.get_rank()
    whole(collector, step=0)
    with pytest.raises(Desynchronised, match=r"step 1,.* step 2,"):
        whole(collector, step=2 if rank else 1)
    with pytest.raises(Desynchronised):
        whole(collector, step=3)
    return "desynchronised"


def stranger() -> str:
    """A rank of another epoch is no rank of this group."""
    with pytest.raises(Desynchronised, match=r"epoch 0,.* epoch 1,"):
        whole(Collector(epoch=min(1, dist.get_rank())), step=0)
    return "desynchronised"


def unlike() -> str:
    """Ranks whose second rounds differ do not start one."""
    with pytest.raises(Desynchronised):
        whole(Collector(transport=transport("nccl" if dist.get_rank() else "gloo")), step=0, value=bytes(MB))
    return "desynchronised"


def left() -> str:
    """A rank dies between two steps: the others hear of it in the next. The last scene: the group is dead."""
    collector = Collector()
    whole(collector, step=0)
    if dist.get_rank() == 1:
        os._exit(0)
    started = time.monotonic()
    with pytest.raises(GroupError):
        whole(collector, step=1)
    with pytest.raises(GroupError):
        whole(collector, step=2)
    return f"heard after {time.monotonic() - started:.3f} s"


def memory(steps: str, megabytes: str) -> str:
    """Many large steps, the last five kept: what does the process hold in the end that it did not after a tenth?"""
    collector, rank = Collector(), dist.get_rank()
    blob = memoryview(np.random.default_rng(rank).bytes(int(megabytes) * MB))
    kept: deque[Any] = deque(maxlen=5)
    after: list[int] = []
    for step in range(int(steps)):
        value = (blob, [1.0] * 1000) if step % 2 else [np.frombuffer(blob, np.float32)[i::4] for i in range(4)]
        kept.append(whole(collector, step=step, value=value))
        if step in (int(steps) // 10, int(steps) - 1):
            after.append(resident())
    return f"grew {(after[1] - after[0]) // MB} MB"


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def huge() -> str:
    """More than 2 GiB in one part, and too much for the next: the group lives on."""
    n, rank = (2 << 30) + (64 << 20) + 5, dist.get_rank()
    collector = Collector(cap=n + MB)
    value = np.zeros(n if rank else 0, np.uint8)  # untouched pages: costs the sender nothing
    value[-1:] = 7
    value[(1 << 31) - 1 : (1 << 31) + 1] = 5
    parts = whole(collector, step=0, value=value)
    if parts:
        got: Any = parts[1].value
        expect(parts[1].error is None and len(got) == n, parts[1].error)
        expect(got[-1] == 7 and (got[(1 << 31) - 1 : (1 << 31) + 1] == 5).all(), got[-1])
        expect(np.count_nonzero(got) == 3)
        del got, parts
    parts = whole(collector, step=1, value=[value, bytes(2 * MB)])
    expect(not parts or "more than the" in str(parts[1].error), parts)
    parts = whole(collector, step=2, value=rank)
    expect(not parts or [part.value for part in parts] == [0, 1], parts)
    return "more than 2 GiB"


def cuda() -> str:
    """Tensors of every rank's device arrive in the memory of the host, over NCCL if they are large."""
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    collector = Collector(device=device)
    expect(type(collector._transport) is Nccl)
    for step, n in enumerate([0, 10, 9_000, MB, 40 * MB + 3]):
        tensor = torch.full((n,), rank + 1, dtype=torch.uint8, device=device)
        half = tensor.to(torch.bfloat16)[::2]
        value = {"all": tensor, "rows": [half, half], "sparse": torch.eye(3, device=device).to_sparse(), "none": None}
        parts = whole(collector, step=step, value=value)
        for r, part in enumerate(parts or []):
            got: Any = part.value
            expect(part.error is None, part.error)
            if r:
                expect({x.device.type for x in (got["all"], *got["rows"], got["sparse"])} == {"cpu"}, r)
            expect(same(got["all"].cpu(), torch.full((n,), r + 1, dtype=torch.uint8)), r, n)
            expect(same(got["rows"][1].cpu(), torch.full(((n + 1) // 2,), r + 1, dtype=torch.bfloat16)), r, n)
    return "on the host"


def whole(collector: Collector, *, step: int, value: Any = None) -> list[Part] | None:
    """A step of one item a rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return collector.collect(value, step=step, start=rank, items=1, size=world)


SCENES = {f.__name__: f for f in (chaos, skipped, stranger, unlike, left, memory, huge, cuda)}


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if sys.argv[1] == "cuda" else "gloo")
    for scene in sys.argv[1:]:
        name, *arguments = scene.split()
        said = SCENES[name](*arguments)
        if dist.get_rank() == 0:
            print(f"{scene}: {said}", flush=True)
    if name == "left":
        os._exit(0)  # a dead group cannot be destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
