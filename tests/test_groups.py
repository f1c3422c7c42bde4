"""Several groups and several models behind one front end: who gets what, and what becomes of it when a group ends.

The groups are fakes in threads (`tests.fake`), so that each test says what its groups do, to the step.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app import dispatcher
from app.catalog import Catalog
from app.groups import Group
from app.main import create_app
from app.queue import Peer
from app.settings import Settings
from tests.fake import FakeGroup, groups, info
from workers import wire
from workers.errors import NoSuchModel, UnnamedModel
from workers.wire import Hello, ModelInfo

SECONDS = 5.0


@asynccontextmanager
async def front_end(run_dir: Path, beside: str | None = None, **settings: object) -> AsyncIterator[httpx.AsyncClient]:
    """A front end of its own, on this event loop."""
    app = create_app(Settings(run_dir=run_dir, log_requests=False, **settings), beside=beside)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        yield client


async def until(what: Callable[[], Any]) -> None:
    """`what` is a condition, or makes a coroutine that is one."""
    end = time.monotonic() + SECONDS
    while not (await found if inspect.isawaitable(found := what()) else found):
        assert time.monotonic() < end, inspect.getsource(what)
        await asyncio.sleep(0.005)


async def alive(client: httpx.AsyncClient, *names: str) -> None:
    """Wait until these groups, and no other, take steps."""

    async def are() -> bool:
        return sorted((await client.get("/info")).json()["groups"]) == sorted(names)

    await until(are)


async def queued(client: httpx.AsyncClient, items: int) -> None:
    async def are() -> bool:
        return (await client.get("/info")).json()["queue"]["items"] == items

    await until(are)


async def ask(
    client: httpx.AsyncClient, *items: object, model: str | None = None, timeout: float = 60
) -> httpx.Response:
    params = {} if model is None else {"model": model}
    headers = {"x-request-timeout": f"{timeout}"}
    return await client.post("/infer", json={"inputs": items}, params=params, headers=headers)


@pytest.fixture(autouse=True)
def _soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MISSING", 0.2)


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")  # 0700


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# ---- who may serve what: decisions


def hello(group: str = "0", epoch: int = 1, model: ModelInfo | None = None) -> Hello:
    return Hello(wire.WIRE, group, epoch, 1, model or info("A"), ["cpu"], ["here"], [1], 0.0)


def catalog(*listed: str) -> Catalog:
    return Catalog(listed, 0.0, patience=30.0, now=0.0)


def come(models: Catalog, said: Hello, now: float = 0.0) -> Group:
    assert models.refusal(said, now) is None
    if (old := models.groups.get(said.group)) is not None:
        models.lose(old, now)
    group = Group(Peer(f"{said.group}/{said.epoch}".encode()), said)
    models.welcome(group)
    return group


def test_one_model_is_whichever_the_first_group_brings() -> None:
    models = catalog()
    assert models.find(None) is models.find("anything")
    come(models, hello("0"))
    come(models, hello("1"))
    assert sorted(models.find("A").groups) == ["0", "1"]
    assert models.find(None) is models.find("A")
    with pytest.raises(NoSuchModel, match="no model 'B'; A is served here"):
        models.find("B")


def test_a_group_of_another_model_is_refused_as_long_as_the_present_one_is_served_or_may_be_back() -> None:
    models = catalog()
    first = come(models, hello("0"))
    other = hello("1", model=info("B"))
    assert "group 0 epoch 1 serves A; PHALANX_MODELS=A,B would serve both" in str(models.refusal(other, 1.0))
    models.lose(first, 10.0)
    assert "requests wait for A" in str(models.refusal(other, 39.0))  # its launcher starts it anew
    assert models.refusal(other, 41.0) is None  # it does not
    come(models, other, 41.0)
    assert models.find(None).name == "B"
    assert "serves B" in str(models.refusal(hello("0", 2), 42.0))


def test_the_same_group_may_bring_another_model_and_so_may_another_once_it_has_left() -> None:
    models = catalog()
    come(models, hello("0"))
    edited = come(models, hello("0", 2, info("B")))
    assert models.find(None).info is edited.hello.model
    edited.leaving = True
    models.lose(edited, 1.0)
    come(models, hello("1", 1, info("C")), 1.0)
    assert models.find(None).name == "C"


def test_models_of_one_name_must_be_one_but_for_the_size_of_a_step() -> None:
    models = catalog()
    old = come(models, hello("0", model=info("A", dtype="float32", shape=(3,))))
    come(models, hello("1", model=info("A", dtype="float32", shape=(3,), max_batch_size=1)))
    assert models.find("A").info is old.hello.model  # what is known of its results stays known
    other = hello("2", model=info("A", dtype="int64", shape=(4,)))
    assert "its A has another dtype and shape, not that of group 0" in str(models.refusal(other, 0.0))
    models.lose(models.groups["0"], 0.0)
    assert "not that of group 1" in str(models.refusal(other, 0.0))
    models.lose(models.groups["1"], 0.0)
    come(models, other)  # it heals by itself
    assert models.find("A").info is other.model


def test_of_listed_models_each_has_its_groups_and_no_other_is_served() -> None:
    models = catalog("A", "B")
    with pytest.raises(UnnamedModel, match="A, B are served here"):
        models.find(None)
    with pytest.raises(NoSuchModel, match="no model 'C'; A, B are served here"):
        models.find("C")
    assert models.find("B").groups == {}  # it will come
    come(models, hello("1", model=info("B")))
    assert list(models.find("B").groups) == ["1"]
    assert models.find("A").groups == {}
    assert "its model is C, and PHALANX_MODELS lists A, B" in str(models.refusal(hello("2", model=info("C")), 0.0))
    come(models, hello("1", 2))  # which changes its model
    assert list(models.find("A").groups) == ["1"]
    assert models.find("B").groups == {}


# ---- two groups of one model


@pytest.mark.anyio
async def test_steps_go_to_whichever_group_is_free_and_the_answer_says_whose_rank_it_was(run_dir: Path) -> None:
    async with front_end(run_dir) as client:
        zero, one = FakeGroup(run_dir, "0"), FakeGroup(run_dir, "one")
        with groups(zero, one):
            await alive(client, "0", "one")
            zero.hold.set()
            one.hold.set()
            held = asyncio.create_task(ask(client, "held"))
            await until(lambda: zero.holds or one.holds)
            busy, idle, name = (zero, one, "one/0") if zero.holds else (one, zero, "0")
            idle.hold.clear()
            for n in range(5):  # none waits behind a step, beside an idle group
                assert (await ask(client, n)).headers["x-phalanx-ranks"] == f"{name}*1"
            assert not held.done()
            busy.hold.clear()
            assert (await held).json()["outputs"] == [[busy.name, "held"]]
            assert {(await held).headers["x-phalanx-ranks"], f"{name}*1"} == {"0*1", "one/0*1"}


@pytest.mark.anyio
async def test_a_request_is_shared_by_the_idle_groups_whether_one_could_take_it_or_not(run_dir: Path) -> None:
    async with front_end(run_dir) as client:
        zero, one = FakeGroup(run_dir, "0"), FakeGroup(run_dir, "1")
        with groups(zero, one):
            await alive(client, "0", "1")
            for n in range(2, 5):  # a canary makes its group busy for a moment
                answers = [await ask(client, *range(n)) for _ in range(5)]
                assert all([item for _, item in answer.json()["outputs"]] == list(range(n)) for answer in answers)
                sizes = {answer.headers["x-phalanx-ranks"] for answer in answers}
                assert sizes & {f"0*{n - n // 2},1/0*{n // 2}", f"1/0*{n - n // 2},0*{n // 2}"}, sizes
            outputs = (await ask(client, *range(40))).json()["outputs"]
            assert [item for _, item in outputs] == list(range(40))
            assert {group for group, _ in outputs} == {"0", "1"}
            assert 'phalanx_rank_items_total{group="0",rank="0"}' in (text := (await client.get("/metrics")).text)
            assert 'phalanx_rank_items_total{group="1",rank="0"}' in text


@pytest.mark.anyio
async def test_what_a_group_held_runs_on_the_other_one_at_once_and_the_lost_one_is_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MISSING", 1.0)
    async with front_end(run_dir, group_wait=0.2) as client:
        zero, one = FakeGroup(run_dir, "0"), FakeGroup(run_dir, "1")
        with groups(zero, one):
            await alive(client, "0", "1")
            for group in (zero, one):
                group.hold.set()
            held = [asyncio.create_task(ask(client, n)) for n in range(8)]
            await until(lambda: zero.holds and one.holds)
            zero.kill()
            one.hold.clear()
            answers = [(await answer).json()["outputs"] for answer in held]
            assert answers == [[["1", n]] for n in range(8)]
            assert set((await client.get("/info")).json()["groups"]) == {"0", "1"}  # it could still have come back
            assert await shown_up(client) == {'{group="0",rank="0"}': "0.0", '{group="1",rank="0"}': "1.0"}
            await alive(client, "1")
            assert (await client.get("/readyz")).status_code == 200
            told = (await client.get("/info")).json()
            assert told["ready"]
            assert told["models"] == {"Echo": {"ready": True, "reason": None, "groups": ["1"]}}
            assert list(told["lost"]) == ["0"]
            assert told["lost"]["0"]["why"] == "group 0 epoch 1: its connection closed"
            again = FakeGroup(run_dir, "0", 2)
            with groups(again):
                await alive(client, "0", "1")
                told = (await client.get("/info")).json()
                assert (told["lost"], told["restarts"]) == ({}, 1)


@pytest.mark.anyio
async def test_poison_fells_each_group_once_and_then_one_alone_while_the_other_serves(run_dir: Path) -> None:
    async with front_end(run_dir) as client:
        living = {name: FakeGroup(run_dir, name) for name in "01"}
        born = list(living.values())
        with groups(*born):
            await alive(client, *living)
            answer = asyncio.create_task(ask(client, 1, 2, "poison", 4, 5, 6, 7))  # four for one, three for the other
            seen: list[tuple[float, str]] = []  # two may die between two looks
            while not answer.done():
                for name, group in living.items():
                    if group.dead.is_set():
                        seen.append((group.died, name))
                        if len(seen) > 2:  # the other one is there for everybody else
                            other = await ask(client, "fine")
                            assert other.json()["outputs"][0][0] != name
                        living[name] = FakeGroup(run_dir, name, group.epoch + 1)
                        born.append(living[name])
                await asyncio.sleep(0.01)
            body = answer.result().json()
            assert [error["type"] for error in body["errors"]] == ["poison-item"]
            assert [one and one[1] for one in body["outputs"]] == [1, 2, None, 4, 5, 6, 7]
            deaths = [name for _, name in sorted(seen)]
            assert len(deaths) == 4  # as it was, as it was, halved, alone
            assert set(deaths[:2]) == {"0", "1"}
            assert deaths[1:] == [deaths[1]] * 3
            for group in born:
                group.kill()


@pytest.mark.anyio
async def test_suspects_do_not_wait_for_a_group_that_does_not_come_back(run_dir: Path) -> None:
    async with front_end(run_dir, group_wait=0.3) as client:
        first, second = FakeGroup(run_dir, "0"), FakeGroup(run_dir, "1")
        with groups(first, second):
            await alive(client, "0", "1")
            answer = asyncio.create_task(ask(client, 1, 2, "poison", 4))
            await until(lambda: first.dead.is_set() and second.dead.is_set())
            for epoch in range(2, 5):
                third = FakeGroup(run_dir, "2", epoch)
                with groups(third):
                    await until(lambda third=third: third.dead.is_set() or answer.done())
                    if epoch == 4:
                        body = (await answer).json()
            assert [one and one[1] for one in body["outputs"]] == [1, 2, None, 4]


# ---- several models


@pytest.mark.anyio
async def test_a_request_gets_the_model_that_it_names_or_is_told_which_there_are(run_dir: Path) -> None:
    async with front_end(run_dir, models="A, B") as client:
        a, b = FakeGroup(run_dir, "0", model=info("A")), FakeGroup(run_dir, "1", model=info("B"))
        with groups(a, b):
            await alive(client, "0", "1")
            for model, group in (("A", "0"), ("B", "1"), ("A", "0")):
                assert (await ask(client, 1, model=model)).json()["outputs"] == [[group, 1]]
            unnamed = await ask(client, 1)
            assert (unnamed.status_code, unnamed.json()["type"]) == (400, "urn:phalanx:error:unnamed-model")
            assert "A, B are served here" in unnamed.json()["detail"]
            twice = await client.post("/infer?model=A&model=B", json={"inputs": [1]})
            assert twice.status_code == 400
            unknown = await ask(client, 1, model="C")
            assert (unknown.status_code, unknown.json()["type"]) == (404, "urn:phalanx:error:no-such-model")
            assert (await client.post("/infer?x=y&model=%42", json={"inputs": [1]})).json()["outputs"] == [["1", 1]]
            assert (await client.get("/readyz")).json() == {"status": "ready"}
            b.kill()
            await alive(client, "0")
            ready = (await client.get("/readyz")).json()
            assert ready["reason"] == "model B: no worker group; the last one: group 1 epoch 1: its connection closed"
            assert (await client.get("/readyz?model=A")).status_code == 200
            assert (await client.get("/readyz?model=B")).status_code == 503
            assert (await client.get("/readyz?model=C")).status_code == 404
            assert (await client.get("/v2/models/A/ready")).json() == {"name": "A", "ready": True}
            assert (await client.get("/v2/models/B/ready")).status_code == 503
            assert (await client.get("/v2/models/C/ready")).status_code == 404
            assert (await client.get("/v2/health/ready")).status_code == 503


@pytest.mark.anyio
async def test_a_named_model_whose_group_has_not_come_is_waited_for_and_never_404(run_dir: Path) -> None:
    async with front_end(run_dir, models="A,B", group_wait=1.0) as client:
        waiting = asyncio.create_task(ask(client, 1, model="B"))
        tensor = {"name": "input", "shape": [1], "datatype": "INT64", "data": [1]}
        other = asyncio.create_task(client.post("/v2/models/B/infer", json={"inputs": [tensor]}, timeout=30))
        a = FakeGroup(run_dir, "0", model=info("A"))
        with groups(a):
            await alive(client, "0")
            assert not waiting.done()
            assert not other.done()
            assert (await client.get("/v2/models/B")).status_code == 503
            b = FakeGroup(run_dir, "1", model=info("B"))
            with groups(b):
                assert (await waiting).json()["outputs"] == [["1", 1]]
                await until(lambda: len(b.items) == 2)
                other.cancel()
            await alive(client, "0")

            async def given_up() -> bool:
                return (await ask(client, 1, model="B", timeout=0.1)).status_code == 503

            await until(given_up)
            late = await ask(client, 1, model="B")
            assert "no worker group for 1 s; the last one: group 1 epoch 1" in late.json()["detail"]


@pytest.mark.anyio
async def test_a_refused_newcomer_is_fenced_and_named_and_comes_in_when_the_old_one_has_gone(run_dir: Path) -> None:
    async with front_end(run_dir, group_wait=0.2) as client:
        old = FakeGroup(run_dir, "0", model=info("A"))
        with groups(old):
            await alive(client, "0")
            new = FakeGroup(run_dir, "1", model=info("B"))
            with groups(new):
                await until(lambda: new.fenced)
                assert "its model is B, and group 0 epoch 1 serves A" in new.fenced
                told = (await client.get("/info")).json()
                assert list(told["groups"]) == ["0"]
                assert "group 1 epoch 1 was refused: its model is B" in told["lost"]["1"]["why"]
                assert (await client.get("/readyz")).status_code == 200
                assert (await ask(client, 1, model="A")).json()["outputs"] == [["0", 1]]
                assert (await ask(client, 1, model="B")).status_code == 404
            await asyncio.to_thread(old.leave)
        await alive(client)
        last = FakeGroup(run_dir, "1", 2, info("B"))
        with groups(last):
            assert (await ask(client, 1)).json()["outputs"] == [["1", 1]]
            assert (await client.get("/info")).json()["lost"] == {}


@pytest.mark.anyio
async def test_nobody_gets_the_answer_of_a_model_that_took_the_place_of_the_one_he_named(run_dir: Path) -> None:
    async with front_end(run_dir) as client:
        old = FakeGroup(run_dir, "0", model=info("A"))
        with groups(old):
            await alive(client, "0")
            old.hold.set()
            named, unnamed = (asyncio.create_task(ask(client, 1, model=model)) for model in ("A", None))
            await queued(client, 2)
        new = FakeGroup(run_dir, "0", 2, info("B"))
        with groups(new):
            assert (await named).status_code == 404
            assert "no model 'A'; B is served here" in (await named).json()["detail"]
            assert (await unnamed).json()["outputs"] == [["0", 1]]


async def shown_up(client: httpx.AsyncClient) -> dict[str, str]:
    """By rank, what the metrics say of it."""
    lines = [line for line in (await client.get("/metrics")).text.splitlines() if line.startswith("phalanx_rank_up{")]
    return dict(line.removeprefix("phalanx_rank_up").split(" ") for line in lines)  # type: ignore[misc]


@pytest.mark.anyio
async def test_a_group_that_left_beside_another_raises_no_alarm_and_the_last_one_does(run_dir: Path) -> None:
    async with front_end(run_dir) as client:
        zero, one = FakeGroup(run_dir, "0"), FakeGroup(run_dir, "1")
        with groups(zero, one):
            await alive(client, "0", "1")
            assert len(await shown_up(client)) == 2
            await asyncio.to_thread(one.leave)
            await alive(client, "0")
            assert await shown_up(client) == {'{group="0",rank="0"}': "1.0"}
            await asyncio.to_thread(zero.leave)
            await alive(client)
            assert await shown_up(client) == {'{group="0",rank="0"}': "0.0"}


@pytest.mark.anyio
async def test_the_group_that_is_started_with_the_front_end_says_which_model_is_served(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "app")
    async with front_end(run_dir, beside="0") as client:
        stranger, same = FakeGroup(run_dir, "1", model=info("B")), FakeGroup(run_dir, "2", model=info("A"))
        with groups(stranger, same):
            await until(lambda: caplog.text.count("is here, and waits for group 0") == 2)
            assert (await client.get("/info")).json()["groups"] == {}
            assert (await client.get("/readyz")).status_code == 503
            answer = asyncio.create_task(ask(client, 1))
            own = FakeGroup(run_dir, "0", model=info("A"))
            with groups(own):
                await alive(client, "0", "2")
                assert (await answer).json()["outputs"][0][1] == 1
                assert not stranger.items
                await until(lambda: stranger.fenced)
                assert "its model is B, and group" in stranger.fenced
