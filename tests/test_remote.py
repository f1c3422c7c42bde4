"""Groups of other hosts: over TCP on 127.0.0.1, each side with a run directory of its own."""

from __future__ import annotations

import asyncio
import io
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from app.sound import result_fault
from tests.fake import FakeGroup, groups, info
from tests.service import MODELS, Service, free_port, until
from tests.test_faults import Load
from tests.test_groups import _soon_given_up, alive, anyio_backend, ask, front_end, run_dir  # noqa: F401 - fixtures
from tests.test_groups import until as soon
from workers import wire
from workers.curve import ClusterKey
from workers.wire import Died, Failure, Hello, Leaving, Ping, RankStats, Result, Watching

TOKEN = "0123456789abcdef"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    ClusterKey.create(tmp_path / "key")
    return tmp_path / "key"


# ---- by hand: fakes, and those who hold the key and send what they like


class Remote(FakeGroup):
    """A fake on another host."""

    def __init__(self, port: int, key: Path, *given: object, token: str = TOKEN, **named: object) -> None:
        self.far = port, ClusterKey.read(key), token
        super().__init__(Path(tempfile.mkdtemp(prefix="phx-")), *given, **named)

    def kill(self) -> None:
        super().kill()
        shutil.rmtree(self.run_dir, ignore_errors=True)


class Launcher:
    """Of a fake group: what it says and what it is told."""

    def __init__(self, port: int, key: Path, group: str, token: str = TOKEN) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, f"launch/{group}/{token}".encode())
        ClusterKey.read(key).join(self.socket)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def say(self, message: wire.Message) -> None:
        self.socket.send_multipart(wire.encode(message))

    def told(self) -> wire.Message | None:
        return wire.decode(self.socket.recv_multipart())[0] if self.socket.poll(0) else None

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.mark.anyio
async def test_groups_here_and_elsewhere_share_the_steps_and_long_bodies_reach_both(run_dir: Path, key: Path) -> None:  # noqa: F811
    port = free_port()
    async with front_end(run_dir, queue_listen=f"127.0.0.1:{port}", cluster_key_file=key) as client:
        here, there = FakeGroup(run_dir, "0"), Remote(port, key, "1")
        with groups(here, there):
            await alive(client, "0", "1")
            outputs = (await ask(client, *["x" * 50_000] * 40)).json()["outputs"]
            assert {group for group, _ in outputs} == {"0", "1"}
            assert all(item == "x" * 50_000 for _, item in outputs)
            there.kill()
            await alive(client, "0")
            assert (await ask(client, 1)).json()["outputs"] == [["0", 1]]


@pytest.mark.anyio
async def test_a_fence_waits_for_its_launcher_and_a_death_is_told_in_its_words(run_dir: Path, key: Path) -> None:  # noqa: F811
    port = free_port()
    async with front_end(run_dir, queue_listen=f"127.0.0.1:{port}", cluster_key_file=key) as client:
        here = FakeGroup(run_dir, "0", model=info("A"))
        await alive(client, "0")
        other = Remote(port, key, "1", 7, info("B"))
        with groups(here, other):

            async def refused() -> bool:
                return "1" in (await client.get("/info")).json()["lost"]

            await soon(refused)
            await asyncio.sleep(0.6)  # longer than a fence is held back: nobody was there to take it
            launcher = Launcher(port, key, "1")
            stranger = Launcher(port, key, "1", token="f" * 16)
            try:
                for one in (stranger, launcher):
                    one.say(Watching(wire.WIRE, "1", 7))
                fences = []
                await soon(lambda: fences.append(found) if (found := launcher.told()) else fences)
                assert fences[0].epoch == 7
                assert "its model is B, and group 0 epoch 1 serves A" in fences[0].why
                assert stranger.told() is None
                stranger.say(Died("0", 1, "rank", "not mine to tell"))
                launcher.say(Died("1", 7, "fenced", "group 1 epoch 7 on h died: of a test"))
                launcher.say(Watching(wire.WIRE, "1", 8))
                other.kill()

                async def told() -> bool:
                    return "epoch 7" in (await client.get("/info")).json()["lost"]["1"]["why"]

                await soon(told)
                assert list((await client.get("/info")).json()["groups"]) == ["0"]
            finally:
                launcher.close()
                stranger.close()
            back = Remote(port, key, "1", 8, info("A"))
            with groups(back):
                await alive(client, "0", "1")
            launcher = Launcher(port, key, "1")
            try:
                launcher.say(Died("1", 8, "rank", "group 1 epoch 8 on h died: rank 0 killed by SIGKILL"))

                async def named() -> bool:
                    lost = (await client.get("/info")).json()["lost"]
                    return "1" in lost and lost["1"]["why"] == "group 1 epoch 8 on h died: rank 0 killed by SIGKILL"

                await soon(named)
            finally:
                launcher.close()


@pytest.mark.anyio
async def test_two_hosts_with_one_name_for_their_groups_are_told_apart_and_the_second_is_refused(
    run_dir: Path,  # noqa: F811
    key: Path,
) -> None:
    port = free_port()
    async with front_end(run_dir, queue_listen=f"127.0.0.1:{port}", cluster_key_file=key) as client:
        first = Remote(port, key, "1")
        with groups(first):
            await alive(client, "1")
            second = Remote(port, key, "1", token="f" * 16)
            with groups(second):

                async def refused() -> bool:
                    lost = (await client.get("/metrics")).text
                    return "phalanx_epochs_total 1.0" in lost and (await ask(client, 1)).is_success

                await soon(refused)
            assert first.items
            assert not second.items


def nonsense(seed: int) -> list[bytes]:
    """Frames of a message that is none, or is one of the wrong kind, or counts what is not there."""
    rng = random.Random(seed)
    huge = 2**62
    stats = RankStats(0, 1, 0.0, 0, 0.0)
    result = Result("s", 1, 1, [[1]], [], [[("", ())]], [stats], 0.0)
    model = info("Echo")
    said = Hello(wire.WIRE, "9", 1, 1, model, ["cpu"], ["h"], [1], 0.0)
    replace = msgspec.structs.replace
    made = [
        [rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(4))],
        [
            msgspec.msgpack.encode(
                rng.choice([None, 1, "x", [], ["Hello"], ["Step", 1], {"a": 1}, ["Result", *[huge] * 7]])
            )
        ],
        [*wire.encode(result)[:1], *[b""] * rng.randrange(50)],
        wire.encode(Ping()),
        wire.encode(Leaving(huge)),
        wire.encode(replace(said, world=huge)),
        wire.encode(replace(said, world=-1)),
        wire.encode(replace(said, group="../../x")),
        wire.encode(replace(said, warmup_seconds=float("nan"))),
        wire.encode(replace(said, model=replace(model, example=b"{"))),
        wire.encode(replace(said, model=replace(model, dtype="float128000", shape=(1,)))),
        wire.encode(replace(said, model=replace(model, max_batch_size=huge))),
        wire.encode(Watching(wire.WIRE, "9", huge)),
        wire.encode(Died("0", 1, "rank", "x" * 100_000)),
    ]
    return made[seed % len(made)]


@pytest.mark.anyio
async def test_nonsense_of_a_holder_of_the_key_is_dropped_and_hurts_nobody(run_dir: Path, key: Path) -> None:  # noqa: F811
    port = free_port()
    async with front_end(run_dir, queue_listen=f"127.0.0.1:{port}", cluster_key_file=key) as client:
        here = FakeGroup(run_dir, "0")
        context = zmq.Context()
        sockets = []
        for identity in (b"9/1/" + TOKEN.encode(), b"0/1", b"launch/0/" + TOKEN.encode(), b"x" * 255, None):
            socket = context.socket(zmq.DEALER)
            if identity is not None:
                socket.setsockopt(zmq.IDENTITY, identity)
            ClusterKey.read(key).join(socket)
            socket.connect(f"tcp://127.0.0.1:{port}")
            sockets.append(socket)
        try:
            with groups(here):
                await alive(client, "0")
                for seed in range(280):
                    frames = nonsense(seed)
                    await asyncio.to_thread(sockets[seed % 5].send_multipart, frames or [b""])
                    if seed % 20 == 0:
                        assert (await ask(client, seed)).json()["outputs"] == [["0", seed]]
                sockets[0].send_multipart(wire.encode(Hello(wire.WIRE, "9", 1, 1, info(), ["cpu"], ["h"], [1], 0.0)))
                await alive(client, "0", "9")  # so all before it was read
                assert (await client.get("/readyz")).status_code == 200
                assert (await client.get("/metrics")).status_code == 200
        finally:
            context.destroy(linger=0)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "wrong",
    [
        {"lengths": [[2**62]]},
        {"lengths": [[-1]]},
        {"lengths": [[1], [1]]},
        {"rows": []},
        {"collect_seconds": float("nan")},
        {"stats": [RankStats(2**40, 1, 0.0, 0, 0.0)]},
        {"stats": [RankStats(0, -5, 0.0, 0, 0.0)]},
        {"failures": [wire.Failure(2**40, "model-error", "x")]},
    ],
    ids=str,
)
async def test_a_result_that_cannot_be_is_dropped_and_its_step_runs_elsewhere(
    wrong: dict,
    run_dir: Path,  # noqa: F811
    key: Path,
) -> None:
    """The liar is given up at the step's deadline; here its launcher says at once that it has died."""
    port = free_port()
    async with front_end(run_dir, queue_listen=f"127.0.0.1:{port}", cluster_key_file=key) as client:
        liar = Remote(port, key, "1", lies=wrong)
        with groups(liar):
            await alive(client, "1")
            answer = asyncio.create_task(ask(client, 5))
            await soon(lambda: liar.steps)
            here = FakeGroup(run_dir, "0")
            with groups(here):
                await alive(client, "0", "1")
                liar.kill()
                assert (await answer).json()["outputs"] == [["0", 5]]


# ---- real ones


@contextmanager
def apart(model: str, key: Path, **settings: object) -> Iterator[tuple[Service, Service]]:
    """A front end, and a group of it that shares nothing with it but a port and a key."""
    port = free_port()
    app = Service("unused", verb="app", queue_listen=f"127.0.0.1:{port}", cluster_key_file=key, **settings)
    workers = Service(
        model if model == "digits" else f"{MODELS}:{model}",
        verb="workers",
        queue=f"127.0.0.1:{port}",
        cluster_key_file=key,
        group="far",
        **{"ranks": 2} | {name: value for name, value in settings.items() if name == "step_timeout"},
    )
    try:
        yield app.wait_ready(), workers
        assert workers.stop() == 0
        assert app.stop() == 0
    except BaseException:
        print(app.log())
        print(workers.log())
        raise
    finally:
        app.close()
        workers.close()


def far(service: Service) -> dict | None:
    return service.info()["groups"].get("far")


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_group_of_another_host_answers_and_its_deaths_cost_no_request(key: Path) -> None:
    with apart("digits", key, step_timeout=2, request_timeout=100, log_requests=False) as (app, workers):
        load = Load(app, 4)
        stopped, killed = ("fenced",), ("rank", "peer")
        for ranks, number, kinds in (
            ((1,), signal.SIGKILL, killed),
            ((0,), signal.SIGKILL, killed),
            ((0, 1), signal.SIGSTOP, stopped),
        ):
            load.more()
            group = far(app)
            for rank in ranks:
                os.kill(group["ranks"][rank]["pid"], number)

            def back(epoch: int = group["epoch"]) -> bool:
                return bool((now := far(app)) and now["epoch"] > epoch)

            until(back, 60, "the next epoch")
            told = app.info()["last_death"]
            assert told.startswith(f"group far epoch {group['epoch']} on ")
            report = (workers.run_dir / "post-mortem" / f"far-{group['epoch']}.txt").read_text()
            assert any(f"kind: {kind};" in report for kind in kinds)
            assert "requests in flight: none that the front end told of" not in report
            app.wait_ready()
        load.more()
        load.end()
        assert not (app.run_dir / "post-mortem").exists()
        assert app.info()["restarts"] == 3


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_front_end_that_starts_anew_finds_the_group_with_its_model_and_long_bodies_come_through(key: Path) -> None:
    with apart("Double", key) as (app, workers):
        pids = [rank["pid"] for rank in far(app)["ranks"]]
        rows = np.random.default_rng(0).random((5000, 3), np.float32)
        file = io.BytesIO()
        np.save(file, rows)
        answer = app.client.post("/infer", content=file.getvalue(), headers={"content-type": "application/x-npy"})
        assert answer.headers["x-phalanx-ranks"].startswith("far/0*16,far/1*16")
        assert answer.content.endswith((rows * 2).tobytes())
        settings = {"queue_listen": workers_queue(workers), "cluster_key_file": key}
        app.process.kill()
        app.process.wait()
        again = Service("unused", verb="app", port=app.port, run_dir=app.run_dir, **settings)
        try:
            again.wait_ready()
            assert [rank["pid"] for rank in far(again)["ranks"]] == pids
            assert again.outputs([[1, 2, 3]]) == [[2, 4, 6]]
            assert workers.stop() == 0
            until(lambda: not again.ready(), 5)
            assert again.info()["lost"] == {}
            assert again.stop() == 0
        finally:
            again.client.close()
            again.log_path.unlink(missing_ok=True)
        app.process = again.process


def workers_queue(workers: Service) -> str:
    environment = Path(f"/proc/{workers.process.pid}/environ").read_bytes().split(b"\0")
    return next(value.partition(b"=")[2].decode() for value in environment if value.startswith(b"PHALANX_QUEUE="))


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_wrong_key_and_no_key_are_refused_and_the_front_end_says_so(key: Path, tmp_path: Path) -> None:
    ClusterKey.create(tmp_path / "other")
    port = free_port()
    app = Service("unused", verb="app", queue_listen=f"127.0.0.1:{port}", cluster_key_file=key)
    workers = Service("digits", verb="workers", queue=f"127.0.0.1:{port}", cluster_key_file=tmp_path / "other", ranks=1)
    context = zmq.Context()
    try:
        until(lambda: "ready after" in workers.log(), 60)
        until(lambda: "the queue refused a connection" in app.log(), 10)
        assert "does not hold this host's cluster key (PHALANX_CLUSTER_KEY_FILE)" in workers.log()
        assert app.info()["groups"] == {}
        before = app.log().count("refused a connection")
        naked = context.socket(zmq.DEALER)
        naked.connect(f"tcp://127.0.0.1:{port}")
        until(lambda: app.log().count("refused a connection") > before, 10)
        assert workers.stop() == 0
        assert app.stop() == 0
    except BaseException:
        print(app.log())
        print(workers.log())
        raise
    finally:
        context.destroy(linger=0)
        app.close()
        workers.close()


def test_a_port_for_other_hosts_needs_a_key(tmp_path: Path) -> None:
    service = Service("unused", verb="app", queue_listen="127.0.0.1:1")
    try:
        assert service.process.wait(20) == 2
        assert "PHALANX_CLUSTER_KEY_FILE" in service.log()
        assert "as PHALANX_QUEUE_LISTEN is 127.0.0.1:1" in service.log()
    finally:
        service.close()


@pytest.mark.long
def test_a_port_that_is_taken_is_named(key: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        service = Service("unused", verb="app", queue_listen=f"127.0.0.1:{port}", cluster_key_file=key)
        try:
            assert service.process.wait(20) == 1
            assert f"127.0.0.1:{port} cannot be listened on (PHALANX_QUEUE_LISTEN)" in service.log()
        finally:
            service.close()


@pytest.mark.parametrize(
    ("kind", "taken"), [("invalid-item", True), ("invalid-parameters", True), ("unauthorized", False), ("", False)]
)
def test_a_group_says_of_an_item_only_what_items_have(kind: str, taken: bool) -> None:
    stats = [RankStats(0, 1, 0.001, 1, 0.0)]
    result = Result("s", 1, 1, [[4]], [Failure(0, kind, "why")], [[]], stats, 0.0)
    assert (result_fault(result, [b"null"], 1, "json", 1) is None) == taken
