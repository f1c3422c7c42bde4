"""The messages between the launchers of one group on several hosts; it opens no socket, see `workers.nodes`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

PROTOCOL = 1  # raised with every change that the other side could misread


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


class Here(_Message, frozen=True, array_like=True, tag=True):
    """A node to node 0: nothing runs here, and the next epoch may begin."""

    protocol: int
    group: str
    nodes: int
    node: int
    host: str
    last: tuple[str, int]  # session and number of the latest epoch that began here


class Refused(_Message, frozen=True, array_like=True, tag=True):
    """The answer to a Here that cannot be taken."""

    text: str


class Start(_Message, frozen=True, array_like=True, tag=True):
    """Node 0 to all: begin this epoch; torchrun's store is at this port of node 0."""

    session: str  # one life of node 0's launcher: another may count the same numbers again
    epoch: int
    port: int


class Dying(_Message, frozen=True, array_like=True, tag=True):
    """Either way: the ranks here are dying."""

    epoch: int


class Leave(_Message, frozen=True, array_like=True, tag=True):
    """Either way: the epoch is to end in order, for a node has been asked to stop."""

    epoch: int


class Ended(_Message, frozen=True, array_like=True, tag=True):
    """A node to node 0: nothing of the epoch is left here. An orderly end has no kind."""

    epoch: int
    kind: str
    text: str
    ready_for: float | None


class Over(_Message, frozen=True, array_like=True, tag=True):
    """Node 0 to all: there will be no further epoch, and why."""

    exit_code: int
    text: str


class Ping(_Message, frozen=True, array_like=True, tag=True):
    """Node 0 to a node, to learn whether it can be reached; it has no answer."""


Message: TypeAlias = Here | Refused | Start | Dying | Leave | Ended | Over | Ping
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
