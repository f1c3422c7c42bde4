"""`phalanx infer`: items of files through a running service into a file of results, and on from where it ended."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shlex
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import orjson

from app.call import ASK_AGAIN
from app.client import AsyncClient, RequestError, tls
from app.results import Results, opened
from app.sources import Source, source
from workers.errors import DeadlineExceeded, NoSuchModel, ResultsError, ServiceError, SettingsError, UnnamedModel

LIVE, PLAIN = 0.2, 5.0  # seconds between two reports, on a terminal and elsewhere
HELLO_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was asked for on the command line."""

    files: list[Path]
    output: Path | None
    url: str
    model: str | None = None
    api_key_file: Path | None
    concurrency: int
    chunk: int
    timeout: float
    resume: bool
    force: bool
    parameters: str | None


def run(wanted: Run) -> int:
    """The exit code: 0, or 1 where an item failed, 130 after Ctrl-C. StartError: it cannot begin, or cannot go on."""
    sources = [source(path) for path in wanted.files]
    total = sum(one.count for one in sources)
    parameters = _parameters(wanted, sources)
    key = _key(wanted.api_key_file)
    output = _output(wanted, sources)
    _greet(wanted.url)
    mark = {"inputs": [one.mark for one in sources], "parameters": parameters} | (
        {"model": wanted.model} if wanted.model else {}
    )
    try:
        with opened(output, mark, total, resume=wanted.resume, force=wanted.force) as results:
            report = Report(results, total)
            try:
                asyncio.run(_infer(wanted, sources, parameters, key, results, report))
            except KeyboardInterrupt:
                report.end(f"stopped at {report}; to go on: {_again()}")
                return 130
            except RequestError as error:
                report.end(f"stopped at {report}")
                raise ServiceError(f"{error.title}: {error.detail}\n{_hint(error)}") from error
            failures = f": see {output}.errors.jsonl" if results.failed else ""
            report.end(f"{report}{failures}")
            return 1 if results.failed else 0
    except OSError as error:
        raise ResultsError(f"{error.filename or output}: {error.strerror}\nto go on: {_again()}") from error


async def _infer(
    wanted: Run,
    sources: list[Source],
    parameters: dict[str, Any] | None,
    key: str | None,
    results: Results,
    report: Report,
) -> None:
    reporting = asyncio.create_task(report.keep())
    # Time is what limits how often a request is tried again: a run survives a restart of the service.
    client = AsyncClient(
        wanted.url,
        api_key=key,
        model=wanted.model,
        timeout=wanted.timeout,
        retries=sys.maxsize,
        chunk_items=wanted.chunk,
    )
    async with client:
        start = results.done
        for one in sources:
            if start < one.count:
                answers = client.map(one.items(start), concurrency=wanted.concurrency, parameters=parameters)
                async with aclosing(answers) as outcomes:
                    async for outcome in outcomes:
                        results.write(one.name(start), outcome)
                        start += 1
                if start != one.count:
                    raise SettingsError(f"{one.path} changed while it was read")
            start -= one.count
    results.finish()
    reporting.cancel()


class Report:
    """How far a run is, on stderr: a line that lives, on a terminal, else one now and then."""

    def __init__(self, results: Results, total: int) -> None:
        self._results = results
        self._total = total
        self._first = results.done
        self._began = time.monotonic()
        self._live = sys.stderr.isatty()

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(LIVE if self._live else PLAIN)
            print(f"\r\x1b[K{self}" if self._live else f"{self}\n", end="", file=sys.stderr, flush=True)

    def end(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self._live else text, file=sys.stderr)

    def __str__(self) -> str:
        rate = (self._results.done - self._first) / max(time.monotonic() - self._began, 1e-3)
        parts = [f"{self._results.done:,}/{self._total:,} items", f"{rate:,.1f}/s"]
        left = self._total - self._results.done
        if left and rate:
            parts.append(f"{timedelta(seconds=math.ceil(left / rate))} left")
        if self._results.failed:
            parts.append(f"{self._results.failed:,} failed")
        return ", ".join(parts)


# ---- what the command line says


def _parameters(wanted: Run, sources: list[Source]) -> dict[str, Any] | None:
    if wanted.parameters is None:
        return None
    with contextlib.suppress(orjson.JSONDecodeError):
        parameters = orjson.loads(wanted.parameters)
        if isinstance(parameters, dict):
            if any(one.path.suffix == ".npy" for one in sources):
                raise SettingsError("--parameters do not go with .npy: an npy body has no room for them")
            return parameters
    raise SettingsError(f"--parameters is {wanted.parameters!r}: expected a JSON object")


def _key(path: Path | None) -> str | None:
    """The first key of a file as the service has it."""
    if path is None:
        return None
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"--api-key-file {path} cannot be read: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys or not keys[0].isascii():
        raise SettingsError(f"--api-key-file {path} holds no key")
    return keys[0]


def _output(wanted: Run, sources: list[Source]) -> Path:
    if wanted.output == Path("-"):
        raise SettingsError("-o - is no file: results go to one, so that --resume can go on with it")
    first = wanted.files[0].resolve()
    output = wanted.output or wanted.files[0].parent / f"{first.name if first.is_dir() else first.stem}.results.jsonl"
    if output.suffix == ".npy" and any(one.path.suffix != ".npy" for one in sources):
        raise SettingsError(f"{output}: only of .npy inputs results are .npy")
    if output.exists() and not output.is_file():
        raise SettingsError(f"{output} is no regular file")
    if not output.parent.is_dir():
        raise SettingsError(f"{output.parent} is no folder")
    if any(one.path.resolve() in (output.resolve(), output.resolve().parent) for one in sources):
        raise SettingsError(f"{output} is among the inputs")
    return output


def _greet(url: str) -> None:
    """To wait for a service that went away is right, and for one that never was is not."""
    try:
        httpx.get(f"{url.rstrip('/')}/livez", timeout=HELLO_TIMEOUT, verify=tls())
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise SettingsError(f"--url is {url!r}: {error}") from None
    except httpx.TransportError as error:
        raise ServiceError(f"there is no service at {url}: {error}") from None


def _hint(error: RequestError) -> str:
    """What to do; to repeat does not cure every refusal."""
    if isinstance(error, NoSuchModel | UnnamedModel):
        return "give the name of one that is served with --model"
    match error.status:
        case 401:
            return "give the service's key with --api-key-file"
        case 404 | 405:
            return "--url is the root of a Phalanx: is it one?"
        case status if status in (*ASK_AGAIN, DeadlineExceeded.status):
            return f"to go on: {_again()}"
    return "the results so far stay; with the cause gone, --resume goes on"


def _again() -> str:
    words = [word for word in sys.argv[1:] if word not in ("--force", "--resume")]
    return shlex.join(["phalanx", *words, "--resume"])
