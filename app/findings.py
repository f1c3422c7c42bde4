"""What the facts of a host mean for a service: a level, a sentence and a remedy for each; it reads nothing itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from app.host import Filesystem, Patience

MIB, GIB = 1 << 20, 1 << 30
NONE_LEFT_OVER = 15.0  # seconds over the drain that a stop may take: see STOP_GRACE in the README
SHM = 1 * GIB  # what NCCL's manual gives a container
SEGMENT = 10 * 10**6  # bytes of one of NCCL's segments in /dev/shm, of which a rank may have two: one a neighbour
STARVED = 8 * MIB  # free on a tmpfs: below it a ring cannot even begin
SUPERVISORS, RANK = 600 * MIB, 250 * MIB  # host memory measured with `digits`: all but the ranks, and each of these
TASKS, RANK_TASKS = 40, 40  # processes and threads: all but the ranks, and each of these without its OpenMP threads
TAKEN = 0.1  # of a device's memory: a CUDA context of our own takes less
SLOW_NAME = 0.5  # seconds
SLOW = 1e9  # bytes a second: PCIe has several times that, in every path that NCCL may take


class Finding(NamedTuple):
    level: Literal["ok", "warn", "fail"]
    topic: str
    text: str  # what was found
    remedy: str = ""  # of what is not ok


class Gather(NamedTuple):
    """One kind of all_gather, as measured."""

    backend: str
    bytes: int  # of each rank
    seconds: float


class Device(NamedTuple):
    """Of a rank; bytes."""

    name: str
    free: int
    total: int


class Torch(NamedTuple):
    """What torch says of GPUs."""

    cuda: str | None  # that it was built for
    nccl: str | None
    seen: int  # GPUs
    why: str  # it sees none


def size(count: float) -> str:
    """Bytes as people write them."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count / unit < 1000 else f"{count / unit:.0f} {name}"
    return f"{count:.0f} B"


def many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def hosts(nodes: int, node: int, address: str, interface: str) -> Finding:
    text = f"node {node} of {nodes}, which the others reach at {address} on {interface}"
    if ipaddress.ip_address(address).is_loopback:
        return Finding("warn", "hosts", text, "that is this host's alone: give an address of all (PHALANX_LOCAL_ADDR)")
    return Finding("ok", "hosts", text)


def name(address: str, found: str | None, seconds: float) -> Finding:
    """Of a host: torch looks it up at every connection, from both ends."""
    text = f"{address} is {found}" if found else f"{address} has no name"
    if seconds > SLOW_NAME:
        remedy = "give it one in DNS or /etc/hosts, on every host: a start looks it up several times"
        return Finding("warn", "name", f"{text}, and to find that took {seconds:.1f} s", remedy)
    return Finding("ok", "name", text)


def node_0(where: str, fault: str | None) -> Finding:
    if fault is None:
        return Finding("ok", "node 0", f"{where} answers")
    remedy = "this node will wait for it: start it, or let its port through the firewall"
    return Finding("warn", "node 0", f"{where} does not answer: {fault}", remedy)


def front_end(where: str, fault: str | None) -> Finding:
    if fault is None:
        return Finding("ok", "front end", f"{where} answers")
    remedy = "start it with PHALANX_QUEUE_LISTEN, or let its port through the firewall"
    return Finding("warn", "front end", f"{where} does not answer: {fault}", remedy)


def cores(count: int, ranks: int, threads: int) -> Finding:
    text = f"{many(count, 'core')} for {many(ranks, 'rank')} of {many(threads, 'thread')} each, and the front end"
    if ranks > count:
        return Finding("warn", "cores", text, f"ranks that share a core wait for each other: --ranks {count}")
    if ranks * threads > count:
        return Finding("warn", "cores", text, f"unset OMP_NUM_THREADS, or set it to {max(1, count // ranks)}")
    return Finding("ok", "cores", text)


def memory(available: float, ranks: int, queue: int, ring: int) -> Finding:
    """Bytes."""
    need = SUPERVISORS + ranks * RANK + queue + ring
    text = f"{size(available)} available; about {size(need)} wanted with a full queue, and the model's own"
    if available < need:
        return Finding("warn", "memory", text, "allow more (mem_limit), or lower PHALANX_QUEUE_BYTES or the ranks")
    return Finding("ok", "memory", text)


def tasks(room: float, ranks: int, threads: int) -> Finding:
    need = TASKS + ranks * (RANK_TASKS + threads)
    if room == float("inf"):
        return Finding("ok", "tasks", f"no limit on processes and threads; about {need} wanted")
    text = f"{room:.0f} more processes and threads allowed; about {need} wanted"
    if room < need:
        return Finding("warn", "tasks", text, f"raise pids_limit (compose) or TasksMax (systemd) by {need - room:.0f}")
    return Finding("ok", "tasks", text)


def open_files(allowed: float, need: int, connections: int) -> Finding:
    if allowed < need:
        return Finding(
            "warn",
            "open files",
            f"{allowed:.0f} allowed; {connections} connections want {need}",
            f"ulimit -Hn {need}, ulimits: nofile (compose) or LimitNOFILE (systemd); or lower PHALANX_MAX_CONNECTIONS",
        )
    shown = "unlimited" if allowed == float("inf") else f"{allowed:.0f} allowed"
    return Finding("ok", "open files", f"{shown}; {connections} connections want {need}")


def locked_memory(allowed: float, on_gpus: bool, ranks: int) -> Finding:
    text = "unlimited" if allowed == float("inf") else f"{size(allowed)} may be locked"
    if not on_gpus:
        return Finding("ok", "memlock", f"{text}; only ranks on GPUs want more")
    if ranks > 1 and allowed != float("inf"):
        remedy = "ulimit -l unlimited, ulimits: memlock: -1 (compose) or LimitMEMLOCK=infinity (systemd)"
        return Finding("warn", "memlock", f"{text}; NCCL wants no limit", remedy)
    return Finding("ok", "memlock", text)


def shared_memory(found: Filesystem, ring: int, on_gpus: bool, ranks: int) -> Finding:
    """/dev/shm; `ring`: bytes that the run directory will want of it."""
    text = f"{size(found.free)} of {size(found.size)} free"
    if ring:
        text += f", of which the ring may take {size(ring)}"
    remedy = "shm_size: 2gb (compose), --shm-size 2g (docker), an emptyDir of medium Memory (Kubernetes)"
    if not on_gpus or ranks == 1:
        return Finding("ok", "/dev/shm", f"{text}; only several ranks on GPUs want more")
    free = found.free - ring
    if free < (need := 2 * ranks * SEGMENT):
        return Finding("fail", "/dev/shm", f"{text}; NCCL may take {size(need)} for {ranks} ranks", remedy)
    if free < SHM:
        return Finding("warn", "/dev/shm", f"{text}; NCCL's manual says {size(SHM)}", remedy)
    return Finding("ok", "/dev/shm", text)


def run_directory(path: Path, found: Filesystem, ring: int) -> Finding:
    """One that the service can use; bytes of the ring."""
    text = f"{path} is usable, {size(found.free)} free"
    elsewhere = "give one on a tmpfs (PHALANX_RUN_DIR)"
    if found.free < STARVED:
        return Finding("fail", "run directory", text, f"free some space, or {elsewhere}")
    if found.free < ring:
        text += f"; the ring may take {size(ring)}, and long bodies go through the socket once it is full"
        return Finding("warn", "run directory", text, f"lower PHALANX_RING_BYTES, make it larger, or {elsewhere}")
    if found.kind not in ("tmpfs", "ramfs"):
        kind = f"on {found.kind}" if found.kind else "not on a tmpfs, as far as can be told"
        return Finding("warn", "run directory", f"{text}; it is {kind}: long bodies would go to a disk", elsewhere)
    return Finding("ok", "run directory", text)


def stop(need: float, known: Patience) -> Finding:
    """`need`: seconds that a stop may take."""
    text = f"a stop may take {need:g} s"
    if known.seconds is not None and known.seconds > need:
        return Finding("ok", "stop", f"{text}, and {known.who} gives {known.seconds:g} s")
    if known.seconds is not None:
        remedy = f"give it more than {need:g} s, or lower PHALANX_DRAIN_TIMEOUT"
        return Finding("warn", "stop", f"{text}, but {known.who} gives {known.seconds:g} s", remedy)
    if known.who:
        remedy = f"see that {known.remedy} is more than {need:g} s"
        return Finding("warn", "stop", f"{text}; how long {known.who} gives cannot be told from in here", remedy)
    return Finding("ok", "stop", f"{text}: whatever stops the service must wait longer before it kills")


def gpus(torch: Torch, device: str, ranks: int, named: int, driver: str | None) -> Finding:
    """`named`: how many GPUs CUDA_VISIBLE_DEVICES or /dev has; `device`: the setting."""
    on_cpu = f"{many(ranks, 'rank')} on the CPU"
    if device == "cpu":
        unused = f"; {many(named, 'GPU')} not used" if named else ""
        return Finding("ok", "GPUs", f"{on_cpu}, as PHALANX_DEVICE says{unused}")
    if torch.seen == 0 and named == 0 and device == "auto":
        return Finding("ok", "GPUs", f"none: {on_cpu}")
    if torch.seen == 0:
        there = f"{many(named, 'GPU')} in /dev or CUDA_VISIBLE_DEVICES" if named else "PHALANX_DEVICE=cuda"
        return Finding("fail", "GPUs", f"{there}, but torch sees none: {torch.why}", _remedy(torch, named, driver))
    text = f"{many(ranks, 'rank')} on {many(torch.seen, 'GPU')}, torch for CUDA {torch.cuda}, driver {driver}"
    if ranks > torch.seen:
        return Finding("fail", "GPUs", text, f"every rank needs one of its own: --ranks {torch.seen}, or auto")
    if ranks < torch.seen:
        return Finding("warn", "GPUs", f"{text}: {torch.seen - ranks} not used", f"--ranks {torch.seen}, or auto")
    return Finding("ok", "GPUs", text)


def _remedy(torch: Torch, named: int, driver: str | None) -> str:
    if torch.cuda is None:
        cure = "install a torch that is built for CUDA"
    elif "too old" in torch.why:
        cure = f"update the driver ({driver}), or install a torch for an older CUDA than {torch.cuda}"
    elif driver is None:
        cure = "install the NVIDIA driver; in a container: --gpus all, and the NVIDIA container toolkit on the host"
    elif named == 0:
        cure = "let the GPUs be seen: CUDA_VISIBLE_DEVICES, --gpus all in a container"
    else:
        cure = "see what nvidia-smi says of them; CUDA_VISIBLE_DEVICES must name some that there are"
    return f"{cure}; or PHALANX_DEVICE=cpu"


def device_memory(devices: Sequence[Device]) -> Finding | None:
    """None where there are no GPUs."""
    on_gpus = [(i, device) for i, device in enumerate(devices) if device.total]
    if not on_gpus:
        return None
    taken = [
        f"{size(one.total - one.free)} of rank {i}'s {size(one.total)}"
        for i, one in on_gpus
        if one.total - one.free > TAKEN * one.total
    ]
    if taken:
        remedy = "nvidia-smi says which processes have it: end them, or give other GPUs (CUDA_VISIBLE_DEVICES)"
        return Finding("warn", "GPU memory", f"{', '.join(taken)} taken by other processes", remedy)
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    return Finding("ok", "GPU memory", f"{size(min(one.free for _, one in on_gpus))} free on each at least ({names})")


def gathered(gathers: Sequence[Gather], ranks: int, nccl: str | None) -> Finding:
    """all_gathers that went well.

    Bandwidth is the bus bandwidth of nccl-tests, in GB/s of 10^9: S/t · (n-1)/n, where S are the bytes that each of n
    ranks has at the end. It compares with what a link can do in one direction, however many ranks there are.
    """
    what = ", ".join(f"{one.backend} {size(one.bytes)} {_time(one.seconds)}" for one in gathers)
    last = gathers[-1]
    if ranks == 1:
        return Finding("ok", "all_gather", f"1 rank: {what}")
    speed = (ranks - 1) * last.bytes / last.seconds
    text = f"{ranks} ranks, a rank sends: {what}, which is {speed / 1e9:.2g} GB/s of bus bandwidth"
    if last.backend == "nccl":
        text += f" (NCCL {nccl})"
        if speed < SLOW:
            remedy = "see nvidia-smi topo -m, and NCCL_P2P_DISABLE, NCCL_P2P_LEVEL; NCCL_DEBUG=INFO says its paths"
            return Finding("warn", "all_gather", text, remedy)
    return Finding("ok", "all_gather", text)


def not_gathered(text: str, on_gpus: bool) -> Finding:
    """`text`: how the ranks ended."""
    if "wrong bytes" in text:
        remedy = (
            "do not serve on this host before its memory, devices and links have been tested (dmesg, nvidia-smi -q)"
        )
    elif "killed by" in text:
        remedy = "dmesg and what the ranks printed say more; is there memory enough for all?"
    elif on_gpus:
        remedy = "NCCL_DEBUG=INFO says where it stands; a hang: NCCL_P2P_DISABLE=1, and PCIe ACS or the IOMMU off; "
        remedy += "an interface: unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
    else:
        remedy = "unset GLOO_SOCKET_IFNAME, or give it an interface that is up (ip link); is lo up?"
    return Finding("fail", "all_gather", text, remedy)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
