"""One client's large batch on one rank and on two, in one run on the same cores: the ratio of the times.

    python -m tests.bench.scaling [--items 1024] [--rounds 7]

The model is `tests.models.Heavy`, CPU-bound, with one thread a rank. Both services run at once and take turns, so that
whatever else the machine does slows both.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from tests.service import Service, serving


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    flags = parser.parse_args()
    array = np.random.default_rng(0).random((flags.items, 512), np.float32)
    file = io.BytesIO()
    np.save(file, array)
    bodies = {
        "application/json": json.dumps({"inputs": array.tolist()}).encode(),
        "application/x-npy": file.getvalue(),
    }

    def post(service: Service, media: str) -> None:
        answer = service.client.post("/infer", content=bodies[media], headers={"content-type": media})
        assert answer.status_code == 200, answer.text

    with serving("Heavy", ranks=1) as one, serving("Heavy", ranks=2) as two:
        print(f"{flags.items} items x 512 floats, medians of {flags.rounds}, one thread a rank\n")
        print("| body | 1 rank | 2 ranks | ratio |\n|---|---|---|---|")
        for media in bodies:
            times: dict[Service, list[float]] = {one: [], two: []}
            for turn in range(flags.rounds + 1):
                for service in times:
                    seconds = timed(lambda service=service, media=media: post(service, media))  # type: ignore[misc]
                    if turn:  # the first is for warming up
                        times[service].append(seconds)
            a, b = (statistics.median(found) for found in times.values())
            print(f"| {media} | {a * 1000:.0f} ms | {b * 1000:.0f} ms | {b / a:.2f} |")


if __name__ == "__main__":
    main()
