"""One group over several hosts: two of them, each with its network and pid namespace, joined by a cable."""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from app.cli import main
from app.settings import load
from tests.service import MODELS, Service, alive, descendants, free_port, parent, until
from tests.test_faults import Load
from workers.curve import ClusterKey
from workers.errors import SettingsError, StartError
from workers.hosts import Hosts, place

NEEDS = [name for name in ("ip", "unshare") if shutil.which(name) is None]
pytestmark = pytest.mark.timeout(300)


def run(*words: str, **options: object) -> str:
    done = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return str(done.stdout)


class Network:
    """Node 0 is 10.77.0.10 and node 1 is 10.77.0.11, on a cable; another one joins node 0, 10.78.0.10, to this host.

    No bridge: whether it forwards anything is for the firewall of the machine to say.
    """

    def __init__(self) -> None:
        self.tag = f"{os.getpid() % 100000:05d}"
        self.names = [f"phx{self.tag}-{node}" for node in range(2)]
        for name in self.names:
            run("ip", "netns", "add", name)
            etc = Path("/etc/netns", name)  # `ip netns exec` lays it over /etc
            etc.mkdir(parents=True)
            # torch looks up its own name and that of every address it connects to, and would wait for a name server
            known = f"127.0.0.1 localhost {socket.gethostname()}\n"
            etc.joinpath("hosts").write_text(f"{known}::ffff:10.77.0.10 node0\n::ffff:10.77.0.11 node1\n")
            etc.joinpath("resolv.conf").write_text("")
            run("ip", "-n", name, "link", "set", "lo", "up")
        first, second = self.names
        run("ip", "-n", first, "link", "add", "lan0", "type", "veth", "peer", "name", "lan0", "netns", second)
        run("ip", "link", "add", f"ph{self.tag}", "type", "veth", "peer", "name", "up0", "netns", first)
        run("ip", "addr", "add", "10.78.0.1/24", "dev", f"ph{self.tag}")
        run("ip", "link", "set", f"ph{self.tag}", "up")
        for name, device, address in (
            (first, "lan0", "10.77.0.10"),
            (second, "lan0", "10.77.0.11"),
            (first, "up0", "10.78.0.10"),
        ):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")

    def inside(self, node: int) -> list[str]:
        own = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        return ["ip", "netns", "exec", self.names[node], *own]

    def cable(self, node: int, state: str) -> None:
        run("ip", "-n", self.names[node], "link", "set", "lan0", state)

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


class Cluster:
    """Two ranks on each of two hosts; the front end is on the first."""

    def __init__(self, network: Network, model: str, **settings: object) -> None:
        self.network = network
        self.folder = Path(tempfile.mkdtemp(prefix="phx-hosts-", dir="/dev/shm"))
        ClusterKey.create(self.folder / "key")
        self.model = model
        self.settings = {"nnodes": 2, "ranks": 2, "rdzv_endpoint": "10.77.0.10:29500", "host": "0.0.0.0"} | settings
        self.nodes = [self.start(node) for node in range(2)]
        self.front_end = self.nodes[0]

    def start(self, node: int, **settings: object) -> Service:
        given = self.settings | {"node_rank": node, "cluster_key_file": self.folder / "key"} | settings
        verb = "workers" if node else "serve"
        run_dir = Path(tempfile.mkdtemp(prefix=f"node{node}-", dir=self.folder))
        inside = self.network.inside(node)
        return Service(self.model, verb=verb, run_dir=run_dir, inside=inside, address="10.78.0.10", **given)

    def ranks(self, node: int) -> list[int]:
        """Of a node, as this host's pids."""
        found = []
        for pid in descendants(self.nodes[node].process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"workers.rank" in words and b"workers.agent" not in words:
                found.append(pid)
        return found

    def epoch(self) -> int:
        group = self.front_end.group()
        return 0 if group is None else int(group["epoch"])

    def again(self, epoch: int) -> None:
        """Wait for a later epoch to be ready."""
        until(lambda: self.epoch() > epoch and self.front_end.ready(), 90, "the next epoch")

    def close(self) -> None:
        for service in self.nodes:
            print(f"---- {service.run_dir.name}\n{service.log()}")
            service.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if NEEDS or os.geteuid() != 0:
        pytest.skip(f"network namespaces need root and {', '.join(NEEDS) or 'iproute2'} (Debian: apt install iproute2)")
    network = Network()
    try:
        yield network
    finally:
        network.close()


@pytest.fixture(scope="module")
def cluster(network: Network) -> Iterator[Cluster]:
    """The digits on two hosts, for the faults that it survives."""
    cluster = Cluster(network, "digits", step_timeout=5, request_timeout=120)
    try:
        cluster.front_end.wait_ready(120)
        cluster.front_end.client.timeout = 120
        yield cluster
    finally:
        cluster.close()


# ---- a group that works


@pytest.mark.long
def test_ranks_of_both_hosts_share_a_batch_and_answer_in_order(network: Network) -> None:
    cluster = Cluster(network, f"{MODELS}:Double")
    try:
        service = cluster.front_end.wait_ready(120)
        ranks = service.group()["ranks"]  # type: ignore[index]
        assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
        for count in [1, 2, 3, 4, 5, 63, 64, 65, 500]:
            items = [[i, i + 0.5, -i] for i in range(count)]
            answer = service.infer(items)
            assert answer.json()["outputs"] == [[2 * number for number in item] for item in items]
        assert re.fullmatch(r"0\*16,1\*16,2\*16,3\*16", service.infer([[1, 2, 3]] * 64).headers["x-phalanx-ranks"])
        # so long that the front end keeps it in the ring, which the second host does not see
        rows = np.random.default_rng(8).standard_normal((16_000, 3), np.float32)
        file = io.BytesIO()
        np.save(file, rows)
        answer = service.client.post("/infer", content=file.getvalue(), headers={"content-type": "application/x-npy"})
        assert answer.status_code == 200, answer.text
        np.testing.assert_array_equal(np.load(io.BytesIO(answer.content)), 2 * rows)
        assert [node.stop() for node in reversed(cluster.nodes)] == [0, 0]
    finally:
        cluster.close()


@pytest.mark.long
def test_no_request_is_lost_whatever_dies(cluster: Cluster) -> None:
    service = cluster.front_end
    victims: list[tuple[str, Callable[[], int]]] = [
        ("a rank of node 1", lambda: random.Random(1).choice(cluster.ranks(1))),
        ("torchrun of node 1", lambda: parent(cluster.ranks(1)[0])),
        ("rank 0", lambda: min(cluster.ranks(0))),
        ("torchrun of node 0", lambda: parent(cluster.ranks(0)[0])),
    ]
    load = Load(service, 8)
    for what, victim in victims:
        load.more(20)
        epoch, before = cluster.epoch(), cluster.ranks(0) + cluster.ranks(1)
        os.kill(victim(), signal.SIGKILL)
        until(lambda: service.client.get("/readyz").status_code == 503, 10, f"{what} is missed")
        cluster.again(epoch)
        assert not any(alive(pid) for pid in before), what
    load.more(20)
    load.end()
    assert "node 1: rank" in "".join(path.read_text() for path in (service.run_dir / "post-mortem").iterdir())


@pytest.mark.long
def test_a_rank_of_another_host_that_is_stopped_is_replaced(cluster: Cluster) -> None:
    epoch, load = cluster.epoch(), Load(cluster.front_end, 4)
    load.more(10)
    os.kill(cluster.ranks(1)[0], signal.SIGSTOP)
    cluster.again(epoch)
    load.more(10)
    load.end()


@pytest.mark.long
def test_a_host_may_leave_and_come_again_under_load(cluster: Cluster) -> None:
    epoch, load = cluster.epoch(), Load(cluster.front_end, 4)
    load.more(10)
    assert cluster.nodes[1].stop() == 0
    reason = until(lambda: cluster.front_end.client.get("/readyz").json().get("reason"), 30)
    assert reason
    cluster.nodes[1].close()
    cluster.nodes[1] = cluster.start(1)
    cluster.again(epoch)
    load.more(10)
    load.end()


@pytest.mark.long
@pytest.mark.parametrize("how", ["its launcher is killed", "its cable is pulled"])
def test_a_host_that_is_gone_is_missed_at_once_and_waited_for(how: str, cluster: Cluster) -> None:
    epoch, load = cluster.epoch(), Load(cluster.front_end, 4)
    load.more(10)
    ranks = cluster.ranks(1)
    if how == "its cable is pulled":
        cluster.network.cable(1, "down")
    else:
        os.kill(cluster.nodes[1].pid, signal.SIGKILL)
    until(lambda: cluster.front_end.client.get("/readyz").status_code == 503, 10, "the host is missed")
    until(lambda: not any(alive(pid) for pid in ranks), 20, "its ranks end by themselves")
    if how == "its cable is pulled":
        cluster.network.cable(1, "up")
    else:
        cluster.nodes[1].close()
        cluster.nodes[1] = cluster.start(1)
    cluster.again(epoch)
    load.more(10)
    load.end()


# ---- strangers


@pytest.mark.long
def test_a_stranger_is_refused_and_logged_at_every_socket(cluster: Cluster) -> None:
    ClusterKey.create(cluster.folder / "other")
    stranger = cluster.start(1, cluster_key_file=cluster.folder / "other", ranks=1)
    try:
        until(lambda: "it holds another cluster key, or none" in stranger.log(), 30)
        until(lambda: "the launcher of node 0 refused a connection" in cluster.front_end.log(), 30)
    finally:
        stranger.close()
    names, epoch = cluster.network.names, cluster.epoch()
    listening = run("ip", "netns", "exec", names[1], "ss", "-Htlnp")
    inboxes = re.findall(r"10\.77\.0\.11\]?:(\d+) ", listening)
    assert len(inboxes) >= 2, listening
    no_key = (
        "import sys, zmq; s = zmq.Context().socket(zmq.PUSH)\n"
        "[s.connect(f'tcp://10.77.0.11:{port}') for port in sys.argv[1:]]\n"
        "s.send(b'let me in'); s.poll(3000, zmq.POLLOUT)\n"
        "import time; time.sleep(2)"
    )
    subprocess.run(["ip", "netns", "exec", names[0], sys.executable, "-c", no_key, *inboxes], check=False, timeout=30)
    for rank in (2, 3):
        until(lambda rank=rank: f"the inbox of rank {rank} refused a connection" in cluster.nodes[1].log(), 30)
    assert cluster.front_end.infer([cluster.front_end.group()["model"]["example"]]).status_code == 200
    assert cluster.epoch() == epoch


# ---- settings, and a host's own addresses


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"nnodes": 2}, "PHALANX_RDZV_ENDPOINT (--rdzv-endpoint) is unset: expected HOST:PORT of node 0"),
        ({"nnodes": 2}, "PHALANX_CLUSTER_KEY_FILE (--cluster-key-file) is unset: expected a file that `phalanx key"),
        ({"node_rank": 1}, "PHALANX_NODE_RANK (--node-rank) is 1: expected less than PHALANX_NNODES, which is 1"),
        ({"rdzv_endpoint": "10.0.0.1"}, "expected HOST:PORT, such as 10.0.0.1:29500 or [fd00::1]:29500"),
        ({"rdzv_endpoint": "fd00::1:29500"}, "expected HOST:PORT"),
        ({"rdzv_endpoint": "a:70000"}, "expected HOST:PORT"),
        ({"cluster_key_file": Path("/dev/null")}, "/dev/null holds no cluster key"),
    ],
)
def test_what_is_missing_or_wrong_is_named(flags: dict[str, object], fault: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(flags)
    assert fault in str(caught.value)


def test_the_front_end_is_beside_node_0_and_nowhere_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", str(tmp_path / "key")]) == 0
    flags = {"--nnodes": "2", "--node-rank": "1", "--rdzv-endpoint": "a:1", "--cluster-key-file": str(tmp_path / "key")}
    assert main(["serve", *(word for flag in flags.items() for word in flag)]) != 0
    assert "the other hosts run `phalanx workers`" in capsys.readouterr().err


def hosts(**fields: object) -> Hosts:
    given = {"group": "0", "nodes": 2, "node": 1, "host": "127.0.0.1", "port": 29500, "key_file": Path("key")} | fields
    return Hosts(**given)  # type: ignore[arg-type]


def test_a_hosts_address_and_interface_are_those_that_lead_to_node_0_unless_it_is_told_others() -> None:
    assert place(hosts()) == ("127.0.0.1", "lo")
    assert place(hosts(interface="lo")) == ("127.0.0.1", "lo")
    assert place(hosts(host="10.0.0.1", local_address="127.0.0.1")) == ("127.0.0.1", "lo")
    assert place(hosts(host="10.0.0.1", local_address="192.0.2.1", interface="lo")) == ("192.0.2.1", "lo")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"interface": "eth99"}, "'eth99'; those with an address: .*lo"),
        ({"local_address": "192.0.2.1"}, "no interface of this host has the address 192.0.2.1"),
        ({"host": "nowhere.invalid"}, "no way to node 0 at nowhere.invalid:29500"),
    ],
)
def test_an_address_that_cannot_be_is_named(fields: dict[str, object], why: str) -> None:
    with pytest.raises(StartError, match=why):
        place(hosts(**fields))


def test_two_launchers_on_one_host_make_one_group_too(tmp_path: Path) -> None:
    ClusterKey.create(tmp_path / "key")
    several = {
        "nnodes": 2,
        "ranks": 1,
        "rdzv_endpoint": f"127.0.0.1:{free_port()}",
        "cluster_key_file": tmp_path / "key",
    }
    nodes = [Service("digits", **several), Service("digits", verb="workers", node_rank=1, **several)]
    try:
        service = nodes[0].wait_ready()
        epoch = service.group()["epoch"]  # type: ignore[index]
        example = service.group()["model"]["example"]  # type: ignore[index]
        assert service.infer([example] * 8).headers["x-phalanx-ranks"] == "0*4,1*4"
        os.kill(service.pids()[1], signal.SIGKILL)
        assert service.infer([example] * 8).status_code == 200
        assert service.group()["epoch"] > epoch  # type: ignore[index]
        assert "node 1: rank 1" in service.info()["last_death"]
        assert [node.stop() for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            print(node.log())
            node.close()


@pytest.mark.long
def test_a_host_with_another_model_ends_with_the_reason_and_the_group_waits_for_the_right_one(tmp_path: Path) -> None:
    ClusterKey.create(tmp_path / "key")
    endpoint = f"127.0.0.1:{free_port()}"
    several = {"nnodes": 2, "ranks": 1, "rdzv_endpoint": endpoint, "cluster_key_file": tmp_path / "key"}
    nodes = [Service("digits", **several), Service(f"{MODELS}:Double", verb="workers", node_rank=1, **several)]
    try:
        assert nodes[1].process.wait(60) == 78
        assert "name of the model is 'Double' on" in nodes[1].log()
        assert "'Digits' on rank 0's host" in nodes[1].log()
        waits = until(lambda: nodes[0].client.get("/readyz").json().get("reason"), 10)
        assert "node 0 of 2 waits for node 1" in waits
        nodes.append(Service("digits", verb="workers", node_rank=1, **several))
        nodes[0].wait_ready()
    finally:
        for node in nodes:
            print(node.log())
            node.close()
