from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from tiermem.errors import Code, DaemonUnavailable, InvalidArgument, TierIOError, TiermemError
from tiermem.mover import Chunk, Mover, Prepared, Ticket, Transfer
from tiermem.stats import Link, LinkStats
from tiermem.testing import FakeClock

READ, WRITE = Link.FLASH_TO_DRAM, Link.DRAM_TO_FLASH
WAIT_S = 20.0


class Gate:
    """A chunk that waits: `entered` when it runs, until `open` is called."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._opened = threading.Event()

    def __call__(self) -> None:
        self.entered.release()
        assert self._opened.wait(WAIT_S)

    def open(self) -> None:
        self._opened.set()

    def wait_entered(self) -> None:
        assert self.entered.acquire(timeout=WAIT_S)


class Done:
    """An `on_done` that keeps what it was called with."""

    def __init__(self) -> None:
        self.errors: list[TiermemError | None] = []
        self.thread = ""
        self._called = threading.Event()

    def __call__(self, error: TiermemError | None) -> None:
        self.errors.append(error)
        self.thread = threading.current_thread().name
        self._called.set()

    def wait(self) -> TiermemError | None:
        assert self._called.wait(WAIT_S)
        [error] = self.errors
        return error


class Log:
    """Chunks that note their name when they run."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str) -> Chunk:
        return lambda: self.names.append(name)


@pytest.fixture
def new_mover() -> Iterator[Callable[..., Mover]]:
    movers: list[Mover] = []

    def new(places: int = 1, workers_per_place: int = 1, clock: FakeClock | None = None) -> Mover:
        movers.append(Mover(places, workers_per_place=workers_per_place, clock=clock))
        return movers[-1]

    yield new
    for mover in movers:
        assert mover.close(WAIT_S)


def submit(
    mover: Mover,
    *chunks: Chunk,
    link: Link = READ,
    place: int = 0,
    deadline_s: float = math.inf,
    done: Done | None = None,
) -> Ticket:
    return mover.submit(Transfer(link, 100, Prepared(place, chunks), done or Done(), deadline_s))


def raiser(error: Exception) -> Chunk:
    def chunk() -> None:
        raise error

    return chunk


NewMover = Callable[..., Mover]


def test_chunks_run_in_order_on_a_named_thread(new_mover: NewMover) -> None:
    mover, log, done = new_mover(), Log(), Done()
    submit(mover, log("a"), log("b"), log("c"), done=done)
    assert done.wait() is None
    assert log.names == ["a", "b", "c"]
    assert done.thread == "tiermem-mover-0-0"
    assert mover.wait_idle(WAIT_S)
    assert mover.idle()


def test_a_transfer_without_chunks_is_done_at_once(new_mover: NewMover) -> None:
    done = Done()
    submit(new_mover(), done=done)
    assert done.wait() is None


def test_workers_share_one_transfer(new_mover: NewMover) -> None:
    mover, gates, done = new_mover(workers_per_place=3), [Gate() for _ in range(3)], Done()
    submit(mover, *gates, done=done)
    for gate in gates:
        gate.wait_entered()
    for gate in gates:
        assert done.errors == []
        gate.open()
    assert done.wait() is None


def test_order_is_deadline_then_reads_then_first_come(new_mover: NewMover) -> None:
    mover, log, gate = new_mover(), Log(), Gate()
    submit(mover, gate)
    gate.wait_entered()
    submit(mover, log("write, never"), link=WRITE)
    submit(mover, log("read, never, first"))
    submit(mover, log("read, never, second"))
    submit(mover, log("write, 5"), link=WRITE, deadline_s=5)
    submit(mover, log("read, 5"), deadline_s=5)
    submit(mover, log("write, 4"), link=WRITE, deadline_s=4)
    submit(mover, log("demand"), deadline_s=-math.inf)
    assert not mover.idle()
    gate.open()
    assert mover.wait_idle(WAIT_S)
    assert log.names == [
        "demand",
        "write, 4",
        "read, 5",
        "write, 5",
        "read, never, first",
        "read, never, second",
        "write, never",
    ]


def test_an_urgent_read_overtakes_between_chunks(new_mover: NewMover) -> None:
    mover, log, gate = new_mover(), Log(), Gate()
    submit(mover, gate, log("second"), log("third"))
    gate.wait_entered()
    submit(mover, log("urgent"), deadline_s=0)
    gate.open()
    assert mover.wait_idle(WAIT_S)
    assert log.names == ["urgent", "second", "third"]


@pytest.mark.parametrize("writes_due_s", [math.inf, 5.0, -math.inf])
def test_an_urgent_read_overtakes_write_backs_at_the_next_chunk(new_mover: NewMover, writes_due_s: float) -> None:
    """Those under way and those queued, and also those that somebody waits for (-inf), since he waits longer anyway."""
    mover, log, first, second, read = new_mover(workers_per_place=2), Log(), Gate(), Gate(), Done()
    submit(mover, first, second, log("third chunk"), link=WRITE, deadline_s=writes_due_s)
    first.wait_entered()
    second.wait_entered()
    queued = [Done() for _ in range(3)]
    for done in queued:
        submit(mover, log("write-back"), link=WRITE, deadline_s=writes_due_s, done=done)
    mover.submit(Transfer(WRITE, 1, lambda: Prepared(0, (log("prepared"),)), Done(), writes_due_s))
    submit(mover, log("read"), deadline_s=-math.inf, done=read)
    first.open()  # one worker is free, the other writes on
    assert read.wait() is None
    assert log.names[0] == "read"
    second.open()
    assert mover.wait_idle(WAIT_S)
    assert sorted(log.names[1:]) == ["prepared", "third chunk", "write-back", "write-back", "write-back"]


def test_write_backs_leave_workers_for_reads(new_mover: NewMover) -> None:
    """However many are queued, an urgent read of several chunks begins at once, on the workers that must not write."""
    mover, write, reads = new_mover(workers_per_place=4), Gate(), [Gate(), Gate()]
    for _ in range(8):
        submit(mover, write, write, link=WRITE, deadline_s=-math.inf)
    write.wait_entered()
    write.wait_entered()
    submit(mover, *reads)
    for gate in reads:
        gate.wait_entered()
        gate.open()
    assert not write.entered.acquire(blocking=False)
    write.open()
    assert mover.wait_idle(WAIT_S)


def test_at_most_two_write_at_a_time(new_mover: NewMover) -> None:
    mover, gate, read = new_mover(workers_per_place=4), Gate(), Done()
    for _ in range(2):
        submit(mover, gate, link=WRITE)
        gate.wait_entered()
    third = Log()
    submit(mover, third("third"), link=WRITE, deadline_s=0)
    submit(mover, Log()("read"), done=read)
    assert read.wait() is None
    assert third.names == []
    gate.open()
    assert mover.wait_idle(WAIT_S)
    assert third.names == ["third"]


def test_a_slow_place_does_not_hold_up_another(new_mover: NewMover) -> None:
    mover, gate, done = new_mover(places=2, workers_per_place=1), Gate(), Done()
    submit(mover, gate, place=0)
    gate.wait_entered()
    submit(mover, Log()("a"), place=1, done=done)
    assert done.wait() is None
    gate.open()


def test_a_place_that_hangs_with_all_its_workers_does_not_hold_up_another(new_mover: NewMover) -> None:
    """Nor the preparation of write-backs for the other one, however much is queued."""
    mover, gate, log = new_mover(places=2, workers_per_place=3), Gate(), Log()
    for _ in range(20):
        submit(mover, gate, gate)
        mover.submit(Transfer(WRITE, 1, lambda: Prepared(0, (gate,)), Done()))
    for _ in range(3):
        gate.wait_entered()
    dones = [Done() for _ in range(6)]
    for i, done in enumerate(dones):
        if i % 2:
            submit(mover, log("read"), place=1, done=done)
        else:
            mover.submit(Transfer(WRITE, 1, lambda: Prepared(1, (log("write"),)), done))
    assert [done.wait() for done in dones] == [None] * 6
    assert sorted(log.names) == ["read"] * 3 + ["write"] * 3
    gate.open()
    assert mover.wait_idle(WAIT_S)


def test_an_error_cancels_the_remaining_chunks(new_mover: NewMover) -> None:
    mover, log, done = new_mover(), Log(), Done()
    error = TierIOError(5, "scripted")
    submit(mover, log("a"), raiser(error), log("c"), done=done)
    assert done.wait() is error
    assert mover.wait_idle(WAIT_S)
    assert log.names == ["a"]


def test_on_done_waits_for_chunks_that_still_run(new_mover: NewMover) -> None:
    mover, gate, done, after, log = new_mover(workers_per_place=2), Gate(), Done(), Done(), Log()
    error = TierIOError(5, "scripted")
    submit(mover, gate, raiser(error), log("third"), done=done)
    gate.wait_entered()
    submit(mover, log("after"), done=after)  # served by the second worker once the error has been noted
    assert after.wait() is None
    assert done.errors == []
    gate.open()
    assert done.wait() is error
    assert log.names == ["after"]


def test_a_bug_in_a_chunk_becomes_an_internal_error(new_mover: NewMover, caplog: pytest.LogCaptureFixture) -> None:
    mover, done, after = new_mover(), Done(), Done()
    bug = ZeroDivisionError("scripted")
    submit(mover, raiser(bug), done=done)
    error = done.wait()
    assert error is not None
    assert (error.code, error.__cause__) == (Code.INTERNAL, bug)
    assert "ZeroDivisionError" in caplog.text
    submit(mover, Log()("a"), done=after)
    assert after.wait() is None


def test_a_bug_in_on_done_is_logged(new_mover: NewMover, caplog: pytest.LogCaptureFixture) -> None:
    mover, after = new_mover(), Done()

    def on_done(error: TiermemError | None) -> None:
        raise ZeroDivisionError("scripted")

    mover.submit(Transfer(READ, 1, Prepared(0, (Log()("a"),)), on_done))
    submit(mover, Log()("b"), done=after)
    assert after.wait() is None
    assert mover.wait_idle(WAIT_S)
    assert "on_done of a transfer of 1 bytes over flash_to_dram raised" in caplog.text


def test_on_done_may_call_the_mover(new_mover: NewMover) -> None:
    mover, done = new_mover(), Done()

    def on_done(error: TiermemError | None) -> None:
        assert not mover.idle()
        submit(mover, Log()("next"), done=done)

    mover.submit(Transfer(READ, 1, Prepared(0, (Log()("a"),)), on_done))
    assert done.wait() is None


def test_a_write_back_is_prepared_on_a_thread_of_its_own_stage(new_mover: NewMover) -> None:
    mover, done, threads = new_mover(places=2), Done(), list[str]()

    def note() -> None:
        threads.append(threading.current_thread().name)

    def prepare() -> Prepared:
        note()
        return Prepared(1, (note, note))

    mover.submit(Transfer(WRITE, 100, prepare, done))
    assert done.wait() is None
    assert threads[0].startswith("tiermem-mover-prepare-")
    assert threads[1:] == ["tiermem-mover-1-0"] * 2
    assert mover.links()[WRITE].transfers == 1


def test_an_error_while_preparing_ends_the_transfer(new_mover: NewMover) -> None:
    mover = new_mover()
    error = TierIOError(28, "scripted")

    def refuse() -> Prepared:
        raise error

    done, unknown = Done(), Done()
    mover.submit(Transfer(WRITE, 100, refuse, done))
    assert done.wait() is error
    mover.submit(Transfer(WRITE, 100, lambda: Prepared(7, ()), unknown))
    assert isinstance(unknown.wait(), InvalidArgument)


def test_a_hung_preparation_does_not_hold_up_the_next(new_mover: NewMover) -> None:
    mover, gate, done = new_mover(), Gate(), Done()

    def hang() -> Prepared:
        gate()
        return Prepared(0, ())

    mover.submit(Transfer(WRITE, 1, hang, Done()))
    gate.wait_entered()
    mover.submit(Transfer(WRITE, 1, lambda: Prepared(0, ()), done))
    assert done.wait() is None
    gate.open()


def test_a_prefetch_that_is_waited_for_is_expedited(new_mover: NewMover) -> None:
    mover, log, gate = new_mover(), Log(), Gate()
    submit(mover, gate)
    gate.wait_entered()
    submit(mover, log("first"), deadline_s=1)
    prefetch = submit(mover, log("prefetch"), deadline_s=9)
    submit(mover, log("last"), deadline_s=5)
    mover.expedite(prefetch, 0)
    mover.expedite(prefetch, 7)  # no way back
    gate.open()
    assert mover.wait_idle(WAIT_S)
    assert log.names == ["prefetch", "first", "last"]
    mover.expedite(prefetch, -1)
    assert mover.idle()


def test_what_is_expedited_while_it_is_prepared_stays_so(new_mover: NewMover) -> None:
    mover, log, preparing, busy = new_mover(), Log(), Gate(), Gate()
    submit(mover, busy)
    busy.wait_entered()
    submit(mover, log("other"), link=WRITE, deadline_s=5)
    prepared = threading.Event()

    def prepare() -> Prepared:
        preparing()
        return Prepared(0, (log("expedited"),))

    ticket = mover.submit(Transfer(WRITE, 1, prepare, Done(), deadline_s=9))
    preparing.wait_entered()
    mover.expedite(ticket, 0)
    preparing.open()
    # Two more preparations fill both threads of the stage, so the first one has left it.
    both = threading.Barrier(2, action=prepared.set)

    def meet() -> Prepared:
        both.wait(WAIT_S)
        return Prepared(0, ())

    for _ in range(2):
        mover.submit(Transfer(WRITE, 1, meet, Done()))
    assert prepared.wait(WAIT_S)
    busy.open()
    assert mover.wait_idle(WAIT_S)
    assert log.names == ["expedited", "other"]


def test_statistics_by_link_and_job(new_mover: NewMover) -> None:
    clock = FakeClock(100.0)
    mover, gate = new_mover(clock=clock), Gate()
    submit(mover, gate)
    gate.wait_entered()
    chunks = (lambda: clock.advance(2), lambda: clock.advance(3))
    mover.submit(Transfer(READ, 60, Prepared(0, chunks), Done(), job="a"))
    mover.submit(
        Transfer(WRITE, 7, Prepared(0, (lambda: clock.advance(1), raiser(TierIOError(5, "x")))), Done(), job="a")
    )
    clock.advance(10)
    assert mover.links("a")[READ] == LinkStats(queued_bytes=60)
    assert mover.links()[READ].queued_bytes == 160
    gate.open()
    assert mover.wait_idle(WAIT_S)
    assert mover.links("a") == {
        READ: LinkStats(bytes=60, transfers=1, seconds=5.0, queue_seconds=10.0),
        WRITE: LinkStats(bytes=0, transfers=0, seconds=1.0, queue_seconds=15.0),
    }
    assert mover.links()[READ] == LinkStats(bytes=160, transfers=2, seconds=15.0, queue_seconds=10.0)
    mover.forget("a")
    assert mover.links("a")[READ] == LinkStats()
    assert mover.links()[READ].bytes == 160


def test_preparing_counts_as_waiting_not_as_io(new_mover: NewMover) -> None:
    clock, done = FakeClock(), Done()
    mover = new_mover(clock=clock)

    def prepare() -> Prepared:
        clock.advance(4)
        return Prepared(0, (lambda: clock.advance(1),))

    mover.submit(Transfer(WRITE, 10, prepare, done))
    assert done.wait() is None
    assert mover.links()[WRITE] == LinkStats(bytes=10, transfers=1, seconds=1.0, queue_seconds=4.0)


def test_close_fails_what_was_not_begun(new_mover: NewMover) -> None:
    mover, gate, log = new_mover(workers_per_place=1), Gate(), Log()
    running, queued, written, preparing = Done(), Done(), Done(), Done()
    hang = Gate()

    def prepare() -> Prepared:
        hang()
        return Prepared(0, (log("prepared"),))

    submit(mover, gate, log("second chunk"), done=running)
    gate.wait_entered()
    submit(mover, log("queued"), done=queued)
    submit(mover, log("written"), link=WRITE, done=written)
    mover.submit(Transfer(WRITE, 1, prepare, preparing))
    hang.wait_entered()
    closer = threading.Thread(target=mover.close, args=(WAIT_S,))
    closer.start()
    # Whoever is refused knows that closing has begun.
    with pytest.raises(DaemonUnavailable, match="closed"):
        list(iter(lambda: submit(mover, log("late")), None))
    gate.open()
    for thread in threading.enumerate():
        if thread.name == "tiermem-mover-0-0":
            thread.join(WAIT_S)
    hang.open()  # what is prepared only now finds no worker at its place any more
    closer.join()
    for done in (running, queued, written, preparing):
        assert isinstance(done.wait(), DaemonUnavailable)
        assert done.thread.startswith("tiermem-mover-")
    assert log.names == []
    assert mover.idle()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tiermem-mover-0")]


def test_close_says_who_is_stuck(new_mover: NewMover, caplog: pytest.LogCaptureFixture) -> None:
    mover, gate, done = new_mover(), Gate(), Done()
    submit(mover, gate, done=done)
    gate.wait_entered()
    assert not mover.close(0.01)
    assert "still in I/O after 0.0 s: tiermem-mover-0-0" in caplog.text
    gate.open()
    assert mover.close(WAIT_S)
    assert done.wait() is None  # its only chunk had run


def test_wrong_arguments_are_refused(new_mover: NewMover) -> None:
    mover = new_mover(places=2)
    for place in (-1, 2):
        with pytest.raises(InvalidArgument, match=f"place {place} is unknown"):
            submit(mover, place=place)
    assert mover.idle()
    with pytest.raises(InvalidArgument, match="0 places"):
        Mover(0)


def test_many_transfers_from_many_threads(new_mover: NewMover) -> None:
    mover = new_mover(places=2, workers_per_place=4)
    lock = threading.Lock()
    ran: dict[int, int] = {}
    dones: list[Done] = []

    def feed(seed: int) -> None:
        source = random.Random(seed)
        for i in range(100):
            serial, chunks = seed * 1000 + i, source.randrange(4)

            def chunk(serial: int = serial) -> None:
                with lock:
                    ran[serial] = ran.get(serial, 0) + 1

            done = Done()
            with lock:
                dones.append(done)
                ran[serial] = -chunks
            work = Prepared(source.randrange(2), (chunk,) * chunks)
            lazy = source.random() < 0.3

            def prepare(work: Prepared = work) -> Prepared:
                return work

            link = WRITE if lazy else source.choice([READ, WRITE])
            ticket = mover.submit(Transfer(link, 3, prepare if lazy else work, done, source.random()))
            if source.random() < 0.3:
                mover.expedite(ticket, -1)

    threads = [threading.Thread(target=feed, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mover.wait_idle(WAIT_S)
    assert [done.errors for done in dones] == [[None]] * 300
    assert set(ran.values()) == {0}
    stats = mover.links()
    assert sum(link.transfers for link in stats.values()) == 300
    assert sum(link.bytes for link in stats.values()) == 900
    assert sum(link.queued_bytes for link in stats.values()) == 0
