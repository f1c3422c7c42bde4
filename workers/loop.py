"""One rank's life: meet, load, warm up, then the loop: poll until there is a step, run it; it knows no HTTP."""

from __future__ import annotations

import argparse
import logging
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import zmq

from workers import items, model, wire
from workers.collect import Collector, Part
from workers.errors import GroupError, InternalError, ModelLoadError
from workers.forward import Forward
from workers.lifeline import Lifeline, Member
from workers.parts import Done, result
from workers.queue import Queue
from workers.wire import Buffer, Form, Goodbye, Hello, ModelInfo, Result, Shard, Step

log = logging.getLogger("workers")

WARMUP_FACTOR = 4  # the first step of a device compiles and allocates: it may take longer than a step


class Rank:
    """One rank of a group."""

    def __init__(self, flags: argparse.Namespace, lifeline: Lifeline) -> None:
        self.flags = flags
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.epoch_dir: Path = flags.run_dir / "epochs" / f"{flags.group}-{flags.epoch}"
        self.lifeline = lifeline
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.step = 0

    def run(self) -> None:
        """The rank's life; it ends by returning only when the group leaves together."""
        self._meet()
        self._load()
        self._join()
        warmup = self._warm_up()
        (self.epoch_dir / f"ready-{self.rank}").touch()
        if self.flags.check:
            self._report()
        elif self.rank == 0:
            self._lead(warmup)
        else:
            self._follow()
        self._leave()

    # ---- start

    def _meet(self) -> None:
        """Publish who we are and watch the others: from here on a death anywhere is everyone's."""
        self.store = dist.FileStore(  # type: ignore[attr-defined]
            str(self.epoch_dir / "store"), self.world
        )
        self.store.set_timeout(timedelta(seconds=self.flags.start_timeout))
        self.store.set(f"member/{self.rank}", Member.here(self.rank).to_json())
        self.members = [Member.from_json(self.store.get(f"member/{r}").decode()) for r in range(self.world)]
        self.lifeline.watch(self.members)

    def _load(self) -> None:
        self.device = _device(self.flags.device, self.local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.model = model.load(self.flags.model, self.device, self.flags.max_batch_size)
        self.forward = Forward(self.model, self.device)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        self.store.set(f"device/{self.rank}", f"{self.device} {name}".strip())

    def _join(self) -> None:
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox.set_hwm(wire.HIGH_WATER_MARK)
        if self.rank > 0:
            self.inbox.bind(f"ipc://{self.epoch_dir}/rank-{self.rank}.sock")
        self._wait_for_all("loaded")  # in the store: ranks may load for longer than a collective waits
        on_cuda = self.device.type == "cuda"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            store=dist.PrefixStore(f"group/{self.flags.epoch}", self.store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=self.flags.process_group_timeout),
            device_id=self.device if on_cuda else None,
        )
        self.collector = Collector(epoch=self.flags.epoch, device=self.device)
        self.outboxes: dict[int, zmq.Socket[bytes]] = {}
        for r in range(1, self.world) if self.rank == 0 else ():
            self.outboxes[r] = self.context.socket(zmq.PUSH)
            self.outboxes[r].set_hwm(wire.HIGH_WATER_MARK)
            self.outboxes[r].setsockopt(zmq.LINGER, 1000)
            self.outboxes[r].connect(f"ipc://{self.epoch_dir}/rank-{r}.sock")

    def _warm_up(self) -> float:
        """Two canary steps through the whole path; the seconds of the second."""
        seconds = 0.0
        for timeout in (self.flags.step_timeout * WARMUP_FACTOR, self.flags.step_timeout):
            started = time.monotonic()
            if self.rank == 0:
                canary = Step("", self.flags.epoch, 0, Form("json", "json"), [], timeout, canary=True)
                self.warm = self._run_step(canary, [])
                for failure in self.warm[0].failures:
                    raise ModelLoadError(f"{self.flags.model}: its example failed: {failure.detail}")
            else:
                self._take(timeout)
            seconds = time.monotonic() - started
        return seconds

    # ---- the loop

    def _lead(self, warmup: float) -> None:
        """Rank 0: poll the queue until there is a step, spread it, run it, answer."""
        address = f"ipc://{self.flags.run_dir}/queue.sock"
        queue = Queue(self.context, address, self._hello(warmup), self.epoch_dir / "leave")
        while (taken := queue.next()) is not None:
            step, payload = taken
            queue.send(*self._run_step(step, payload))
        self.lifeline.release()
        for outbox in self.outboxes.values():
            outbox.send_multipart(wire.encode(Goodbye()))

    def _follow(self) -> None:
        """Every other rank: poll the inbox until there is a shard, run it."""
        while self._take():
            pass
        self.lifeline.release()

    def _take(self, timeout: float | None = None) -> bool:
        """Run the next shard; False when there is none to come."""
        if timeout is not None and not self.inbox.poll(int(timeout * 1000)):
            raise GroupError(f"rank 0 sent no shard within {timeout:g} s")
        message, payload = wire.decode([frame.buffer for frame in self.inbox.recv_multipart(copy=False)])
        if isinstance(message, Shard):
            self._work(message, payload[0])
        return isinstance(message, Shard)

    def _run_step(self, step: Step, payload: list[Buffer]) -> tuple[Result, list[Buffer]]:
        """Rank 0's part of a step. Until the last shard is sent nothing has happened; after it, all ranks run it."""
        self.step += 1
        sizes = [int(self.model.has_example)] * self.world if step.canary else [len(one) for one in step.lengths]
        size, start = sum(sizes), 0
        if not step.canary and (len(payload) != self.world or sizes != [len(s) for s in wire.shares(size, self.world)]):
            raise GroupError(f"step {step.step} is cut into {sizes} for {self.world} ranks")
        shards = []
        for r, count in enumerate(sizes):
            lengths = [] if step.canary else step.lengths[r]
            shards.append(Shard(self.step, step.form, start, size, lengths, step.timeout, step.canary))
            start += count
        for r, outbox in self.outboxes.items():
            outbox.send_multipart(wire.encode(shards[r], [b"" if step.canary else payload[r]]), copy=False)
        parts, seconds = self._work(shards[0], b"" if step.canary else payload[0])
        assert parts is not None
        return result(step, parts, seconds)

    def _work(self, shard: Shard, frame: Buffer) -> tuple[list[Part] | None, float]:
        """This rank's shard through the model and the collect, to which every rank comes once a step."""
        self.lifeline.begin(shard.timeout, f"step {shard.step}")
        done = self._forward(shard, frame)
        started = time.perf_counter()
        parts = self.collector.collect(
            done, step=shard.step, start=shard.start, items=len(done.lengths), size=shard.size
        )
        self.lifeline.end()
        return parts, time.perf_counter() - started

    def _forward(self, shard: Shard, frame: Buffer) -> Done:
        started = time.perf_counter()
        patience = shard.timeout / 4
        size = int(self.model.has_example) if shard.canary else len(shard.lengths)
        try:
            if shard.canary:
                encoded, failures = self.forward.run_example(patience)
            else:
                encoded, failures = self.forward.run(frame, shard.lengths, shard.form, patience)
        except GroupError:
            raise
        except Exception:
            log.exception("step %d: a fault outside the model", shard.step)
            failures = dict.fromkeys(range(size), InternalError("a fault outside the model; the log has the stack"))
            encoded = items.encode([], failures, size, shard.form.returns)
        device_bytes = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        return Done(
            memoryview(encoded.frame),
            encoded.lengths,
            [(i, error.type, error.detail) for i, error in sorted(failures.items())],
            encoded.rows,
            (self.rank, size, time.perf_counter() - started, device_bytes),
        )

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
        self._wait_for_all("left")  # every lifeline is released before the first rank goes
        dist.destroy_process_group()
        self.context.destroy(linger=1000)

    def _wait_for_all(self, place: str) -> None:
        self.store.set(f"{place}/{self.rank}", "")
        self.store.wait([f"{place}/{r}" for r in range(self.world)], timedelta(seconds=self.flags.start_timeout))

    def _everyone(self, what: str) -> list[str]:
        return [self.store.get(f"{what}/{r}").decode() for r in range(self.world)]

    def _hello(self, warmup: float) -> Hello:
        spec = self.model.inputs
        return Hello(
            wire.WIRE,
            self.flags.group,
            self.flags.epoch,
            self.world,
            ModelInfo(
                self.model.name,
                self.model.max_batch_size,
                None if spec is None else spec.dtype,
                None if spec is None else spec.shape,
                self._example_json(),
                self.model.has_example,
            ),
            self._everyone("device"),
            [member.pid for member in self.members],
            warmup,
        )

    def _example_json(self) -> bytes | None:
        failures: items.Failures = {}
        encoded = items.encode([self.model.example], failures, 1, "json")
        return encoded.frame if self.model.has_example and not failures else None


def _device(wanted: str, local_rank: int, local_world: int) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return torch.device("cpu")
    if count < local_world:
        raise ModelLoadError(f"{local_world} ranks need {local_world} GPUs, and {count} can be seen; lower the ranks")
    return torch.device("cuda", local_rank)
