"""The hosts of a group as one of them sees them: addresses, and what its launcher hears of the others; no messages.

`Alone` is a group on one host; with several, `workers.nodes` has the messages.
"""

from __future__ import annotations

import fcntl
import ipaddress
import secrets
import socket
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from workers.epoch import Death
from workers.errors import SettingsError, StartError

SIOCGIFCONF, IFREQ = 0x8912, 40  # of netdevice(7): the request for all interfaces, and the bytes of one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a group, as one of them sees them; "node" is torchrun's word for a host."""

    group: str
    nodes: int
    node: int  # rank of this one; rank 0 has the front end beside it
    host: str  # of node 0, as all can reach it
    port: int  # at which node 0 waits for the others
    key_file: Path
    interface: str | None = None  # for gloo and NCCL; None: the one that leads to node 0
    local_address: str | None = None  # None: the interface's


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """A front end on another host, that a group works for."""

    host: str
    port: int
    key_file: Path
    token: str = field(default_factory=lambda: secrets.token_hex(8))  # of this launcher, in the names it goes by there

    @property
    def address(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the torchruns of one epoch meet."""

    address: str  # of node 0
    port: int
    local_address: str
    interface: str


class Next(NamedTuple):
    """The epoch that begins."""

    number: int
    meeting: Meeting | None  # None: there is one host


@dataclass(slots=True)
class News:
    """What the other nodes say of the running epoch."""

    leave: bool = False
    ended: Death | None = None  # why it cannot go on


class Nodes(Protocol):
    """The other hosts of a group, as its launcher sees them; nothing here waits but `settle`."""

    @property
    def fds(self) -> tuple[int, ...]:
        """File descriptors that are readable when there may be news."""

    def next(self) -> Next | None:
        """The next epoch, once every node is ready for it. Raises StartError when there is none."""

    def wait(self) -> str:
        """What `next` waits for."""

    def news(self) -> News: ...

    def dying(self) -> None:
        """Tell the others that the ranks here are."""

    def leave(self) -> None:
        """Tell the others that this node has been asked to stop."""

    def settle(self, death: Death | None) -> Death | None:
        """The epoch has ended here: tell so, and return why it did, as far as is known here."""

    def over(self, error: StartError) -> None:
        """Tell the others that there is no further epoch."""

    def close(self) -> None: ...


class Alone:
    """A group on one host."""

    fds: tuple[int, ...] = ()

    def __init__(self, count: Callable[[], int]) -> None:
        self.count = count

    def next(self) -> Next:
        return Next(self.count(), None)

    def wait(self) -> str:
        return ""

    def news(self) -> News:
        return News()

    def dying(self) -> None: ...
    def leave(self) -> None: ...
    def close(self) -> None: ...
    def over(self, error: StartError) -> None: ...

    def settle(self, death: Death | None) -> Death | None:
        return death


def place(hosts: Hosts) -> tuple[str, str]:
    """This host's address and interface, as the other hosts reach it. SettingsError where there are none."""
    own = [*_addresses()]
    if hosts.local_address is not None:
        address = hosts.local_address
    elif hosts.interface is not None:
        address = next((one for name, one in own if name == hosts.interface), "")
        if not address:
            names = ", ".join(sorted({name for name, _ in own}))
            given = f"PHALANX_INTERFACE (--interface) is {hosts.interface!r}"
            raise SettingsError(f"{given}; those with an address: {names}")
    else:
        address, theirs = _toward(hosts.host, hosts.port)
        if hosts.node == 0 and address != theirs:
            where = f"{hosts.host} is no address of this host, which is node 0"
            raise SettingsError(f"PHALANX_RDZV_ENDPOINT (--rdzv-endpoint): {where}")
    interface = hosts.interface or next((name for name, one in own if one == address), "")
    if not interface:
        where = "(PHALANX_LOCAL_ADDR, PHALANX_INTERFACE)"
        raise SettingsError(f"no interface of this host has the address {address} {where}")
    return address, interface


def _toward(host: str, port: int) -> tuple[str, str]:
    """The own address that packets to `host` leave from, and that of `host`; none is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]), str(address[0])
    except OSError as error:
        raise SettingsError(f"no way to node 0 at {host}:{port} (PHALANX_RDZV_ENDPOINT): {error.strerror}") from None


def _addresses() -> Iterator[tuple[str, str]]:
    """Every interface with each of its addresses: netdevice(7) for IPv4, /proc for IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = array("B", bytes(IFREQ * 1024))
        where, size = found.buffer_info()
        request = struct.pack("iP", size, where)
        size = struct.unpack("iP", fcntl.ioctl(any_socket.fileno(), SIOCGIFCONF, request))[0]
    for i in range(0, size, IFREQ):
        entry = found[i : i + IFREQ].tobytes()
        yield entry[:16].partition(b"\0")[0].partition(b":")[0].decode(), socket.inet_ntoa(entry[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            if not (address := ipaddress.IPv6Address(int(number, 16))).is_link_local:
                yield name, str(address)
