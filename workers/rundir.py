"""The run directory: checks, locks, the epoch counter, the epochs' directories; it starts no process."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from workers.errors import RunDirectoryError
from workers.lifeline import process_stat, start_time

IPC_PATH = 107  # bytes a socket's path may have
KEPT = 3  # dead epochs of a group whose directories stay for the post-mortem


def prepare_run_dir(path: Path, group: str = "0") -> None:
    """Make the run directory, 0700, or check the one that is there: ours, private, and short enough for its sockets."""
    longest = path.absolute() / "epochs" / f"{group}-{10**6 - 1}" / "rank-999.sock"
    if (excess := len(os.fsencode(longest)) - IPC_PATH) > 0:
        raise RunDirectoryError(f"{path} is {excess} bytes too long: a socket's path in it may have {IPC_PATH} at most")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()  # a symbolic link is not followed: in /dev/shm anyone may have put it there
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise RunDirectoryError(f"{path} is a symbolic link, not a directory")
    if found.st_uid != os.geteuid():
        raise RunDirectoryError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        raise RunDirectoryError(f"{path} has mode {mode:04o}; it must be 0700, for others could reach into the queue")


def try_run_dir(path: Path) -> None:
    """RunDirectoryError where a service could not use `path` now; what was not there before is not there afterwards."""
    missing = [one for one in (path, *path.parents) if not os.path.lexists(one)]
    try:
        prepare_run_dir(path)
        for lock in ("serve.lock", "lock", *(found.name for found in path.glob("launch-*.lock"))):
            _look_at(path / lock)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"\0")
    except RunDirectoryError:
        raise
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written to: {error.strerror}") from error
    finally:
        for one in missing:
            with suppress(OSError):  # never made, or somebody is in there by now
                one.rmdir()


def _look_at(lock: Path) -> None:
    """RunDirectoryError where another process has it; it is not taken from anyone, and not made."""
    with suppress(FileNotFoundError):
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _held(lock, fd) from error
        finally:
            os.close(fd)


def claim(path: Path) -> int:
    """Lock the file at `path` for as long as this process lives or the returned file descriptor is open.

    Raises RunDirectoryError, with the holder's pid where it can be read, when another process has it.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        held = _held(path, fd)
        os.close(fd)
        raise held from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    return fd


def _held(path: Path, fd: int) -> RunDirectoryError:
    pid = os.pread(fd, 20, 0).decode(errors="replace").strip()
    return RunDirectoryError(f"{path} is held by {f'process {pid}' if pid else 'another process'}")


def next_epoch(run_dir: Path, group: str) -> int:
    """Count the group's epochs up by one, for the holder of its lock; a number never given before in this directory."""
    counter, last = run_dir / f"epoch-{group}", max(_epochs(run_dir, group), default=0)
    with suppress(FileNotFoundError, ValueError):  # ValueError: cut short by a full disk; the directories know better
        last = max(last, int(counter.read_text()))
    draft = run_dir / f".{counter.name}"
    draft.write_text(f"{last + 1}\n")
    draft.replace(counter)
    return last + 1


def open_epoch(run_dir: Path, group: str, number: int) -> Path:
    """The epoch's new, empty directory. All but the last three dead epochs are removed."""
    dead = _epochs(run_dir, group)
    # of several hosts one counts; it may have lost its run directory, and count anew
    for epoch in [epoch for epoch in dead if epoch >= number]:
        remove(dead.pop(epoch))
    for epoch in sorted(dead)[:-KEPT]:
        remove(dead.pop(epoch))
    for directory in dead.values():  # of a launcher that was killed
        close_sockets(directory)
    directory = run_dir / "epochs" / f"{group}-{number}"
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700)
    return directory


def readiness(run_dir: Path, group: str = "0") -> tuple[bool, str]:
    """Whether every rank of the group's newest epoch is ready and alive, and a sentence a rank.

    For a process that sees the ranks' pids: on the same host, in the same container.
    """
    epochs = _epochs(run_dir, group)
    if (wait := waits(run_dir).get(group)) is not None:
        return False, f"group {group}: {wait}"
    if not epochs:
        where = f"no ranks of group {group} have run in {run_dir}"
        return False, f"{where}: give the --port, --run-dir or --group that they were started with"
    epoch = max(epochs)
    directory = epochs[epoch]
    said, all_well = [f"group {group}, epoch {epoch}"], True
    for path in sorted(directory.glob("pid-*")):
        rank = path.name.removeprefix("pid-")
        state = "gone"
        with suppress(OSError, ValueError):  # its epoch may be cleared away meanwhile
            pid, started = map(int, path.read_text().split())
            stat_of = process_stat(pid)
            if stat_of is not None and start_time(pid) == started and stat_of[0] not in "ZX":
                state = "ready" if (directory / f"ready-{rank}").exists() else "loading"
                state = "stopped" if stat_of[0] in "Tt" else state
        all_well = all_well and state == "ready"
        said.append(f"rank {rank}: {state}")
    ending = [path.name for path in directory.glob("*") if path.name.startswith(("failed-", "fenced", "leave"))]
    if ending:
        said.append(f"it is ending ({', '.join(sorted(ending))})")
    return all_well and len(said) > 1 and not ending, "\n".join(said)


def keep_post_mortem(run_dir: Path, name: str, text: str) -> Path:
    """Write one epoch's post-mortem and remove all but the last few of its group; where it is."""
    folder = run_dir / "post-mortem"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{name}.txt"
    path.write_text(text)
    ours = [one for one in folder.iterdir() if _group_of(one) == _group_of(path)]
    for old in sorted(ours, key=lambda one: one.stat().st_mtime_ns)[: -2 * KEPT]:
        old.unlink()
    return path


class Told(NamedTuple):
    """What a post-mortem begins with."""

    group: str
    epoch: int
    text: str  # who died of what
    kind: str  # of `workers.epoch.Death`
    at: float  # seconds since 1970


def last_deaths(run_dir: Path) -> dict[str, Told]:
    """Of each group that has died, what its newest post-mortem begins with."""
    newest: dict[str, tuple[float, Path]] = {}
    for path in (run_dir / "post-mortem").glob("*-*.txt"):
        with suppress(OSError):  # it may be removed meanwhile
            at = path.stat().st_mtime
            if at >= newest.get(_group_of(path), (0.0, path))[0]:
                newest[_group_of(path)] = at, path
    told: dict[str, Told] = {}
    for group, (at, path) in newest.items():
        with suppress(OSError, ValueError), path.open(errors="replace") as file:
            text, kind = file.readline().strip(), file.readline().removeprefix("kind: ").partition(";")[0]
            told[group] = Told(group, int(path.stem.rpartition("-")[2]), text, kind, at)
    return told


def note_wait(run_dir: Path, group: str, text: str) -> None:
    """Say what the group's launcher waits for, or with "" that it waits for nothing any more."""
    path = run_dir / f"waits-{group}"
    if text:
        path.write_text(text)
    else:
        path.unlink(missing_ok=True)


def waits(run_dir: Path) -> dict[str, str]:
    """What launchers wait for, by group."""
    found = {}
    for path in run_dir.glob("waits-*"):
        with suppress(OSError):  # the wait may be over
            found[path.name.removeprefix("waits-")] = path.read_text(errors="replace")
    return found


def remove_run_dir(run_dir: Path, but: str = "") -> bool:
    """Remove all of it, unless somebody still lives in it; whether it is gone. `but` is a lock of the caller's own."""
    for path in {*run_dir.glob("*lock")} - {run_dir / but}:
        try:
            os.close(claim(path))
        except RunDirectoryError:
            return False
    shutil.rmtree(run_dir, ignore_errors=True)
    return True


def remove(epoch_dir: Path) -> None:
    shutil.rmtree(epoch_dir, ignore_errors=True)


def close_sockets(epoch_dir: Path) -> None:
    """Remove a dead epoch's socket files, which survive their owners; the rest is for the post-mortem."""
    for path in epoch_dir.glob("*"):
        if path.is_socket():
            path.unlink()


def _group_of(post_mortem: Path) -> str:
    return post_mortem.stem.rpartition("-")[0]


def _epochs(run_dir: Path, group: str) -> dict[int, Path]:
    matches = [(re.fullmatch(re.escape(group) + r"-(\d+)", path.name), path) for path in run_dir.glob("epochs/*")]
    return {int(match[1]): path for match, path in matches if match}
