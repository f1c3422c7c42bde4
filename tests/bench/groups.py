"""Two groups of one rank against one group of two: the same model on the same cores, as ratios within one run.

    python -m tests.bench.groups [--seconds 3] [--rounds 3]

The two services take turns. A ratio over 1 says that the two groups do more, or take longer. Needs wrk, see
`tests.bench.serving`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.bench.serving import JSON, NPY, Bench, Found, as_json, as_npy, middle, rows
from tests.service import MODELS, Service, serving, until


@contextmanager
def two_groups(model: str) -> Iterator[Service]:
    with serving(model, ranks=1, device="cpu") as service:
        beside = {"run_dir": service.run_dir, "port": service.port}
        second = Service(f"{MODELS}:{model}", verb="workers", group="1", ranks=1, device="cpu", **beside)
        try:
            until(lambda: len(service.info()["groups"]) == 2, 120, "two groups")
            yield service
            assert second.stop() == 0
        finally:
            second.client.close()
            if second.process.poll() is None:
                second.process.kill()
                second.process.wait()
            second.log_path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns that count, a side")
    flags = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("the load comes from wrk, which is not installed (Debian: apt install wrk)")
    bench = Bench(flags.seconds, flags.rounds)
    print(f"{os.cpu_count()} cores, turns of {flags.seconds:g} s, medians of {flags.rounds}\n")
    print("| two groups of one rank, of one group of two | requests/s | p50 | p99 | |\n|---|---|---|---|---|")
    try:
        with bench.serving("Heavy", 2) as one, two_groups("Heavy") as two:
            for name, clients, body, media in (
                ("1 item, 16 clients, JSON", 16, as_json(rows(1, 512)), JSON),
                ("64 items, 1 client, npy", 1, as_npy(rows(64, 512)), NPY),  # one step of a group of two
                ("256 items, 1 client, npy", 1, as_npy(rows(256, 512)), NPY),
            ):
                turns = [bench.wrk(f"{service.client.base_url}/infer", clients, body, media) for service in (one, two)]
                whole, halves = map(_middle, bench.turns(*turns))
                ratios = f"{halves.rate / whole.rate:.2f} | {halves.p50 / whole.p50:.2f} | {halves.p99 / whole.p99:.2f}"
                print(f"| {name} | {ratios} | {_said(halves)}; one group: {_said(whole)} |", flush=True)
    finally:
        shutil.rmtree(bench.folder)


def _middle(found: list[Found]) -> Found:
    return Found(*(middle([getattr(one, name) for one in found]) for name in ("rate", "p50", "p99")))


def _said(found: Found) -> str:
    return f"{found.rate:.0f}/s, p50 {1e3 * found.p50:.1f}, p99 {1e3 * found.p99:.1f} ms"


if __name__ == "__main__":
    main()
