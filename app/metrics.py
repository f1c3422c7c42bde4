"""Every exported number, declared once, in a registry of its own; it knows nothing of who counts or who scrapes."""

from __future__ import annotations

from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from workers.errors import PhalanxError
from workers.wire import Result

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
A_RANK = ("group", "rank")


class Metrics:
    """One app's numbers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._worlds: dict[str, int] = {}  # ranks that are shown, by group
        # requests
        self.requests = self._counter("requests", "Requests for inference, and those that the door refused", "code")
        self.rejected = self._counter("rejected_requests", "Of these, those that got no results, by reason", "reason")
        self.aborted = self._counter("aborted_requests", "Requests whose client went away, by moment", "during")
        self.request_seconds = self._seconds("request_seconds", "From the first byte to the answer")
        self.request_bytes = self._counter("request_bytes", "Bytes of bodies taken in")
        self.response_bytes = self._counter("response_bytes", "Bytes of answers' bodies")
        self.items = self._counter("items", "Items answered, by outcome", "outcome")
        # the queue
        self.queue_seconds = self._seconds("queue_wait_seconds", "From admission to the first step")
        self.queue_items = self._gauge("queue_items", "Items admitted and not yet answered")
        self.queue_bytes = self._gauge("queue_bytes", "Bytes of bodies and answers held")
        # steps
        self.steps = self._counter("steps", "Steps answered by a group")
        self.step_items = self._histogram("step_items", "Items in a step", ITEMS)
        self.step_fill_ratio = self._histogram("step_fill_ratio", "Items in a step, of those that fit", RATIOS)
        self.forward_skew_seconds = self._seconds("forward_skew_seconds", "Slowest forward of a step, less the fastest")
        self.collect_seconds = self._seconds("collect_seconds", "Collect of one step on rank 0")
        # ranks
        self.rank_up = self._gauge("rank_up", "Whether the rank's group takes steps", *A_RANK)
        self.rank_items = self._counter("rank_items", "Items that the rank ran", *A_RANK)
        self.forward_seconds = self._seconds("forward_seconds", "Forward of one rank in one step", *A_RANK)
        self.rank_memory = self._gauge(
            "rank_memory_bytes", "Device memory that the rank has allocated; on the CPU, its resident memory", *A_RANK
        )
        # groups
        self.ready = self._gauge("ready", "Whether a request would be answered now")
        self.epochs = self._counter("epochs", "Groups that said HELLO")
        self.group_deaths = self._counter("group_deaths", "Groups that ended")
        self.restarts = self._counter("restarts", "Groups that replaced one, by how that one ended", "reason")
        self.requeued = self._counter("requeued_items", "Items put back when their group ended")
        self.dropped = self._counter("dropped_messages", "Messages of another session, epoch or step")

    def refused(self, error: PhalanxError) -> None:
        self.requests.labels(error.status).inc()
        self.rejected.labels(error.type).inc()

    def group_changed(self, group: str, world: int, up: bool) -> None:
        self._forget(group, range(world, self._worlds.get(group, 0)))
        self._worlds[group] = world
        for rank in range(world):
            self.rank_up.labels(group, rank).set(up)

    def group_left(self, group: str) -> None:
        """It is not missed, and raises no alarm."""
        self._forget(group, range(self._worlds.pop(group, 0)))

    def _forget(self, group: str, ranks: range) -> None:
        for rank in ranks:
            for gauge in (self.rank_up, self.rank_memory):
                with suppress(KeyError):  # it has ended no step yet
                    gauge.remove(group, rank)

    def step_ended(self, group: str, items: int, capacity: int, result: Result) -> None:
        self.steps.inc()
        self.step_items.observe(items)
        self.step_fill_ratio.observe(items / capacity)
        self.collect_seconds.observe(result.collect_seconds)
        forwards = [stats.forward_seconds for stats in result.stats if stats.items]
        self.forward_skew_seconds.observe(max(forwards, default=0.0) - min(forwards, default=0.0))
        for stats in result.stats:
            rank = group, stats.rank
            self.rank_items.labels(*rank).inc(stats.items)
            self.forward_seconds.labels(*rank).observe(stats.forward_seconds)
            self.rank_memory.labels(*rank).set(stats.memory_bytes)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"phalanx_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"phalanx_{name}", text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"phalanx_{name}", text, labels, buckets=SECONDS, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"phalanx_{name}", text, buckets=buckets, registry=self.registry)


def table() -> str:
    """The README's."""
    rows = ["| metric | |", "|---|---|"]
    for metric in Metrics().registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        rows.append(f"| `{name}` | {metric.documentation} |")
    return "\n".join(rows) + "\n"
