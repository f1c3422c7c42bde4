"""Dying together, with real processes and real signals; the ranks are `ranks/member.py`."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from workers.epoch import cause
from workers.lifeline import PARENT, Member

pytestmark = pytest.mark.timeout(20)

AT_ONCE = 0.5  # seconds; a death is seen within 50 ms, on a machine that does nothing else


class Rank:
    """One member process; `say` sends a command and waits until it is carried out."""

    def __init__(self, rank: int, world: int, epoch_dir: Path) -> None:
        command = [sys.executable, str(Path(__file__).parent / "ranks" / "member.py"), str(rank), str(world)]
        self.process = subprocess.Popen(
            [*command, str(epoch_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self.process.pid

    def hear(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")

    def say(self, command: str, answer: str = "done") -> None:
        self.tell(command)
        self.hear(answer)

    def lives(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


Start = Callable[[int], list[Rank]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts that many ranks, which watch one another; members that are in the directory already count too."""
    started: list[Rank] = []

    def start(count: int) -> list[Rank]:
        world = count + len(list(tmp_path.glob("member-*.json")))
        started.extend(Rank(rank, world, tmp_path) for rank in range(count))
        for rank in started:
            rank.hear("watching")
        return started

    yield start
    for rank in started:
        rank.close()


def all_gone(ranks: list[Rank]) -> float:
    """The time (monotonic) at which the last of them was gone."""
    for rank in ranks:
        rank.process.wait(10)
    return time.monotonic()


def why(epoch_dir: Path) -> tuple[int, str, str]:
    """What the launcher will find: rank, kind, text."""
    report = cause(epoch_dir)
    assert report is not None
    return report.rank, report.kind, report.text


def stacks(epoch_dir: Path, rank: int) -> str:
    return (epoch_dir / f"stacks-{rank}.txt").read_text()


def test_a_killed_rank_fells_the_others_at_once(start: Start, tmp_path: Path) -> None:
    ranks = start(3)
    assert len([target for target in descriptors(ranks[0].pid) if "pidfd" in target]) == 2
    killed = time.monotonic()
    ranks[1].process.kill()
    assert all_gone(ranks) - killed < AT_ONCE
    assert all(rank.process.returncode in (1, -9) for rank in ranks)
    assert why(tmp_path)[1:] == ("peer", f"rank 1 (pid {ranks[1].pid}) died: killed by SIGKILL")


def test_a_rank_that_exits_with_0_fells_the_others_too(start: Start) -> None:
    ranks = start(2)
    exited = time.monotonic()
    ranks[1].tell("exit 0")
    assert all_gone(ranks) - exited < AT_ONCE
    assert ranks[0].process.returncode == 1


def test_a_rank_that_fells_the_group_takes_all_with_it_and_says_why(start: Start, tmp_path: Path) -> None:
    ranks = start(3)
    ranks[2].tell("fell collective connection-reset")
    all_gone(ranks)
    assert all(rank.process.returncode in (1, -9) for rank in ranks)
    assert why(tmp_path) == (2, "collective", "connection-reset")


def test_a_connection_that_broke_by_a_peers_death_is_reported_as_that(start: Start, tmp_path: Path) -> None:
    ranks = start(2)
    ranks[0].tell(f"break {ranks[1].pid} connection-reset")
    all_gone(ranks)
    died = f"rank 1 (pid {ranks[1].pid}) died: killed by SIGKILL, seen here as: connection-reset"
    assert why(tmp_path) == (0, "peer", died)


def test_the_first_report_of_a_rank_stays(start: Start, tmp_path: Path) -> None:
    ranks = start(1)
    (tmp_path / "failed-0.json").write_text('{"rank": 0, "kind": "model", "text": "the-first", "at": 0}')
    ranks[0].tell("fell peer the-second")
    all_gone(ranks)
    assert why(tmp_path)[2] == "the-first"


def test_released_ranks_may_go_one_by_one(start: Start) -> None:
    ranks = start(3)
    for rank in ranks:
        rank.say("release")
    for rank in ranks:
        rank.tell("exit 0")
    all_gone(ranks)
    assert [rank.process.returncode for rank in ranks] == [0, 0, 0]


@pytest.mark.parametrize("released", [0, 1], ids=["the one that stays", "the one that goes"])
def test_a_rank_may_go_once_it_or_the_other_is_released(start: Start, tmp_path: Path, released: int) -> None:
    ranks = start(2)
    ranks[released].say("release")
    ranks[1].tell("exit 0")
    ranks[1].process.wait(10)
    ranks[0].say("begin 0.3 step")  # only by its end can one see that it took the exit in, and lived
    all_gone(ranks)
    assert why(tmp_path)[1] == "deadline"


def test_a_step_past_its_deadline_fells_the_group_and_leaves_the_stacks_of_all(start: Start, tmp_path: Path) -> None:
    ranks = start(2)
    began = time.monotonic()
    ranks[0].say("begin 0.5 step-7")
    assert 0.5 <= all_gone(ranks) - began < 0.5 + AT_ONCE
    assert why(tmp_path) == (0, "deadline", "step-7 took longer than 0.5 s")
    assert "member.py" in stacks(tmp_path, 0)
    assert "member.py" in stacks(tmp_path, 1)


def test_a_step_that_ends_in_time_has_neither_deadline_nor_backstop_any_more(start: Start, tmp_path: Path) -> None:
    ranks = start(2)
    ranks[0].say("begin 0.2 quick")
    ranks[0].say("end")
    ranks[1].say("begin 2.5 slow")
    all_gone(ranks)
    assert why(tmp_path) == (1, "deadline", "slow took longer than 2.5 s")


def test_a_rank_that_holds_its_gil_is_felled_with_its_stack(start: Start, tmp_path: Path) -> None:
    ranks = start(2)
    ranks[1].say("hold", "holding")
    began = time.monotonic()
    ranks[0].say("begin 0.3 step")
    assert all_gone(ranks) - began < 0.3 + AT_ONCE
    assert "hold_the_gil" in stacks(tmp_path, 1)


def test_a_stopped_rank_is_felled(start: Start) -> None:
    ranks = start(2)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    ranks[0].say("begin 0.3 step")
    assert all_gone(ranks) - began < 0.3 + AT_ONCE


def test_the_backstop_ends_a_lone_rank_that_holds_its_gil(start: Start, tmp_path: Path) -> None:
    ranks = start(1)
    began = time.monotonic()
    ranks[0].say("begin 0.3 step")
    ranks[0].say("hold", "holding")
    assert 2.3 <= all_gone(ranks) - began < 2.3 + AT_ONCE
    assert ranks[0].process.returncode == 1
    assert "Timeout" in stacks(tmp_path, 0)
    assert "hold_the_gil" in stacks(tmp_path, 0)


def test_a_segfault_leaves_its_stack(start: Start, tmp_path: Path) -> None:
    ranks = start(2)
    os.kill(ranks[1].pid, signal.SIGSEGV)
    all_gone(ranks)
    assert "Segmentation fault" in stacks(tmp_path, 1)


@pytest.mark.parametrize("elsewhere", [{"boot_id": "another-boot"}, {"pid_namespace": 1}], ids=["boot", "namespace"])
def test_a_pid_of_another_host_or_namespace_is_an_innocents(
    start: Start, tmp_path: Path, elsewhere: dict[str, object]
) -> None:
    with subprocess.Popen(["sleep", "60"]) as innocent:
        try:
            stranger = replace(Member.here(1), pid=innocent.pid, **elsewhere)  # type: ignore[arg-type]
            (tmp_path / "member-1.json").write_text(stranger.to_json())
            ranks = start(1)
            assert not any("pidfd" in target for target in descriptors(ranks[0].pid))
            ranks[0].tell("fell deadline step")
            all_gone(ranks)
            assert innocent.poll() is None
        finally:
            innocent.kill()


def test_a_pid_that_has_passed_on_to_another_process_is_a_dead_peer(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as innocent:
        try:
            (tmp_path / "member-1.json").write_text(replace(Member.here(1), pid=innocent.pid).to_json())
            rank = Rank(0, 2, tmp_path)
            try:
                assert rank.process.wait(10) == 1
            finally:
                rank.close()
            assert why(tmp_path)[2] == f"rank 1 (pid {innocent.pid}) died: nobody saw how"
            assert innocent.poll() is None
        finally:
            innocent.kill()


def test_a_member_survives_its_json() -> None:
    here = Member.here(3)
    assert Member.from_json(here.to_json()) == here


def test_a_child_dies_with_its_parent() -> None:
    child = "import time; from workers.lifeline import die_with_parent as d; d(); print(flush=True); time.sleep(60)"
    script = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=without_mark()) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert select.select([pidfd], [], [], AT_ONCE)[0]
        os.close(pidfd)


@pytest.mark.parametrize("told", ["", "parent"], ids=["by the environment", "by the argument"])
def test_a_child_whose_parent_has_already_gone_does_not_live_on(told: str) -> None:
    child = f"""
import os, sys, time
from workers.epoch import cause
from workers.lifeline import PARENT, die_with_parent
parent = int(os.environ[PARENT])
while os.getppid() == parent:
    time.sleep(0.001)
die_with_parent({told})
print("lives on")
"""
    script = f"""
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", {child!r}], env=dict(os.environ, {PARENT}=str(os.getpid())))
os._exit(0)
"""
    said = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=10, check=True).stdout
    assert said == b""  # run waits for the pipe's end: the child's


def test_orphans_are_found_and_ended_by_the_mark_of_the_parent_that_they_lost() -> None:
    script = """
import subprocess, time
from workers.launch import spawn
from workers.lifeline import adopt_orphans, end_orphans, process_stat
adopt_orphans()
innocent = subprocess.Popen(["sleep", "60"])
parent = spawn(["sh", "-c", "for i in $(seq 20); do sleep 60 & echo $!; done"], stdout=subprocess.PIPE)
orphans = [int(parent.stdout.readline()) for _ in range(20)]
parent.wait()
while not end_orphans(parent.pid):
    time.sleep(0.001)
print({process_stat(orphan) for orphan in orphans}, innocent.poll(), flush=True)
innocent.kill()
"""
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=10, check=True, text=True)
    assert run.stdout == "{None} None\n"


def without_mark() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != PARENT}


def descriptors(pid: int) -> list[str]:
    return [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
