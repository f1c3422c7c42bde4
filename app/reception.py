"""Which groups that say HELLO get steps, and what becomes of the others; it sends no step and holds no request."""

from __future__ import annotations

import logging
import re
import time

from app.catalog import Catalog
from app.fencing import Fencing, launches, rank_0
from app.lost import TEXT, Lost
from app.queue import Peer
from app.sound import NAME, hello_fault
from workers import wire
from workers.wire import Died, Hello, Watching

log = logging.getLogger("app")


class Reception:
    """Refuses groups, for ever, with the reason in the log, in `/info` and in the epoch's post-mortem."""

    def __init__(self, catalog: Catalog, lost: Lost, fencing: Fencing, beside: str | None = None) -> None:
        """`beside` is the group that says which model is served, where none is listed; others wait for it."""
        self._beside = beside
        self._early: dict[Peer, Hello] = {}
        self._catalog = catalog
        self._lost = lost
        self._fencing = fencing
        self._over: dict[Peer, str] = {}  # epochs that get no step any more, and why

    def admits(self, peer: Peer, hello: Hello) -> bool:
        """Whether it gets steps; where not, it is fenced, unless it speaks another language."""
        if (fault := hello_fault(peer, hello)) is not None:
            log.error("a HELLO from %r is dropped: %s", peer.identity, fault)
            return False
        if hello.wire != wire.WIRE:
            self._refuse(hello, f"it speaks wire version {hello.wire}, this front end {wire.WIRE}")
            return False
        if self._beside is not None and self._catalog.open and (peer.remote or hello.group != self._beside):
            log.info("group %s is here, and waits for group %s: its model is served", hello.group, self._beside)
            self._early[peer] = hello
            return False
        known = self._catalog.groups.get(hello.group)
        if known is not None and known.peer == peer:
            return True
        if peer not in self._over:
            why = self._catalog.refusal(hello, time.monotonic())
            if known is not None and not known.missing and known.peer.place != peer.place:
                there = f"another group {hello.group} lives, on {known.hello.hosts[0]}"
                why = f"{there}; PHALANX_GROUP gives this one a name of its own"
                log.error("group %s of %s is refused: %s", hello.group, hello.hosts[0], why)
            elif why is not None:
                self._refuse(hello, why)
            else:
                return True
            self._over[peer] = why
        self._fencing.fence(peer, hello, self._over[peer])
        return False

    def early(self) -> list[tuple[Peer, Hello]]:
        """Those who came before it was known which model is served, and may say HELLO again once it is."""
        early, self._early = self._early, {}
        return [*early.items()]

    def is_over(self, peer: Peer) -> None:
        """An epoch that has died, was superseded or has left."""
        self._over[peer] = "its epoch was given up"

    def told(self, peer: Peer, message: Watching | Died) -> Peer | None:
        """By a launcher on another host: the rank 0 of an epoch that has died, if it says so of its own group."""
        if not peer.remote or not re.fullmatch(NAME, message.group) or not launches(peer, message.group):
            log.error("%r spoke of group %r: dropped", peer.identity, message.group[:40])
            return None
        if isinstance(message, Watching):
            log.info("the launcher of group %s on another host is there, with epoch %d", message.group, message.epoch)
            self._fencing.watching(peer, message)
            return None
        log.error("%s", " ".join(message.text[:TEXT].split()))
        self._lost.tell(message)
        ended = rank_0(peer, message.epoch)
        self._fencing.died(ended)
        return ended

    def _refuse(self, hello: Hello, why: str) -> None:
        log.error("group %s epoch %d is refused: %s", hello.group, hello.epoch, why)
        self._lost.refuse(hello, why)
