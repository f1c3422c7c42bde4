"""One rank's life: meet, load, warm up, then the loop; it knows no HTTP.

Three threads, so that the model need not wait. All of a model's code runs in the main thread, as its libraries may
expect; a second one takes steps in and sends results, and never waits for anything else; the third brings what comes
out of the model to the collect.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
import zmq

from workers import items, memory, model, wire
from workers.collect import Collector, Part
from workers.curve import ClusterKey
from workers.errors import GroupError, InternalError, ModelLoadError
from workers.forward import Forward
from workers.lifeline import Lifeline, Member
from workers.parts import Done, result
from workers.queue import Place, Queue
from workers.ring import Reader
from workers.shards import Inbox, Outboxes
from workers.wire import Buffer, Form, Goodbye, Hello, ModelInfo, Result, Shard, Step

log = logging.getLogger("workers")

SWITCH = 0.0005  # seconds after which a model that holds the GIL lets the collect of the step before have it
WARMUP_FACTOR = 4  # the first step of a device compiles and allocates: it may take longer than a step


class _Running(NamedTuple):
    """A step that has begun; who is not rank 0 knows only its own shard of it."""

    step: Step | None
    collected: Future[tuple[list[Part] | None, float]]


class Rank:
    """One rank of a group."""

    def __init__(self, flags: argparse.Namespace, lifeline: Lifeline) -> None:
        self.flags = flags
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.node = int(os.environ["GROUP_RANK"])
        self.epoch_dir: Path = flags.run_dir / "epochs" / f"{flags.group}-{flags.epoch}"
        self.lifeline = lifeline
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.step = 0
        self.ring = Reader(flags.run_dir)
        self.key = ClusterKey.read(flags.cluster_key_file) if flags.cluster_key_file else None
        self.shards: SimpleQueue[tuple[Shard, Buffer, Future[Done]] | None] = SimpleQueue()  # for the model
        self.steps_thread = ThreadPoolExecutor(1, "steps")
        self.collect_thread = ThreadPoolExecutor(1, "collect")
        self.running: deque[_Running] = deque()  # in the order of the steps
        self.collected = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable when a step has been

    def run(self) -> None:
        """The rank's life; it ends by returning only when the group leaves together."""
        sys.setswitchinterval(SWITCH)
        self._meet()
        self._load()
        self._join()
        warmup = self._warm_up()
        (self.epoch_dir / f"ready-{self.rank}").touch()
        if self.flags.check:
            self._report()
        else:
            steps = self.steps_thread.submit(self._pass_steps, warmup)
            while (shard := self.shards.get()) is not None:
                self._run(*shard)
            steps.result()
        self._leave()

    # ---- start

    def _meet(self) -> None:
        """Publish who we are and watch the others: from here on a death anywhere is everyone's."""
        self.store = self._open_store()
        self.store.set_timeout(timedelta(seconds=self.flags.start_timeout))
        self.store.set(f"host/{self.rank}", socket.gethostname())
        self.store.set(f"member/{self.rank}", Member.here(self.rank, self.node).to_json())
        self.members = [Member.from_json(self.store.get(f"member/{r}").decode()) for r in range(self.world)]
        self.lifeline.watch(self.members)

    def _open_store(self) -> Any:
        """Where the ranks of all hosts meet: a file, or torchrun's own store where there are several hosts."""
        if self.flags.local_address is None:
            return dist.FileStore(str(self.epoch_dir / "store"), self.world)  # type: ignore[attr-defined]
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=self.flags.start_timeout)
        store = dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
        return dist.PrefixStore("ranks", store)  # type: ignore[attr-defined]

    def _load(self) -> None:
        self.device = model.device(self.flags.device, self.local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
        self._set_device()
        self.collect_thread.submit(self._set_device).result()
        self.model = model.load(self.flags.model, self.device, self.flags.max_batch_size)
        self.forward = Forward(self.model, self.device)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        self.store.set(f"device/{self.rank}", f"{self.device} {name}".strip())
        self._compare(self._model_info())

    def _compare(self, info: ModelInfo) -> None:
        """ModelLoadError where this rank has another model than rank 0: hosts may differ in what a name stands for."""
        if self.rank == 0:
            self.store.set("model", msgspec.json.encode(info))
        first = msgspec.json.decode(self.store.get("model"), type=ModelInfo)
        for field in ("name", "max_batch_size", "dtype", "shape", "has_example"):  # an example may be drawn at random
            ours, theirs = getattr(info, field), getattr(first, field)
            if ours != theirs:
                host = socket.gethostname()
                raise ModelLoadError(f"{field} of the model is {ours!r} on {host}, and {theirs!r} on rank 0's host")

    def _set_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _join(self) -> None:
        if self.rank > 0:
            place = self.flags.local_address if self.node else self.epoch_dir / f"rank-{self.rank}.sock"
            self.inbox = Inbox(self.context, f"the inbox of rank {self.rank}", place, self.key)
            self.store.set(f"inbox/{self.rank}", self.inbox.address)
        self._wait_for_all("loaded")  # in the store: ranks may load for longer than a collective waits
        on_cuda = self.device.type == "cuda"
        timeout = timedelta(seconds=self.flags.process_group_timeout)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", self.flags.interface or "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", self.flags.interface or "lo")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=dist.PrefixStore(f"group/{self.flags.epoch}", self.store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.world,
            timeout=timeout,
            device_id=self.device if on_cuda else None,
        )
        # a group of its own: a model that uses the default one does so while the step before is collected
        self.collector = Collector(epoch=self.flags.epoch, device=self.device, group=dist.new_group(timeout=timeout))
        if self.rank == 0:
            addresses = {r: self.store.get(f"inbox/{r}").decode() for r in range(1, self.world)}
            self.outboxes = Outboxes(self.context, addresses, Reader(self.flags.run_dir), self.key)

    def _warm_up(self) -> float:
        """Two canary steps through the whole path; the seconds of the second."""
        seconds = 0.0
        for timeout in (self.flags.step_timeout * WARMUP_FACTOR, self.flags.step_timeout):
            started = time.monotonic()
            if self.rank == 0:
                self._spread(Step("", self.flags.epoch, 0, Form("json", "json"), [], [], timeout, canary=True), [])
            elif not self.inbox.wait(seconds=timeout):
                raise GroupError(f"rank 0 sent no shard within {timeout:g} s")
            else:
                self._take()
            shard = self.shards.get()
            assert shard is not None
            self._run(*shard)
            self.running[0].collected.result()
            for message, frames in self._results():
                self.warm = message, frames
                for failure in message.failures:
                    raise ModelLoadError(f"{self.flags.model}: its example failed: {failure.detail}")
            seconds = time.monotonic() - started
        return seconds

    # ---- the loop

    def _pass_steps(self, warmup: float) -> None:
        """In its own thread, until the group leaves; what goes wrong here ends the group at once."""
        try:
            if self.rank == 0:
                self._lead(warmup)
            else:
                self._follow()
        except Exception as error:
            log.exception("the rank fells its group")
            self.lifeline.fell("exception", f"{type(error).__name__}: {error}")
        self.shards.put(None)

    def _lead(self, warmup: float) -> None:
        """Rank 0: poll until there is a step, which is spread, or one that has been collected, which is answered."""
        place = Place(f"ipc://{self.flags.run_dir}/queue.sock")
        if self.flags.queue:
            place = Place(self.flags.queue, self.flags.launcher, self.key)
        queue = Queue(self.context, place, self._hello(warmup), self.epoch_dir / "leave", lambda: len(self.running))
        while self.running or not queue.left:
            taken = queue.next(self.collected)
            if taken is not None:
                self._spread(*taken)
            for message, frames in self._results():
                queue.send(message, frames)
        self.lifeline.release()
        self.outboxes.tell(Goodbye())

    def _follow(self) -> None:
        """Every other rank: poll until there is a shard, which is begun, or one that has been collected."""
        more = True
        while self.running or more:
            if self.inbox.wait(self.collected):
                more = self._take()
            for _ in self._results():
                pass
        self.lifeline.release()

    def _take(self) -> bool:
        """Begin the next shard; False when there is none to come."""
        message, payload = self.inbox.take()
        if isinstance(message, Shard):
            self._begin(message, payload[0], None)
        return isinstance(message, Shard)

    def _spread(self, step: Step, payload: list[Buffer]) -> None:
        """Rank 0's way to begin. Until the last shard is sent nothing has happened; after it, all ranks run it."""
        self.step += 1
        sizes = [int(self.model.has_example)] * self.world if step.canary else [len(one) for one in step.lengths]
        size, start = sum(sizes), 0
        if not step.canary and (
            len(payload) != self.world
            or len(step.places) != self.world
            or sizes != [len(s) for s in wire.shares(size, self.world)]
        ):
            raise GroupError(f"step {step.step} is cut into {sizes} for {self.world} ranks")
        shards = []
        for r, count in enumerate(sizes):
            lengths = [] if step.canary else step.lengths[r]
            place = None if step.canary else step.places[r]
            shards.append(Shard(self.step, step.form, start, size, lengths, step.timeout, step.canary, place))
            start += count
        frames = [b""] * self.world if step.canary else payload
        self.outboxes.send(shards, frames)
        self._begin(shards[0], frames[0], step)

    def _begin(self, shard: Shard, frame: Buffer, step: Step | None) -> None:
        """Hand a shard to the model, and what comes of it to the collect."""
        done: Future[Done] = Future()
        self.shards.put((shard, frame, done))
        collected = self.collect_thread.submit(self._collect, shard, done)
        self.running.append(_Running(step, collected))
        collected.add_done_callback(lambda _: os.eventfd_write(self.collected, 1))

    def _results(self) -> Iterator[tuple[Result, list[Buffer]]]:
        """Of the steps that have been collected, in their order; rank 0 has them. Raises what ends the group."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.collected)
        while self.running and self.running[0].collected.done():
            step, collected = self.running.popleft()
            parts, seconds = collected.result()
            if step is not None and parts is not None:
                yield result(step, parts, seconds)

    def _run(self, shard: Shard, frame: Buffer, done: Future[Done]) -> None:
        """In the main thread: a shard through the model."""
        self.lifeline.begin(shard.timeout, f"step {shard.step}")
        done.set_result(self._forward(shard, frame))

    def _forward(self, shard: Shard, frame: Buffer) -> Done:
        began, started = time.monotonic(), time.perf_counter()
        patience = shard.timeout / 4
        size = int(self.model.has_example) if shard.canary else len(shard.lengths)
        try:
            if shard.canary:
                encoded, failures = self.forward.run_example(patience)
            else:
                if shard.place is not None:
                    frame = self.ring.view(shard.place.ring, shard.place.start, shard.place.size)
                encoded, failures = self.forward.run(frame, shard.lengths, shard.form, patience)
        except GroupError:
            raise
        except Exception:
            log.exception("step %d: a fault outside the model", shard.step)
            failures = dict.fromkeys(range(size), InternalError("a fault outside the model; the log has the stack"))
            encoded = items.encode([], failures, size, shard.form.returns)
        on_cuda = self.device.type == "cuda"
        memory_bytes = torch.cuda.memory_allocated(self.device) if on_cuda else memory.resident_bytes()
        return Done(
            memoryview(encoded.frame),
            encoded.lengths,
            [(i, error.type, error.detail) for i, error in sorted(failures.items())],
            encoded.rows,
            (self.rank, size, time.perf_counter() - started, memory_bytes, 0.0 if self.node else began),
        )

    def _collect(self, shard: Shard, done: Future[Done]) -> tuple[list[Part] | None, float]:
        """In the collect's thread: every rank comes here once a step, whatever became of its shard."""
        value = done.result()
        started = time.perf_counter()
        parts = self.collector.collect(
            value, step=shard.step, start=shard.start, items=len(value.lengths), size=shard.size
        )
        self.lifeline.end()
        return parts, time.perf_counter() - started

    # ---- the end

    def _report(self) -> None:
        """`--check`: what the warm-up gave."""
        if self.rank == 0:
            print(f"{self.model.name}: {self.world} ranks on {', '.join(self._everyone('device'))}")
            if not self.model.has_example:
                print("no example: the model was loaded, but predict has not run")
            for r, frame in enumerate(self.warm[1] if self.model.has_example else []):
                print(f"rank {r}: {bytes(frame).decode()}")
        self.lifeline.release()

    def _leave(self) -> None:
        self.steps_thread.shutdown()
        self.collect_thread.shutdown()
        if self.rank > 0:
            self.inbox.close()
        self._wait_for_all("left")  # every lifeline is released before the first rank goes
        dist.destroy_process_group()
        self.context.destroy(linger=1000)

    def _wait_for_all(self, place: str) -> None:
        self.store.set(f"{place}/{self.rank}", "")
        self.store.wait([f"{place}/{r}" for r in range(self.world)], timedelta(seconds=self.flags.start_timeout))

    def _everyone(self, what: str) -> list[str]:
        return [self.store.get(f"{what}/{r}").decode() for r in range(self.world)]

    def _hello(self, warmup: float) -> Hello:
        return Hello(
            wire.WIRE,
            self.flags.group,
            self.flags.epoch,
            self.world,
            self._model_info(),
            self._everyone("device"),
            self._everyone("host"),
            [member.pid for member in self.members],
            warmup,
        )

    def _model_info(self) -> ModelInfo:
        spec = self.model.inputs
        return ModelInfo(
            self.flags.model_name or self.model.name,
            self.model.max_batch_size,
            None if spec is None else spec.dtype,
            None if spec is None else spec.shape,
            self._example_json(),
            self.model.has_example,
        )

    def _example_json(self) -> bytes | None:
        failures: items.Failures = {}
        encoded = items.encode([self.model.example], failures, 1, "json")
        return encoded.frame if self.model.has_example and not failures else None
