"""The cluster key, on real sockets: who holds it comes in, nobody else does, and the log says so."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.service import until
from workers.curve import ClusterKey, Connections, Guard
from workers.errors import StartError


@pytest.fixture
def key(tmp_path: Path) -> ClusterKey:
    ClusterKey.create(tmp_path / "key")
    return ClusterKey.read(tmp_path / "key")


class Server:
    def __init__(self, key: ClusterKey, guarded: bool = True) -> None:
        self.context: zmq.Context = zmq.Context()
        self.guard = Guard(self.context, key) if guarded else None
        self.socket = self.context.socket(zmq.PULL)
        key.serve(self.socket, 1 << 16)
        self.connections = Connections(self.socket, "the server")
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.clients: zmq.Context = zmq.Context()
        self.made: list[zmq.Socket] = []

    def close(self) -> None:
        if self.guard is not None:
            self.guard.close()
        self.connections.close()
        self.context.destroy(linger=0)
        self.clients.destroy(linger=0)

    def client(self) -> zmq.Socket:
        made = self.clients.socket(zmq.PUSH)
        self.made.append(made)
        made.setsockopt(zmq.RECONNECT_IVL, 20)
        return made

    def send(self, client: zmq.Socket, text: bytes) -> None:
        client.connect(f"tcp://127.0.0.1:{self.port}")
        client.send(text)

    def has_refused(self, log: pytest.LogCaptureFixture, why: str) -> bool:
        self.connections.read()
        return why in log.text


@pytest.fixture
def server(key: ClusterKey) -> Iterator[Server]:
    made = Server(key)
    yield made
    made.close()


def test_a_holder_of_the_key_is_heard_and_its_end_is_seen(server: Server, key: ClusterKey) -> None:
    client = server.client()
    key.join(client)
    server.send(client, b"hello")
    assert server.socket.poll(5000)
    assert server.socket.recv() == b"hello"
    client.close()
    until(server.connections.read)


@pytest.mark.parametrize("stranger", ["another key", "no key", "the public half alone"])
def test_a_stranger_is_refused_and_logged(
    stranger: str, server: Server, key: ClusterKey, caplog: pytest.LogCaptureFixture
) -> None:
    client = server.client()
    other = ClusterKey(*zmq.curve_keypair())
    why = "does not hold this cluster's key"
    if stranger == "another key":
        other.join(client)
    elif stranger == "the public half alone":
        client.curve_publickey, client.curve_secretkey = other
        client.curve_serverkey = key.public
        why = "is not this cluster's"
    with caplog.at_level(logging.WARNING, "workers"):
        server.send(client, b"let me in")
        until(lambda: server.has_refused(caplog, why), 10)
    assert not server.socket.poll(100)


def test_a_server_without_a_guard_lets_nobody_in(key: ClusterKey) -> None:
    server = Server(key, guarded=False)
    client = server.client()
    key.join(client)
    server.send(client, b"hello")
    assert not server.socket.poll(500)
    server.close()


def test_a_client_does_not_talk_to_a_server_without_the_key(key: ClusterKey) -> None:
    context: zmq.Context = zmq.Context()
    impostor = context.socket(zmq.PULL)
    port = impostor.bind_to_random_port("tcp://127.0.0.1")
    client = context.socket(zmq.PUSH)
    key.join(client)
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send(b"a secret")
    assert not impostor.poll(500)
    context.destroy(linger=0)


def test_a_refusal_that_goes_on_is_one_line(server: Server, key: ClusterKey, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "workers"):
        server.send(server.client(), b"let me in")
        until(lambda: server.has_refused(caplog, "does not hold"), 10)
        for _ in range(20):
            server.socket.poll(20)
            server.connections.read()
    assert len(caplog.records) == 1


def test_a_key_is_for_its_owner_alone_and_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    ClusterKey.create(path)
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(StartError, match="exists"):
        ClusterKey.create(path)
    assert path.read_text() == text
    with pytest.raises(StartError, match="No such file"):
        ClusterKey.create(tmp_path / "nowhere" / "key")


@pytest.mark.parametrize("text", ["", "short", "x" * 41, "ä" * 40, "has a blank in it                       "])
def test_a_file_that_holds_no_key_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(StartError, match=f"{path} holds no cluster key"):
        ClusterKey.read(path)
    path.unlink()
    with pytest.raises(StartError, match="cannot be read: No such file"):
        ClusterKey.read(path)


def test_a_stranger_cannot_make_a_server_hold_more_than_a_message_may_have(server: Server) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stranger:
        stranger.sendall(greeting)
        assert stranger.recv(64)
        stranger.sendall(b"\x06" + (1 << 40).to_bytes(8, "big"))  # the length of a command
        until(lambda: has_closed(stranger), 10)


def has_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(65536)
    except ConnectionError:
        return True
