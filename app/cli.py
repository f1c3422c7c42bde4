"""`phalanx` and its verbs; each imports what it needs inside its verb, so that none pays for another."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.settings import Settings, add_flags, endpoint, environ, load
from workers import launch
from workers.errors import SettingsError, StartError

if TYPE_CHECKING:
    from app.groups import Group

log = logging.getLogger("app")

CPU_RANKS = 2  # where there is no GPU and nobody said how many
STOP_GRACE = 10.0  # seconds over the drain for a child to end
CURL_EXAMPLE = 2000  # bytes of an example that still make a command line to copy


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run its verb; the exit code."""
    parser = argparse.ArgumentParser(prog="phalanx", description="One POST, every GPU, the answers in order.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    helps = {
        "serve": "the front end and a worker group, until Ctrl-C",
        "app": "the front end alone",
        "workers": "a worker group alone",
        "status": "how the ranks of this host are; code 0 if all are ready",
        "check": "load the model on every rank, run its example once, say what came out",
        "doctor": "check this host for a service, before its first start: a line a finding",
    }
    for verb, text in helps.items():
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        if verb not in ("app", "status"):
            sub.add_argument(
                "model", nargs="?" if verb != "check" else None, default=argparse.SUPPRESS, metavar="MODEL"
            )
        add_flags(sub, [name for name in Settings.model_fields if name != "model" or verb != "check"])
        if verb == "app":  # the group that `serve` starts, whose model is the one to serve
            sub.add_argument("--beside", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    text = "make the key that the hosts of a cluster share"
    key = verbs.add_parser("key", help=text, description=text)
    key.add_argument("file", type=Path, metavar="FILE", help="a new file, which only its owner can read; - prints it")
    text = "send files of items to a running service, write the results in order"
    _add_infer_flags(verbs.add_parser("infer", help=text, description=text))
    flags = vars(parser.parse_args(argv))
    verb, beside = flags.pop("verb"), flags.pop("beside", None)
    try:
        if verb == "infer":
            return _infer(flags)
        if verb == "key":
            return _key(**flags)
        settings = load(flags)
        logging.basicConfig(
            stream=sys.stdout,
            level="WARNING" if verb in ("check", "doctor") else settings.log_level.upper(),  # what they say is no log
            format=f"%(asctime)s %(levelname)s {verb}: %(message)s",
        )
        if verb == "app":
            return _app(settings, beside)
        run = {"serve": _serve, "workers": _workers, "status": _status, "check": _check, "doctor": _doctor}
        return run[verb](settings)
    except KeyboardInterrupt:  # of the verbs that do not drain
        return 128 + signal.SIGINT
    except StartError as error:
        print(f"phalanx {verb}: {error}", file=sys.stderr)
        return error.exit_code


# ---- the verbs


def _serve(settings: Settings) -> int:
    """A tiny supervisor of two siblings: the front end, and the launcher of the group. It restarts neither."""
    if settings.node_rank:
        raise SettingsError("the front end is beside node 0; the other hosts run `phalanx workers` (PHALANX_NODE_RANK)")
    if settings.queue is not None:
        raise SettingsError("a group of a front end on another host runs as `phalanx workers` (PHALANX_QUEUE)")
    run_dir = settings.run_directory
    launch.prepare_run_dir(run_dir)
    try:
        lock = launch.claim(run_dir / "serve.lock")
    except StartError as error:
        why = f"a service of this port, {settings.port}, runs already: {error}; stop it, or give another --port"
        raise type(error)(why) from error
    with _recorded_signals() as (wake, seen):
        front_end = _spawn("app", settings, "--beside", settings.group)
        workers = _spawn("workers", settings)
        first = _wait_for_any([front_end, workers], wake, seen)
        if first is None:
            log.info("stopping")
        elif first.returncode:
            log.error("the %s ended with code %d", "front end" if first is front_end else "workers", first.returncode)
        # The front end first, so that it drains while there are ranks; they then leave with nothing in hand.
        for child in (front_end, workers):
            _stop(child, settings.drain_timeout + STOP_GRACE)
    # with the lock still held: the next service must not come in between
    if not launch.remove_run_dir(run_dir, but="serve.lock"):
        log.info("%s stays: another group lives in it", run_dir)
    os.close(lock)
    return 0 if first is None else first.returncode or 1


def _app(settings: Settings, beside: str | None = None) -> int:
    from app.main import create_app
    from app.server import Server
    from workers.memory import keep_freed_blocks

    keep_freed_blocks()

    def on_ready(group: Group) -> None:
        host, port = server.bind()
        print(_banner(settings.public_url or _address(host, port), group, settings.model_names), flush=True)

    app = create_app(settings, on_ready, beside)
    server = Server(app, settings, drain=app.state.dispatcher.drain)
    return server.run()


def _workers(settings: Settings) -> int:
    code = launch.Launcher(_group(settings)).run()
    if code == 0 and (settings.queue is not None or settings.node_rank):  # else the front end is here, or will be
        launch.remove_run_dir(settings.run_directory)
    return code


def _status(settings: Settings) -> int:
    well, text = launch.readiness(settings.run_directory, settings.group)
    print(text)
    return 0 if well else 1


def _check(settings: Settings) -> int:
    """One epoch in a run directory of its own; the ranks print what came out."""
    with tempfile.TemporaryDirectory(prefix="phalanx-check-", dir="/dev/shm") as folder:
        return launch.check(_group(settings.model_copy(update={"run_dir": Path(folder), "nnodes": 1, "queue": None})))


def _doctor(settings: Settings) -> int:
    from app import doctor

    return doctor.run(settings, _group(settings))


def _infer(flags: dict[str, Any]) -> int:
    from app import infer_files

    try:
        return infer_files.run(infer_files.Run(**flags))
    except KeyboardInterrupt:  # before there was anything to keep
        return 128 + signal.SIGINT


def _key(file: Path) -> int:
    from workers.curve import ClusterKey

    if str(file) == "-":
        try:
            print(ClusterKey.new().secret.decode(), flush=True)
        except OSError as error:
            raise StartError(f"no key was printed: {error.strerror}") from None
    else:
        ClusterKey.create(file)
    return 0


# ---- what they need


def _add_infer_flags(parser: argparse.ArgumentParser) -> None:
    def count(text: str) -> int:
        if not text.isdecimal() or not int(text):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
        return int(text)

    def seconds(text: str) -> float:
        if not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text):
            raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
        return float(text)

    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help=".jsonl (an item a line), .npy (a row each) or a folder")
    add("-o", "--output", type=Path, metavar="RESULTS", help=".jsonl or, of .npy, .npy (default: FILE.results.jsonl)")
    add("--url", default="http://127.0.0.1:8000", metavar="URL", help="the service (default: %(default)s)")
    add("--model", metavar="NAME", help="which model, where the service has several")
    add("--api-key-file", type=Path, metavar="PATH", help="file whose first line is the API key")
    add("--parameters", metavar="JSON", help="an object: keyword arguments of predict")
    add("--concurrency", type=count, default=4, metavar="N", help="requests at a time (default: %(default)s)")
    add("--chunk", type=count, default=1024, metavar="N", help="items in a request, at most (default: %(default)s)")
    add(
        "--timeout", type=seconds, default=300.0, metavar="N", help="seconds until a request is given up (default: 300)"
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on with RESULTS, if they are begun")
    existing.add_argument("--force", action="store_true", help="begin RESULTS anew")


def _group(settings: Settings) -> launch.Group:
    ranks = settings.ranks or (launch.visible_gpus() if settings.device != "cpu" else 0) or CPU_RANKS
    return launch.Group(
        model=settings.model,
        group=settings.group,
        model_name=settings.model_name or "",
        run_dir=settings.run_directory,
        ranks=ranks,
        device=settings.device,
        max_batch_size=settings.max_batch_size or 0,
        step_timeout=settings.step_timeout,
        process_group_timeout=settings.process_group_timeout,
        start_timeout=settings.start_timeout,
        max_restarts=settings.max_restarts,
        drain_timeout=settings.drain_timeout,
        log_level=settings.log_level,
        hosts=_hosts(settings) if settings.nnodes > 1 else None,
        front_end=_front_end(settings),
    )


def _front_end(settings: Settings) -> launch.FrontEnd | None:
    if settings.queue is None:
        return None
    assert settings.cluster_key_file is not None  # says Settings, with a queue
    host, port = endpoint(settings.queue)
    return launch.FrontEnd(host=host, port=port, key_file=settings.cluster_key_file.absolute())


def _hosts(settings: Settings) -> launch.Hosts:
    assert settings.rdzv_endpoint is not None  # says Settings, with several nodes
    assert settings.cluster_key_file is not None
    host, port = endpoint(settings.rdzv_endpoint)
    return launch.Hosts(
        group=settings.group,
        nodes=settings.nnodes,
        node=settings.node_rank,
        host=host,
        port=port,
        key_file=settings.cluster_key_file.absolute(),
        interface=settings.interface,
        local_address=settings.local_addr,
    )


def _spawn(verb: str, settings: Settings, *flags: str) -> subprocess.Popen[bytes]:
    # -P: a stranger's `app` folder in the current one must not be run
    command = [sys.executable, "-P", "-m", "app.cli", verb, *flags]
    return launch.spawn(command, env={**os.environ, **environ(settings)}, stdin=subprocess.DEVNULL)


@contextmanager
def _recorded_signals() -> Iterator[tuple[int, list[int]]]:
    """SIGTERM and SIGINT are put into the list, and make the file descriptor readable."""
    seen: list[int] = []
    wake, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: seen.append(received))
    yield wake, seen


def _wait_for_any(
    children: Sequence[subprocess.Popen[bytes]], wake: int, seen: Sequence[int]
) -> subprocess.Popen[bytes] | None:
    """The first child that ends; None where a signal came before."""
    poll = select.poll()
    for fd in (wake, *(os.pidfd_open(child.pid) for child in children)):
        poll.register(fd, select.POLLIN)
    while not seen:
        poll.poll()
        for child in children:
            if child.poll() is not None:
                return child
    return None


def _stop(child: subprocess.Popen[bytes], patience: float) -> None:
    child.terminate()  # does nothing to one that has ended
    try:
        child.wait(patience)
    except subprocess.TimeoutExpired:
        log.error("process %d did not stop within %g s", child.pid, patience)
        child.kill()
        child.wait()


def _address(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _banner(address: str, group: Group, models: Sequence[str]) -> str:
    hello = group.hello
    ranks = f"{hello.world} rank{'s' if hello.world != 1 else ''} on {', '.join(hello.devices)}"
    lines = [f"Phalanx serves {hello.model.name} at {address} ({ranks}). Try:", ""]
    body = _example_body(group)
    if body is not None:
        url = f"'{address}/infer?model={hello.model.name}'" if len(models) > 1 else f"{address}/infer"
        lines.append(f"  curl -s {url} -H 'Content-Type: application/json' -d {body}")
    else:
        lines.append(f"  curl -s {address}/info")
    return "\n".join(["", *lines, ""])


def _example_body(group: Group) -> str | None:
    """Of a curl line: the shipped samples of the default model, where they are near, or the model's own example."""
    model = group.hello.model
    samples = Path(__file__).resolve().parent.parent / "workers" / "models" / "digits-samples.json"
    if model.name == "Digits" and samples.is_relative_to(here := Path.cwd()):
        return shlex.quote(f"@{samples.relative_to(here)}")
    example = model.example
    if example is None and model.shape is not None and None not in model.shape:
        zeros = "0"
        for size in reversed(model.shape):
            zeros = f"[{','.join([zeros] * min(size or 0, CURL_EXAMPLE))}]"
        example = zeros.encode()
    if example is None or len(example) > CURL_EXAMPLE:
        return None
    return shlex.quote(json.dumps({"inputs": [json.loads(example)]}))


if __name__ == "__main__":
    sys.exit(main())
