"""Clients under random faults, seeded: what was answered, what was wrong, what was lost, and how long recovery took.

    python -m tests.bench.chaos [--seconds 600] [--seed 1] [--ranks 2] [--groups 1] [--every 5]

Each client POSTs batches of random sizes, some with deadlines, and checks every result. An answer is *wrong* when a
result is not its item's; a request is *lost* when it gets no answer, or another than 200, or 504 after the deadline
that it set itself. Meanwhile a fault strikes every few seconds: a rank killed, stopped, or told to exit, or torchrun
killed. Of several groups one is struck at a time, so that `/readyz` must stay 200: any other answer is *unready*. Exit
code 1 when anything was wrong, lost or unready.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack

import httpx

from tests.service import MODELS, READY_SECONDS, Service, parent, serving, until

CLIENTS = 16


class Chaos:
    """One run."""

    def __init__(self, service: Service, seed: int, groups: int = 1) -> None:
        self.service = service
        self.groups = [str(group) for group in range(groups)]
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.recoveries: dict[str, list[tuple[float, float]]] = defaultdict(list)  # seconds to a 503, to ready again
        self.stop = threading.Event()
        self.clients = [threading.Thread(target=self.client, args=(self.rng.random(),)) for _ in range(CLIENTS)]

    def client(self, seed: float) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.service.client.base_url, timeout=120) as http:
            while not self.stop.is_set():
                items = [rng.randrange(10**9) for _ in range(rng.choice([1, 1, 2, 3, 8, 40, 200]))]
                headers = {"x-request-timeout": str(rng.uniform(0.05, 3))} if rng.random() < 0.2 else {}
                self.counts["requests"] += 1
                try:
                    answer = http.post("/infer", json={"inputs": items}, headers=headers)
                except httpx.TransportError as error:
                    self.problem("lost", repr(error))
                    continue
                if answer.status_code == 200:
                    self.counts["answers"] += 1
                    if answer.json()["outputs"] != items:
                        self.problem("wrong", answer.text[:200])
                elif answer.status_code == 504 and headers:
                    self.counts["late"] += 1
                else:
                    self.problem("lost", f"{answer.status_code} {answer.text[:200]}")

    def problem(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        self.problems.append(f"{kind}: {text}")

    def group(self, name: str) -> dict | None:
        return self.service.info()["groups"].get(name)

    def fault(self) -> None:
        """Strike, and wait until the group that was struck is ready with a new epoch."""
        name = self.rng.choice(self.groups)
        group = until(lambda: self.group(name), READY_SECONDS, f"group {name}")
        pids = [rank["pid"] for rank in group["ranks"]]
        kind = self.rng.choice(["kill", "kill", "stop", "torchrun", "terminate"])
        victim = self.rng.choice(pids)
        if kind == "torchrun":
            victim = parent(victim)
        number = {"stop": signal.SIGSTOP, "terminate": signal.SIGTERM}.get(kind, signal.SIGKILL)
        os.kill(victim, number)
        started = time.monotonic()
        until(lambda: self.serving_epoch(name) != group["epoch"], 10, f"group {name} not ready after {kind}")
        seen = time.monotonic() - started
        until(lambda: self.serving_epoch(name) > group["epoch"], 120, f"recovery of group {name} from {kind}")
        self.recoveries[kind].append((seen, time.monotonic() - started))

    def serving_epoch(self, name: str) -> int:
        """Of the group, 0 while it is not ready: where there is no other, `/readyz` says so."""
        ready, group = self.service.ready(), self.group(name)
        if len(self.groups) > 1:
            if not ready:
                self.problem("unready", self.service.client.get("/readyz").text)
            ready = group is not None and group["ready"]
        return group["epoch"] if ready and group is not None else 0

    def run(self, seconds: float, every: float) -> None:
        end = time.monotonic() + seconds
        for client in self.clients:
            client.start()
        try:
            while time.monotonic() < end:
                self.stop.wait(self.rng.uniform(0.2, 2 * every))
                self.fault()
        finally:
            self.stop.set()
            for client in self.clients:
                client.join(120)

    def report(self) -> str:
        epochs = [ready for times in self.recoveries.values() for _, ready in times]
        lines = [
            f"requests {self.counts['requests']}, answers {self.counts['answers']}, late {self.counts['late']}",
            f"wrong {self.counts['wrong']}, lost {self.counts['lost']}, unready {self.counts['unready']}",
            f"epochs lost {len(epochs)}, worst time to recover {max(epochs, default=0):.1f} s",
        ]
        for kind, times in sorted(self.recoveries.items()):
            seen, ready = (sorted(column) for column in zip(*times, strict=True))
            middle = len(times) // 2
            lines.append(
                f"  {kind:9} {len(times):3} times: said so after {seen[middle]:.2f} s, worst {seen[-1]:.2f};"
                f" ready again after {ready[middle]:.1f} s, worst {ready[-1]:.1f}"
            )
        return "\n".join([*lines, *self.problems[:20]])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--every", type=float, default=5, help="seconds between faults, on average")
    flags = parser.parse_args(argv)
    common = {"ranks": flags.ranks, "step_timeout": 2}
    with ExitStack() as stack:
        service = stack.enter_context(serving("Obedient", request_timeout=100, queue_items=100_000, **common))
        for group in range(1, flags.groups):
            beside = Service(
                f"{MODELS}:Obedient",
                verb="workers",
                group=group,
                run_dir=service.run_dir,
                port=service.port,
                **common,
            )
            stack.callback(beside.close)
            stack.callback(beside.stop)
        until(lambda: len(service.info()["groups"]) == flags.groups, READY_SECONDS * flags.groups, "all groups")
        chaos = Chaos(service, flags.seed, flags.groups)
        chaos.run(flags.seconds, flags.every)
        what = (
            f"seed {flags.seed}, {flags.groups} groups of {flags.ranks} ranks, {CLIENTS} clients, {flags.seconds:g} s"
        )
        print(f"chaos: {what}\n{chaos.report()}")
    return 1 if chaos.problems or not chaos.counts["answers"] else 0


if __name__ == "__main__":
    sys.exit(main())
