"""The restarter, with real processes and real signals; the ranks are `ranks/standin.py`, mostly without torchrun."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from workers import epoch, launch, lifeline, rundir
from workers.epoch import Death, Restarts
from workers.errors import ModelLoadError, RunDirectoryError, StartError

pytestmark = pytest.mark.timeout(60)

AT_ONCE = 1.0  # seconds


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `condition` returns once it is true."""
    patience = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < patience, "waited in vain"
        time.sleep(0.005)
    return value


class Launched:
    """A launcher in a process of its own, with two ranks."""

    def __init__(self, run_dir: Path, model: str, torchrun: bool = False, constants: Any = None, **fields: Any) -> None:
        self.run_dir = run_dir
        group = {"model": model, "run_dir": str(run_dir), "ranks": 2, "torchrun": torchrun, **fields}
        script = Path(__file__).parent / "ranks" / "launcher.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(group | {"constants": constants or {}})],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def epoch_dir(self, epoch: int) -> Path:
        return self.run_dir / "epochs" / f"0-{epoch}"

    def pids(self, epoch: int) -> list[int]:
        """Those of the ranks, once both have one."""
        files = [self.epoch_dir(epoch) / f"pid-{rank}" for rank in range(2)]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text().split()[0]) for file in files]

    def started(self, epoch: int) -> list[int]:
        """Those of the ranks that have come to say it."""
        return [int((file.read_text().split() or ["0"])[0]) for file in self.epoch_dir(epoch).glob("pid-*")]

    def agent(self) -> int:
        """The pid of what stands for torchrun."""
        pid = self.process.pid
        return int(until(lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text().split())[0])

    def ready(self, epoch: int) -> list[int]:
        until(lambda: all((self.epoch_dir(epoch) / f"ready-{rank}").exists() for rank in range(2)))
        return self.pids(epoch)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def code(self, seconds: float = 20.0) -> int:
        return self.process.wait(seconds)

    def log(self) -> str:
        """All that it said; to be called after its end."""
        assert self.process.stdout is not None
        return self.process.stdout.read()


Launch = Callable[..., Launched]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launch]:
    started: list[Launched] = []

    def launched(model: str, **fields: Any) -> Launched:
        started.append(Launched(tmp_path / "run", model, **fields))
        return started[-1]

    yield launched
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()
        assert launcher.process.stdout is not None
        launcher.process.stdout.close()


def gone(pids: list[int], seconds: float = AT_ONCE) -> bool:
    """Whether all of them end in time."""
    patience = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < patience:
        time.sleep(0.005)
    return not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    stat = lifeline.process_stat(pid)
    return stat is not None and stat[0] not in "ZX"


# --- a group that starts ---------------------------------------------------------------------------------------------


def test_a_stop_lets_the_ranks_leave_and_nothing_is_left(launched: Launch) -> None:
    launcher = launched("serves")
    pids = [launcher.agent(), *launcher.ready(1)]
    launcher.stop()
    assert launcher.code() == 0
    assert not any(alive(pid) for pid in pids)
    assert not launcher.epoch_dir(1).exists()
    assert (launcher.run_dir / "epoch-0").read_text() == "1\n"
    assert "has left" in launcher.log()


def test_ctrl_c_is_a_stop_too(launched: Launch) -> None:
    launcher = launched("serves")
    launcher.ready(1)
    launcher.process.send_signal(signal.SIGINT)
    assert launcher.code() == 0


def test_ranks_that_do_not_leave_are_killed_at_the_drain_timeout(launched: Launch) -> None:
    launcher = launched("deaf-to-leave", drain_timeout=0.5)
    pids = launcher.ready(1)
    stopped = time.monotonic()
    launcher.stop()
    assert launcher.code() == 0
    assert 0.5 <= time.monotonic() - stopped < 0.5 + AT_ONCE
    assert not any(alive(pid) for pid in pids)
    assert "did not leave within 0.5 s" in launcher.log()


def test_a_rank_that_is_stopped_does_not_hold_up_the_stop(launched: Launch) -> None:
    launcher = launched("serves", drain_timeout=0.5)
    pids = launcher.ready(1)
    os.kill(pids[1], signal.SIGSTOP)
    launcher.stop()
    assert launcher.code(0.5 + AT_ONCE) == 0
    assert not any(alive(pid) for pid in pids)


def test_a_stop_while_starting_ends_at_once(launched: Launch) -> None:
    launcher = launched("stuck-at-start")
    pids = launcher.pids(1)
    launcher.stop()
    assert launcher.code(AT_ONCE) == 0
    assert not any(alive(pid) for pid in pids)
    assert not launcher.epoch_dir(1).exists()


def test_a_stop_in_the_back_off_ends_at_once(launched: Launch) -> None:
    launcher = launched("homeless", constants={"BACKOFF": [60.0]})
    until(lambda: launcher.epoch_dir(1).exists() and list(launcher.epoch_dir(1).glob("failed-*.json")))
    until(lambda: not Path(f"/proc/{launcher.process.pid}/task/{launcher.process.pid}/children").read_text())
    launcher.stop()
    assert launcher.code(AT_ONCE) == 0


def test_a_group_that_the_front_end_has_asked_to_leave_is_not_respawned(launched: Launch) -> None:
    launcher = launched("serves")
    launcher.ready(1)
    (launcher.epoch_dir(1) / "leave").touch()
    assert launcher.code() == 0


# --- a group that does not -------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_loaded_ends_the_launcher_with_78_and_the_reason(launched: Launch) -> None:
    launcher = launched("broken")
    assert launcher.code() == 78
    log = launcher.log()
    assert "no module named 'broken' (model, rank 1)" in log
    assert "epoch 2" not in log


def test_a_group_that_never_becomes_ready_is_given_up_with_the_reason(launched: Launch) -> None:
    launcher = launched("homeless", max_restarts=2, constants={"BACKOFF": [0.0]})
    assert launcher.code() == 1
    log = launcher.log()
    assert "3 epochs died before they were ready, the last of them: no device is left (start, rank 1)" in log
    assert (launcher.run_dir / "epoch-0").read_text() == "3\n"


def test_a_death_without_a_report_is_told_by_an_exit_code(launched: Launch) -> None:
    launcher = launched("dies-silently", max_restarts=0)
    assert launcher.code() == 1
    # the rank's, where the launcher saw it before torchrun did
    assert re.search(r"torchrun exited with 1, and no rank said why|rank \d \(pid \d+\) exited with \d", launcher.log())


def test_a_failed_start_may_be_followed_by_a_good_one(launched: Launch) -> None:
    launcher = launched("fails-first")
    launcher.ready(2)
    launcher.stop()
    assert launcher.code() == 0


def test_a_group_that_is_not_ready_in_time_is_killed(launched: Launch) -> None:
    launcher = launched("stuck-at-start", start_timeout=0.5, max_restarts=0, constants={"START_GRACE": 0.0})
    agent = launcher.agent()
    assert launcher.code() == 1
    assert not any(alive(pid) for pid in [agent, *launcher.started(1)])
    assert "not ready after" in launcher.log()


def test_a_stopped_rank_does_not_hold_up_the_restart_after_a_failed_start(launched: Launch) -> None:
    launcher = launched("stopped-beside-a-failure", constants={"REPORTED": 0.2})
    first = launcher.pids(1)
    launcher.ready(2)  # torchrun by itself would wait 30 s
    assert not any(alive(pid) for pid in first)


# --- a group that dies -----------------------------------------------------------------------------------------------


def test_a_killed_rank_is_followed_by_the_next_epoch(launched: Launch) -> None:
    launcher = launched("serves")
    first = launcher.ready(1)
    os.kill(first[1], signal.SIGKILL)
    launcher.ready(2)
    assert not any(alive(pid) for pid in first)
    launcher.stop()
    assert launcher.code() == 0
    assert f"epoch 1 died: rank 1 (pid {first[1]}) died: killed by SIGKILL (peer, rank 0)" in launcher.log()


def test_ranks_that_all_return_without_being_asked_are_respawned(launched: Launch) -> None:
    launcher = launched("serves")
    launcher.ready(1)
    (launcher.epoch_dir(1) / "walk-out").touch()
    launcher.ready(2)


def test_a_fenced_group_is_killed_and_respawned(launched: Launch) -> None:
    launcher = launched("serves")
    first = launcher.ready(1)
    os.kill(first[0], signal.SIGSTOP)  # what the front end fences for
    (launcher.epoch_dir(1) / "fenced").write_text("no heartbeat for 3 s\n")
    launcher.ready(2)
    assert not any(alive(pid) for pid in first)
    launcher.stop()
    assert launcher.code() == 0
    assert "epoch 1 died: fenced by the front end: no heartbeat for 3 s" in launcher.log()


def test_a_killed_torchrun_leaves_no_rank_and_is_respawned(launched: Launch) -> None:
    launcher = launched("serves")
    first = launcher.ready(1)
    os.kill(first[1], signal.SIGSTOP)
    os.kill(launcher.agent(), signal.SIGKILL)
    assert gone(first)
    launcher.ready(2)
    launcher.stop()
    assert launcher.code() == 0
    assert "epoch 1 died: torchrun died of SIGKILL" in launcher.log()


def test_a_rank_that_lost_torchrun_before_its_first_line_is_found_all_the_same(launched: Launch) -> None:
    launcher = launched("deaf")
    first = launcher.pids(1)
    os.kill(launcher.agent(), signal.SIGKILL)
    assert gone(first)
    launcher.pids(2)
    launcher.stop()
    assert launcher.code() == 0


def test_a_killed_launcher_leaves_no_rank(launched: Launch) -> None:
    launcher = launched("serves")
    pids = [launcher.agent(), *launcher.ready(1)]
    os.kill(pids[1], signal.SIGSTOP)
    launcher.process.kill()
    assert gone(pids)


def test_the_epochs_go_on_counting_in_the_next_launcher_and_the_last_three_dead_are_kept(launched: Launch) -> None:
    launcher = launched("homeless", max_restarts=3, constants={"BACKOFF": [0.0]})
    assert launcher.code() == 1
    launcher = launched("serves")
    launcher.ready(5)
    kept = {path.name for path in (launcher.run_dir / "epochs").iterdir()}
    assert kept == {"0-2", "0-3", "0-4", "0-5"}


def test_a_dead_epoch_keeps_its_reports_but_no_socket(launched: Launch) -> None:
    launcher = launched("serves")
    os.kill(launcher.ready(1)[1], signal.SIGKILL)
    launcher.ready(2)
    left = {path.name for path in launcher.epoch_dir(1).iterdir()}
    assert "rank-0.sock" not in left
    assert {"failed-0.json", "stacks-0.txt", "stacks-1.txt"} <= left


def test_a_run_directory_that_is_removed_ends_the_launcher_with_the_reason(launched: Launch) -> None:
    launcher = launched("")
    pids = launcher.ready(1)
    shutil.rmtree(launcher.run_dir)
    os.kill(pids[0], signal.SIGKILL)
    assert launcher.code() == RunDirectoryError.exit_code
    assert gone(pids)
    assert (
        (log := launcher.log())
        .splitlines()[-1]
        .endswith(f"{launcher.run_dir} was removed, and no group can live without it")
    ), log


def test_what_the_ranks_leave_behind_is_reaped_while_they_run(launched: Launch) -> None:
    launcher = launched("litters")
    launcher.ready(1)
    orphans = [int((launcher.epoch_dir(1) / f"orphan-{rank}").read_text()) for rank in range(2)]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in orphans))
    assert launcher.process.poll() is None


# --- under the real torchrun -----------------------------------------------------------------------------------------


@pytest.mark.long
def test_torchrun_itself_a_rank_killed_then_a_stop(launched: Launch) -> None:
    launcher = launched("serves", torchrun=True)
    first = launcher.ready(1)
    os.kill(first[0], signal.SIGKILL)
    second = launcher.ready(2)
    assert not any(alive(pid) for pid in first)
    launcher.stop()
    assert launcher.code() == 0
    assert not any(alive(pid) for pid in second)
    assert not list((launcher.run_dir / "epochs" / "0-2").glob("*"))


@pytest.mark.long
def test_torchrun_itself_the_launcher_killed(launched: Launch) -> None:
    launcher = launched("serves", torchrun=True)
    pids = [launcher.agent(), *launcher.ready(1)]
    launcher.process.kill()
    assert gone(pids)


@pytest.mark.long
def test_torchrun_itself_a_rank_stopped_beside_a_failed_start(launched: Launch) -> None:
    launcher = launched("stopped-beside-a-failure", torchrun=True)
    first = launcher.pids(1)
    until(lambda: (launcher.epoch_dir(1) / "failed-0.json").exists())
    assert gone(first, epoch.REPORTED + AT_ONCE)
    launcher.ready(2)


# --- the decisions ---------------------------------------------------------------------------------------------------


def test_the_back_off_grows_and_a_steady_group_begins_anew() -> None:
    restarts = Restarts(allowed=0)
    died = Death("peer", "rank 1 died", ready_for=1.0)
    assert [restarts.after(died) for _ in range(7)] == [0.0, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0]
    assert restarts.after(Death("peer", "rank 1 died", ready_for=60.0)) == 0.0
    assert restarts.after(died) == 1.0


def test_a_group_that_has_served_is_never_given_up() -> None:
    restarts = Restarts(allowed=0)
    restarts.after(Death("peer", "rank 1 died", ready_for=1.0))
    for kind in ("model", "start"):
        restarts.after(Death(kind, "the disk is away", ready_for=None))


def test_tries_and_model_errors_before_the_first_ready() -> None:
    restarts = Restarts(allowed=1)
    restarts.after(Death("start", "no device", ready_for=None))
    with pytest.raises(StartError, match=r"2 epochs .* no device"):
        restarts.after(Death("start", "no device", ready_for=None))
    with pytest.raises(ModelLoadError, match="no such file"):
        Restarts(allowed=9).after(Death("model", "no such file", ready_for=None))


def test_the_cause_is_a_ranks_own_fault_before_what_followed_from_it(tmp_path: Path) -> None:
    for rank, kind in enumerate(["peer", "deadline", "exception"]):
        fields = {"rank": rank, "kind": kind, "text": "it", "at": rank}
        (tmp_path / f"failed-{rank}.json").write_text(json.dumps(fields))
    found = []
    while cause := epoch.cause(tmp_path):
        found.append(cause.kind)
        (tmp_path / f"failed-{cause.rank}.json").unlink()
    assert found == ["deadline", "exception", "peer"]


def test_a_report_that_is_none_of_ours_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "failed-0.json").write_text("[]")
    (tmp_path / "failed-1.json").write_text('{"rank": ')
    assert epoch.cause(tmp_path) is None


# --- the run directory -----------------------------------------------------------------------------------------------


def test_two_launchers_on_one_run_directory(launched: Launch) -> None:
    first = launched("serves")
    first.ready(1)
    second = launched("serves")
    assert second.code() == RunDirectoryError.exit_code
    assert f"launch-0.lock is held by process {first.process.pid}" in second.log()
    assert first.process.poll() is None


def test_a_lock_is_free_again_once_its_file_is_closed(tmp_path: Path) -> None:
    held = launch.claim(tmp_path / "lock")
    with pytest.raises(RunDirectoryError, match=f"lock is held by process {os.getpid()}"):
        launch.claim(tmp_path / "lock")
    os.close(held)
    os.close(launch.claim(tmp_path / "lock"))


def test_a_lock_whose_holder_left_no_pid(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RunDirectoryError, match="lock is held by another process"):
            launch.claim(tmp_path / "lock")


def test_the_run_directory_is_made_private_and_found_again(tmp_path: Path) -> None:
    for _ in range(2):
        launch.prepare_run_dir(tmp_path / "new" / "run")
    assert (tmp_path / "new" / "run").stat().st_mode & 0o777 == 0o700


def test_a_run_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(RunDirectoryError, match="mode 0750"):
        launch.prepare_run_dir(tmp_path)


def test_a_run_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(RunDirectoryError, match=f"belongs to user {owner}, not to {owner + 1}"):
        launch.prepare_run_dir(tmp_path)


def test_a_run_directory_that_is_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(RunDirectoryError, match=name):
            launch.prepare_run_dir(tmp_path / name)


def test_a_path_too_long_for_a_socket_is_refused_with_the_number_of_bytes(tmp_path: Path) -> None:
    room = 107 - len("/epochs/0-999999/rank-999.sock") - len(str(tmp_path)) - 1
    launch.prepare_run_dir(tmp_path / ("x" * room))
    with pytest.raises(RunDirectoryError, match="2 bytes too long"):
        launch.prepare_run_dir(tmp_path / ("x" * (room + 2)))


def test_a_run_directory_goes_with_the_last_who_lives_in_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rundir.prepare_run_dir(run_dir)
    own = rundir.claim(run_dir / "serve.lock")
    for name in ("lock", "launch-1.lock"):  # a front end, another group
        other = rundir.claim(run_dir / name)
        assert not rundir.remove_run_dir(run_dir, but="serve.lock")
        os.close(other)
    assert not rundir.remove_run_dir(run_dir)
    assert rundir.remove_run_dir(run_dir, but="serve.lock")
    assert not run_dir.exists()
    os.close(own)


def test_the_epoch_counter_never_goes_back(tmp_path: Path) -> None:
    assert rundir.next_epoch(tmp_path, "a") == 1
    rundir.open_epoch(tmp_path, "a", 1)
    assert rundir.next_epoch(tmp_path, "a-1") == 1  # another group, for all its name
    (tmp_path / "epoch-a").write_text("")
    assert rundir.next_epoch(tmp_path, "a") == 2
    rundir.remove(tmp_path / "epochs" / "a-1")
    assert rundir.next_epoch(tmp_path, "a") == 3


def test_the_last_dead_epochs_are_kept_and_of_an_earlier_count_none(tmp_path: Path) -> None:
    for number in (7, 8, 9, 10, 11):
        assert not [*rundir.open_epoch(tmp_path, "a", number).iterdir()]
    assert sorted(path.name for path in (tmp_path / "epochs").iterdir()) == ["a-10", "a-11", "a-8", "a-9"]
    rundir.open_epoch(tmp_path, "a", 9)
    assert sorted(path.name for path in (tmp_path / "epochs").iterdir()) == ["a-8", "a-9"]


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_is_torchrun_then_the_rank_with_its_flags(tmp_path: Path) -> None:
    group = launch.Group(model="digits", run_dir=tmp_path, ranks=4, step_timeout=2.5)
    command = launch.torchrun_command(group, 7)
    assert command[:4] == [sys.executable, "-m", "workers.agent", "--standalone"]
    flags = command[command.index("workers.rank") :]
    assert flags[flags.index("--epoch") + 1] == "7"
    assert flags[flags.index("--step-timeout") + 1] == "2.5"


def test_the_users_own_thread_count_stays_and_ours_shares_out_the_cores() -> None:
    assert launch.torchrun_environment(2, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert launch.torchrun_environment(1, {})["OMP_NUM_THREADS"] == str(launch.cores())
    assert launch.torchrun_environment(10**6, {})["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("listed", "count"), [("", 0), ("-1", 0), ("0", 1), ("2,3", 2), ("0,-1,1", 1), ("GPU-8932f937,MIG-0a1b", 2)]
)
def test_gpus_are_counted_as_cuda_counts_them(listed: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert launch.visible_gpus() == count


def test_without_a_list_every_device_file_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = ["nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"]
    monkeypatch.setattr(Path, "iterdir", lambda path: (path / name for name in names))
    assert launch.visible_gpus() == 2


def test_a_spawned_child_has_its_own_session_and_environment() -> None:
    script = "import os; print(os.getsid(0) == os.getpid() == int(os.environ['LIFELINE_PARENT']), os.environ['MINE'])"
    child = launch.spawn([sys.executable, "-c", script], env={"MINE": "yes"}, stdout=subprocess.PIPE)
    assert child.communicate(timeout=10)[0] == b"True yes\n"


def test_a_spawned_child_dies_with_its_parent() -> None:
    script = (
        "from workers.launch import spawn; child = spawn(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert select.select([pidfd], [], [], AT_ONCE)[0]
        os.close(pidfd)


def test_a_child_is_not_spawned_from_a_thread_whose_end_would_kill_it() -> None:
    raised: list[BaseException] = []

    def body() -> None:
        try:
            launch.spawn(["true"])
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert len(raised) == 1
