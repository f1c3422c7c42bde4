"""Which models are served, by which groups, and what waits for each; it decides who is welcome, and sends nothing.

Models are listed at the start, or there is one: whichever the groups bring. What a request gets never depends on the
order in which groups came: two models at a time are served only where both are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from app.batcher import Batcher
from app.groups import Group
from workers.errors import NoSuchModel, UnnamedModel
from workers.wire import Hello, ModelInfo


@dataclass(eq=False)
class Served:
    """A model as it is served: the groups that run it, and what waits for them."""

    batcher: Batcher
    name: str | None  # None: no group has come yet to say it
    without_group_since: float
    info: ModelInfo | None = None  # as its groups have it, which may have ended
    groups: dict[str, Group] = field(default_factory=dict)  # those that live
    had: set[str] = field(default_factory=set)  # groups that have served it
    left: bool = False  # the last of them said goodbye

    def unreadiness(self, now: float) -> str | None:
        """Why none of its groups, of which there is one at least, would answer now; None when one would."""
        reasons = [group.unreadiness(now) for group in self.groups.values()]
        return None if None in reasons else reasons[0]


class Catalog:
    """All models, and all groups that live, by name."""

    def __init__(self, listed: Sequence[str], max_wait: float, patience: float, now: float) -> None:
        """`max_wait` is the batchers'. After `patience` without a group a model that is not listed may be replaced.

        Times are in seconds, on one clock.
        """
        self._listed = bool(listed)
        self._patience = patience
        names: Sequence[str | None] = listed or [None]
        self.models = [Served(Batcher(max_wait), name, now) for name in names]
        self.groups: dict[str, Group] = {}

    @property
    def open(self) -> bool:
        """Whether nobody has said yet which model is served."""
        return not self._listed and self.models[0].info is None

    @property
    def several(self) -> bool:
        return len(self.models) > 1

    def find(self, name: str | None) -> Served:
        """The model that a request is for; one that is not known yet may be any. NoSuchModel, UnnamedModel."""
        if name is None and self.several:
            raise UnnamedModel(f"{self._names()} are served here: say which, as in /infer?model={self.models[0].name}")
        for served in self.models:
            if name is None or served.name in (None, name):
                return served
        verb = "are" if self.several else "is"
        raise NoSuchModel(f"there is no model {(name or '')[:100]!r}; {self._names()} {verb} served here")

    def serving(self, model: str) -> Served | None:
        """The place of groups that bring this model; None where it is not listed."""
        if not self._listed:
            return self.models[0]
        return next((served for served in self.models if served.name == model), None)

    def of(self, group: Group) -> Served:
        """What a group serves that is or was welcome."""
        served = self.serving(group.hello.model.name)
        assert served is not None
        return served

    def refusal(self, hello: Hello, now: float) -> str | None:
        """Why a group that says HELLO gets no steps; None when it is welcome, which its predecessor's model is too."""
        model, served = hello.model, self.serving(hello.model.name)
        if served is None:
            return f"its model is {model.name}, and PHALANX_MODELS lists {self._names()}"
        other = next((group for name, group in served.groups.items() if name != hello.group), None)
        if served.info is None or (other is None and served.name == model.name):
            return None
        if served.name == model.name:
            assert other is not None
            differences = _differences(other.hello.model, model)
            theirs = f"not that of {other.name}"
            return f"its {model.name} has another {' and '.join(differences)}, {theirs}" if differences else None
        remedy = f"PHALANX_MODELS={served.name},{model.name} would serve both"
        if other is not None:
            return f"its model is {model.name}, and {other.name} serves {served.name}; {remedy}"
        waited = now - served.without_group_since > self._patience
        if hello.group in served.had or (not served.groups and (served.left or waited)):
            return None
        return f"its model is {model.name}, and requests wait for {served.name}; {remedy}"

    def welcome(self, group: Group) -> Served:
        """Take in a group that `refusal` did not refuse, and whose predecessor was given up."""
        model, served = group.hello.model, self.of(group)
        if served.name != model.name:
            served.had.clear()
        if not served.groups:  # else it is the same, and what was learned of it stays
            served.info = model
        served.name = model.name
        served.had.add(group.hello.group)
        served.groups[group.hello.group] = self.groups[group.hello.group] = group
        return served

    def lose(self, group: Group, now: float) -> Served:
        """Take out a group that has ended."""
        served = self.of(group)
        del served.groups[group.hello.group], self.groups[group.hello.group]
        if not served.groups:
            served.without_group_since = now
            served.left = group.leaving
        return served

    def _names(self) -> str:
        return ", ".join(served.name or "" for served in self.models)


def _differences(one: ModelInfo, other: ModelInfo) -> list[str]:
    """Between two models of one name, that clients would see."""
    a, b = msgspec.structs.asdict(one), msgspec.structs.asdict(other)
    return [name for name in ("dtype", "shape", "example") if a[name] != b[name]]
