"""`app.batcher`: no item lost or doubled, fair turns, nothing over its bound, and poison found; no clock, no I/O."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.batcher import Account, Batch, Batcher, Job, Piece
from workers.errors import QueueFull, TooLarge

pytestmark = pytest.mark.timeout(120)
quick = settings(deadline=None, max_examples=80)
NEVER = math.inf


def queue(*sizes: int, form: Any = "a", max_wait: float = 0.0) -> tuple[Batcher, list[Job]]:
    batcher = Batcher(max_wait)
    jobs = [Job(form, size, NEVER) for size in sizes]
    for job in jobs:
        batcher.add(job, 0.0)
    return batcher, jobs


def spans(batch: Batch | None, jobs: list[Job]) -> list[tuple[int, int, int]]:
    """Pieces as (job's place, start, stop)."""
    assert batch is not None
    return [(jobs.index(piece.job), piece.start, piece.stop) for piece in batch.pieces]


# ---- turns


def test_whatever_waits_goes_together_up_to_capacity_and_a_job_that_does_not_fit_is_cut() -> None:
    batcher, jobs = queue(2, 3, 4)
    assert spans(batcher.take(6, 0), jobs) == [(0, 0, 2), (1, 0, 3), (2, 0, 1)]
    assert batcher.waiting(0) == 3
    assert spans(batcher.take(6, 0), jobs) == [(2, 1, 4)]
    assert batcher.take(6, 0) is None
    assert batcher.waiting(0) == 0


def test_a_large_job_takes_turns_with_those_that_came_after_it() -> None:
    batcher, jobs = queue(100, 1, 1)
    assert spans(batcher.take(10, 0), jobs) == [(0, 0, 10)]
    assert spans(batcher.take(10, 0), jobs) == [(1, 0, 1), (2, 0, 1), (0, 10, 18)]
    assert spans(batcher.take(10, 0), jobs) == [(0, 18, 28)]


def test_only_jobs_of_one_form_share_a_step_and_other_forms_get_their_turn() -> None:
    batcher = Batcher()
    jobs = [Job(form, 3, NEVER) for form in "abab"]
    for job in jobs:
        batcher.add(job, 0.0)
    assert spans(batcher.take(5, 0), jobs) == [(0, 0, 3), (2, 0, 2)]
    assert spans(batcher.take(5, 0), jobs) == [(1, 0, 3), (3, 0, 2)]
    assert spans(batcher.take(5, 0), jobs) == [(2, 2, 3)]
    assert spans(batcher.take(5, 0), jobs) == [(3, 2, 3)]


def test_a_second_step_goes_only_if_it_is_as_large_as_the_one_beside_it_or_full() -> None:
    batcher, _ = queue(3)
    assert batcher.take(10, 0, beside=4) is None
    assert batcher.waiting(0) == 3
    batch = batcher.take(10, 0, beside=3)
    assert batch is not None
    assert batch.size == 3
    for beside, goes in ((0, True), (None, True), (9, True), (4, True), (20, True)):
        batcher, _ = queue(4)
        assert (batcher.take(4, 0, beside) is not None) is goes


def test_an_idle_group_waits_for_max_wait_for_a_fuller_step_and_a_busy_one_does_not() -> None:
    batcher, _ = queue(3, max_wait=0.5)
    assert batcher.wake_at() == 0.5
    assert batcher.take(10, 0.4) is None
    assert batcher.take(3, 0.4) is not None  # full
    batcher, _ = queue(3, max_wait=0.5)
    assert batcher.take(10, 0.4, beside=2) is not None
    batcher, _ = queue(3, max_wait=0.5)
    assert batcher.take(10, 0.5) is not None
    assert batcher.wake_at() == NEVER


def test_what_idle_groups_can_take_together_is_shared_out_by_what_each_holds() -> None:
    batcher, jobs = queue(1, 9)
    assert spans(batcher.take(8, 0, idle=24), jobs) == [(0, 0, 1), (1, 0, 3)]
    assert spans(batcher.take(16, 0, idle=16), jobs) == [(1, 3, 9)]
    batcher, jobs = queue(1)
    assert spans(batcher.take(4, 0, idle=8), jobs) == [(0, 0, 1)]
    assert batcher.take(4, 0, idle=4) is None
    batcher, jobs = queue(1, 1, 1, 1, 1)
    assert spans(batcher.take(4, 0, idle=8), jobs) == [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 1)]
    assert spans(batcher.take(4, 0, idle=4), jobs) == [(4, 0, 1)]
    batcher, jobs = queue(100)
    for start in (0, 4, 8):
        assert spans(batcher.take(4, 0, idle=12), jobs) == [(0, start, start + 4)]
    batcher, _ = queue(7, max_wait=0.5)
    assert batcher.take(8, 0.4, idle=16) is None  # it waits for a fuller step as a whole
    assert batcher.take(8, 0.5, idle=16).size == 4  # type: ignore[union-attr]


def test_a_job_that_nobody_waits_for_is_dropped_and_not_run() -> None:
    batcher, jobs = queue(2, 2, 2, 2)
    jobs[0].live = jobs[2].live = False
    jobs[3].deadline = 5.0
    assert batcher.waiting(4.9) == 4
    assert batcher.waiting(5.0) == 2
    assert spans(batcher.take(10, 5.0), jobs) == [(1, 0, 2)]
    assert batcher.take(10, 5.0) is None


def test_jobs_that_nobody_waits_for_do_not_pile_up_while_no_step_is_taken() -> None:
    batcher, (kept, *_) = queue(1)
    for _ in range(1000):
        gone = Job("a", 1, NEVER)
        batcher.add(gone, 0.0)
        gone.live = False
    assert len(batcher._jobs) < 10
    assert spans(batcher.take(10, 0), [kept]) == [(0, 0, 1)]


@quick
@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from("abc")), max_size=8),
    st.integers(1, 10),
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from("abc")), max_size=60),
)
def test_a_job_waits_at_most_as_many_steps_as_jobs_stood_before_it(
    before: list[tuple[int, str]], capacity: int, after: list[tuple[int, str]]
) -> None:
    """However large those are, and whatever comes after it."""
    batcher = Batcher()
    for size, form in before:
        batcher.add(Job(form, size, NEVER), 0.0)
    mine = Job("a", 1, NEVER)
    batcher.add(mine, 0.0)
    steps = 0
    while not mine.taken:
        for size, form in after[3 * steps : 3 * steps + 3]:
            batcher.add(Job(form, size, NEVER), 0.0)
        assert batcher.take(capacity, 0.0) is not None
        steps += 1
    assert steps <= len(before) + 1


@quick
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 10))
def test_no_job_gets_a_second_turn_before_every_other_has_had_its_first(sizes: list[int], capacity: int) -> None:
    batcher, jobs = queue(*sizes)
    turns: Counter[int] = Counter()
    while (batch := batcher.take(capacity, 0.0)) is not None:
        for k, _, _ in spans(batch, jobs):
            turns[k] += 1
            assert turns[k] == 1 or len(turns) == len(jobs)
    assert all(job.taken == job.size for job in jobs)


# ---- after a death


def test_what_was_in_flight_goes_back_to_the_head_in_order_as_it_was() -> None:
    batcher, jobs = queue(3, 3, 3)
    first, second = batcher.take(4, 0), batcher.take(4, 0)
    assert first is not None
    assert second is not None
    assert batcher.put_back([first, second], strike=False) == []
    assert batcher.waiting(0) == 9
    assert spans(batcher.take(4, 0), jobs) == [(0, 0, 3), (1, 0, 1)]
    assert spans(batcher.take(4, 0), jobs) == [(2, 0, 3), (1, 1, 2)]
    assert spans(batcher.take(4, 0), jobs) == [(1, 2, 3)]


def test_a_suspect_runs_alone_and_nothing_goes_beside_it() -> None:
    batcher, jobs = queue(4, 4, 4)
    batches = [batcher.take(4, 0), batcher.take(4, 0)]
    batcher.put_back([batch for batch in batches if batch], strike=True)
    assert batcher.take(4, 0, beside=4) is None
    assert spans(batcher.take(4, 0), jobs) == [(0, 0, 4)]
    assert batcher.take(4, 0, beside=4) is None
    assert spans(batcher.take(4, 0), jobs) == [(1, 0, 4)]
    assert spans(batcher.take(4, 0, beside=4), jobs) == [(2, 0, 4)]


def test_a_suspect_that_nobody_waits_for_any_more_holds_up_nobody() -> None:
    batcher, jobs = queue(4, 4)
    batch = batcher.take(4, 0)
    assert batch is not None
    batcher.put_back([batch], strike=True)
    jobs[0].live = False
    assert spans(batcher.take(4, 0, beside=4), jobs) == [(1, 0, 4)]


def test_of_a_returned_step_only_what_is_still_wanted_runs() -> None:
    batcher, jobs = queue(2, 2, 2)
    batch = batcher.take(6, 0)
    assert batch is not None
    jobs[1].live = False
    batcher.put_back([batch], strike=True)
    assert batcher.waiting(0) == 4
    assert spans(batcher.take(6, 0), jobs) == [(0, 0, 2), (2, 0, 2)]


def test_a_returned_step_is_cut_to_what_the_next_group_holds() -> None:
    batcher, jobs = queue(3, 7)
    batch = batcher.take(10, 0)
    assert batch is not None
    batcher.put_back([batch], strike=True)
    taken = [batcher.take(4, 0) for _ in range(3)]
    assert [spans(one, jobs) for one in taken] == [[(0, 0, 3), (1, 0, 1)], [(1, 1, 5)], [(1, 5, 7)]]
    assert [one.strikes for one in taken if one] == [1, 1, 1]
    assert batcher.take(4, 0) is None


def test_the_rule_for_a_second_step_holds_for_a_returned_one_too() -> None:
    batcher, jobs = queue(2)
    batch = batcher.take(4, 0)
    assert batch is not None
    batcher.put_back([batch], strike=False)
    assert batcher.take(4, 0, beside=3) is None
    assert spans(batcher.take(4, 0, beside=2), jobs) == [(0, 0, 2)]


def test_a_death_without_a_strike_is_never_held_against_an_item() -> None:
    batcher, jobs = queue(1)
    for _ in range(10):
        batch = batcher.take(4, 0)
        assert batch is not None
        assert batcher.put_back([batch], strike=False) == []
    assert spans(batcher.take(4, 0), jobs) == [(0, 0, 1)]


@settings(deadline=None, max_examples=120)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.integers(1, 24),
    st.sets(st.integers(0, 71), min_size=1, max_size=3),
    st.booleans(),
)
@example([64], 64, {63}, False)
@example([1], 1, {0}, True)
def test_poison_is_found_within_its_deaths_and_no_innocent_fails(
    sizes: list[int], capacity: int, poison_places: set[int], second_in_flight: bool
) -> None:
    """A group that dies of every step with a poison item in it; a second step may be in flight, and dies with it."""
    batcher, jobs = queue(*sizes)
    items = [(k, i) for k, size in enumerate(sizes) for i in range(size)]
    poison = {items[place % len(items)] for place in poison_places}
    done: list[tuple[int, int]] = []
    failed: list[tuple[int, int]] = []
    deaths = 0

    def holds(pieces: list[Piece]) -> list[tuple[int, int]]:
        return [(jobs.index(job), i) for job, start, stop in pieces for i in range(start, stop)]

    while (batch := batcher.take(capacity, 0)) is not None:
        assert batch.size <= capacity
        beside = batcher.take(capacity, 0, batch.size) if second_in_flight and not batch.strikes else None
        assert beside is None or not beside.strikes
        flights = [batch, beside] if beside else [batch]
        if poison & {item for flight in flights for item in holds(flight.pieces)}:
            deaths += 1
            failed += holds(batcher.put_back(flights, strike=True))
        else:
            done += [item for flight in flights for item in holds(flight.pieces)]

    assert set(failed) == poison
    assert sorted(done + failed) == items
    assert deaths <= len(poison) * (2 + math.ceil(math.log2(min(capacity, len(items)))))


# ---- whatever happens


class Machine(RuleBasedStateMachine):
    """A dispatcher with one group that holds two steps; every item is watched through its life."""

    @initialize(max_wait=st.sampled_from([0.0, 0.0, 2.0]))
    def begin(self, max_wait: float) -> None:
        self.batcher = Batcher(max_wait)
        self.now = 0.0
        self.capacity = 6
        self.jobs: list[Job] = []
        self.poison: set[tuple[int, int]] = set()
        self.flights: list[Batch] = []
        self.ended: Counter[tuple[int, int]] = Counter()
        self.next_item: Counter[int] = Counter()  # a job: the item that its next fresh piece starts with
        self.returned: set[tuple[int, int]] = set()

    def items(self, pieces: list[Piece]) -> list[tuple[int, int]]:
        return [(self.jobs.index(job), i) for job, start, stop in pieces for i in range(start, stop)]

    @rule(
        size=st.integers(1, 15),
        form=st.sampled_from("aab"),
        patience=st.sampled_from([3.0, 1e9, 1e9]),
        poison=st.integers(0, 60),
    )
    def add(self, size: int, form: str, patience: float, poison: int) -> None:
        job = Job(form, size, self.now + patience)
        self.jobs.append(job)
        if poison < size:
            self.poison.add((len(self.jobs) - 1, poison))
        self.batcher.add(job, self.now)

    @precondition(lambda self: any(job.live for job in self.jobs))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([job for job in self.jobs if job.live])).live = False

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: len(self.flights) < 2)
    @rule()
    def take(self) -> None:
        if any(flight.strikes for flight in self.flights):
            return  # as the dispatcher does
        beside = self.flights[0].size if self.flights else None
        waiting = self.batcher.waiting(self.now)
        batch = self.batcher.take(self.capacity, self.now, beside)
        if batch is None:
            assert waiting == self.batcher.waiting(self.now)
            assert beside is not None or not waiting or self.now < self.batcher.wake_at()
            return
        assert 0 < batch.size <= self.capacity
        assert batch.size >= min(beside or 0, self.capacity)
        assert beside is None or not batch.strikes
        assert len({piece.job.form for piece in batch.pieces}) == 1
        assert batch.form == batch.pieces[0].job.form
        assert all(piece.job.wanted(self.now) and piece.size > 0 for piece in batch.pieces)
        assert self.batcher.waiting(self.now) == waiting - batch.size
        for item in self.items(batch.pieces):
            if item in self.returned:
                self.returned.remove(item)
            else:  # for the first time, so in order
                assert self.next_item[item[0]] == item[1]
                self.next_item[item[0]] += 1
        self.flights.append(batch)
        in_flight = Counter(item for flight in self.flights for item in self.items(flight.pieces))
        assert max(in_flight.values()) == 1
        assert not self.ended.keys() & in_flight.keys()

    @precondition(lambda self: self.flights)
    @rule()
    def step_ends(self) -> None:
        if self.poison & set(self.items(self.flights[0].pieces)):
            self.group_dies(strike=True)
            return
        self.ended.update(self.items(self.flights.pop(0).pieces))

    @precondition(lambda self: self.flights)
    @rule(strike=st.booleans(), capacity=st.integers(1, 12))
    def group_dies(self, strike: bool, capacity: int = 6) -> None:
        """And one that may hold more or less takes its place."""
        self.capacity = capacity
        flights, self.flights = self.flights, []
        before = {id(flight): flight.strikes for flight in flights}
        held = self.items([piece for flight in flights for piece in flight.pieces])
        given_up = self.items(self.batcher.put_back(flights, strike))
        for item in given_up:
            alone = [flight for flight in flights if self.items(flight.pieces) == [item]]
            assert strike
            assert len(alone) == 1  # in its step
            assert before[id(alone[0])] >= 1  # and not for the first time
            assert flights == alone  # and in its group
        self.ended.update(given_up)
        self.returned.update(item for item in held if item not in given_up)

    @invariant()
    def nothing_ends_twice(self) -> None:
        assert max(self.ended.values(), default=1) == 1

    @invariant()
    def what_waits_is_what_is_wanted_and_nowhere_else(self) -> None:
        flying = {item for flight in self.flights for item in self.items(flight.pieces)}
        wanted = {(k, i) for k, job in enumerate(self.jobs) if job.wanted(self.now) for i in range(job.size)}
        assert self.batcher.waiting(self.now) == len(wanted - flying - self.ended.keys())

    def teardown(self) -> None:
        """Everything that somebody waits for ends, in bounded steps."""
        if not hasattr(self, "batcher"):
            return
        self.now += 10.0  # over every max_wait
        size = sum(job.size for job in self.jobs)
        for _ in range(20 * size + 20):
            if self.flights:
                self.step_ends()
            elif self.batcher.waiting(self.now):
                self.take()
                assert self.flights
        assert self.flights == []
        wanted = {(k, i) for k, job in enumerate(self.jobs) if job.wanted(self.now) for i in range(job.size)}
        assert wanted <= self.ended.keys()


TestWhateverHappens = Machine.TestCase
TestWhateverHappens.settings = settings(
    deadline=None, max_examples=35, stateful_step_count=40, report_multiple_bugs=False
)


# ---- the account


@quick
@given(st.data())
def test_the_account_stays_within_its_bounds_and_ends_empty(data: st.DataObject) -> None:
    account = Account(max_items=10, max_bytes=100)
    holds = [account.open() for _ in range(3)]
    answers = 0
    for _ in range(data.draw(st.integers(0, 25))):
        hold = data.draw(st.sampled_from(holds))
        what = data.draw(st.sampled_from(["bytes", "items", "answer", "release"]))
        items, size = account.items, account.bytes
        count = data.draw(st.integers(0, 13 if what == "items" else 130))
        if what == "release":
            hold.release()
            assert (hold.items, hold.bytes) == (0, 0)
        elif what == "answer":
            hold.add_bytes(count)
            answers += count
        else:
            own, held, most = (hold.items, items, 10) if what == "items" else (hold.bytes, size, 100)
            take = hold.take_items if what == "items" else hold.take_bytes
            try:
                take(count)
            except TooLarge:
                assert own + count > most  # it could never be taken
            except QueueFull:
                assert held + count > most
            else:
                assert held + count <= most
                continue
            assert (account.items, account.bytes) == (items, size)  # a refusal takes nothing
        assert account.items == sum(hold.items for hold in holds) <= 10
        assert account.bytes == sum(hold.bytes for hold in holds) <= 100 + answers
    for hold in holds:
        hold.release()
        hold.release()
    assert (account.items, account.bytes) == (0, 0)


def test_what_can_never_fit_is_too_large_and_what_does_not_fit_now_is_not() -> None:
    account = Account(max_items=10, max_bytes=100)
    first, second = account.open(), account.open()
    first.take_bytes(60)
    first.take_items(6)
    with pytest.raises(QueueFull, match="41"):
        second.take_bytes(41)
    with pytest.raises(QueueFull, match="5"):
        second.take_items(5)
    with pytest.raises(TooLarge, match="101"):
        second.take_bytes(101)
    with pytest.raises(TooLarge, match="11"):
        second.take_items(11)
    with pytest.raises(TooLarge, match="110"):
        first.take_bytes(50)  # a body that grows: it holds 60 already
    second.take_bytes(40)
    second.take_items(4)
    first.release()
    second.take_bytes(60)
    assert (account.items, account.bytes) == (4, 100)


def test_an_answer_counts_and_is_never_refused() -> None:
    account = Account(max_items=1, max_bytes=10)
    hold = account.open()
    hold.add_bytes(25)
    assert account.bytes == 25
    with pytest.raises(QueueFull):
        account.open().take_bytes(1)
    hold.release()
    account.open().take_bytes(10)
