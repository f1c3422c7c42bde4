"""`phalanx doctor`: what each fact of a host comes to, and real runs that find what is wrong with one."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app import doctor, findings, host
from app.findings import GIB, MIB, Device, Finding, Gather, Torch
from app.host import Filesystem, Patience
from tests.service import MODELS, ROOT, Service, free_port
from tests.test_cli import phalanx
from workers import launch, probe
from workers.errors import GroupError, RunDirectoryError

UNLIMITED = float("inf")
CUDA = Torch("12.8", "2.27.3", 2, "")
CPU_BUILD = Torch(None, None, 0, "Torch not compiled with CUDA enabled")
OLD_DRIVER = Torch("12.8", "2.27.3", 0, "The NVIDIA driver on your system is too old (found version 11040).")
NO_DRIVER = Torch("12.8", "2.27.3", 0, "Found no NVIDIA driver on your system.")


@pytest.mark.parametrize(
    ("finding", "level", "said"),
    [
        (findings.cores(8, 4, 2), "ok", "8 cores for 4 ranks of 2 threads each"),
        (findings.cores(2, 4, 1), "warn", "--ranks 2"),
        (findings.cores(8, 4, 8), "warn", "unset OMP_NUM_THREADS, or set it to 2"),
        (findings.memory(8 * GIB, 2, 512 * MIB, 256 * MIB), "ok", "8 GiB available; about 1.82 GiB wanted"),
        (findings.memory(1 * GIB, 2, 512 * MIB, 256 * MIB), "warn", "lower PHALANX_QUEUE_BYTES or the ranks"),
        (findings.tasks(UNLIMITED, 2, 1), "ok", "no limit"),
        (findings.tasks(4096, 2, 1), "ok", "4096 more"),
        (findings.tasks(100, 2, 1), "warn", "raise pids_limit (compose) or TasksMax (systemd) by 22"),
        (findings.open_files(UNLIMITED, 2304, 1024), "ok", "unlimited"),
        (findings.open_files(2304, 2304, 1024), "ok", "2304 allowed"),
        (findings.open_files(1024, 2304, 1024), "warn", "1024 connections want 2304"),
        (findings.locked_memory(64 << 10, False, 8), "ok", "64 KiB may be locked"),
        (findings.locked_memory(64 << 10, True, 1), "ok", "64 KiB"),
        (findings.locked_memory(UNLIMITED, True, 8), "ok", "unlimited"),
        (findings.locked_memory(64 << 10, True, 8), "warn", "memlock: -1"),
        (findings.shared_memory(Filesystem("tmpfs", 64 * MIB, 64 * MIB), 0, False, 8), "ok", "64 MiB of 64 MiB free"),
        (findings.shared_memory(Filesystem("tmpfs", 64 * MIB, 64 * MIB), 0, True, 1), "ok", "only several ranks"),
        (findings.shared_memory(Filesystem("tmpfs", 64 * MIB, 64 * MIB), 0, True, 2), "warn", "shm_size: 2gb"),
        (findings.shared_memory(Filesystem("tmpfs", 64 * MIB, 64 * MIB), 0, True, 4), "fail", "76.3 MiB for 4 ranks"),
        (findings.shared_memory(Filesystem("tmpfs", 2 * GIB, 2 * GIB), 0, True, 8), "ok", "2 GiB of 2 GiB free"),
        (findings.shared_memory(Filesystem("tmpfs", 2 * GIB, GIB), 256 * MIB, True, 8), "warn", "the ring may take"),
        (findings.run_directory(Path("/r"), Filesystem("tmpfs", GIB, GIB), 256 * MIB), "ok", "/r is usable"),
        (findings.run_directory(Path("/r"), Filesystem("tmpfs", GIB, MIB), 256 * MIB), "fail", "free some space"),
        (findings.run_directory(Path("/r"), Filesystem("tmpfs", GIB, 64 * MIB), 256 * MIB), "warn", "RING_BYTES"),
        (findings.run_directory(Path("/r"), Filesystem("ext4", GIB, GIB), 256 * MIB), "warn", "it is on ext4"),
        (findings.run_directory(Path("/r"), Filesystem("", GIB, GIB), 256 * MIB), "warn", "as far as can be told"),
        (findings.hosts(2, 1, "10.0.0.2", "eth0"), "ok", "node 1 of 2, which the others reach at 10.0.0.2 on eth0"),
        (findings.hosts(2, 0, "127.0.1.1", "lo"), "warn", "PHALANX_LOCAL_ADDR"),
        (findings.name("10.0.0.2", "gpu2", 0.01), "ok", "10.0.0.2 is gpu2"),
        (findings.name("10.0.0.2", None, 0.01), "ok", "10.0.0.2 has no name"),
        (findings.name("10.0.0.2", None, 8.0), "warn", "to find that took 8.0 s; give it one in DNS"),
        (findings.node_0("10.0.0.1:29500", None), "ok", "10.0.0.1:29500 answers"),
        (findings.node_0("10.0.0.1:29500", "Connection refused"), "warn", "does not answer: Connection refused; this"),
        (findings.front_end("10.0.0.1:29400", None), "ok", "10.0.0.1:29400 answers"),
        (findings.front_end("10.0.0.1:29400", "timed out"), "warn", "does not answer: timed out; start it with"),
        (findings.stop(40, Patience("")), "ok", "a stop may take 40 s: whatever stops the service must wait longer"),
        (findings.stop(40, Patience("STOP_GRACE", 45)), "ok", "STOP_GRACE gives 45 s"),
        (findings.stop(40, Patience("STOP_GRACE", 40)), "warn", "give it more than 40 s"),
        (findings.stop(40, Patience("the kubelet", None, "this")), "warn", "see that this is more than 40 s"),
        (findings.gpus(CPU_BUILD, "auto", 2, 0, None), "ok", "none: 2 ranks on the CPU"),
        (findings.gpus(CPU_BUILD, "cpu", 2, 4, "550.54"), "ok", "4 GPUs not used"),
        (findings.gpus(CUDA, "auto", 2, 2, "570.86"), "ok", "2 ranks on 2 GPUs, torch for CUDA 12.8, driver 570.86"),
        (findings.gpus(CUDA, "auto", 1, 2, "570.86"), "warn", "1 not used"),
        (findings.gpus(CUDA, "auto", 4, 2, "570.86"), "fail", "--ranks 2, or auto"),
        (findings.gpus(CPU_BUILD, "auto", 2, 2, "550.54"), "fail", "install a torch that is built for CUDA"),
        (findings.gpus(OLD_DRIVER, "auto", 2, 2, "470.1"), "fail", "too old (found version 11040).; update the driver"),
        (findings.gpus(NO_DRIVER, "cuda", 2, 0, None), "fail", "NVIDIA container toolkit"),
        (findings.gpus(CUDA._replace(seen=0), "cuda", 2, 0, "550.54"), "fail", "let the GPUs be seen"),
        (findings.gpus(CUDA._replace(seen=0), "auto", 2, 2, "550.54"), "fail", "must name some that there are"),
        (findings.device_memory([Device("H200", 139 * GIB, 140 * GIB)]), "ok", "139 GiB free"),
        (
            findings.device_memory([Device("H200", 139 * GIB, 140 * GIB), Device("H200", 40 * GIB, 140 * GIB)]),
            "warn",
            "100 GiB of rank 1's 140 GiB taken by other processes",
        ),
        (findings.gathered([Gather("gloo", 16 * MIB, 0.001)], 1, None), "ok", "1 rank: gloo 16 MiB 1 ms"),
        (findings.gathered([Gather("gloo", 16 * MIB, 0.1)], 4, None), "ok", "is 0.5 GB/s of bus bandwidth"),
        (findings.gathered([Gather("nccl", 16 * MIB, 0.0002)], 2, "2.27"), "ok", "is 84 GB/s of bus bandwidth (NCCL"),
        (findings.gathered([Gather("nccl", 16 * MIB, 0.1)], 2, "2.27"), "warn", "NCCL_P2P_DISABLE"),
        (findings.not_gathered("it hangs", False), "fail", "GLOO_SOCKET_IFNAME"),
        (findings.not_gathered("it hangs", True), "fail", "NCCL_P2P_DISABLE=1"),
        (findings.not_gathered("rank 1 died: killed by SIGKILL", True), "fail", "dmesg"),
        (findings.not_gathered("rank 1 got wrong bytes", True), "fail", "do not serve on this host"),
    ],
)
def test_a_fact_of_the_host_comes_to_a_finding(finding: Finding, level: str, said: str) -> None:
    assert finding.level == level
    assert said in doctor.line(finding)
    assert bool(finding.remedy) == (level != "ok")


def test_ranks_on_the_cpu_say_nothing_of_gpu_memory() -> None:
    assert findings.device_memory([Device("cpu", 0, 0)]) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("1m30s", 90), ("1min 30s", 90), ("90", 90), ("1h", 3600), ("500ms", 0.5), ("infinity", UNLIMITED)],
)
def test_durations_of_compose_and_systemd_are_read(text: str, seconds: float) -> None:
    assert host.duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 moons", "-5s"])
def test_what_is_no_duration_is_none(text: str) -> None:
    assert host.duration(text) is None


def test_the_filesystem_of_a_place_that_is_not_there_yet_is_that_of_the_folder_above() -> None:
    found = host.filesystem(Path("/dev/shm/not/there/yet"))
    assert found.kind == "tmpfs"
    assert found.size >= found.free > 0


def test_a_run_directory_is_tried_and_nothing_of_it_stays(tmp_path: Path) -> None:
    launch.try_run_dir(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    kept = tmp_path / "kept"
    launch.prepare_run_dir(kept)
    launch.try_run_dir(kept)
    assert list(kept.iterdir()) == []
    held = launch.claim(kept / "serve.lock")
    with pytest.raises(RunDirectoryError, match=f"is held by process {os.getpid()}"):
        launch.try_run_dir(kept)
    os.close(held)
    launch.try_run_dir(kept)


def gather(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """An all_gather of rank 0 of 2, whose neighbour sends what it should; `change` spoils it."""

    def all_gather(everyone: torch.Tensor, mine: torch.Tensor) -> None:
        everyone.copy_(torch.cat([mine, mine + 1]))
        change(everyone)

    return all_gather


def test_a_gather_that_is_right_is_timed_and_one_wrong_byte_is_seen() -> None:
    right = gather(lambda everyone: None)
    assert probe.timed_gather(right, torch.device("cpu"), 0, 2, 1024, rounds=2) > 0
    wrong = gather(lambda everyone: everyone[1500].add_(1))
    with pytest.raises(GroupError, match="rank 0 got wrong bytes for those of rank 1, of 1024 each"):
        probe.timed_gather(wrong, torch.device("cpu"), 0, 2, 1024, rounds=2)


def test_a_check_that_cannot_be_made_is_a_finding_and_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def _odd_place(service: doctor.Service) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctor, "CHECKS", (_odd_place, doctor._versions))
    group = launch.Group(model="digits", run_dir=Path("/dev/shm/none"), ranks=1)
    assert doctor.run(doctor.Settings(), group) == 1
    failed, versions = capsys.readouterr().out.splitlines()
    assert failed.startswith("fail  odd place      cannot be checked: [Errno 5] Input/output error; ")
    assert versions.startswith("ok    versions       Phalanx ")


def test_of_several_hosts_this_ones_address_and_the_way_to_node_0_are_looked_at(tmp_path: Path) -> None:
    port = free_port()

    def found(**fields: Any) -> list[tuple[str, str]]:
        given = {"group": "0", "nodes": 2, "node": 0, "host": "127.0.0.1", "port": port, "key_file": tmp_path} | fields
        group = launch.Group(model="digits", run_dir=tmp_path, ranks=1, hosts=launch.Hosts(**given))
        return [(one.level, one.topic) for one in doctor._hosts(doctor.Service(doctor.Settings(), group))]

    assert found() == [("warn", "hosts"), ("ok", "name"), ("ok", "node 0")]
    assert found(node=1) == [("warn", "hosts"), ("ok", "name"), ("warn", "node 0")]
    with socket.create_server(("127.0.0.1", port)):
        assert found()[2] == ("fail", "node 0")
        assert found(node=1)[2] == ("ok", "node 0")
    assert found(interface="eth99") == [("fail", "hosts")]


def levels(output: str) -> dict[str, str]:
    """Of each topic; every line is a finding."""
    found = [re.fullmatch(r"(ok|warn|fail) +(.+?)  +(.+)", line) for line in output.splitlines()]
    assert all(found), output
    return {one[2]: one[1] for one in found if one}


@pytest.mark.long
def test_two_ranks_on_the_cpu_are_fit_and_the_readme_shows_it() -> None:
    shm = set(Path("/dev/shm").iterdir())
    port = free_port()
    done = phalanx("doctor", "digits", "--ranks", "2", "--device", "cpu", PHALANX_PORT=str(port), STOP_GRACE="45s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(levels(done.stdout).values()) <= {"ok", "warn"}
    assert re.search(r"gloo 1 KiB .+, gloo 16 MiB .+ GB/s of bus bandwidth", done.stdout)
    assert "Digits on cpu, cpu: loaded and ran its example in" in done.stdout
    left = set(Path("/dev/shm").iterdir()) - shm
    assert not [path for path in left if path.name.startswith("phalanx-doctor") or str(port) in path.name]
    shown = (
        (ROOT / "README.md").read_text().split("$ phalanx doctor digits --ranks 2 --device cpu\n")[1].split("```")[0]
    )
    assert list(levels(shown)) == list(levels(done.stdout))


@pytest.mark.long
def test_a_service_that_runs_holds_its_port_and_run_directory_and_a_model_that_cannot_load_is_told(
    digits: Service,
) -> None:
    done = phalanx(
        *("doctor", f"{MODELS}:Refuses", "--ranks", "1"),
        PHALANX_PORT=str(digits.port),
        PHALANX_RUN_DIR=str(digits.run_dir),
    )
    assert done.returncode == 1
    found = levels(done.stdout)
    assert {topic for topic, level in found.items() if level == "fail"} == {"run directory", "port", "model"}
    assert f"serve.lock is held by process {digits.process.pid}; stop that service" in done.stdout
    assert f"127.0.0.1:{digits.port} is in use" in done.stdout
    assert "Refuses.__init__ raised OSError: the weights are not there" in done.stdout
    assert "Traceback" in done.stderr
    assert digits.ready()


@pytest.mark.long
def test_gpus_that_are_named_but_not_there_are_missed() -> None:
    done = phalanx("doctor", "--device", "cuda", PHALANX_PORT=str(free_port()), CUDA_VISIBLE_DEVICES="7,8")
    assert done.returncode == 1
    found = levels(done.stdout)
    assert (found["GPUs"], found["model"]) == ("fail", "fail")
    assert "2 GPUs in /dev or CUDA_VISIBLE_DEVICES, but torch sees none" in done.stdout


@pytest.mark.long
def test_a_model_that_hangs_is_ended_and_the_place_is_told(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n\nclass Slow:\n    def __init__(self, device):\n        time.sleep(1000)\n\n"
        "    def predict(self, items):\n        return items\n"
    )
    done = phalanx(
        *("doctor", "slow.py:Slow", "--ranks", "1", "--device", "cpu", "--start-timeout", "8"),
        cwd=tmp_path,
        PHALANX_PORT=str(free_port()),
    )
    assert done.returncode == 1
    assert re.search(r"fail +model +not ready after \d+ s; rank 0 in __init__ \(.*slow.py, line 5\)", done.stdout)
