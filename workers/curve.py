"""The cluster key and the sockets between hosts that only its holders can use; it knows no message and no group.

The key is a CURVE key pair that all hosts of a cluster share (RFC 26 of the ZeroMQ project): servers and clients prove
to each other that they hold it. libzmq alone lets any client in that knows a server's public key; an authenticator
(RFC 27, ZAP) refuses all but the one.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.utils.monitor
from zmq.auth.thread import ThreadAuthenticator

from workers.errors import StartError

log = logging.getLogger("workers")

HANDSHAKE_MS = 3000  # for a stranger to show the key, or be gone
DOMAIN = "phalanx"
QUIET = 10.0  # seconds between two lines of the same refusal: a client tries several times a second
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class ClusterKey(NamedTuple):
    """A CURVE key pair, each half as 40 characters of Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """Of the file that `create` wrote. StartError where it holds no key."""
        try:
            text = path.read_bytes().strip()
        except OSError as error:
            raise StartError(f"the cluster key {path} cannot be read: {error.strerror}") from None
        if re.fullmatch(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", text) is None:
            raise StartError(f"{path} holds no cluster key, which is 40 characters; `phalanx key FILE` makes one")
        return cls(zmq.curve_public(text), text)

    @classmethod
    def new(cls) -> ClusterKey:
        return cls(*zmq.curve_keypair())

    @classmethod
    def create(cls, path: Path) -> None:
        """Write a new key to a new file that its owner alone can read. StartError where there can be none."""
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(cls.new().secret + b"\n")
        except OSError as error:
            raise StartError(f"no key was made: {path}: {error.strerror}") from None

    def serve(self, server: zmq.Socket[bytes], largest: int) -> None:
        """Before it is bound: `server` takes only holders of the key, while a `Guard` of its context lives.

        A message may have `largest` bytes; that holds for those who have not shown yet that they hold the key, too.
        """
        self._pair(server)
        server.setsockopt(zmq.MAXMSGSIZE, largest)
        server.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        server.curve_server = True
        server.zap_domain = DOMAIN.encode()
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a guard nobody gets in

    def join(self, client: zmq.Socket[bytes]) -> None:
        """Before it is connected: `client` talks only to a server that holds the key."""
        self._pair(client)
        client.curve_serverkey = self.public

    def _pair(self, either: zmq.Socket[bytes]) -> None:
        either.curve_publickey, either.curve_secretkey = self
        either.setsockopt(zmq.IPV6, 1)


class Guard:
    """The authenticator of one ZeroMQ context, in a thread of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: ClusterKey) -> None:
        self._key = key
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        self._authenticator.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the client with this public key may come in; pyzmq asks."""
        return hmac.compare_digest(key, self._key.public)

    def close(self) -> None:
        """Before its context ends."""
        self._authenticator.stop()


class Connections:
    """Whom a server refused, as lines in the log, and when some peer has gone; libzmq does not say from where.

    `monitor` becomes readable with every event; then `read` is to be called.
    """

    def __init__(self, server: zmq.Socket[bytes], name: str) -> None:
        """`name` is what the log calls the server."""
        self.monitor = server.get_monitor_socket(REFUSED | zmq.EVENT_DISCONNECTED)
        self._server = server
        self._name = name
        self._told: dict[str, float] = {}  # when a line was last written (monotonic)

    def read(self) -> bool:
        """Take in what has happened, without waiting; whether some connection closed, if only a refused one."""
        gone = False
        with contextlib.suppress(zmq.Again):
            while True:
                event = zmq.utils.monitor.recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"]
                if event & REFUSED:
                    self._tell(event)
                else:
                    gone = True
        return gone

    def close(self) -> None:
        """Before the server is closed."""
        self._server.disable_monitor()
        self.monitor.close()

    def _tell(self, event: int) -> None:
        now, known = time.monotonic(), event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        why = "its key is not this cluster's" if known else "it does not hold this cluster's key"
        if now >= self._told.get(why, -QUIET) + QUIET:
            self._told[why] = now
            log.warning("%s refused a connection: %s", self._name, why)
