"""`app.settings`: where values come from, what is refused, and how it is said."""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from app import settings as module
from app.settings import Settings, add_flags, environ, load, table
from workers.errors import SettingsError

MIB = 2**20


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith("PHALANX_")]:
        monkeypatch.delenv(key)


def faults(flags: dict[str, object] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(flags)
    return caught.value.detail.splitlines()


def parsed(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(arguments))


def test_without_anything_there_are_the_defaults() -> None:
    settings = load()
    assert (settings.model, settings.host, settings.port, settings.ranks) == ("digits", "127.0.0.1", 8000, None)
    assert (settings.queue_bytes, settings.max_body_bytes) == (512 * MIB, 64 * MIB)


def test_flags_go_over_the_environment_and_the_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_PORT", "9000")
    monkeypatch.setenv("PHALANX_RANKS", "4")
    settings = load(parsed("--port", "9001"))
    assert (settings.port, settings.ranks, settings.max_restarts) == (9001, 4, 3)


@pytest.mark.parametrize(
    ("text", "size"), [("1048576", MIB), ("1MiB", MIB), ("1 mib", MIB), ("0.5GiB", 512 * MIB), ("2MB", 2_000_000)]
)
def test_sizes_are_written_as_people_write_them(text: str, size: int) -> None:
    assert load({"max_body_bytes": text}).max_body_bytes == size


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().port = 1


def test_a_bad_value_is_told_with_its_key_its_flag_and_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_PORT", "eighty")
    assert faults() == ["PHALANX_PORT (--port) is 'eighty': expected a whole number"]
    assert faults({"port": 70000}) == ["PHALANX_PORT (--port) is 70000: expected less than or equal to 65535"]


def test_all_faults_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_DEVICE", "gpu")
    monkeypatch.setenv("PHALANX_QUEUE_ITEMS", "100")
    monkeypatch.setenv("PHALANX_MAX_BODY_SIZE", "1MiB")
    assert faults(parsed("--max-body-bytes", "3 elephants")) == [
        "PHALANX_MAX_BODY_SIZE is not a setting: did you mean PHALANX_MAX_BODY_BYTES?",
        "PHALANX_DEVICE (--device) is 'gpu': expected 'auto', 'cpu' or 'cuda'",
        "PHALANX_MAX_ITEMS (--max-items) is 16384: expected at most PHALANX_QUEUE_ITEMS, which is 100",
        "PHALANX_MAX_BODY_BYTES (--max-body-bytes) is '3 elephants': expected a size, such as 67108864 or 64MiB",
    ]


@pytest.mark.parametrize(
    "flags",
    [
        {"max_items": 101, "queue_items": 100},
        {"max_body_bytes": "3MiB", "queue_bytes": "2MiB"},
        {"process_group_timeout": 30, "step_timeout": 30},
    ],
)
def test_settings_that_contradict_each_other_stop_the_start(flags: dict[str, object]) -> None:
    (fault,) = faults(flags)
    assert all(f"PHALANX_{name.upper()}" in fault for name in flags)


def test_equal_limits_do_not_contradict_each_other() -> None:
    load({"max_items": 100, "queue_items": 100, "max_body_bytes": "2MiB", "queue_bytes": "2MiB"})


MAY_BE_ZERO = {"port", "max_wait_ms", "max_restarts", "node_rank"}
NUMBERS = [
    name for name, field in Settings.model_fields.items() if re.search("int|float|ByteSize", str(field.annotation))
]


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_negative_and_few_are_zero(name: str) -> None:
    assert f"PHALANX_{name.upper()} (" in faults({name: -1})[0]
    if name not in MAY_BE_ZERO:
        assert f"PHALANX_{name.upper()} (" in faults({name: 0})[0]


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_times_are_finite(value: str) -> None:
    assert faults({"step_timeout": value})[0].startswith("PHALANX_STEP_TIMEOUT")


def test_an_unknown_variable_stops_the_start_and_the_nearest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_MAX_BATCHSIZE", "4")
    assert faults() == ["PHALANX_MAX_BATCHSIZE is not a setting: did you mean PHALANX_MAX_BATCH_SIZE?"]


def test_an_unknown_variable_that_is_near_to_nothing_is_just_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_ZZZZZZ", "4")
    assert faults() == ["PHALANX_ZZZZZZ is not a setting"]


def test_an_unknown_flag_is_named_too() -> None:
    assert faults({"rank": 2}) == ["--rank is not a setting: did you mean --ranks?"]


def test_an_empty_variable_is_a_bad_value_and_not_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.setenv(f"PHALANX_{name.upper()}", "")
    assert len(faults()) == len(Settings.model_fields)


def test_the_log_level_may_be_shouted() -> None:
    assert load({"log_level": "INFO"}).log_level == "info"


def test_kubernetes_service_links_are_ignored_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for key, value in {
        "PHALANX_SERVICE_HOST": "10.0.0.1",
        "PHALANX_SERVICE_PORT": "8000",
        "PHALANX_SERVICE_PORT_HTTP": "8000",
        "PHALANX_PORT": "tcp://10.0.0.1:8000",
        "PHALANX_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PHALANX_PORT_8000_TCP_PROTO": "tcp",
        "PHALANX_METRICS_SERVICE_HOST": "10.0.0.2",
        "PHALANX_METRICS_SERVICE_PORT": "9090",
        "PHALANX_METRICS_PORT": "tcp://10.0.0.2:9090",
        "PHALANX_METRICS_PORT_9090_TCP_ADDR": "10.0.0.2",
    }.items():
        monkeypatch.setenv(key, value)
    assert load().port == 8000
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_port_with_a_number_is_no_service_link(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PHALANX_PORT", "8123")
    assert load().port == 8123
    assert not caplog.records


def test_api_keys_are_lines_without_blanks_and_comments(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(b"# ours\nfirst\r\n\n  second  \n#third\n")
    assert load({"api_keys_file": keys}).api_keys() == (b"first", b"second")
    assert load().api_keys() == ()


def test_a_key_file_that_is_missing_a_folder_or_empty_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing yet\n")
    (tmp_path / "blank").write_text("one\ntwo words\n")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    for path, reason in (
        (tmp_path / "none", f"a file that user {os.geteuid()} can read: No such file or directory"),
        (tmp_path, f"a file that user {os.geteuid()} can read: Is a directory"),
        (tmp_path / "empty", "a file with at least one key in it"),
        (tmp_path / "blank", "a file of keys, one a line; line 2 holds a blank or what is not ASCII"),
        (tmp_path / "latin", "a file of keys, one a line; line 1 holds a blank or what is not ASCII"),
    ):
        (fault,) = faults({"api_keys_file": str(path)})
        assert fault == f"PHALANX_API_KEYS_FILE (--api-keys-file) is {str(path)!r}: expected {reason}"


def test_the_run_directory_is_one_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert load({"port": 8001}).run_directory == Path("/run/user/1000/phalanx-8001")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert load({"port": 8001}).run_directory == Path(f"/dev/shm/phalanx-{os.getuid()}-8001")
    assert load({"run_dir": "/run/phalanx"}).run_directory == Path("/run/phalanx")


def test_a_flag_that_is_not_given_leaves_nothing_behind() -> None:
    assert parsed() == {}
    assert parsed("--max-batch-size", "4") == {"max_batch_size": "4"}


def test_flags_can_be_a_selection() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, ["host", "port"])
    assert "--port N" in parser.format_help()
    assert "--ranks" not in parser.format_help()


def test_every_flag_has_its_meaning_its_default_and_its_variable_in_the_help() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')} " in text
        assert f"PHALANX_{name.upper()})" in text
        assert field.description is not None
        assert field.description.endswith(".")
    assert "64MiB" in text


def test_a_child_process_gets_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = load({"port": 9001, "max_body_bytes": "1MiB", "max_wait_ms": "0.25", "ranks": 3, "run_dir": "/run/x"})
    monkeypatch.setenv("PHALANX_PORT", "tcp://10.0.0.1:8000")
    for key, value in environ(mine).items():
        monkeypatch.setenv(key, value)
    assert load() == mine


def test_the_table_has_a_row_for_every_setting() -> None:
    rows = table().splitlines()[2:]
    assert len(rows) == len(Settings.model_fields)
    assert all(row.count(" | ") == 3 for row in rows)
    assert rows[2] == ("| `PHALANX_PORT` | `--port` | `8000` | Port the front end listens on; 0 takes a free one. |")


def test_settings_are_light_to_import() -> None:
    code = "import sys, app.settings; print({'torch', 'fastapi', 'zmq'} & set(sys.modules))"
    root = Path(module.__file__).parent.parent
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=root).strip() == "set()"


def test_models_are_names_with_commas_between_and_each_is_there_once() -> None:
    assert load({"models": "A, b-2.x"}).model_names == ("A", "b-2.x")
    assert load().model_names == ()
    for bad, reason in (
        ("A,,B", "names, comma-separated, each of at most 64 letters"),
        ("A/B", "names, comma-separated, each of at most 64 letters"),
        ("A,B,A", "each name once; A is there 2 times"),
    ):
        assert f"PHALANX_MODELS (--models) is {bad!r}: expected {reason}" in faults({"models": bad})[0]


@pytest.mark.parametrize("name", ["", "-1", "..", "a/b", "a b", "x" * 33, "ä", "a\n"])
def test_a_group_has_a_name_that_fits_into_paths_and_command_lines(name: str) -> None:
    assert "expected a name of at most 32 letters" in faults({"group": name})[0]
    assert "expected a name of at most 64 letters" in faults({"model_name": name and 2 * name})[0]


def test_the_number_of_ranks_may_be_left_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_RANKS", "auto")
    assert load().ranks is None
