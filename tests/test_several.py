"""Real groups beside each other: load that is shared, deaths that nobody notices, models that are told apart."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from app.client import Client
from tests.service import MODELS, Service, alive, until
from tests.test_faults import Load


def of(model: str) -> str:
    return model if model == "digits" else f"{MODELS}:{model}"


@contextmanager
def together(first: Service, *others: Service) -> Iterator[None]:
    """They share a run directory; the log of each is shown where something fails."""
    services = [first, *others]
    with ExitStack() as stack:
        for service in services:
            stack.callback(service.close)
        try:
            yield
        except BaseException:
            for service in services:
                print(service.log())
            raise


def beside(first: Service, model: str, verb: str = "workers", **settings: object) -> Service:
    return Service(of(model), verb=verb, run_dir=first.run_dir, port=first.port, **settings)


def groups(service: Service) -> dict:
    return service.info()["groups"]


def ran(service: Service) -> dict[str, float]:
    """Items that each group ran."""
    text = service.client.get("/metrics").text
    found = re.findall(r'^phalanx_rank_items_total{group="(.*?)",rank="0"} (\S+)', text, re.M)
    return {group: float(items) for group, items in found}


class Probe:
    """What `/readyz` says, again and again, until the end."""

    def __init__(self, service: Service) -> None:
        self.said: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, args=(str(service.client.base_url),))
        self._thread.start()

    def _ask(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=10) as client:
            while not self._stop.wait(0.02):
                self.said.add(client.get("/readyz").status_code)

    def end(self) -> set[int]:
        self._stop.set()
        self._thread.join()
        return self.said


@pytest.mark.timeout(120)
def test_two_groups_share_the_load_and_one_may_be_killed_without_anybody_noticing() -> None:
    service = Service("digits", ranks=1, log_requests=False)
    second = beside(service, "digits", group="1", ranks=1)
    with together(service, second):
        service.wait_ready()
        until(lambda: len(groups(service)) == 2, 60, "two groups")
        load, probe = Load(service, 4), Probe(service)
        until(lambda: len(ran(service)) == 2 and min(ran(service).values()) > 20, 20, "both run items")
        pid = groups(service)["1"]["ranks"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: service.info()["lost"], 10, "the lost group is named")
        told = service.info()
        assert set(told["lost"]) == {"1"}
        assert told["models"]["Digits"] == {"ready": True, "reason": None, "groups": ["0"]}
        until(lambda: f"rank 0 (pid {pid}) killed by SIGKILL" in service.info()["lost"]["1"]["why"], 5)
        load.more()
        load.end()
        assert probe.end() == {200}
        assert second.stop() == 0
        assert service.stop() == 0
        assert not service.run_dir.exists()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_either_of_two_groups_may_be_stopped_or_killed_again_and_again_under_load() -> None:
    service = Service("digits", ranks=1, step_timeout=2, request_timeout=100, log_requests=False)
    second = beside(service, "digits", group="1", ranks=1, step_timeout=2)
    with together(service, second):
        service.wait_ready()
        until(lambda: len(groups(service)) == 2, 60, "two groups")
        load = Load(service, 8)
        for name, number in (
            ("0", signal.SIGKILL),
            ("1", signal.SIGKILL),
            ("0", signal.SIGSTOP),
            ("1", signal.SIGSTOP),
        ):
            load.more()
            group = groups(service)[name]
            os.kill(group["ranks"][0]["pid"], number)

            def back(name: str = name, epoch: int = group["epoch"]) -> bool:
                return name in (now := groups(service)) and now[name]["epoch"] > epoch

            until(back, 60, f"group {name} is back")
            assert service.info()["lost"] == {}
        load.more()
        load.end()
        assert service.info()["restarts"] == 4
        # the service goes, and the second group stays for the next one
        pid = groups(service)["1"]["ranks"][0]["pid"]
        assert service.stop() == 0
        assert service.run_dir.exists()
        assert alive(pid)
        again = beside(service, "digits", verb="serve", ranks=1)
        with together(again):
            again.wait_ready()
            until(lambda: groups(again).get("1"), 20, "the second group comes again")
            assert groups(again)["1"]["ranks"][0]["pid"] == pid
            assert second.stop() == 0
            assert again.stop() == 0


@pytest.mark.long
@pytest.mark.timeout(240)
def test_two_models_answer_by_name_and_a_front_end_that_starts_anew_says_404_of_neither() -> None:
    zero = Service(of("Double"), verb="workers", ranks=1, model_name="twice")
    one = beside(zero, "Obedient", group="1", ranks=2, model_name="echo")
    app = beside(zero, "unused", verb="app", models="twice,echo", log_requests=False)
    with together(zero, one, app):
        app.wait_ready()
        assert {name: group["model"]["name"] for name, group in groups(app).items()} == {"0": "twice", "1": "echo"}
        assert app.infer([[1, 2, 3]]).status_code == 400
        assert app.client.post("/infer?model=Double", json={"inputs": []}).status_code == 404

        def load(model: str) -> None:
            with Client(str(app.client.base_url), model=model, chunk_items=20) as client:
                for n in range(30):
                    items = [[n, i, 1] for i in range(50)]
                    factor = {"twice": 2, "echo": 1}[model]
                    assert client.infer(items) == [[factor * n, factor * i, factor] for i in range(50)]

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(load, model) for model in ("twice", "echo") * 3]:
                done.result()
        tensor = {"name": "input", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
        answer = app.client.post("/v2/models/twice/infer", json={"inputs": [tensor]})
        assert answer.json()["outputs"][0]["data"] == [2.0, 4.0, 6.0]
        answer = app.client.post("/infer?model=echo", json={"inputs": [1, 2]})
        assert answer.headers["x-phalanx-ranks"] == "1/0*1,1/1*1"

        app.process.kill()
        app.process.wait()
        again = beside(zero, "unused", verb="app", models="twice,echo", log_requests=False)
        with together(again):

            def first(model: str) -> httpx.Response:
                def posted() -> httpx.Response | None:
                    try:
                        return httpx.post(
                            f"{again.client.base_url}/infer?model={model}", json={"inputs": [[1, 2, 3]]}, timeout=30
                        )
                    except httpx.TransportError:
                        return None

                answer = until(posted, 30)
                assert answer is not None
                return answer

            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                twice, echo = pool.map(first, ("twice", "echo"))
            assert twice.json()["outputs"] == [[2.0, 4.0, 6.0]]
            assert echo.json()["outputs"] == [[1, 2, 3]]
            assert again.stop() == 0
            assert zero.stop() == 0
            assert one.stop() == 0


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_group_of_another_model_is_refused_with_the_reason_and_comes_in_when_the_first_has_left() -> None:
    zero = Service(of("Obedient"), verb="workers", ranks=1)
    app = beside(zero, "unused", verb="app")
    with together(zero, app):
        app.wait_ready()
        one = beside(zero, "Double", group="1", ranks=1)
        with together(one):
            until(lambda: app.info()["lost"].get("1"), 60, "the newcomer is refused")
            assert "its model is Double, and group 0 epoch 1 serves Obedient" in app.info()["lost"]["1"]["why"]
            assert app.ready()
            assert app.outputs([1]) == [1]
            until(lambda: "fenced by the front end: its model is Double" in one.log(), 10)
            assert zero.stop() == 0
            until(lambda: groups(app).get("1"), 60, "the newcomer is welcome")
            assert app.outputs([[1, 2, 3]]) == [[2.0, 4.0, 6.0]]
            assert app.info()["lost"] == {}
            assert app.stop() == 0
            assert one.stop() == 0
