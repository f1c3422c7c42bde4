"""`workers.ring`: blocks of shared memory, and what a rank sees of them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.codecs import Rows
from workers.ring import ALIGNMENT, Block, Reader, Ring, open_ring
from workers.wire import Place

pytestmark = pytest.mark.timeout(60)

SIZE = 64 * ALIGNMENT


def test_a_rank_sees_what_was_written_and_cannot_write(tmp_path: Path) -> None:
    ring = open_ring(tmp_path, "a", SIZE)
    ranks = [Reader(tmp_path), Reader(tmp_path)]
    for text in (b"first", b"second"):
        block = ring.take(len(text))
        assert block is not None
        block.view[:] = text
        for rank in ranks:
            seen = rank.view(block.ring, block.start, len(text))
            assert seen == text
            assert seen.readonly


def test_a_rank_follows_a_new_front_end_to_its_ring_and_finds_no_old_one(tmp_path: Path) -> None:
    rank = Reader(tmp_path)
    for session in ("a", "b"):
        ring = open_ring(tmp_path, session, SIZE)
        block = ring.take(1)
        assert block is not None
        block.view[:] = session.encode()
        assert rank.view(block.ring, block.start, 1) == session.encode()
        assert [path.name for path in tmp_path.iterdir()] == [f"ring-{session}"]
    with pytest.raises(FileNotFoundError):
        Reader(tmp_path).view("ring-a", 0, 1)
    ring.close()
    assert not list(tmp_path.iterdir())


def test_a_full_ring_says_so_and_has_room_again(tmp_path: Path) -> None:
    ring = open_ring(tmp_path, "a", SIZE)
    assert ring.take(SIZE + 1) is None
    whole = ring.take(SIZE)
    assert whole is not None
    assert ring.take(1) is None
    del whole
    assert ring.take(SIZE) is not None


def test_a_slice_alone_does_not_hold_a_block_and_the_block_does(tmp_path: Path) -> None:
    ring = open_ring(tmp_path, "a", SIZE)
    block = ring.take(SIZE)
    assert block is not None
    view = block.view[1:]
    del block
    assert ring.take(SIZE) is not None
    del view


def test_items_of_a_ring_whose_file_was_removed_go_through_the_socket(tmp_path: Path) -> None:
    ring = open_ring(tmp_path, "a", SIZE)
    block = ring.take(100)
    assert block is not None
    rows = Rows(block.view, 10, 10, block, 0)
    assert rows.place(2, 4) == Place("ring-a", block.start + 20, 20)
    (tmp_path / "ring-a").unlink()
    assert rows.place(2, 4) is None


def test_a_full_tmpfs_is_no_signal_but_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = open_ring(tmp_path, "a", SIZE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert ring.take(1) is None
    monkeypatch.undo()
    assert ring.take(1) is not None


def test_memory_is_claimed_as_it_is_needed(tmp_path: Path) -> None:
    ring = open_ring(tmp_path, "a", 64 << 20)
    path = tmp_path / "ring-a"
    assert path.stat().st_size == 64 << 20
    assert path.stat().st_blocks * 512 < 1 << 20
    for _ in range(20):  # again and again the same pages
        block = ring.take(5 << 20)
        assert block is not None
        assert block.start == 0
        del block
    assert path.stat().st_blocks * 512 == 8 << 20


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, SIZE // 3), st.integers(0, 5)), max_size=40))
def test_no_two_blocks_overlap_and_nothing_leaks(steps: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ring = Ring(Path(folder, "ring"), SIZE)
        held: list[Block] = []
        for number, (size, release) in enumerate(steps):
            block = ring.take(size)
            if block is not None:
                assert len(block.view) == size
                block.view[:] = bytes([number]) * size
                held.append(block)
                del block
            assert all(len(set(one.view)) == 1 for one in held)
            if release < len(held):
                del held[release]
        held.clear()
        assert ring.take(SIZE) is not None
        ring.close()
