"""Deaths under load: no request is lost, none is answered wrongly, and nothing is left behind."""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.service import Service, alive, descendants, samples, serving, until


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


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.timeout(240)
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


def test_an_item_that_kills_its_rank_every_time_fails_alone() -> None:
    with serving("Obedient", ranks=2) as service, concurrent.futures.ThreadPoolExecutor(4) as pool:
        poison = {"do": "exit", "rank": "any", "code": 3}
        answer = pool.submit(service.infer, ["a", poison, "b", "c"])
        until(lambda: service.metric("phalanx_group_deaths_total") >= 1)
        others = [pool.submit(service.outputs, [n]) for n in range(3)]
        body = answer.result(60).json()
        assert body["outputs"] == ["a", None, "b", "c"]
        assert [(error["index"], error["type"]) for error in body["errors"]] == [(1, "poison-item")]
        assert [other.result(60) for other in others] == [[0], [1], [2]]
        assert service.metric("phalanx_group_deaths_total") <= 2 + 2


def test_a_rank_that_hangs_is_felled_at_the_step_deadline_and_its_request_runs_again() -> None:
    with serving("Obedient", ranks=2, step_timeout=2) as service:
        pids = service.pids()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(service.outputs, list(range(8)), parameters={"sleep": 0.5})
            until(lambda: service.info()["queue"]["items"] == 8)
            os.kill(pids[1], signal.SIGSTOP)
            assert answer.result(60) == list(range(8))
        assert not set(pids) & set(service.pids())


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


def test_the_front_end_restarts_and_the_group_keeps_its_epoch_and_its_model() -> None:
    port_and_dir = {}
    workers = Service("digits", verb="workers", ranks=2)
    app = None
    try:
        port_and_dir = {"port": workers.port, "run_dir": workers.run_dir}
        app = Service("digits", verb="app", **port_and_dir).wait_ready()
        pids, epoch = app.pids(), app.group()["epoch"]
        app.process.kill()
        app.process.wait()
        started = time.monotonic()
        app.client.close()
        app = Service("digits", verb="app", **port_and_dir).wait_ready()
        images, labels = samples()
        assert [one["digit"] for one in app.outputs(images)] == labels
        assert (app.pids(), app.group()["epoch"]) == (pids, epoch)
        assert time.monotonic() - started < 30
        assert app.stop() == 0
        assert workers.stop() == 0
        assert not any(map(alive, pids))
    finally:
        if app is not None:
            app.close()
        workers.close()
