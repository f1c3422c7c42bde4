"""`phalanx infer`: what is read, what is written, how it ends, and how it goes on where it ended."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from app import cli, infer_files, sources
from app.results import opened
from tests.service import Service, free_port, samples, until
from tests.stub import Stub, problem, stub
from workers.errors import ModelError, SettingsError

pytestmark = pytest.mark.timeout(60)

PHALANX = Path(sys.executable).with_name("phalanx")


@pytest.fixture
def told() -> Iterator[Stub]:
    with stub() as service:
        yield service


def infer(service: Service | Stub, *arguments: object) -> int:
    """The exit code, in this process."""
    url = service.url if isinstance(service, Stub) else str(service.client.base_url)
    return cli.main(["infer", "--url", url, *map(str, arguments)])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def jsonl(path: Path, items: list) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


# ---- what is read and written


def test_json_lines_become_a_line_an_item_in_order(digits: Service, tmp_path: Path, capsys) -> None:
    images, labels = samples()
    path = jsonl(tmp_path / "digits.jsonl", images)
    assert infer(digits, path, "--chunk", 3) == 0
    results = lines(tmp_path / "digits.results.jsonl")
    assert [line["index"] for line in results] == list(range(len(labels)))
    assert [line["output"]["digit"] for line in results] == labels
    assert f"{len(labels)}/{len(labels)} items" in capsys.readouterr().err
    assert not (tmp_path / "digits.results.jsonl.errors.jsonl").exists()


def test_failed_items_and_broken_lines_go_to_their_own_file(obedient: Service, tmp_path: Path, capsys) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf"a"\r\n\n{"do": "raise", "n": 7}\n[1, 2\n  \n"b\xff"\n123456789012345678901234567890'
    )
    out = tmp_path / "out.jsonl"
    assert infer(obedient, path, "-o", out, "--chunk", 2) == 1
    assert [line["output"] for line in lines(out)] == ["a", None, None, None, 123456789012345678901234567890]
    first, second, third = lines(tmp_path / "out.jsonl.errors.jsonl")
    assert (first["index"], first["type"]) == (1, "model-error")
    assert "as told by item 7" in first["detail"]
    assert (second["index"], second["type"]) == (2, "invalid-item")
    assert "line 4 is not JSON" in second["detail"]
    assert (third["index"], "line 6" in third["detail"]) == (3, True)
    assert "3 failed: see" in capsys.readouterr().err


def test_a_line_too_long_for_memory_is_passed_over(obedient: Service, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE", 10)
    path = jsonl(tmp_path / "items.jsonl", ["short", "x" * 10, "y" * 50, "exact7", 5])
    assert infer(obedient, path) == 1
    assert [line["output"] for line in lines(tmp_path / "items.results.jsonl")] == ["short", None, None, "exact7", 5]


def test_rows_become_rows_or_lines(double: Service, tmp_path: Path) -> None:
    rows = np.arange(30, dtype=np.float32).reshape(10, 3)
    np.save(tmp_path / "a.npy", rows)
    np.save(tmp_path / "b.npy", rows[:1])
    out = tmp_path / "out.npy"
    assert infer(double, tmp_path / "a.npy", tmp_path / "b.npy", "-o", out, "--chunk", 4) == 0
    assert np.array_equal(np.load(out), np.concatenate([rows, rows[:1]]) * 2)
    assert np.load(out).dtype == np.float32
    assert infer(double, tmp_path / "a.npy") == 0
    assert [line["output"] for line in lines(tmp_path / "a.results.jsonl")] == (rows * 2).tolist()


def test_json_has_no_infinity_and_npy_has(double: Service, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3e38], [4, 5, 6]], np.float32))  # twice that is infinite
    assert infer(double, tmp_path / "a.npy") == 1
    [failure] = lines(tmp_path / "a.results.jsonl.errors.jsonl")
    assert (failure["index"], failure["type"]) == (0, "non-finite-result")
    assert infer(double, tmp_path / "a.npy", "-o", tmp_path / "out.npy") == 0
    assert np.isinf(np.load(tmp_path / "out.npy")).tolist() == [[False, False, True], [False, False, False]]


def test_the_files_of_a_folder_are_items_by_name(told: Stub, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    (folder / "within").mkdir(parents=True)
    for name in ("b.png", "a.png", ".hidden", "gone.png"):
        (folder / name).write_bytes(name.encode())
    told.script.append(lambda seen: (folder / "gone.png").unlink() or told.always(seen))
    assert infer(told, folder, "--chunk", 1, "--concurrency", 1, "--parameters", '{"size": 3}') == 1
    assert lines(tmp_path / "images.results.jsonl") == [
        {"index": 0, "file": "a.png", "output": "a.png"},
        {"index": 1, "file": "b.png", "output": "b.png"},
        {"index": 2, "file": "gone.png", "output": None},
    ]
    [failure] = lines(tmp_path / "images.results.jsonl.errors.jsonl")
    assert (failure["index"], failure["file"]) == (2, "gone.png")
    assert told.seen[0].items == [("a.png", b"a.png")]
    assert told.seen[0].parameters == {"size": 3}


def test_an_outage_is_waited_out(told: Stub, tmp_path: Path) -> None:
    told.script.extend([problem(503, "draining", retry_after="0")] * 20)
    assert infer(told, jsonl(tmp_path / "items.jsonl", [1, 2])) == 0
    assert [line["output"] for line in lines(tmp_path / "items.results.jsonl")] == [1, 2]


# ---- how it ends


def test_what_is_there_is_not_written_over(obedient: Service, tmp_path: Path, capsys) -> None:
    path = jsonl(tmp_path / "items.jsonl", ["a", "b"])
    out = tmp_path / "items.results.jsonl"
    assert infer(obedient, path, "--resume") == 0  # nothing to go on with: a beginning
    before = out.read_bytes()
    assert infer(obedient, path) == 2
    assert "--resume goes on with it, --force begins it anew" in capsys.readouterr().err
    assert infer(obedient, path, "--resume") == 0
    assert out.read_bytes() == before
    jsonl(path, ["c", "b"])
    assert infer(obedient, path, "--resume") == 2
    assert "of other inputs" in capsys.readouterr().err
    assert infer(obedient, path, "--resume", "--parameters", '{"sleep": 0}') == 2
    assert out.read_bytes() == before
    assert infer(obedient, path, "--force") == 0
    assert [line["output"] for line in lines(out)] == ["c", "b"]
    out.write_text('{"index":1,"output":"b"}\n')
    assert infer(obedient, path, "--resume") == 2
    assert "line 1 is not of item 0" in capsys.readouterr().err
    assert infer(obedient, path, "-o", path, "--force") == 2
    assert "among the inputs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.jsonl"], "missing.jsonl cannot be read: No such file"),
        (["cat.png"], "cat.png is no .jsonl, no .npy and no folder"),
        (["text.npy"], "text.npy is no npy file"),
        (["words.npy"], "no array of numeric items"),
        (["items.jsonl", "-o", "-"], "-o - is no file"),
        (["items.jsonl", "-o", "out.npy"], "only of .npy inputs results are .npy"),
        (["items.jsonl", "-o", "none/out.jsonl"], "none is no folder"),
        (["items.jsonl", "--parameters", "[1]"], "expected a JSON object"),
        (["rows.npy", "--parameters", '{"a": 1}'], "--parameters do not go with .npy"),
        (["items.jsonl", "--api-key-file", "empty"], "empty holds no key"),
        (["items.jsonl", "--url", "localhost:8000"], "--url is 'localhost:8000'"),
        (["items.jsonl", "--chunk", "0"], "no whole number from 1 on"),
        (["items.jsonl", "--resume", "--force"], "not allowed with"),
    ],
)
def test_what_cannot_be_done_is_said_and_ends_with_2(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cat.png", "text.npy", "empty"):
        (tmp_path / name).touch()
    jsonl(tmp_path / "items.jsonl", [1])
    np.save("words.npy", np.array(["a"]))
    np.save("rows.npy", np.ones((1, 3)))
    here = sorted(tmp_path.iterdir())
    try:
        code = cli.main(["infer", *arguments])
    except SystemExit as stop:  # of argparse
        code = stop.code
    assert code == 2
    assert sentence in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == here


def test_without_a_service_it_ends_with_69_and_leaves_nothing(tmp_path: Path, capsys) -> None:
    path = jsonl(tmp_path / "items.jsonl", [1])
    assert cli.main(["infer", str(path), "--url", f"http://127.0.0.1:{free_port()}"]) == 69
    assert "there is no service at http://127.0.0.1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_a_refused_run_ends_with_69_and_can_go_on(told: Stub, tmp_path: Path, capsys) -> None:
    path, key = jsonl(tmp_path / "items.jsonl", [1, 2, 3]), tmp_path / "key"
    key.write_text("# of mine\nsecret\n")
    told.script.extend([told.always, problem(401, "unauthorized")])
    one_by_one = ("--chunk", 1, "--concurrency", 1, "--api-key-file", key)
    assert infer(told, path, *one_by_one) == 69
    said = capsys.readouterr().err
    assert "stopped at 1/3 items" in said
    assert "The unauthorized: why" in said
    assert "give the service's key with --api-key-file" in said
    assert infer(told, path, "--resume", *one_by_one) == 0
    assert [line["output"] for line in lines(tmp_path / "items.results.jsonl")] == [1, 2, 3]
    assert [seen.items for seen in told.seen] == [[1], [2], [2], [3]]
    assert told.seen[0].headers["authorization"] == "Bearer secret"


def test_results_that_are_no_rows_have_no_npy(digits: Service, tmp_path: Path, capsys) -> None:
    np.save(tmp_path / "a.npy", np.array(samples()[0], np.float32))
    assert infer(digits, tmp_path / "a.npy", "-o", tmp_path / "out.npy") == 2
    assert "no rows of numbers: -o a .jsonl file" in capsys.readouterr().err
    assert not (tmp_path / "out.npy").exists()


# ---- how it goes on


def start(service: Service, path: Path, stderr: object, *arguments: str) -> subprocess.Popen[bytes]:
    command = [PHALANX, "infer", path, "--url", str(service.client.base_url), "--chunk", "5", "--concurrency", "2"]
    return subprocess.Popen([*command, *arguments], stderr=stderr, cwd=path.parent)


def test_after_kill_9_resume_does_and_loses_no_item_twice(obedient: Service, tmp_path: Path) -> None:
    items = [{"do": "raise", "n": n} if n % 40 == 3 else n for n in range(200)]
    path, out = jsonl(tmp_path / "items.jsonl", items), tmp_path / "items.results.jsonl"
    errors = tmp_path / "items.results.jsonl.errors.jsonl"
    slow = ("--parameters", '{"sleep": 0.02}')
    running = start(obedient, path, subprocess.DEVNULL, *slow)
    try:
        until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 50)
    finally:
        running.kill()
        running.wait()
    done = len(out.read_bytes().splitlines())
    assert 50 <= done < 200
    with out.open("ab") as results, errors.open("ab") as failures:
        results.write(b'{"index":%d,"out' % done)  # as if it had died in the middle of a line
        failures.write(b'{"index":%d,"type":"model-error"}\n{"ind' % done)
    assert infer(obedient, path, "--resume", *slow) == 1
    assert [line["index"] for line in lines(out)] == list(range(200))
    assert [line["output"] for line in lines(out)] == [None if n % 40 == 3 else n for n in range(200)]
    assert [line["index"] for line in lines(errors)] == list(range(3, 200, 40))


def test_ctrl_c_says_how_to_go_on_and_a_terminal_sees_a_live_line(obedient: Service, tmp_path: Path) -> None:
    path, out = jsonl(tmp_path / "items.jsonl", list(range(150))), tmp_path / "items.results.jsonl"
    terminal, end = pty.openpty()
    shown = b""

    def live() -> bool:
        nonlocal shown
        if select.select([terminal], [], [], 0)[0]:
            shown += os.read(terminal, 65536)
        return shown.count(b"\r\x1b[K") >= 2

    running = start(obedient, path, end, "--parameters", '{"sleep": 0.1}')
    try:
        os.close(end)
        until(live)
        running.send_signal(signal.SIGINT)
        assert running.wait(10) == 130
        while select.select([terminal], [], [], 0)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # so ends a terminal
                break
    finally:
        running.kill()
        running.wait()
        os.close(terminal)
    assert b"/150 items, " in shown
    assert b"stopped at " in shown
    command = shlex.split(shown.decode().rsplit("to go on: ", 1)[1])
    assert command[:2] == ["phalanx", "infer"]
    done = subprocess.run([PHALANX, *command[1:]], capture_output=True, text=True, cwd=tmp_path, timeout=50)
    assert done.returncode == 0, done.stderr
    assert [line["output"] for line in lines(out)] == list(range(150))


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with opened(out, {}, 1, resume=True, force=False) as results:
        results.write(None, 1)
        with pytest.raises(SettingsError, match="written by another run"), opened(out, {}, 1, resume=True, force=False):
            pass


@pytest.mark.parametrize("torn", range(0, 152, 4))
def test_an_array_of_results_goes_on_from_any_byte(tmp_path: Path, torn: int) -> None:
    out = tmp_path / "out.npy"
    outcomes = [ModelError("first"), np.float32([1, 2]), ModelError("third"), np.float32([4]), np.float64([5, 6])]

    def write() -> int:
        with opened(out, {}, 5, resume=True, force=False) as results:
            begun = results.done
            for outcome in outcomes[results.done :]:
                results.write(None, outcome)
            results.finish()
            assert (results.done, results.failed) == (5, 3)
        return begun

    assert write() == 0
    whole = out.read_bytes()
    assert len(whole) == 128 + 40
    os.truncate(out, torn)
    assert write() == max(0, torn - 128) // 8
    assert out.read_bytes() == whole
    array = np.load(out)
    assert array.dtype == np.float32
    assert np.array_equal(array, np.float32([[np.nan] * 2, [1, 2], [np.nan] * 2, [np.nan] * 2, [5, 6]]), equal_nan=True)
    assert [line["index"] for line in lines(tmp_path / "out.npy.errors.jsonl")] == [0, 2, 3]


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        (np.int64(0), np.float64(0.375), False),
        (np.int64(0), np.float64(np.nan), False),
        (np.int64(0), np.float64(2), True),
        (np.bool_(True), np.int64(2), False),
        (np.uint8(1), np.int64(-1), False),
        (np.float32(1), np.float64(0.1), False),
        (np.float64(1), np.int64(2**53 + 1), False),
        (np.float64(1), np.float32(0.1), True),
        (np.float32(1), np.float64(np.nan), True),
    ],
)
def test_a_result_that_the_array_cannot_hold_fails_and_is_not_bent(
    first: np.generic, second: np.generic, fits: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out.npy"
    with opened(out, {}, 2, resume=False, force=False) as results:
        for outcome in (first, second):
            results.write(None, outcome)
        results.finish()
        assert results.failed == (not fits)
    array = np.load(out)
    assert array.dtype == first.dtype
    if fits:
        assert np.array_equal(array[1], second, equal_nan=True)
    else:
        [failure] = lines(tmp_path / "out.npy.errors.jsonl")
        assert (failure["index"], failure["type"]) == (1, "unencodable-result")
        assert f"the result is {second.dtype}, the first ones {first.dtype}" in failure["detail"]


def test_a_failure_does_not_change_the_kind_of_the_others_numbers(double: Service, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    rows[3, 1] = np.nan
    np.save(tmp_path / "a.npy", rows)
    assert infer(double, tmp_path / "a.npy", "-o", tmp_path / "out.npy") == 1
    array = np.load(tmp_path / "out.npy")
    assert array.dtype == np.float32
    assert np.array_equal(array, 2 * np.where(np.arange(5)[:, None] == 3, np.nan, rows), equal_nan=True)


def test_an_array_of_failures_alone_is_still_an_array(tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    with opened(out, {}, 2, resume=False, force=False) as results:
        for _ in range(2):
            results.write(None, ModelError("why"))
        results.finish()
    assert np.isnan(np.load(out)).tolist() == [True, True]


def test_a_changed_folder_is_another_input(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    before = sources.source(tmp_path).mark
    (tmp_path / "b").touch()
    assert sources.source(tmp_path).mark != before


def test_elsewhere_than_on_a_terminal_a_line_comes_now_and_then(
    obedient: Service, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(infer_files, "PLAIN", 0.01)
    path = jsonl(tmp_path / "items.jsonl", list(range(60)))
    assert infer(obedient, path, "--chunk", 5, "--parameters", '{"sleep": 0.01}') == 0
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("60/60 items, ")
    assert " left\n" in said
    assert "\r" not in said
