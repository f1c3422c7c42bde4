"""The launchers of several hosts among themselves: real sockets on this host, and no ranks."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tests.service import free_port, until
from workers import nodes
from workers.curve import ClusterKey, Guard
from workers.epoch import NODE, Death, Restarts
from workers.errors import ModelLoadError, StartError
from workers.hosts import Hosts, Next
from workers.nodes import Follower, Leader

KILLED = Death("rank", "rank 3 (pid 7) killed by SIGKILL", 5.0)
ECHO = Death("exception", "RuntimeError: connection closed by peer (exception, rank 0)", 5.0)


class Launchers:
    """One for each of `count` nodes."""

    def __init__(self, folder: Path, count: int) -> None:
        ClusterKey.create(folder / "key")
        self.hosts = {
            "group": "0",
            "nodes": count,
            "host": "127.0.0.1",
            "port": free_port(),
            "key_file": folder / "key",
        }
        self.counted = 0
        self.leader = Leader(Hosts(node=0, **self.hosts), self.count)  # type: ignore[arg-type]
        self.followers = [self.follow(node) for node in range(1, count)]

    def count(self) -> int:
        self.counted += 1
        return self.counted

    def follow(self, node: int, **changed: object) -> Follower:
        return Follower(Hosts(node=node, **self.hosts | changed))  # type: ignore[arg-type]

    def begin(self) -> list[Next]:
        """Everyone's next epoch."""
        everyone = [self.leader, *self.followers]
        begun: list[Next | None] = [None] * len(everyone)

        def all_begun() -> bool:
            for i, one in enumerate(everyone):
                begun[i] = begun[i] or one.next()
            return None not in begun

        until(all_begun, 10)
        return [one for one in begun if one is not None]

    def close(self) -> None:
        for follower in self.followers:
            follower.close()
        self.leader.close()


Make = Callable[[int], Launchers]


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Make]:
    made: list[Launchers] = []

    def launchers(count: int) -> Launchers:
        made.append(Launchers(tmp_path, count))
        return made[-1]

    yield launchers
    for one in made:
        one.close()


def test_all_begin_the_same_epoch_at_the_same_place_and_none_before_the_last_has_come(launchers: Make) -> None:
    group = launchers(3)
    late = group.followers.pop()
    until(lambda: (group.followers[0].next(), group.leader.next(), group.leader.wait())[2].endswith("for node 2"), 10)
    assert group.counted == 0
    assert late.wait().startswith("node 2 of 3 waits for ")
    group.followers.append(late)
    begun = group.begin()
    assert {one.number for one in begun} == {1}
    assert len({(one.meeting.address, one.meeting.port) for one in begun if one.meeting}) == 1


@pytest.mark.parametrize("first", [0, 1, 2])
def test_when_the_ranks_of_one_die_all_others_hear_of_it(first: int, launchers: Make) -> None:
    group = launchers(3)
    group.begin()
    everyone = [group.leader, *group.followers]
    everyone[first].dying()
    for other in everyone:
        if other is not everyone[first]:
            until(lambda: [one.news() for one in everyone] and other.news().ended, 10)  # noqa: B023


def test_the_cause_goes_before_its_echo_and_the_next_epoch_waits_for_all(launchers: Make) -> None:
    group = launchers(2)
    group.begin()
    [follower] = group.followers
    follower.dying()
    assert follower.settle(KILLED) == KILLED
    death = group.leader.settle(ECHO)
    assert death == Death("rank", f"node 1: {KILLED.text}", 5.0)
    assert {one.number for one in group.begin()} == {2}


def test_a_node_whose_model_cannot_be_loaded_ends_and_the_others_wait_for_the_next(launchers: Make) -> None:
    group = launchers(2)
    group.begin()
    [follower] = group.followers
    follower.settle(Death("model", "there is no file x.py (model, rank 1)", None))
    assert follower.next() is None  # it says that it is here, as long as it has not heard that it is to end
    death = group.leader.settle(Death("told", "the ranks of node 1 died", None))
    assert death == Death(NODE, "node 1: there is no file x.py (model, rank 1)", None)
    assert Restarts(allowed=0).after(death) == 0.0
    with pytest.raises(ModelLoadError, match=r"node 1: there is no file x\.py"):
        until(lambda: group.leader.next() or follower.next(), 10)
    group.followers.pop().close()
    assert group.leader.next() is None
    assert group.counted == 1
    group.followers.append(group.follow(1))
    assert {one.number for one in group.begin()} == {2}


def test_of_two_causes_the_leaders_own_is_told(launchers: Make) -> None:
    group = launchers(2)
    group.begin()
    group.followers[0].settle(KILLED)
    assert (
        group.leader.settle(Death("rank", "rank 0 (pid 5) exited with 3", 5.0)).text == "rank 0 (pid 5) exited with 3"
    )  # type: ignore[union-attr]


def test_an_epoch_that_died_before_a_node_had_begun_it_ends_there_too(launchers: Make) -> None:
    group = launchers(2)
    [follower] = group.followers
    until(lambda: (follower.next(), group.leader.next())[1], 10)
    group.leader.dying()
    begun = until(follower.next, 10)
    assert begun.number == 1
    assert until(lambda: follower.news().ended, 10).kind == "told"


def test_whoever_is_asked_to_stop_all_leave_in_order(launchers: Make) -> None:
    group = launchers(3)
    group.begin()
    group.followers[1].leave()
    for one in (group.leader, group.followers[0]):
        until(lambda: one.news().leave, 10)  # noqa: B023
    assert group.leader.news().ended is None
    assert [one.settle(None) for one in [*group.followers, group.leader]] == [None, None, None]


def test_a_node_that_goes_is_lost_and_may_come_again(launchers: Make) -> None:
    group = launchers(2)
    group.begin()
    group.followers.pop().close()
    ended = until(lambda: group.leader.news().ended, 10)
    assert (ended.kind, ended.text) == ("lost", "node 1 cannot be reached")
    assert group.leader.settle(ended) == ended
    group.followers.append(group.follow(1))
    assert {one.number for one in group.begin()} == {2}


class Wire:
    """A TCP connection through this, of which one end can be cut without the other one's knowledge."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._here: list[socket.socket] = []
        self._there: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._server.accept()
                there = socket.create_connection(("127.0.0.1", self._to))
                self._here.append(here)
                self._there.append(there)
                for source, sink in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def cut(self) -> None:
        for one in self._here:
            one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        for one in [*self._here, *self._there]:
            one.close()


def test_a_node_whose_old_connection_seems_to_live_is_known_again_on_its_new_one(launchers: Make) -> None:
    group = launchers(2)
    group.followers.pop().close()
    wire = Wire(int(str(group.hosts["port"])))
    group.followers.append(group.follow(1, port=wire.port))
    group.begin()
    [follower] = group.followers
    wire.cut()
    ended = until(lambda: follower.news().ended, 10)
    assert ended.kind == "lost"
    follower.settle(ended)
    ended = until(lambda: (follower.next(), group.leader.news().ended)[1], 10)
    assert ended.kind == "lost"
    started = time.monotonic()
    group.leader.settle(ended)
    assert time.monotonic() - started < 5
    assert {one.number for one in group.begin()} == {2}
    wire.close()


def test_a_start_that_is_lost_on_the_way_is_said_again(launchers: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "AGAIN", 0.1)
    group = launchers(2)
    [follower] = group.followers
    begun = until(lambda: (follower.next(), group.leader.next())[1], 10)
    until(lambda: follower._start, 10) if follower._start else until(lambda: (follower._take(), follower._start)[1], 10)
    follower._start, follower._idle, follower._last = None, True, ("", 0)  # as if it had never come
    assert until(lambda: (group.leader.news(), follower.next())[1], 10).number == begun.number
    assert group.leader.news().ended is None


def test_a_node_that_has_begun_and_says_it_is_idle_has_lost_the_epoch(launchers: Make) -> None:
    group = launchers(2)
    group.begin()
    [follower] = group.followers
    follower._idle, follower._said = True, False
    ended = until(lambda: (follower.next(), group.leader.news().ended)[1], 10)
    assert (ended.kind, ended.text) == ("lost", "node 1 had lost the connection")


def test_a_leader_that_goes_is_lost_to_the_nodes_which_wait_for_the_next(launchers: Make) -> None:
    group = launchers(2)
    group.begin()
    [follower] = group.followers
    group.leader.close()
    ended = until(lambda: follower.news().ended, 10)
    assert (ended.kind, ended.text) == ("lost", "the connection to node 0 closed")
    follower.settle(ended)
    group.leader = Leader(Hosts(node=0, **group.hosts), group.count)  # type: ignore[arg-type]
    assert {one.number for one in group.begin()} == {2}


@pytest.mark.parametrize(
    ("error", "kind"), [(ModelLoadError("no such file"), ModelLoadError), (StartError("x"), StartError)]
)
def test_what_ends_node_0_for_good_ends_the_others_with_its_code(
    error: StartError, kind: type[StartError], launchers: Make
) -> None:
    group = launchers(2)
    group.begin()
    group.leader.over(error)
    [follower] = group.followers

    def over() -> StartError | None:
        try:
            follower.next()
        except StartError as raised:
            return raised
        return None

    raised = until(over, 10)
    assert type(raised) is kind
    assert str(raised) == f"node 0 begins no further epoch: {error}"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"node": 1}, "says it is node 1, which is here already"),
        ({"node": 1, "group": "1"}, "has ranks of group '1', node 0 those of group '0'"),
        ({"nodes": 3}, "says it is node 2 of 3, node 0 has 2 nodes"),
        ({}, "says it is node 2 of 2, node 0 has 2 nodes"),
    ],
)
def test_a_node_that_cannot_be_is_refused_on_both_sides(
    changed: dict[str, int], why: str, launchers: Make, caplog: pytest.LogCaptureFixture
) -> None:
    group = launchers(2)
    group.begin()
    with caplog.at_level(logging.INFO, "workers"):
        wrong = group.follow(**{"node": 2} | changed)  # type: ignore[arg-type]
        until(lambda: (wrong.next(), group.leader.news())[0] or "node 0 refused this node" in caplog.text, 10)
    wrong.close()
    assert caplog.text.count(why) == 2
    assert group.leader.news().ended is None


def test_another_version_of_the_protocol_is_refused(
    launchers: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = launchers(2)
    [follower] = group.followers
    until(lambda: follower.next() or follower._connected, 10)
    monkeypatch.setattr(nodes, "PROTOCOL", 2)
    with caplog.at_level(logging.ERROR, "workers"):
        until(lambda: group.leader.next() or "speaks version 1, node 0 version 2" in caplog.text, 10)
    assert group.counted == 0


def test_what_cannot_be_read_is_dropped(launchers: Make, caplog: pytest.LogCaptureFixture) -> None:
    group = launchers(2)
    group.begin()
    context: zmq.Context = zmq.Context()
    holder = context.socket(zmq.DEALER)
    ClusterKey.read(Path(str(group.hosts["key_file"]))).join(holder)
    holder.connect(f"tcp://127.0.0.1:{group.hosts['port']}")
    with caplog.at_level(logging.ERROR, "workers"):
        for frames in ([b"\xff"], [b""], [b"", b""], [b"\x92\xa4Here\x01"]):
            holder.send_multipart(frames)
        until(lambda: group.leader.news() and caplog.text.count("cannot be read") == 4, 10)
    assert group.leader.news().ended is None
    holder.close(linger=0)
    context.term()


def test_a_wrong_key_is_named_on_both_sides(launchers: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    group = launchers(2)
    ClusterKey.create(tmp_path / "other")
    with caplog.at_level(logging.WARNING, "workers"):
        stranger = group.follow(1, key_file=tmp_path / "other")
        said = "does not talk to this node: it holds another cluster key, or none"
        until(lambda: stranger.next() or said in caplog.text, 10)
        until(lambda: "refused a connection" in caplog.text or group.leader.next(), 10)
    stranger.close()


def test_an_endpoint_in_use_is_named(launchers: Make) -> None:
    group = launchers(2)
    with pytest.raises(
        StartError, match=rf"127.0.0.1:{group.hosts['port']} cannot be listened on: Address already in use"
    ):
        Leader(Hosts(node=0, **group.hosts), group.count)  # type: ignore[arg-type]


def test_a_node_0_without_the_key_is_not_talked_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ClusterKey.create(tmp_path / "key")
    context: zmq.Context = zmq.Context()
    other = ClusterKey.new()
    guard = Guard(context, other)
    impostor = context.socket(zmq.ROUTER)
    other.serve(impostor, 1 << 16)
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    follower = Follower(Hosts(group="0", nodes=2, node=1, host="127.0.0.1", port=port, key_file=tmp_path / "key"))
    with caplog.at_level(logging.ERROR, "workers"):
        until(lambda: follower.next() or "does not talk to this node" in caplog.text, 10)
    assert not impostor.poll(0)
    follower.close()
    guard.close()
    impostor.close(linger=0)
    context.term()
