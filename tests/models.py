"""Models that the tests serve: each shows something of how it was run, or does what its item says."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import random
import threading
import time

import numpy as np
import torch
import torch.distributed as dist

from workers.model import TensorSpec


class WhichRank:
    """Which rank ran the item, and how many items its forward saw."""

    max_batch_size = 32
    example = 0

    def __init__(self, device):
        self.rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])

    def predict(self, items):
        return [{"item": item, "rank": self.rank, "seen": len(items)} for item in items]


class Jitter:
    """Twice the number, after a time that varies at random by step and rank."""

    max_batch_size = 8
    example = 1

    def __init__(self, device):
        self.random = random.Random(os.getpid())

    def predict(self, items):
        time.sleep(self.random.choice([0, 0, 0.001, 0.004, 0.02]))
        return [2 * item for item in items]


class Double:
    """Twice a row of three numbers, as a tensor."""

    inputs = TensorSpec("float32", (3,))
    max_batch_size = 16
    example = (1.0, 2.0, 3.0)

    def __init__(self, device):
        pass

    def predict(self, items):
        return items * 2


class Forms:
    """A pair of bfloat16 as the result that `form` names."""

    inputs = TensorSpec("bfloat16", (2,))

    def __init__(self, device):
        pass

    def predict(self, items, form="as it is"):
        match form:
            case "as it is":
                return items
            case "half":
                return items.half()
            case "bool":
                return items > 1
            case "big-endian":
                return [np.asarray(item.float(), ">i4") for item in items]
            case "ragged":
                return [item[: i + 1] for i, item in enumerate(items)]
            case "triple":
                return items.repeat(1, 2)[:, :3]
            case "dict":
                return [{"sum": float(item.sum())} for item in items]


class Obedient:
    """Does what its item says; an item that says nothing is its own result."""

    max_batch_size = 64
    example = "ok"

    def __init__(self, device):
        self.rank = int(os.environ["RANK"])

    def predict(self, items, rank=None, sleep=0.0):
        if rank is None or rank == self.rank:
            time.sleep(sleep)
        return [result for item in items for result in self._obey(item)]

    def _obey(self, item):
        match item:
            case bytes():
                return [{"name": item.name, "size": len(item), "digest": hashlib.sha256(item).hexdigest()}]
            case {"do": "raise"}:
                raise RuntimeError(f"as told by item {item.get('n')}")
            case {"do": "sleep", "seconds": seconds}:
                time.sleep(seconds)
            case {"do": "touch", "path": path}:
                open(path, "x").close()
            case {"do": "await", "path": path}:
                while not os.path.exists(path):  # noqa: PTH110
                    time.sleep(0.001)
            case {"do": "drop"}:
                return []
            case {"do": "double"}:
                return [item, item]
            case {"do": "lambda"}:
                return [lambda: item]
            case {"do": "none"}:
                return [None]
            case {"do": "nan"}:
                return [[1.0, {"deep": float("nan")}]]
            case {"do": "empty"}:
                return [[]]
            case {"do": "big", "bytes": size}:
                return ["x" * size]
            case {"do": "exit", "code": code}:
                os._exit(code)
            case {"do": "once", "path": path, "then": fault}:
                if not os.path.exists(path):  # noqa: PTH110
                    open(path, "x").close()
                    return self._fault(fault, item)
            case {"do": "where"}:
                return [{"rank": self.rank, "pid": os.getpid(), "marker": os.environ.get("PHALANX_TEST_MARKER")}]
        return [item]

    def _fault(self, fault, item):
        match fault:
            case "exit 0":
                os._exit(0)
            case "segfault":
                ctypes.string_at(0)
            case "hang":
                time.sleep(1000)
            case "hang with the GIL":
                sum(range(10**13))
            case "allocate":
                _ = [b"x" * 2**20 for _ in range(2**20)]
            case "exit from a thread":
                threading.Thread(target=os._exit, args=(1,)).start()
                time.sleep(1000)
        return [item]


class Together:
    """Its ranks talk to one another in every forward: each result is the number of ranks."""

    example = 0

    def __init__(self, device):
        pass

    def predict(self, items):
        count = torch.ones(1)
        dist.all_reduce(count)
        return [int(count)] * len(items)


class Heavy:
    """CPU-bound: an MLP of 512-2048-2048-512 in float32."""

    inputs = TensorSpec("float32", (512,))
    max_batch_size = 64

    def __init__(self, device):
        torch.manual_seed(0)
        sizes = (512, 2048, 2048, 512)
        layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        self.network = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2]).to(device)

    def predict(self, items):
        return self.network(items)


class Images:
    """Memory-bound: the mean colour of an image, and a linear layer on it."""

    inputs = TensorSpec("uint8", (3, 224, 224))
    max_batch_size = 64

    def __init__(self, device):
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 10).to(device)

    def predict(self, items):
        return self.layer(items.mean((2, 3), dtype=torch.float32))


class Sleeper:
    """A stand-in for a GPU: 20 ms a forward; its results are the seconds since the forward before."""

    inputs = TensorSpec("float32", (8,))
    max_batch_size = 16

    def __init__(self, device):
        self.ended = time.perf_counter()

    def predict(self, items):
        gap = time.perf_counter() - self.ended
        time.sleep(0.02)
        self.ended = time.perf_counter()
        return torch.full((len(items), 1), gap)


class Refuses:
    """Cannot be loaded."""

    def __init__(self, device):
        raise OSError("the weights are not there")

    def predict(self, items):
        return items
