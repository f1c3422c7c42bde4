"""How an epoch is killed for the front end, and told what it held: files in its directory; it decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from workers.wire import Hello

DELAY = 0.5  # seconds: ranks that still can end by themselves say better why


class Fencing:
    """What the launcher of a group reads."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def fence(self, hello: Hello, why: str) -> None:
        """Ask the launcher to kill the epoch in a moment, whatever state its ranks are in."""
        asyncio.get_running_loop().call_later(DELAY, self._write, hello, "fenced", why)

    def note_in_flight(self, hello: Hello, request_ids: str) -> None:
        """For the post-mortem, which is written within a second of a death."""
        self._write(hello, "in-flight", request_ids or "none")

    def _write(self, hello: Hello, name: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the launcher may have cleared the epoch away already
            (self._run_dir / "epochs" / f"{hello.group}-{hello.epoch}" / name).write_text(text)
