"""`phalanx` on the command line: its verbs, its exit codes, and what it says when it cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.service import MODELS, Service, alive, descendants, samples, serving, until

PHALANX = Path(sys.executable).with_name("phalanx")


def phalanx(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PHALANX_")}
    return subprocess.run(
        [PHALANX, *arguments], capture_output=True, text=True, timeout=100, cwd=cwd, env=clean | environment
    )


@pytest.mark.long
def test_check_runs_the_example_on_every_rank_and_says_what_came_out() -> None:
    done = phalanx("check", "digits", "--ranks", "2", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "Digits: 2 ranks on cpu, cpu" in done.stdout
    assert 'rank 0: {"digit":6,' in done.stdout
    assert 'rank 1: {"digit":6,' in done.stdout


@pytest.mark.long
def test_check_of_a_model_whose_example_fails_says_why(tmp_path: Path) -> None:
    model = tmp_path / "broken.py"
    model.write_text(
        "class Broken:\n"
        "    example = 0\n"
        "    def __init__(self, device): pass\n"
        "    def predict(self, items): return [1 / item for item in items]\n"
    )
    done = phalanx("check", f"{model}:Broken", "--ranks", "1", "--device", "cpu")
    assert done.returncode == 78
    assert "its example failed: predict raised ZeroDivisionError" in done.stdout


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        pytest.param("nowhere.py:Model", "no such file: nowhere.py", marks=pytest.mark.long),
        pytest.param(f"{MODELS}:Missing", "has no class 'Missing'", marks=pytest.mark.long),
        (f"{MODELS}:Refuses", "Refuses.__init__ raised OSError: the weights are not there"),
    ],
)
def test_a_model_that_cannot_be_loaded_ends_the_start_with_78_and_one_sentence(model: str, sentence: str) -> None:
    service = Service(model, ranks=2)
    try:
        family = descendants(service.process.pid)
        assert service.process.wait(60) == 78
        assert sentence in service.log()
        assert not any(map(alive, family))
        assert not service.run_dir.exists()
    finally:
        service.close()


@pytest.mark.long
def test_a_front_end_alone_says_why_there_is_no_group_and_a_public_address_is_printed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with ExitStack() as services:

        def start(model: str, verb: str, **settings: object) -> Service:
            service = Service(model, verb=verb, run_dir=run_dir, **settings)
            services.callback(service.close)
            return service

        def reason() -> str:
            return str(front_end.client.get("/readyz").json().get("reason"))

        front_end = start("digits", "app", public_url="https://example.org")
        until(lambda: "listening" in front_end.log())
        workers = start("nowhere", "workers", ranks=1)
        assert workers.process.wait(60) == 78
        assert "is not tried again: 'nowhere' names no model" in workers.log()
        assert "ChildFailedError" not in workers.log()
        assert reason().startswith("no worker group; the last one: group 0 epoch 1 died: 'nowhere' names no model")
        workers = start("digits", "workers", ranks=1)
        until(front_end.ready, 60)
        assert "curl -s https://example.org/infer" in front_end.log()
        assert workers.stop() == 0
        until(lambda: reason().startswith("no worker group"))
        assert reason() == "no worker group; the last one: group 0 epoch 2: it has left"


def test_unknown_and_bad_settings_stop_the_start_and_are_named() -> None:
    done = phalanx("serve", PHALANX_RANK="2", PHALANX_PORT="eighty")
    assert done.returncode == 2
    assert "PHALANX_RANK is not a setting: did you mean PHALANX_RANKS?" in done.stderr
    assert "PHALANX_PORT" in done.stderr
    assert "eighty" in done.stderr


def test_a_taken_port_is_named(digits: Service) -> None:
    done = phalanx("app", "--port", str(digits.port), PHALANX_RUN_DIR=f"/dev/shm/phx-taken-{os.getpid()}")
    assert done.returncode != 0
    assert str(digits.port) in done.stderr


@pytest.mark.long
def test_a_model_is_served_from_a_folder_that_has_its_own_app_and_workers(tmp_path: Path) -> None:
    for name in ("app", "workers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a stranger was imported')\n")
        (tmp_path / name / "cli.py").write_text("raise RuntimeError('a stranger was run')\n")
        (tmp_path / name / "rank.py").write_text("raise RuntimeError('a stranger was run')\n")
    (tmp_path / "helper.py").write_text("FACTOR = 3\n")
    (tmp_path / "model.py").write_text(
        "import helper\n"
        "class Triple:\n"
        "    def __init__(self, device): pass\n"
        "    def predict(self, items): return [helper.FACTOR * item for item in items]\n"
    )
    with serving("model.py:Triple", ranks=2, cwd=tmp_path) as service:
        assert service.outputs([1, 2, 3]) == [3, 6, 9]


def test_ready_prints_an_address_and_a_curl_line_that_works(digits: Service) -> None:
    [line] = [line for line in digits.log().splitlines() if line.startswith("  curl ")]
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=30, cwd=digits.cwd)
    assert done.returncode == 0
    assert f'{{"digit":{samples()[1][0]},' in done.stdout


@pytest.mark.long
def test_two_services_run_side_by_side_and_ctrl_c_stops_one(digits: Service) -> None:
    with serving("Jitter", ranks=1) as other:
        family = [other.process.pid, *descendants(other.process.pid)]
        assert other.outputs([4]) == [8]
        assert digits.ready()
        assert other.stop(signal.SIGINT) == 0
        until(lambda: not any(map(alive, family)), 2, "all gone")
    assert digits.ready()


def test_status_says_how_each_rank_is(digits: Service) -> None:
    done = phalanx("status", PHALANX_RUN_DIR=str(digits.run_dir))
    assert done.returncode == 0
    assert done.stdout.splitlines()[1:] == ["rank 0: ready", "rank 1: ready"]


def test_status_is_of_one_group(digits: Service) -> None:
    done = phalanx("status", "--group", "1", PHALANX_RUN_DIR=str(digits.run_dir))
    assert done.returncode == 1
    assert "no ranks" in done.stdout


def test_status_of_a_place_without_ranks_is_bad(tmp_path: Path) -> None:
    done = phalanx("status", PHALANX_RUN_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "have run in" in done.stdout
