"""The README is true: its commands, its examples, its settings table and its figures."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from app import metrics, settings
from tests.service import ROOT, Service, serving

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def python_block(start: str) -> str:
    [block] = [text for language, text in BLOCKS if language == "python" and text.startswith(start)]
    return block


def shape(text: str) -> re.Pattern[str]:
    """What a printed line looks like: … stands for anything."""
    return re.compile(re.escape(text).replace("…", ".*"))


def test_the_two_commands_stand_before_line_30() -> None:
    head = "\n".join(README.splitlines()[:30])
    assert "$ make serve\n" in head
    assert "$ make test\n" in head
    for target in ("serve", "test", "test-long", "check", "bench"):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_the_settings_table_is_the_one_that_the_code_makes() -> None:
    table = README.split("<!-- settings -->\n")[1].split("<!-- /settings -->")[0]
    assert table == settings.table(), "python -c 'from app.settings import table; print(table(), end=str())'"


def test_the_table_of_metrics_is_the_one_that_the_code_makes() -> None:
    table = README.split("<!-- metrics -->\n")[1].split("<!-- /metrics -->")[0]
    assert table == metrics.table(), "python -c 'from app.metrics import table; print(table(), end=str())'"


@pytest.mark.long
def test_the_image_model_answers_as_the_readme_says(tmp_path: Path) -> None:
    (tmp_path / "colour.py").write_text(python_block("# colour.py"))
    Image.new("RGB", (9, 9), "red").save(tmp_path / "red.png")
    (tmp_path / "notes.txt").write_text("not an image")
    [block] = [text for language, text in BLOCKS if language == "console" and "red.png" in text]
    curl, printed = block.splitlines()
    with serving("colour.py:Colour", ranks=1, cwd=tmp_path) as service:
        command = curl.removeprefix("$ ").replace(":8000", f":{service.port}")
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30, cwd=tmp_path)
        assert shape(printed).fullmatch(done.stdout), done.stdout


def test_lines_are_answered_as_the_readme_says(obedient: Service) -> None:
    [block] = [text for language, text in BLOCKS if language == "console" and "printf" in text]
    curl, *printed = block.splitlines()
    command = curl.removeprefix("$ ").replace(":8000", f":{obedient.port}")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=30)
    assert shape("\n".join(printed)).fullmatch(done.stdout.strip()), done.stdout


def test_the_first_curl_prints_what_the_readme_says(digits: Service) -> None:
    [command] = [line[2:] for line in README.splitlines() if line.startswith("$ curl") and "digits-samples" in line]
    done = subprocess.run(
        command.replace(":8000", f":{digits.port}"), shell=True, capture_output=True, text=True, timeout=30, cwd=ROOT
    )
    [printed] = [line for line in README.splitlines() if line.startswith('{"id":"…","outputs":[{"digit"')]
    assert shape(printed).fullmatch(done.stdout), done.stdout


def test_the_sentiment_model_checks_as_the_readme_says(tmp_path: Path) -> None:
    (tmp_path / "sentiment.py").write_text(python_block("# sentiment.py"))
    [block] = [text for language, text in BLOCKS if language == "console" and "phalanx check" in text]
    command, *printed = block.splitlines()[:4]
    *_, curl, answer = block.splitlines()
    phalanx = Path(sys.executable).with_name("phalanx")
    arguments = [phalanx, *shlex.split(command)[2:], "--ranks", "2", "--device", "cpu"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == printed
    with serving("sentiment.py:Sentiment", ranks=2, cwd=tmp_path) as service:
        here = curl[2:].replace(":8000", f":{service.port}")
        done = subprocess.run(here, shell=True, capture_output=True, text=True, timeout=30)
        assert shape(answer).fullmatch(done.stdout), done.stdout


def test_the_tensor_model_answers_as_the_readme_says(tmp_path: Path) -> None:
    (tmp_path / "scale.py").write_text(python_block("# scale.py"))
    [block] = [text for language, text in BLOCKS if language == "console" and "phalanx serve scale.py:Scale" in text]
    command = block.split("$ ")[2].rsplit("\n{", 1)[0]
    printed = block.splitlines()[-1]
    with serving("scale.py:Scale", ranks=2, cwd=tmp_path) as service:
        here = command.replace(":8000", f":{service.port}")
        done = subprocess.run(here, shell=True, capture_output=True, text=True, timeout=30)
        assert shape(printed).fullmatch(done.stdout), done.stdout
        for start, printed in (("import io, httpx", "(4, 3)\n"), ("import numpy as np, tritonclient", "120.0\n")):
            code = python_block(start).replace(":8000", f":{service.port}")
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
            assert done.stdout == printed, done.stderr
        code = python_block("from app.client").replace(":8000", f":{service.port}")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
        printed = ["[[10.0, 20.0, 30.0], [40.0, 50.0, 60.0]]", "[[2.0, 4.0, 6.0], None] invalid-item"]
        assert done.stdout.splitlines() == printed + [str([2.0 * n] * 3) for n in range(5)], done.stderr
        assert_infer_prints_what_the_readme_says(service, tmp_path)


def assert_infer_prints_what_the_readme_says(service: Service, folder: Path) -> None:
    (folder / "items.jsonl").write_text("[1, 2, 3]\n[1, 2\n[4, 5, 6]\n")
    [block] = [text for language, text in BLOCKS if language == "console" and "phalanx infer" in text]
    for lines in block.split("$ ")[1:]:
        command, *printed = lines.splitlines()
        here = command.replace("phalanx infer", f"phalanx infer --url http://127.0.0.1:{service.port}")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            here, shell=True, capture_output=True, text=True, timeout=30, cwd=folder, env=os.environ | {"PATH": path}
        )
        assert shape("\n".join(printed) + "\n").fullmatch(done.stderr + done.stdout), done.stderr + done.stdout


def test_every_status_of_the_openapi_is_in_the_table(digits: Service) -> None:
    schema = digits.client.get("/openapi.json").json()
    for operation in (operation for path in schema["paths"].values() for operation in path.values()):
        for status in operation["responses"]:
            assert re.search(rf"^\|.*\b{status}\b.*\|", README, re.MULTILINE), status


def test_every_path_of_the_openapi_is_in_the_table(digits: Service) -> None:
    version = "/versions/{version}"
    table = README.replace(f"[{version}]", "")
    for path, operations in digits.client.get("/openapi.json").json()["paths"].items():
        for method in operations:
            assert f"`{method.upper()} {path.replace(version, '')}`" in table
        assert version not in path or f"[{version}]" in README


@pytest.mark.parametrize("name", ["digits-samples.json", "digits-labels.json"])
def test_files_that_the_readme_names_exist(name: str) -> None:
    assert json.loads((ROOT / "workers" / "models" / name).read_text())
