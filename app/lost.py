"""Groups that have ended or were refused: which, when and why; it knows no step and no request.

The front end sees a connection close; why the group died its launcher knows, and keeps in a post-mortem.
"""

from __future__ import annotations

import re
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from app.groups import Group
from workers.launch import Told, last_deaths
from workers.wire import Died, Hello

TEXT = 2000  # characters of another host's that are kept


_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # of a terminal that reads the log


@dataclass(frozen=True)
class Ended:
    """One epoch of a group that gets no steps any more."""

    group: str
    epoch: int
    why: str
    kind: str  # of `workers.epoch.Death`; "left" of its own accord, "refused", or "unknown"
    at: float  # seconds since 1970
    model: str | None = None  # None: it never said which


class Lost:
    """The latest end of each group."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._seen: dict[str, Ended] = {}
        self._refused: dict[str, Ended] = {}
        self._told: dict[str, Told] = {}  # by launchers of other hosts

    def add(self, group: Group) -> None:
        """A group whose `ended_by` says what the front end saw."""
        hello, kind = group.hello, "left" if group.leaving else "unknown"
        why = f"{group.name}: {group.ended_by}"
        self._seen[hello.group] = Ended(hello.group, hello.epoch, why, kind, time.time(), hello.model.name)

    def refuse(self, hello: Hello, why: str) -> None:
        text = f"group {hello.group} epoch {hello.epoch} was refused: {why}"
        self._refused[hello.group] = Ended(hello.group, hello.epoch, text, "refused", time.time(), hello.model.name)

    def tell(self, died: Died) -> None:
        """What the launcher of a group on another host says of an epoch."""
        kind = died.kind if re.fullmatch("[a-z]{1,20}", died.kind) else "unknown"
        self._told[died.group] = Told(
            died.group, died.epoch, " ".join(_CONTROLS.sub(" ", died.text[:TEXT]).split()), kind, time.time()
        )

    def _deaths(self) -> dict[str, Told]:
        return last_deaths(self._run_dir) | self._told

    def replaced(self, group: str) -> str | None:
        """The kind of end that a group's new epoch follows; None where it is the first that the front end sees."""
        self._refused.pop(group, None)
        seen = self._seen.get(group)
        if seen is None:
            return None
        told = self._deaths().get(group)
        return told.kind if told is not None and told.epoch == seen.epoch else seen.kind

    def all(self) -> dict[str, Ended]:
        """By group, those that live again among them; in the ranks' own words where the launcher has kept them.

        That may be a group that never came to say HELLO: its model cannot be loaded, say.
        """
        ends = dict(self._seen)
        for group, told in self._deaths().items():
            seen = ends.get(group)
            if seen is None or told.epoch >= seen.epoch:
                model = None if seen is None else seen.model
                ends[group] = Ended(group, told.epoch, told.text, told.kind, told.at, model)
        return ends | self._refused

    def last_death(self) -> str:
        """Why the latest group died, "" for none; one that left or was refused did not."""
        died = [(told.at, told.text) for told in self._deaths().values()]
        died += [(seen.at, seen.why) for seen in self.all().values() if seen.kind == "unknown"]
        return max(died, default=(0.0, ""))[1]

    def last(self, model: str | None = None, living: Container[str] = ()) -> str:
        """Why the latest did, "" for none: of those that may have served `model`, and that do not live again."""
        ends = [
            end
            for end in self.all().values()
            if end.group not in living and (model is None or end.model in (None, model))
        ]
        return max(ends, key=lambda end: end.at).why if ends else ""
