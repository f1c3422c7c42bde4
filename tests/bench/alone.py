"""One rank's work with no server: for each line of seconds on stdin it prints how many items it did in them.

python -m tests.bench.alone model|codec|images [device]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from tests.models import Heavy, Images
from workers import model
from workers.forward import Forward
from workers.memory import keep_freed_blocks
from workers.wire import Form

ITEMS = 64


def forward(kind: type, device: torch.device) -> Callable[[], object]:
    made = kind(device)
    shape, dtype = made.inputs.shape, getattr(torch, made.inputs.dtype)
    batch = torch.ones((ITEMS, *shape), dtype=dtype, device=device)

    def run() -> object:
        with torch.inference_mode():
            return made.predict(batch).cpu()  # waits, and brings the results to where a server needs them

    return run


def codec(device: torch.device) -> Callable[[], object]:
    """JSON items to results as JSON: all that a rank does, but for the collect."""
    rows = np.random.default_rng(0).random((ITEMS, 512), np.float32)
    texts = [json.dumps(row).encode() for row in rows.tolist()]
    frame, lengths = b",".join(texts), [len(text) for text in texts]
    ours = Forward(model.load("tests.models:Heavy", device, 0), device)
    return lambda: ours.run(frame, lengths, Form("json", "json"), 10.0)


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_blocks()  # as the ranks do
    device = torch.device((sys.argv[2:] or ["cpu"])[0])
    model_alone = {"model": Heavy, "images": Images}.get(sys.argv[1])
    work = forward(model_alone, device) if model_alone else codec(device)
    work()
    print("ready", flush=True)
    for line in sys.stdin:
        end = time.perf_counter() + float(line)
        done = 0
        while time.perf_counter() < end:
            work()
            done += ITEMS
        print(done, flush=True)


if __name__ == "__main__":
    main()
