"""How an epoch is killed for the front end, and told what it held; it decides nothing.

Beside the group that is a file in the epoch's directory; to another host it is a message to the launcher, and one that
cannot be delivered is kept until the launcher connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from pathlib import Path

from app.queue import Peer
from workers.wire import Fence, Hello, Message, Watching

DELAY = 0.5  # seconds: ranks that still can end by themselves say better why


class Fencing:
    """What the launcher of a group reads."""

    def __init__(self, run_dir: Path, send: Callable[[Peer, Message], object]) -> None:
        self._run_dir = run_dir
        self._send = send
        self._wanted: dict[Peer, Fence] = {}  # of other hosts, until their launchers say that they have died

    def fence(self, peer: Peer, hello: Hello, why: str) -> None:
        """Have the epoch killed in a moment, whatever state its ranks are in."""
        asyncio.get_running_loop().call_later(DELAY, self._fence, peer, hello, why)

    def note_in_flight(self, peer: Peer, hello: Hello, request_ids: str) -> None:
        """For the post-mortem, which is written within a second of a death."""
        if peer.remote:
            self._send(launcher(peer), Fence(hello.epoch, "", request_ids or "none"))
        else:
            self._write(hello, "in-flight", request_ids or "none")

    def watching(self, peer: Peer, message: Watching) -> None:
        """A launcher has connected."""
        fence = self._wanted.get(rank_0(peer, message.epoch))
        if fence is not None:
            self._send(peer, fence)

    def died(self, peer: Peer) -> None:
        """An epoch, says its launcher."""
        self._wanted.pop(peer, None)

    def _fence(self, peer: Peer, hello: Hello, why: str) -> None:
        if peer.remote:
            self._wanted[peer] = Fence(hello.epoch, why, "")
            self._send(launcher(peer), self._wanted[peer])
        else:
            self._write(hello, "fenced", why)

    def _write(self, hello: Hello, name: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the launcher may have cleared the epoch away already
            (self._run_dir / "epochs" / f"{hello.group}-{hello.epoch}" / name).write_text(text)


def launcher(peer: Peer) -> Peer:
    """Of a rank 0 on another host, `GROUP/EPOCH/TOKEN`."""
    group, _, token = peer.identity.split(b"/")
    return Peer(b"launch/%b/%b" % (group, token), remote=True)


def launches(peer: Peer, group: str) -> bool:
    """Whether that is the launcher of a group."""
    return re.fullmatch(f"launch/{re.escape(group)}/[0-9a-f]{{16}}", peer.identity.decode("latin-1")) is not None


def rank_0(launcher: Peer, epoch: int) -> Peer:
    """Of an epoch that a launcher on another host has."""
    _, group, token = launcher.identity.split(b"/")
    return Peer(b"%b/%d/%b" % (group, epoch, token), remote=True)
