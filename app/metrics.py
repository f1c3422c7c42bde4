"""Every exported number, declared once, in a registry of its own; it knows nothing of who counts or who scrapes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITEMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """One app's numbers."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("phalanx_requests", "Requests to /infer, by status", ["code"], registry=registry)
        self.aborted = Counter(
            "phalanx_aborted_requests", "Requests whose client went away, by moment", ["during"], registry=registry
        )
        self.request_seconds = Histogram(
            "phalanx_request_seconds", "From the first byte to the answer", buckets=SECONDS, registry=registry
        )
        self.queue_seconds = Histogram(
            "phalanx_queue_wait_seconds", "From admission to the first step", buckets=SECONDS, registry=registry
        )
        self.items = Counter("phalanx_items", "Items answered, by outcome", ["outcome"], registry=registry)
        self.queue_items = Gauge("phalanx_queue_items", "Items admitted and not yet answered", registry=registry)
        self.queue_bytes = Gauge("phalanx_queue_bytes", "Bytes of bodies and answers held", registry=registry)
        self.steps = Counter("phalanx_steps", "Steps answered by a group", registry=registry)
        self.step_items = Histogram("phalanx_step_items", "Items in a step", buckets=ITEMS, registry=registry)
        self.forward_seconds = Histogram(
            "phalanx_forward_seconds", "Forward of one rank in one step", ["rank"], buckets=SECONDS, registry=registry
        )
        self.collect_seconds = Histogram(
            "phalanx_collect_seconds", "Collect of one step on rank 0", buckets=SECONDS, registry=registry
        )
        self.ranks_up = Gauge("phalanx_ranks_up", "Ranks of groups that take steps", registry=registry)
        self.epochs = Counter("phalanx_epochs", "Groups that said HELLO", registry=registry)
        self.group_deaths = Counter("phalanx_group_deaths", "Groups that ended", registry=registry)
        self.requeued = Counter("phalanx_requeued_items", "Items put back when their group ended", registry=registry)
        self.dropped = Counter(
            "phalanx_dropped_messages", "Messages of another session, epoch or step", registry=registry
        )
