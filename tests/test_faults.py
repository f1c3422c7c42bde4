"""The failure matrix: no request is lost, none is answered wrongly, and nothing is left behind."""

from __future__ import annotations

import concurrent.futures
import json
import math
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.service import MODELS, Service, alive, descendants, parent, samples, serving, until


class Load:
    """Clients that POST batches of real digits of random sizes, and hold every answer to be 200, right and in order."""

    def __init__(self, service: Service, clients: int) -> None:
        self._service = service
        self._images, self._labels = samples()
        self._stop = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(clients)
        self.answered = 0
        self._futures = [self._pool.submit(self._client, seed) for seed in range(clients)]

    def _client(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stop.is_set():
            chosen = [rng.randrange(len(self._images)) for _ in range(rng.choice([1, 1, 2, 7, 30]))]
            answer = self._service.infer([self._images[i] for i in chosen])
            assert answer.status_code == 200, answer.text
            assert [one["digit"] for one in answer.json()["outputs"]] == [self._labels[i] for i in chosen]
            self.answered += 1

    def more(self, count: int = 50) -> None:
        """Wait until so many further requests are answered."""
        target = self.answered + count
        until(lambda: self.answered >= target or any(f.done() for f in self._futures), 60, "answers under load")

    def end(self) -> None:
        self._stop.set()
        for future in self._futures:
            future.result(90)
        self._pool.shutdown()


def torchrun_pid(service: Service) -> int:
    [pid] = {parent(pid) for pid in service.pids()}
    return pid


@pytest.fixture(scope="module")
def fragile() -> Iterator[Service]:
    """`tests.models.Obedient` on two ranks, for faults that it survives."""
    with serving("Obedient", ranks=2, step_timeout=2, request_timeout=100) as service:
        service.client.timeout = 100
        yield service


@pytest.mark.timeout(240)
@pytest.mark.long
def test_killing_any_rank_or_torchrun_under_load_loses_no_request() -> None:
    with serving("digits", ranks=2) as service:
        victims: list[Callable[[], int]] = [
            lambda: service.pids()[0],
            lambda: service.pids()[1],
            lambda: torchrun_pid(service),
        ]
        load = Load(service, 16)
        for victim in victims:
            load.more()
            epoch = service.group()["epoch"]
            old = service.pids()
            os.kill(victim(), signal.SIGKILL)
            until(lambda: service.client.get("/readyz").status_code == 503, 2, "not ready after a death")
            until(lambda before=epoch: (group := service.group()) and group["epoch"] > before, 60, "the next epoch")
            assert not any(map(alive, old))
            service.wait_ready()
        load.more()
        load.end()
        assert service.metric("phalanx_epochs_total") == 4
        info = service.info()
        assert (info["restarts"], info["groups"]["0"]["epoch"]) == (3, 4)
        assert "torchrun" in info["last_death"] or "rank" in info["last_death"]


@pytest.mark.parametrize("n", [2, pytest.param(16, marks=pytest.mark.long)])
def test_an_item_that_kills_its_rank_every_time_fails_alone_and_within_the_promised_restarts(n: int) -> None:
    with serving("Obedient", ranks=2, request_timeout=300) as service, concurrent.futures.ThreadPoolExecutor(4) as pool:
        service.client.timeout = 300
        poison = {"do": "exit", "code": 3}
        answer = pool.submit(service.infer, [poison, *range(n - 1)])
        until(lambda: service.metric("phalanx_group_deaths_total") >= 1)
        others = [pool.submit(service.outputs, [n]) for n in range(3)]
        body = answer.result(300).json()
        assert body["outputs"] == [None, *range(n - 1)]
        assert [(error["index"], error["type"]) for error in body["errors"]] == [(0, "poison-item")]
        assert [other.result(60) for other in others] == [[0], [1], [2]]
        assert service.metric("phalanx_group_deaths_total") <= 2 + math.log2(n)
        assert len(list((service.run_dir / "post-mortem").iterdir())) <= 6


WHY = {
    "exit 0": "exited with 0",
    "hang with the GIL": "took longer than 2 s",
    "segfault": "killed by SIGSEGV",
    "hang": "took longer than 2 s",
    "exit from a thread": "exited with 1",
}


@pytest.mark.parametrize(
    "fault",
    [
        "hang with the GIL",
        *(pytest.param(fault, marks=pytest.mark.long) for fault in WHY if fault != "hang with the GIL"),
    ],
)
def test_a_fault_in_a_step_costs_a_restart_and_no_request(fault: str, tmp_path: Path, fragile: Service) -> None:
    pids = fragile.pids()
    items = [*range(6), {"do": "once", "path": str(tmp_path / "struck"), "then": fault}, 7]
    answer = fragile.client.post("/infer", json={"inputs": items}, headers={"x-request-id": "mine-1"})
    assert answer.json()["outputs"] == items
    assert not set(pids) & set(fragile.pids())
    assert not any(map(alive, pids))
    epoch = fragile.group()["epoch"]
    report = (fragile.run_dir / "post-mortem" / f"0-{epoch - 1}.txt").read_text()
    assert WHY[fault] in report
    assert "mine-1" in report
    assert "---- rank 0: stacks" in report
    assert "---- rank 1: stacks" in report


@pytest.fixture
def limited(fragile: Service) -> Iterator[Path]:
    """A memory cgroup with room for 256 MiB more, and the ranks of `fragile` in it."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    group = (v1 if v1.is_dir() else v2) / f"phalanx-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")).write_text(str(256 << 20))
    except OSError as error:
        pytest.skip(f"needs memory cgroups that it may make: {error}")
    for pid in fragile.pids():
        (group / "cgroup.procs").write_text(str(pid))
    yield group
    until(lambda: not (group / "cgroup.procs").read_text(), 10, "the cgroup is empty")
    group.rmdir()


@pytest.mark.long
def test_a_rank_that_the_kernel_kills_for_its_memory_costs_a_restart_and_no_request(
    limited: Path, tmp_path: Path, fragile: Service
) -> None:
    pids = fragile.pids()
    items = [*range(6), {"do": "once", "path": str(tmp_path / "struck"), "then": "allocate"}, 7]
    assert fragile.outputs(items) == items
    assert not set(pids) & set(fragile.pids())
    epoch = fragile.group()["epoch"]
    report = (fragile.run_dir / "post-mortem" / f"0-{epoch - 1}.txt").read_text()
    assert "killed by SIGKILL" in report


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_that_is_stopped_while_idle_is_noticed_and_replaced(rank: int, fragile: Service) -> None:
    fragile.wait_ready()
    pids = fragile.pids()
    os.kill(pids[rank], signal.SIGSTOP)
    until(lambda: fragile.client.get("/readyz").status_code == 503, 5, "not ready")
    assert fragile.client.get("/livez").status_code == 200
    assert fragile.outputs([1, 2, 3]) == [1, 2, 3]
    until(lambda: not any(map(alive, pids)), 5, "the old ranks are gone")


@pytest.mark.long
def test_a_front_end_that_is_paused_keeps_its_group(obedient: Service) -> None:
    pids = obedient.pids()
    [front_end] = [
        pid for pid in descendants(obedient.process.pid) if b"app.cli\0app" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(front_end, signal.SIGSTOP)
    paused = time.monotonic()
    until(lambda: time.monotonic() - paused > 4, 5)  # longer than its heartbeats may be late
    os.kill(front_end, signal.SIGCONT)
    obedient.wait_ready(20)
    assert obedient.outputs([1, 2]) == [1, 2]
    assert obedient.pids() == pids


@pytest.mark.long
def test_steps_of_uneven_ranks_that_each_keep_their_deadline_fell_nobody(fragile: Service) -> None:
    pids = fragile.pids()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # rank 0 is done at once, and far ahead of rank 1
        answers = [
            pool.submit(fragile.outputs, [n, n], parameters={"rank": 1, "sleep": 1.5 + n / 100}) for n in range(4)
        ]
        assert [answer.result(60) for answer in answers] == [[n, n] for n in range(4)]
    assert fragile.pids() == pids


@pytest.mark.long
def test_a_front_end_that_comes_back_to_a_busy_group_waits_for_it() -> None:
    workers = Service(f"{MODELS}:Obedient", verb="workers", ranks=2)
    here = {"port": workers.port, "run_dir": workers.run_dir}
    app = Service("unused", verb="app", **here).wait_ready()
    try:
        pids = app.pids()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            lost = pool.submit(app.infer, list(range(4)), parameters={"sleep": 12})  # longer than a canary may take
            until(lambda: app.info()["queue"]["items"] == 4)
            app.process.kill()
            app.process.wait()
            assert isinstance(lost.exception(10), httpx.TransportError)
        app.client.close()
        app = Service("unused", verb="app", **here)
        app.wait_ready()
        assert app.outputs(["next"]) == ["next"]
        assert app.pids() == pids
    finally:
        app.stop()
        app.close()
        workers.stop()
        workers.close()


@pytest.mark.long
def test_a_rank_that_is_stopped_in_a_step_is_felled_at_the_deadline(fragile: Service) -> None:
    pids = fragile.pids()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fragile.outputs, list(range(8)), parameters={"sleep": 0.5})
        until(lambda: fragile.info()["queue"]["items"] == 8)
        os.kill(pids[1], signal.SIGSTOP)
        assert answer.result(100) == list(range(8))
    assert not set(pids) & set(fragile.pids())


def test_sigterm_finishes_what_is_in_flight_and_leaves_nothing() -> None:
    with serving("Obedient", ranks=2) as service, concurrent.futures.ThreadPoolExecutor(20) as pool:
        family = [service.process.pid, *descendants(service.process.pid)]
        answers = [pool.submit(service.infer, [0], parameters={"sleep": 2})]
        until(lambda: service.info()["queue"]["items"] == 1)
        answers += [pool.submit(service.infer, [n]) for n in range(1, 20)]
        until(lambda: service.info()["queue"]["items"] == 20, 2)
        service.process.send_signal(signal.SIGTERM)
        until(lambda: service.client.get("/readyz").status_code == 503, 2)
        assert service.infer([1]).status_code == 503
        assert [answer.result(30).json()["outputs"] for answer in answers] == [[n] for n in range(20)]
        assert service.process.wait(30) == 0
        assert not [pid for pid in family if alive(pid)]
        assert not service.run_dir.exists()


def test_killing_serve_itself_leaves_no_process() -> None:
    service = Service("digits", ranks=2).wait_ready()
    try:
        family = descendants(service.process.pid)
        assert len(family) >= 5
        service.process.kill()
        until(lambda: not any(map(alive, family)), 5, "all gone")
    finally:
        service.close()


def test_a_second_service_on_the_same_run_directory_is_refused(digits: Service) -> None:
    second = Service("digits", run_dir=digits.run_dir)
    try:
        assert second.process.wait(30) == 73
        assert str(digits.run_dir) in second.log()
        assert digits.ready()
    finally:
        second.client.close()
        second.log_path.unlink()


def test_the_front_end_is_killed_while_a_step_runs_and_the_group_lives_on() -> None:
    workers = Service(f"{MODELS}:Obedient", verb="workers", ranks=2)
    here = {"port": workers.port, "run_dir": workers.run_dir}
    app = Service("unused", verb="app", **here).wait_ready()
    try:
        pids, epoch = app.pids(), app.group()["epoch"]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            lost = pool.submit(app.infer, list(range(4)), parameters={"sleep": 1})
            until(lambda: app.info()["queue"]["items"] == 4)
            app.process.kill()
            app.process.wait()
            assert isinstance(lost.exception(10), httpx.TransportError)
        app.client.close()
        app = Service("unused", verb="app", **here).wait_ready()
        assert app.outputs(["next"]) == ["next"]
        assert (app.pids(), app.group()["epoch"]) == (pids, epoch)
    finally:
        app.stop()
        app.close()
        workers.stop()
        workers.close()


@pytest.mark.long
def test_sigterm_to_the_workers_alone_finishes_what_they_hold_and_the_rest_waits_for_the_next() -> None:
    workers = Service(f"{MODELS}:Obedient", verb="workers", ranks=2)
    here = {"port": workers.port, "run_dir": workers.run_dir}
    app = Service("unused", verb="app", **here).wait_ready()
    second = None
    try:
        with concurrent.futures.ThreadPoolExecutor(30) as pool:
            answers = [pool.submit(app.outputs, [n], parameters={"sleep": 0.05 + n / 1000}) for n in range(30)]
            until(lambda: app.metric("phalanx_steps_total") >= 3)
            assert workers.stop() == 0
            until(lambda: app.client.get("/readyz").status_code == 503, 2)
            assert app.metric("phalanx_requeued_items_total") == 0
            second = Service(f"{MODELS}:Obedient", verb="workers", ranks=2, **here)
            assert [answer.result(60) for answer in answers] == [[n] for n in range(30)]
    finally:
        app.stop()
        app.close()
        for service in filter(None, (workers, second)):
            service.stop()
            service.close()


@pytest.mark.long
def test_what_is_not_done_at_the_end_of_the_drain_gets_503_rather_than_silence() -> None:
    service = Service(f"{MODELS}:Obedient", ranks=1, drain_timeout=1).wait_ready()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(service.infer, ["slow"], parameters={"sleep": 20})
            until(lambda: service.info()["queue"]["items"] == 1)
            service.process.send_signal(signal.SIGTERM)
            assert answer.result(10).status_code == 503
            assert answer.result().json()["type"] == "urn:phalanx:error:draining"
        assert service.process.wait(20) == 0
        assert not service.run_dir.exists()
    finally:
        service.close()


@pytest.mark.parametrize("size", [300_000, 5_000_000])
def test_a_client_that_hangs_up_after_a_large_body_frees_it(size: int, obedient: Service) -> None:
    body = json.dumps({"inputs": ["x" * size]}).encode()
    head = b"POST /infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        blockers = []
        for n in (1, 2):
            blockers.append(pool.submit(obedient.outputs, ["blocker"], parameters={"sleep": 1.0}))
            until(lambda n=n: obedient.info()["queue"]["items"] == n)
        with socket.create_connection(("127.0.0.1", obedient.port)) as sock:
            sock.sendall(head % len(body))
            until(lambda: obedient.info()["queue"]["bytes"] >= size, 1)
            sock.sendall(body)
            until(lambda: obedient.info()["queue"]["waiting_items"] == 1, 1)
        until(lambda: obedient.info()["queue"]["items"] == 2, 1)
        assert [blocker.result() for blocker in blockers] == [["blocker"]] * 2


def test_clients_that_hang_up_free_their_queued_items(obedient: Service) -> None:
    before = obedient.metric("phalanx_step_items_sum")
    body = json.dumps({"inputs": ["hung up"]}).encode()
    head = b"POST /infer HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        # one step that runs and one that waits on the ranks' side: the rest is queued
        blockers = []
        for n in (1, 2):
            blockers.append(pool.submit(obedient.outputs, ["blocker"], parameters={"sleep": 1.0}))
            until(lambda n=n: obedient.info()["queue"]["items"] == n)
        until(lambda: obedient.info()["queue"]["waiting_items"] == 0)
        sockets = [socket.create_connection(("127.0.0.1", obedient.port)) for _ in range(19)]
        for sock in sockets:
            sock.sendall(head % len(body) + body)
        stays = pool.submit(obedient.outputs, ["stays"])
        until(lambda: obedient.info()["queue"]["waiting_items"] == 20, 1)
        for sock in sockets:
            sock.close()
        until(lambda: obedient.info()["queue"]["waiting_items"] == 1, 1)
        assert [blocker.result() for blocker in blockers] == [["blocker"]] * 2
        assert stays.result() == ["stays"]
    assert obedient.metric("phalanx_step_items_sum") - before <= 2 + 3
