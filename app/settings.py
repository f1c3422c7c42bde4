"""Every knob once: its name, default, bounds and one sentence; what a knob does is known where it is used, not here."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, ByteSize, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from workers.errors import SettingsError, StartError

log = logging.getLogger("app")

PREFIX = "PHALANX_"
MIB = 2**20
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"  # of groups and models: they stand in paths, addresses and command lines
GROUP_NAME, MODEL_NAME = 32, 64  # characters at most

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Size = Annotated[ByteSize, Field(gt=0)]
Level = Literal["debug", "info", "warning", "error"]


class Settings(BaseSettings):
    """The settings of one service. `load` makes them; calling the class reads the environment too, with raw errors."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    model: str = Field(
        "digits",
        min_length=1,
        description="The model: a shipped name, `package.module:Class` or `path/to/file.py:Class`.",
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address the front end listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port the front end listens on; 0 takes a free one.")
    public_url: str | None = Field(
        None, pattern=r"^https?://\S+$", description="What clients call the service by, where it is another address."
    )
    ranks: Count | None = Field(
        None, description="Ranks in the group; unset or `auto`: one a GPU, or 2 where there is none."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the ranks run: `auto` takes the GPUs if there are any."
    )
    run_dir: Path | None = Field(
        None,
        description="Run directory, on tmpfs; unset: `$XDG_RUNTIME_DIR/phalanx-<port>`, else "
        "`/dev/shm/phalanx-<uid>-<port>`.",
    )
    model_name: str | None = Field(None, description="What clients call the model by; unset: its class's name.")
    models: str | None = Field(
        None,
        description="Names of the models a front end serves, comma-separated, where there are several; unset: one, "
        "whichever the groups bring.",
    )
    group: str = Field("0", description="Name of the worker group; each in a run directory has its own.")
    max_batch_size: Count | None = Field(None, description="Items a rank gets in one step; unset: the model's own.")
    max_wait_ms: float = Field(
        0, ge=0, allow_inf_nan=False, description="Milliseconds an idle group waits for more items before a step."
    )
    queue_items: Count = Field(65536, description="Items admitted and not yet answered; beyond it, 429.")
    queue_bytes: Size = Field(
        ByteSize(512 * MIB), description="Bytes of bodies and answers held in all; beyond it, 429."
    )
    ring_bytes: Size = Field(
        ByteSize(256 * MIB), description="Memory in the run directory for long npy bodies, which the ranks read there."
    )
    compress_from: Size | None = Field(
        None, description="Bytes from which answers are gzipped for all who take that; unset: for who sends gzip."
    )
    max_items: Count = Field(16384, description="Items in one request; beyond it, 413.")
    max_body_bytes: Size = Field(ByteSize(64 * MIB), description="Bytes in one request's body; beyond it, 413.")
    request_timeout: Seconds = Field(
        60, description="Seconds a request may take in all, unless it says otherwise (`X-Request-Timeout`); then 504."
    )
    body_timeout: Seconds = Field(30, description="Seconds without a byte of an unfinished body; then 408.")
    step_timeout: Seconds = Field(30, description="Seconds one step may take; then its group is felled and replaced.")
    process_group_timeout: Seconds = Field(
        600, description="Seconds torch waits in a collective; the backstop behind the step time-out."
    )
    start_timeout: Seconds = Field(900, description="Seconds a group may take to load the model and meet.")
    group_wait: Seconds = Field(30, description="Seconds requests are admitted while there is no group; then 503.")
    drain_timeout: Seconds = Field(25, description="Seconds a stop waits for the requests already admitted.")
    max_restarts: int = Field(3, ge=0, description="Tries again when a group dies before it was ever ready.")
    max_connections: Count = Field(1024, description="Open client connections; beyond it, 503.")
    api_keys_file: Path | None = Field(
        None, description="File of API keys, one a line, `#` for comments; unset: no key is asked for."
    )
    nnodes: Count = Field(1, description="Hosts of the group; with several, each runs `phalanx workers`.")
    node_rank: int = Field(0, ge=0, description="Which of these hosts this is; 0 has the front end beside it.")
    rdzv_endpoint: str | None = Field(
        None, description="HOST:PORT of node 0, at which its launcher waits for those of the other hosts."
    )
    interface: str | None = Field(
        None, min_length=1, description="Interface between the hosts; unset or `auto`: the one that leads to node 0."
    )
    local_addr: str | None = Field(
        None, min_length=1, description="This host's address for the others; unset or `auto`: the interface's."
    )
    queue_listen: str | None = Field(None, description="HOST:PORT at which a front end takes groups of other hosts.")
    queue: str | None = Field(
        None, description="HOST:PORT of a front end on another host, for `phalanx workers`; unset: the run directory's."
    )
    cluster_key_file: Path | None = Field(
        None, description="File of the key that the hosts of a cluster share; `phalanx key FILE` makes one."
    )
    log_requests: bool = Field(
        True, description="Whether each request is a line on standard output, JSON unless that is a terminal."
    )
    log_level: Annotated[Level, BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value)] = (
        Field("info", description="Least severe log records written.")
    )

    @property
    def run_directory(self) -> Path:
        """`run_dir`, or where it is by default: one a user and port, on a tmpfs that every Linux has."""
        if self.run_dir is not None:
            return self.run_dir
        runtime = os.environ.get("XDG_RUNTIME_DIR", "")
        if runtime.startswith("/"):
            return Path(runtime, f"phalanx-{self.port}")
        return Path(f"/dev/shm/phalanx-{os.getuid()}-{self.port}")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Of `models`; none where that is unset."""
        return () if self.models is None else tuple(name.strip() for name in self.models.split(","))

    def api_keys(self) -> tuple[bytes, ...]:
        """The keys in `api_keys_file`, read now; none where it is unset. OSError or ValueError where it is unusable."""
        return () if self.api_keys_file is None else _read_keys(self.api_keys_file)

    # Each fault belongs to one field, and validators run for defaults too: so one start reports all of them.
    @field_validator("max_items", "max_body_bytes")
    @classmethod
    def _fits_the_queue(cls, value: int, info: ValidationInfo) -> int:
        queue = "queue_items" if info.field_name == "max_items" else "queue_bytes"
        if value > info.data.get(queue, value):
            raise ValueError(f"at most {_key(queue)}, which is {_shown(info.data[queue])}")
        return value

    @field_validator("queue_listen", "queue")
    @classmethod
    def _is_a_place(cls, value: str | None) -> str | None:
        if value is not None:
            endpoint(value)
        return value

    @field_validator("rdzv_endpoint")
    @classmethod
    def _is_an_endpoint(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            endpoint(value)
        elif info.data.get("nnodes", 1) > 1:
            raise ValueError(f"HOST:PORT of node 0, as {_key('nnodes')} is {info.data['nnodes']}")
        return value

    @field_validator("node_rank")
    @classmethod
    def _is_one_of_the_nodes(cls, value: int, info: ValidationInfo) -> int:
        if value >= info.data.get("nnodes", value + 1):
            raise ValueError(f"less than {_key('nnodes')}, which is {info.data['nnodes']}")
        return value

    @field_validator("process_group_timeout")
    @classmethod
    def _outlasts_a_step(cls, value: float, info: ValidationInfo) -> float:
        step = info.data.get("step_timeout")
        if step is not None and value <= step:
            raise ValueError(f"more than {_key('step_timeout')}, which is {_shown(step)}")
        return value

    @field_validator("ranks", "interface", "local_addr", mode="before")
    @classmethod
    def _auto(cls, value: object) -> object:
        return None if value == "auto" else value  # a compose file can give a variable a value, but not take it away

    @field_validator("group")
    @classmethod
    def _names_a_group(cls, value: str) -> str:
        if not re.fullmatch(NAME, value) or len(value) > GROUP_NAME:
            raise ValueError(
                f"a name of at most {GROUP_NAME} letters, digits, `_`, `.` and `-`, the first no `-` or `.`"
            )
        return value

    @field_validator("model_name", "models")
    @classmethod
    def _names_models(cls, value: str | None, info: ValidationInfo) -> str | None:
        one = info.field_name == "model_name"
        names = [] if value is None else [value] if one else [name.strip() for name in value.split(",")]
        for name in names:
            if not re.fullmatch(NAME, name) or len(name) > MODEL_NAME:
                what = "a name" if one else "names, comma-separated, each"
                raise ValueError(
                    f"{what} of at most {MODEL_NAME} letters, digits, `_`, `.` and `-`, the first no `-` or `.`"
                )
            if names.count(name) > 1:
                raise ValueError(f"each name once; {name} is there {names.count(name)} times")
        return value

    @field_validator("run_dir", "api_keys_file", "cluster_key_file", mode="before")
    @classmethod
    def _not_blank(cls, value: object) -> object:
        if value == "":  # Path("") is the current folder; and no keys by accident would be an open door
            raise ValueError("a path")
        return value

    @field_validator("cluster_key_file")
    @classmethod
    def _holds_the_key(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is None:
            needs = {"nnodes": info.data.get("nnodes", 1) > 1, "queue_listen": False, "queue": False}
            needs |= {name: info.data.get(name) is not None for name in ("queue_listen", "queue")}
            for name in (name for name, needed in needs.items() if needed):
                raise ValueError(f"a file that `phalanx key FILE` made, as {_key(name)} is {info.data[name]}")
        if value is not None:
            from workers.curve import ClusterKey  # only who has several hosts needs ZeroMQ for it

            try:
                ClusterKey.read(value)
            except StartError as error:
                raise ValueError(f"a file that `phalanx key FILE` made: {error}") from None
        return value

    @field_validator("api_keys_file")
    @classmethod
    def _holds_a_key(cls, value: Path | None) -> Path | None:
        if value is not None:
            try:
                _read_keys(value)
            except OSError as error:
                raise ValueError(f"a file that user {os.geteuid()} can read: {error.strerror}") from None
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls)


class _Environment(EnvSettingsSource):
    """The environment without what Kubernetes puts there for a service that is called phalanx."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        value, key, is_complex = super().get_field_value(field, field_name)
        return (None if _is_service_link(_key(field_name), str(value)) else value), key, is_complex


def load(flags: Mapping[str, object] | None = None) -> Settings:
    """The settings: flags over environment over defaults. SettingsError names every fault, a line each.

    `flags` holds field names (`max_batch_size`), as `add_flags` makes them. The environment may not hold a `PHALANX_*`
    variable that is no setting.
    """
    flags = flags or {}
    environment = {key.upper(): value for key, value in os.environ.items() if key.upper().startswith(PREFIX)}
    links = [key for key, value in environment.items() if _is_service_link(key, value)]
    if links:
        log.warning(
            "ignored the service-link variables of Kubernetes (%s, ...); enableServiceLinks: false keeps them out",
            links[0],
        )
    fields = Settings.model_fields
    names = [key.removeprefix(PREFIX).lower() for key in environment if key not in links]
    faults = [_unknown(name, _key) for name in names if name not in fields]
    faults += [_unknown(name, _flag) for name in flags if name not in fields]
    try:
        settings = Settings(**{name: value for name, value in flags.items() if name in fields})  # type: ignore[arg-type]
    except ValidationError as error:
        faults += [
            _bad_value(str(fault["loc"][0]), fault["input"], fault["type"], fault["msg"]) for fault in error.errors()
        ]
    if faults:
        raise SettingsError("\n".join(faults))
    return settings


def add_flags(parser: argparse.ArgumentParser, names: Sequence[str] | None = None) -> None:
    """Adds a flag for each setting (or each of `names`); one that is not given leaves no attribute behind."""
    for name, field in Settings.model_fields.items():
        if names is None or name in names:
            default = "" if field.default is None else f"default: {_shown(field.default)}; "
            parser.add_argument(
                _flag(name),
                dest=name,
                default=argparse.SUPPRESS,
                metavar=_metavar(field),
                help=f"{field.description} ({default}{_key(name)})".replace("`", "").replace("%", "%%"),
            )


def environ(settings: Settings) -> dict[str, str]:
    """The variables that give a child process these settings; lay them over `os.environ`."""
    values = {name: getattr(settings, name) for name in Settings.model_fields}
    return {_key(name): _shown(value, exact=True) for name, value in values.items() if value is not None}


def table() -> str:
    """The settings as a Markdown table, as the README has it."""
    rows = ["| variable | flag | default | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "unset" if field.default is None else f"`{_shown(field.default)}`"
        rows.append(f"| `{_key(name)}` | `{_flag(name)}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def endpoint(text: str) -> tuple[str, int]:
    """`HOST:PORT`, with an IPv6 address in brackets, as host and port. ValueError where it is none."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]]+)):(\d{1,5})", text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError("HOST:PORT, such as 10.0.0.1:29500 or [fd00::1]:29500")
    return match[1] or match[2], int(match[3])


def _key(name: str) -> str:
    return PREFIX + name.upper()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(value: object, exact: bool = False) -> str:
    """The value as a user would write it: 64MiB, 30, cpu."""
    if isinstance(value, ByteSize):
        return str(int(value)) if exact else value.human_readable(separator="").replace(".0", "")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _metavar(field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "|".join(get_args(field.annotation))
    metavars: dict[object, str] = {ByteSize: "SIZE", str: "TEXT", Path: "PATH", bool: "true|false"}
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if kind in metavars]
    return metavars[kinds[0]] if kinds else "N"


def _read_keys(path: Path) -> tuple[bytes, ...]:
    lines = [line.strip() for line in path.read_bytes().splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith(b"#"))
    if not keys:
        raise ValueError("a file with at least one key in it")
    for number, line in enumerate(lines, 1):
        if not line.startswith(b"#") and not re.fullmatch(rb"[\x21-\x7e]*", line):
            raise ValueError(f"a file of keys, one a line; line {number} holds a blank or what is not ASCII")
    return keys


def _is_service_link(key: str, value: str) -> bool:
    """Whether Kubernetes made the variable: it does for a service that is called phalanx or phalanx-something."""
    if re.fullmatch(PREFIX + r"(SERVICE_\w+|\w+_SERVICE_(HOST|PORT)(_\w+)?|(\w+_)?PORT_\d+_\w+)", key):
        return True
    return re.fullmatch(PREFIX + r"(\w+_)?PORT", key) is not None and re.match(r"(tcp|udp|sctp)://", value) is not None


def _unknown(name: str, written: Callable[[str], str]) -> str:
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    return f"{written(name)} is not a setting" + (f": did you mean {written(near[0])}?" if near else "")


# What is expected, where pydantic's own words ("Input should be ...") would not help.
_EXPECTED = {
    "bool_parsing": "true or false",
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "byte_size": "a size, such as 67108864 or 64MiB",
    "byte_size_unit": "a size, such as 67108864 or 64MiB",
    "string_too_short": "some text",
    "string_pattern_mismatch": "an address such as https://example.org",
}


def _bad_value(name: str, value: object, kind: str, message: str) -> str:
    expected = _EXPECTED.get(kind) or message.removeprefix("Value error, ").removeprefix("Input should be ")
    shown = "unset" if value is None else repr(value) if isinstance(value, str) else _shown(value)
    return f"{_key(name)} ({_flag(name)}) is {shown}: expected {expected}"
