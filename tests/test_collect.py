"""The collect: what comes out of real groups of ranks (`ranks/collecting.py`), and of its pieces one by one."""

from __future__ import annotations

import array
import gc
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.collect import Collector, Part, shares
from workers.encode import ALIGN, LARGE, OUT_OF_BAND, OverCap, aligned, pack, segments, unpack
from workers.rounds import Array, Gloo, Pending, Places, Pool, _Works

pytestmark = pytest.mark.timeout(120)
MB = 1 << 20


# ---- real groups


def play(ranks: int, *scenes: str, timeout: float = 100) -> dict[str, str]:
    """What rank 0 says of each scene."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    script = str(Path(__file__).parent / "ranks" / "collecting.py")
    process = subprocess.Popen(
        [*torchrun, "--nproc-per-node", str(ranks), script, *scenes],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()  # and with it the ranks
        output, _ = process.communicate()
        pytest.fail(f"after {timeout} s:\n{output}")
    said = dict(line.split(": ", 1) for line in output.splitlines() if line.split(": ", 1)[0] in scenes)
    assert [*said] == [*scenes], output
    return said


SHORT = ["chaos 40 1", "chaos 30 2 nccl", "skipped", "stranger", "unlike", "left"]


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Two ranks, all the short scenes; the last one ends the group."""
    return play(2, *SHORT)


def test_every_part_is_right_or_its_own_error_and_kept_results_stay_what_they_are(said: dict[str, str]) -> None:
    assert said["chaos 40 1"].startswith("40 steps")


def test_the_device_s_second_round_gives_the_same(said: dict[str, str]) -> None:
    assert said["chaos 30 2 nccl"].startswith("30 steps")


def test_a_rank_that_misses_a_step_ends_the_group_and_mixes_nothing_up(said: dict[str, str]) -> None:
    assert said["skipped"] == "desynchronised"


def test_a_rank_of_another_epoch_ends_the_group(said: dict[str, str]) -> None:
    assert said["stranger"] == "desynchronised"


def test_ranks_that_would_move_bytes_differently_end_the_group(said: dict[str, str]) -> None:
    assert said["unlike"] == "desynchronised"


def test_a_rank_that_dies_is_noticed_in_the_next_collect_and_the_collector_stays_dead(said: dict[str, str]) -> None:
    assert said["left"].startswith("heard after")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "ranks"), [("gloo", 2), ("gloo", 3), ("gloo", 4), ("nccl", 3)])
def test_four_hundred_random_steps(kind: str, ranks: int) -> None:
    scene = f"chaos 400 {ranks} {kind}"
    assert play(ranks, scene, timeout=590)[scene].startswith("400 steps")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_thousand_steps_of_4_mb_leave_memory_flat() -> None:
    grew = int(play(2, "memory 1000 4", timeout=390)["memory 1000 4"].split()[1])
    assert grew <= 8


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_part_of_more_than_2_gib_arrives_and_one_over_the_cap_is_an_error() -> None:
    assert play(2, "huge", timeout=290)["huge"] == "more than 2 GiB"


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_on_a_device_arrives_on_the_host(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    assert play(ranks, "cuda")["cuda"] == "on the host"


# ---- a group of threads: any world, any sizes


class Threads(Gloo):
    """A transport between threads of this process."""

    def __init__(self, rank: int, world: int, meet: threading.Barrier, table: dict[Any, Any]) -> None:
        super().__init__()
        self.rank, self.world, self.meet, self.table = rank, world, meet, table

    def first(self, frames: torch.Tensor, frame: torch.Tensor) -> None:
        self.table[self.rank] = frame.clone()
        self.meet.wait(10)
        frames.copy_(torch.cat([self.table[r] for r in range(self.world)]))

    def send(self, sending: Sequence[Array]) -> Pending:
        for segment in sending:
            self.table["sent", self.rank].put(segment.copy())
        return _Works()

    def receive(self, rank: int, places: Places) -> tuple[memoryview, Pending]:
        whole = np.zeros(places[-1].stop if places else 0, np.uint8)

        class Received:
            def wait(_) -> None:
                for place in places:
                    whole[place.start : place.stop] = self.table["sent", rank].get(timeout=10)

        return whole.data, Received()


def collect_in_threads(values: Sequence[Any], ranges: Sequence[range], size: int) -> list[Part]:
    world = len(values)
    meet, table = threading.Barrier(world), {("sent", rank): queue.SimpleQueue[Array]() for rank in range(world)}
    got: list[list[Part] | None] = [None] * world

    def run(rank: int) -> None:
        collector = Collector(transport=Threads(rank, world, meet, table))
        mine = ranges[rank]
        got[rank] = collector.collect(values[rank], step=1, start=mine.start, items=len(mine), size=size)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    parts, *others = got
    assert parts is not None
    assert others == [None] * (world - 1)
    return parts


@given(st.integers(0, 10**12), st.integers(1, 4096))
def test_shares_are_contiguous_complete_and_equal_to_within_one(n: int, world: int) -> None:
    ranges = shares(n, world)
    lengths = [len(share) for share in ranges]
    assert len(ranges) == world
    assert [share.start for share in ranges] == [0, *(share.stop for share in ranges[:-1])]
    assert ranges[-1].stop == n
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


SIZES = st.sampled_from([0, 1, 100, 5_000, 30_000, OUT_OF_BAND - 1, OUT_OF_BAND, 100_001, LARGE, LARGE + 1])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 5), st.lists(SIZES, min_size=1, max_size=8), st.booleans())
def test_any_items_of_any_size_come_back_in_their_order(n: int, world: int, sizes: list[int], as_bytes: bool) -> None:
    def item(i: int) -> Any:
        filling = np.full(sizes[i % len(sizes)], i % 251, np.uint8)
        return (i, filling.tobytes() if as_bytes else filling)

    ranges = shares(n, world)
    parts = collect_in_threads([[item(i) for i in share] for share in ranges], ranges, n)
    assert [part.error for part in parts] == [None] * world
    together: Any = [one for part in parts for one in part.value]  # type: ignore[attr-defined]
    assert [i for i, _ in together] == [*range(n)]
    for i, filling in together:
        assert bytes(filling) == bytes(item(i)[1])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 20), st.integers(-1, 20)), min_size=1, max_size=4))
def test_parts_that_do_not_tile_the_step_are_all_errors(size: int, claims: list[tuple[int, int]]) -> None:
    ranges = [range(start, start + max(0, items)) for start, items in claims]
    at, tiles = 0, True
    for share in ranges:
        tiles, at = tiles and share.start == at, share.stop
    parts = collect_in_threads([None] * len(ranges), ranges, size)
    errors = [part.error for part in parts]
    if tiles and at == size:
        assert errors == [None] * len(ranges)
    else:
        assert all(error and "do not tile" in error for error in errors)


MUCH = [{"n": i, "third": i / 3} for i in range(100_000)]  # sent before it is all made


class Cannot:
    """Raises where it is encoded, or only where it is decoded."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        if self.where == "sent":
            raise ValueError("it cannot")
        return int, ("no number",)


def test_a_long_pickle_arrives_with_what_is_out_of_band_before_and_behind_it() -> None:
    value = [np.arange(MB), MUCH, memoryview(bytes(MB)), MUCH[:10], np.arange(OUT_OF_BAND), bytes(3 * MB)]
    parts = collect_in_threads([None, value, value[::-1], MUCH], shares(9, 4), 9)
    assert [part.error for part in parts] == [None] * 4
    for got, sent in zip([*parts[1].value, *parts[2].value[::-1]], value * 2, strict=True):  # type: ignore[index,misc]
        assert type(got) is type(sent)
        assert (got == sent).all() if isinstance(got, np.ndarray) else got == sent
    assert parts[3].value == MUCH


@pytest.mark.parametrize("where", ["sent", "read"])
@pytest.mark.parametrize("long", [[], MUCH, [MUCH, np.zeros(MB)]], ids=["short", "long", "long with a body"])
def test_what_cannot_be_sent_or_read_is_an_error_of_its_part_alone(where: str, long: Any) -> None:
    parts = collect_in_threads([0, [long, Cannot(where), long], MUCH], shares(3, 3), 3)
    error = parts[1].error
    assert error is not None
    assert error.startswith(f"the result cannot be {where}: ValueError: ")
    assert [part.error for part in parts] == [None, error, None]
    assert parts[2].value == MUCH


def test_a_long_pickle_stops_where_the_parts_do_not_tile_the_step() -> None:
    parts = collect_in_threads([0, MUCH, 0], [range(1), range(2, 3), range(3, 4)], 4)
    assert all("do not tile" in str(part.error) for part in parts)


def test_this_process_alone_collects_its_own_value_by_reference() -> None:
    value = [lambda: 0]
    parts = Collector().collect(value, step=0, start=0, items=3, size=3)
    assert parts == [Part(0, 3, value, None)]
    assert parts[0].value is value


def test_an_error_is_a_sentence_of_bounded_length() -> None:
    class Wordy:
        def __reduce__(self) -> Any:
            raise ValueError("\ud800" + "word " * 100_000)

    _, part = collect_in_threads([0, Wordy()], shares(2, 2), 2)
    assert part.error is not None
    assert part.error.startswith("the result cannot be sent: ValueError: ?word word")
    assert len(part.error) < 3000


# ---- objects and bytes


def through(value: Any) -> Any:
    """`value` as rank 0 would see it."""
    packed = pack(value, 1 << 30)
    body = bytearray()
    for segment in segments(packed.body, ALIGN):
        body += bytes(aligned(len(body)) - len(body)) + segment
    return unpack(memoryview(b"".join(packed.head)), memoryview(body))


TENSORS = [
    torch.zeros(0, 3),
    torch.tensor(5),
    torch.tensor(True),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.zeros(0, 3, dtype=torch.bfloat16),
    torch.ones(1, dtype=torch.bfloat16).expand(5),
    torch.ones(1, dtype=torch.bfloat16).as_strided((1, 1), (0, 7)),
    torch.arange(12.0).view(3, 4).t(),
    torch.arange(2 * OUT_OF_BAND).view(2, -1)[:, ::2],
    torch.tensor([1 + 2j]).conj(),
    torch.tensor([1 + 2j]).conj().imag,
    torch.ones(2, dtype=torch.float8_e4m3fn),
    torch.eye(3).to_sparse(),
    torch.ones(3, requires_grad=True) * 2,
    torch.nn.Parameter(torch.ones(3)),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}-{tuple(t.shape)}")
def test_a_tensor_arrives_with_its_dtype_shape_and_numbers(tensor: torch.Tensor) -> None:
    got = through(tensor)
    assert type(got) is torch.Tensor
    assert (got.dtype, got.shape, got.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert not got.requires_grad
    assert torch.equal(got.to_dense().to(torch.complex128), tensor.to_dense().to(torch.complex128))


ARRAYS = [
    np.zeros((0, 3), np.float32),
    np.array(7),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(24).reshape(4, 6)[:, ::2],
    np.arange(4, dtype=">i4"),
    np.array(["a", "bc"]),
    np.array([1, None], dtype=object),
    np.array(["2020-01-01"], dtype="M8[D]"),
    np.arange(LARGE).reshape(2, -1)[:, ::2],
]


@pytest.mark.parametrize("one", ARRAYS, ids=lambda a: f"{a.dtype}-{a.shape}")
def test_an_array_arrives_with_its_dtype_shape_and_numbers(one: np.ndarray[Any, Any]) -> None:
    got = through(one)
    assert (got.dtype, got.shape) == (one.dtype, one.shape)
    assert got.flags.writeable
    assert (got == one).all()


@pytest.mark.parametrize("view", [b"", b"abc", bytes(MB), array.array("d", [1, 2]), np.ones((2, 3))], ids=str)
def test_a_memoryview_arrives_as_one(view: Any) -> None:
    got = through(memoryview(view))
    assert isinstance(got, memoryview)
    assert got.tobytes() == memoryview(view).tobytes()
    assert len(got) == len(view)


def test_what_is_shared_within_a_value_stays_shared_and_classes_travel_by_name() -> None:
    one = np.arange(10)
    first, second, kind = through([one, one, Part])
    assert first is second
    assert kind is Part


def test_rows_of_a_batch_bring_their_own_bytes_only() -> None:
    packed = pack(list(torch.zeros(64, 4096)), 2 * MB)
    assert sum(map(len, [*packed.head, *packed.body])) < 64 * 4096 * 4 + 64 * 200


def test_large_buffers_are_neither_copied_to_be_sent_nor_to_be_read() -> None:
    blob, floats, tensor = bytes(MB), np.zeros(MB, np.float32), torch.zeros(MB)
    packed = pack([memoryview(blob), floats, tensor], 1 << 30)
    assert [address(s) for s in segments(packed.body, ALIGN)] == [address(blob), floats.ctypes.data, tensor.data_ptr()]
    body = memoryview(bytearray(9 * MB))
    view, got, got_tensor = unpack(memoryview(b"".join(packed.head)), body)  # type: ignore[misc]
    at = address(body)
    assert [address(view), got.ctypes.data, got_tensor.data_ptr()] == [at, at + MB, at + 5 * MB]


def test_large_bytes_are_not_copied_to_be_sent() -> None:
    blob = os.urandom(2 * MB)
    assert any(piece is blob for piece in segments(pack([1, blob, 2], 1 << 30).head, 1))


def test_many_large_buffers_are_few_segments() -> None:
    assert len(segments([bytes(LARGE)] * 300, ALIGN)) == 1


@pytest.mark.parametrize("value", [bytes(MB), np.zeros(MB, np.uint8), [1.5] * MB, "x" * MB], ids=type)
def test_a_value_over_the_cap_is_refused(value: Any) -> None:
    with pytest.raises(OverCap, match=f"more than the {MB} bytes"):
        pack(value, MB)


def address(buffer: Any) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


# ---- receive buffers


LOOKS = {
    "memoryview": lambda b: b[10:20],
    "array": lambda b: np.frombuffer(b, np.uint8)[5:],
    "unpickled array": lambda b: np.ndarray((2, 2), np.int64, b)[1],
    "tensor": lambda b: torch.frombuffer(b, dtype=torch.uint8)[3:],
    "unpickled tensor": lambda b: torch.from_numpy(np.ndarray((60,), np.uint8, b[8:]))[1:].view(59, 1),
    "memoryview of an array": lambda b: memoryview(np.frombuffer(b[8:], np.uint8)),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_a_buffer_is_used_again_only_when_no_view_of_it_is_left(look: Any) -> None:
    pool = Pool(MB, lambda n: np.empty(n, np.uint8))
    at = address(pool.take(68))
    assert address(pool.take(68)) == at
    kept = look(pool.take(68))
    assert address(pool.take(68)) != at
    del kept
    gc.collect()
    assert at in {address(one) for one in [pool.take(68), pool.take(68)]}


def test_a_pool_holds_on_to_a_bounded_number_of_bytes() -> None:
    made: list[Any] = []

    def allocate(n: int) -> Array:
        made.append(np.empty(n, np.uint8))
        return made[-1]

    pool = Pool(4 * MB, allocate)
    lent = [pool.take(MB) for _ in range(10)]
    del lent
    held = sum(sys.getrefcount(one) > 3 for one in made)
    assert held <= 4


def test_a_buffer_larger_than_the_pool_may_hold_lives_as_long_as_its_view() -> None:
    pool = Pool(MB, lambda n: np.empty(n, np.uint8))
    view = pool.take(3 * MB)
    view[-1] = 7
    assert pool.take(10)[:0] == b""
    assert view[-1] == 7
