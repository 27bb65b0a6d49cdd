"""AddressSpace against a second mapping of the same memfd, which is what the daemon sees."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiermem.errors import InvalidArgument, ResourceExhausted, TiermemError
from tiermem.units import KIB, MIB
from tiermem_client.address_space import AddressSpace, Range
from tiermem_client.page_moves import Mechanism, Remap, kernel_remap

FRAME = 16 * KIB
FRAMES = 64
ROOT = Path(__file__).resolve().parents[2]


def sealed_memfd(nbytes: int, *, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("tiermem-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@dataclass
class Arena:
    """A client's address space and the daemon's linear view of the same frames."""

    space: AddressSpace
    daemon: mmap.mmap

    @classmethod
    def make(cls, mechanism: Mechanism, frames: int = FRAMES, remap: Remap = kernel_remap) -> Arena:
        fd = sealed_memfd(frames * FRAME)
        daemon = mmap.mmap(fd, frames * FRAME)
        return cls(AddressSpace(fd, frames * FRAME, FRAME, mechanism=mechanism, remap=remap), daemon)

    def close(self) -> None:
        self.space.close()
        self.daemon.close()

    def frame(self, number: int) -> bytes:
        return self.daemon[number * FRAME : (number + 1) * FRAME]

    def fill(self, number: int, value: int) -> None:
        self.daemon[number * FRAME : (number + 1) * FRAME] = bytes([value]) * FRAME


@pytest.fixture(params=list(Mechanism))
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    made = Arena.make(request.param)
    yield made
    made.space.check_invariants()
    made.close()


def fragmented_runs(rng: random.Random, frames: list[int], count: int) -> list[tuple[int, int]]:
    """`count` of `frames` in random order, neighbours sometimes joined."""
    chosen = rng.sample(frames, count)
    if rng.random() < 0.5:
        chosen.sort()
    runs: list[tuple[int, int]] = []
    for number in chosen:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def permissions(address: int) -> str:
    """ "rw-s", "---p", ... of the kernel mapping that holds `address`; "" where nothing is mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, mode, *_ = line.split()
        first, last = (int(part, 16) for part in span.split("-"))
        if first <= address < last:
            return mode
    return ""


def test_bytes_are_shared_with_the_daemon_both_ways(arena: Arena) -> None:
    range_ = arena.space.reserve(3 * FRAME)
    for number, value in ((7, 1), (8, 2), (40, 3)):
        arena.fill(number, value)
    arena.space.map(range_, 0, [(40, 1), (7, 2)])
    view = memoryview(arena.space.as_buffer(range_, 0, 3 * FRAME)).cast("B")
    assert view.tobytes() == b"\x03" * FRAME + b"\x01" * FRAME + b"\x02" * FRAME
    view[0:2] = b"\xaa\xbb"
    view[3 * FRAME - 1] = 0xCC
    assert arena.frame(40)[:2] == b"\xaa\xbb"
    assert arena.frame(8)[-1] == 0xCC
    arena.fill(7, 9)
    assert view[FRAME : 2 * FRAME] == b"\x09" * FRAME
    arena.space.unmap(range_, 0, [(40, 1), (7, 2)])
    assert arena.frame(40)[:2] == b"\xaa\xbb"


def test_addresses_and_bytes_stay_over_100_remaps_of_random_runs(arena: Arena) -> None:
    rng = random.Random(1)
    ranges = [arena.space.reserve(frames * FRAME) for frames in (1, 5, 12, 30)]
    addresses = [arena.space.address(range_) for range_ in ranges]
    stored = [rng.randbytes(range_.nbytes) for range_ in ranges]
    for _ in range(100):
        index = rng.randrange(len(ranges))
        range_ = ranges[index]
        runs = fragmented_runs(rng, list(range(FRAMES)), range_.nbytes // FRAME)
        numbers = [number for start, count in runs for number in range(start, start + count)]
        for place, number in enumerate(numbers):  # the daemon loads from flash
            arena.daemon[number * FRAME : (number + 1) * FRAME] = stored[index][place * FRAME : (place + 1) * FRAME]
        arena.space.map(range_, 0, runs)
        buffer = memoryview(arena.space.as_buffer(range_, 0, range_.nbytes)).cast("B")
        assert buffer == stored[index]
        changed = rng.randrange(range_.nbytes)
        buffer[changed] ^= 0xFF
        stored[index] = buffer.tobytes()
        arena.space.unmap(range_, 0, runs)
        assert b"".join(arena.frame(number) for number in numbers) == stored[index]
    assert [arena.space.address(range_) for range_ in ranges] == addresses
    stats = arena.space.stats()
    assert stats.mapped_bytes == 0
    assert stats.ranges == 4
    assert stats.moved_bytes >= 200 * FRAME
    assert stats.moves <= stats.syscalls
    assert stats.seconds > 0


def test_tiles_lie_side_by_side_in_one_range(arena: Arena) -> None:
    range_ = arena.space.reserve(6 * FRAME)
    arena.space.map(range_, 2 * FRAME, [(10, 2)])
    arena.space.map(range_, 0, [(3, 1), (1, 1)])
    arena.space.map(range_, 4 * FRAME, [(20, 2)])
    whole = memoryview(arena.space.as_buffer(range_, 0, 6 * FRAME)).cast("B")
    whole[:] = bytes(range(6)) * FRAME
    arena.space.unmap(range_, 2 * FRAME, [(10, 2)])
    assert permissions(range_.address + FRAME) == "rw-s"
    assert permissions(range_.address + 2 * FRAME) == "---p"
    assert permissions(range_.address + 4 * FRAME) == "rw-s"
    seen = b"".join(arena.frame(number) for number in (3, 1, 10, 11, 20, 21))
    assert seen == bytes(range(6)) * FRAME


def test_what_holds_no_frame_is_closed(arena: Arena) -> None:
    range_ = arena.space.reserve(2 * FRAME)
    assert permissions(range_.address) == "---p"
    arena.space.map(range_, 0, [(0, 2)])
    assert permissions(range_.address) == "rw-s"
    arena.space.unmap(range_, 0, [(0, 2)])
    assert permissions(range_.address) == "---p"
    arena.space.release(range_)
    assert permissions(range_.address) == ""
    with pytest.raises(InvalidArgument, match="not reserved here"):
        arena.space.address(range_)


def test_the_frames_are_readable_in_one_place_only() -> None:
    arena = Arena.make(Mechanism.MREMAP)
    homes = memfd_spans()  # the daemon's view and home
    range_ = arena.space.reserve(FRAME)
    arena.space.map(range_, 0, [(5, 1)])
    assert sum(last - first for first, last in memfd_spans()) == sum(last - first for first, last in homes)
    arena.close()


def memfd_spans() -> list[tuple[int, int]]:
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:tiermem-test" in line]
    return [(int(first, 16), int(last, 16)) for first, last in (line.split()[0].split("-") for line in lines)]


@pytest.mark.parametrize(
    ("nbytes", "align"), [(1, FRAME), (2 * MIB - 1, FRAME), (2 * MIB, 2 * MIB), (5 * MIB, 2 * MIB)]
)
def test_ranges_are_aligned_and_whole_frames(arena: Arena, nbytes: int, align: int) -> None:
    for _ in range(5):
        range_ = arena.space.reserve(nbytes)
        assert range_.address % align == 0
        assert range_.nbytes % FRAME == 0
        assert 0 <= range_.nbytes - nbytes < FRAME


def split_kernel_mappings(address: int, frames: tuple[int, ...]) -> None:
    """Give single frames another flag, which makes them kernel mappings of their own."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for number in frames:
        assert libc.madvise(address + number * FRAME, FRAME, mmap.MADV_SEQUENTIAL) == 0


def mapping_end(address: int) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return last
    return 0


class OldKernel:
    """mremap as before Linux 6.17: a source in several mappings is EFAULT, with the target unmapped by then. Call
    number `failing_at` is refused with ENOMEM.
    """

    def __init__(self) -> None:
        self.failing_at = 0
        self.calls = 0

    def __call__(self, source: int, target: int, nbytes: int) -> int:
        self.calls += 1
        if self.calls == self.failing_at:
            ctypes.set_errno(errno.ENOMEM)
            return errno.ENOMEM
        if mapping_end(source) < source + nbytes:
            libc = ctypes.CDLL(None)
            libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
            assert libc.munmap(target, nbytes) == 0
            ctypes.set_errno(errno.EFAULT)
            return errno.EFAULT
        return kernel_remap(source, target, nbytes)


@pytest.mark.parametrize("kernel", [kernel_remap, OldKernel()], ids=["this kernel", "old kernel"])
def test_a_run_over_several_kernel_mappings_is_moved(kernel: Remap) -> None:
    arena = Arena.make(Mechanism.MREMAP, remap=kernel)
    range_ = arena.space.reserve(8 * FRAME)
    for number in range(8):
        arena.fill(number, number + 1)
    arena.space.map(range_, 0, [(0, 8)])
    split_kernel_mappings(range_.address, (1, 4, 5))
    arena.space.unmap(range_, 0, [(0, 8)])
    if kernel is not kernel_remap:
        assert arena.space.stats().splits > 0
    assert {permissions(range_.address + number * FRAME) for number in range(8)} == {"---p"}
    arena.space.map(range_, 0, [(0, 8)])
    assert bytes(arena.space.as_buffer(range_, 0, 8 * FRAME))[::FRAME] == bytes(range(1, 9))
    arena.space.check_invariants()
    arena.close()


@pytest.mark.parametrize("failing_at", range(1, 9))
def test_a_move_refused_halfway_is_undone(failing_at: int) -> None:
    kernel = OldKernel()
    arena = Arena.make(Mechanism.MREMAP, remap=kernel)
    range_ = arena.space.reserve(8 * FRAME)
    for number in range(12):
        arena.fill(number, number + 1)
    runs = [(4, 2), (0, 4), (10, 2)]
    arena.space.map(range_, 0, runs)
    split_kernel_mappings(range_.address, (3, 4))
    kernel.calls, kernel.failing_at = 0, failing_at
    with pytest.raises(ResourceExhausted, match=r"vm\.max_map_count"):
        arena.space.unmap(range_, 0, runs)
    assert bytes(arena.space.as_buffer(range_, 0, 8 * FRAME))[::FRAME] == bytes([5, 6, 1, 2, 3, 4, 11, 12])
    assert arena.space.stats().mapped_bytes == 8 * FRAME
    kernel.failing_at = 0
    arena.space.unmap(range_, 0, runs)
    assert {permissions(range_.address + number * FRAME) for number in range(8)} == {"---p"}
    arena.space.check_invariants()
    arena.close()


def test_a_kernel_that_refuses_the_move_is_served_by_mmap_and_told(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(source: int, target: int, nbytes: int) -> int:
        return errno.EINVAL

    space = AddressSpace(sealed_memfd(FRAME), FRAME, FRAME, remap=refuses)
    assert space.stats().mechanism is Mechanism.MMAP
    assert "frames move by mmap" in caplog.text
    space.close()
    with pytest.raises(InvalidArgument, match=r"Mechanism\.MMAP"):
        AddressSpace(sealed_memfd(FRAME), FRAME, FRAME, mechanism=Mechanism.MREMAP, remap=refuses)
    assert memfd_spans() == []


def test_misuse_is_refused_with_the_history_and_changes_nothing(arena: Arena) -> None:
    one, two = arena.space.reserve(4 * FRAME), arena.space.reserve(4 * FRAME)
    arena.space.map(one, 0, [(3, 2)])
    with pytest.raises(TiermemError, match=r"are not home .*4 at 0x.*map \[\(3, 2\)\] range 1 \+ 0"):
        arena.space.map(two, 0, [(9, 1), (4, 1)])
    with pytest.raises(TiermemError, match="is taken"):
        arena.space.map(one, FRAME, [(9, 1)])
    with pytest.raises(TiermemError, match="holds"):
        arena.space.unmap(one, 0, [(4, 1), (3, 1)])
    with pytest.raises(TiermemError, match="released with frames in it"):
        arena.space.release(one)
    for offset, runs in (
        (1, [(0, 1)]),
        (4 * FRAME, [(0, 1)]),
        (0, [(0, 5)]),
        (0, [(63, 2)]),
        (0, [(0, 1), (0, 1)]),
        (0, [(0, 0)]),
    ):
        with pytest.raises(InvalidArgument):
            arena.space.map(two, offset, runs)
    with pytest.raises(InvalidArgument, match="not inside"):
        arena.space.as_buffer(one, 3 * FRAME, FRAME + 1)
    with pytest.raises(InvalidArgument, match="not reserved here"):
        arena.space.map(Range(99, one.address, FRAME), 0, [(0, 1)])
    with pytest.raises(InvalidArgument, match="at least 1"):
        arena.space.reserve(0)
    assert arena.space.stats().mapped_bytes == 2 * FRAME
    arena.space.map(two, 0, [(9, 1)])


@pytest.mark.parametrize("mechanism", Mechanism)
def test_only_the_fallback_keeps_a_descriptor_until_it_is_closed(mechanism: Mechanism) -> None:
    fd = sealed_memfd(FRAME)
    arena = os.fstat(fd)
    space = AddressSpace(fd, FRAME, FRAME, mechanism=mechanism)
    assert space.stats().mechanism == mechanism
    assert len(descriptors_of(arena)) == (1 if mechanism is Mechanism.MMAP else 0)
    space.close()
    assert descriptors_of(arena) == []


def descriptors_of(file: os.stat_result) -> list[str]:
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [path for path in paths if os.path.exists(path) and os.path.samestat(os.stat(path), file)]


def test_the_probe_takes_what_the_kernel_has() -> None:
    forced = sealed_memfd(FRAME)
    try:
        AddressSpace(forced, FRAME, FRAME, mechanism=Mechanism.MREMAP).close()
        expected = Mechanism.MREMAP
    except InvalidArgument:
        expected = Mechanism.MMAP
    space = AddressSpace(sealed_memfd(FRAME), FRAME, FRAME)
    assert space.mechanism is space.stats().mechanism is expected
    space.close()


@pytest.mark.parametrize(
    ("held", "arena_bytes", "frame", "seals", "message"),
    [
        (FRAME, 2 * FRAME, FRAME, fcntl.F_SEAL_SHRINK, "holds 16384 bytes"),
        (4 * FRAME, 3 * FRAME + 1, FRAME, fcntl.F_SEAL_SHRINK, "not whole frames"),
        (4 * FRAME, 4 * FRAME, 2048, fcntl.F_SEAL_SHRINK, "2048 bytes is not a power of two"),
        (3 * FRAME, 3 * FRAME, 3 * FRAME, fcntl.F_SEAL_SHRINK, "not a power of two"),
        (FRAME, FRAME, FRAME, fcntl.F_SEAL_GROW, "not sealed against shrinking"),
    ],
)
def test_a_wrong_arena_is_refused_and_its_descriptor_closed(
    held: int, arena_bytes: int, frame: int, seals: int, message: str
) -> None:
    fd = sealed_memfd(held, seals=seals)
    with pytest.raises(InvalidArgument, match=message):
        AddressSpace(fd, arena_bytes, frame)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_close_unmaps_everything_and_may_be_repeated(arena: Arena) -> None:
    range_ = arena.space.reserve(4 * FRAME)
    arena.space.map(range_, 0, [(0, 2)])
    arena.space.close()
    arena.space.close()
    assert permissions(range_.address) == ""
    assert len(memfd_spans()) == 1  # the daemon's
    with pytest.raises(InvalidArgument, match="is closed"):
        arena.space.reserve(FRAME)


SCRIPT_HEAD = """
import faulthandler, fcntl, mmap, os, sys
faulthandler.enable()
from tiermem.errors import InvalidArgument
from tiermem_client.address_space import AddressSpace
from tiermem_client.page_moves import Mechanism
def open_fds():
    return [n for n in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{n}")]
fd = os.memfd_create("tiermem-test", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 1 << 20)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
daemon = mmap.mmap(fd, 1 << 20)
kept = max(open_fds())  # mmap's duplicate
arena = os.fstat(fd)
space = AddressSpace(fd, 1 << 20, 1 << 12, mechanism=Mechanism(sys.argv[1]))
range_ = space.reserve(16 << 12)
buffer = space.as_buffer(range_, 0, 16 << 12)
"""


def run_script(mechanism: Mechanism, body: str) -> subprocess.CompletedProcess[str]:
    """Runs in a process of its own, because it is meant to die or to use up a limit."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    return subprocess.run(
        [sys.executable, "-c", SCRIPT_HEAD + textwrap.dedent(body), mechanism],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("mechanism", Mechanism)
@pytest.mark.parametrize("before", ["pass", "space.map(range_, 0, [(2, 16)]); space.unmap(range_, 0, [(2, 16)])"])
def test_a_stray_read_is_a_fault_that_names_the_python_line(mechanism: Mechanism, before: str) -> None:
    done = run_script(
        mechanism,
        f"""
        def stray_read():
            return buffer[100]
        {before}
        stray_read()
        """,
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "in stray_read" in done.stderr


@pytest.mark.parametrize("mechanism", Mechanism)
def test_a_forked_child_that_touches_a_range_dies_and_the_parent_does_not_notice(mechanism: Mechanism) -> None:
    done = run_script(
        mechanism,
        """
        space.map(range_, 0, [(5, 1), (200, 2)])
        buffer[:3] = b"abc"
        child = os.fork()
        if child == 0:
            filler = [mmap.mmap(-1, 1 << 14) for _ in range(200)]  # would land in a gap, if there were one
            try:
                space.reserve(1)
            except InvalidArgument as error:
                print(error, flush=True)
            print(any(os.path.samestat(os.fstat(n), arena) for n in open_fds() if n != kept), flush=True)
            print(buffer[0], flush=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        print(os.WTERMSIG(status), bytes(buffer[:3]), daemon[5 << 12:(5 << 12) + 3])
        space.unmap(range_, 0, [(5, 1), (200, 2)])
        space.check_invariants()
        space.close()
        """,
    )
    assert done.returncode == 0, done.stderr
    refused, holds_descriptor, parent = done.stdout.splitlines()
    assert "forked child" in refused
    assert holds_descriptor == "False"
    assert parent == f"{int(signal.SIGSEGV)} b'abc' b'abc'"


def test_too_many_mappings_is_refused_with_the_limit_and_nothing_changes() -> None:
    done = run_script(
        Mechanism.MREMAP,
        """
        import ctypes
        from tiermem.errors import ResourceExhausted
        libc = ctypes.CDLL(None)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        most = int(open("/proc/sys/vm/max_map_count").read())
        filler = mmap.mmap(-1, (most + 1000) << 12, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(filler))
        page = 0
        while libc.mprotect(address + (page << 12), 1 << 12, mmap.PROT_READ) == 0:  # each makes a mapping of its own
            page += 2
        libc.mprotect(address, 24 << 12, mmap.PROT_READ)  # and here is room for the first few runs
        before = space.stats()
        try:
            space.map(range_, 0, [(2 * number, 1) for number in range(16)])
        except ResourceExhausted as error:
            print(error)
        assert space.stats().mapped_bytes == 0 == before.mapped_bytes
        space.check_invariants()
        libc.mprotect(address, (page + 2) << 12, mmap.PROT_READ)
        daemon[0] = 77
        space.map(range_, 0, [(2 * number, 1) for number in range(16)])
        print(buffer[0])
        """,
    )
    assert done.returncode == 0, done.stderr
    message, value = done.stdout.splitlines()
    assert "vm.max_map_count allows" in message
    assert "sysctl -w vm.max_map_count=" in message
    assert value == "77"


class Frames(RuleBasedStateMachine):
    """Random map, unmap, reserve, release against a model: which frame holds which byte, and where it stands."""

    mechanism = Mechanism.MREMAP

    @initialize(seed=st.integers(0, 2**16))
    def start(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.arena = Arena.make(self.mechanism, frames=24)
        self.contents = dict.fromkeys(range(24), 0)
        self.ranges = [self.arena.space.reserve(frames * FRAME) for frames in (1, 4, 9)]
        self.mapped: dict[tuple[int, int], tuple[Range, list[tuple[int, int]]]] = {}

    def free_frames(self) -> list[int]:
        held = {n for _, runs in self.mapped.values() for first, count in runs for n in range(first, first + count)}
        return [number for number in self.contents if number not in held]

    @rule(which=st.integers(0, 2), half=st.booleans())
    def map(self, which: int, half: bool) -> None:
        range_ = self.ranges[which]
        frames = range_.nbytes // FRAME
        first, count = (frames // 2, frames - frames // 2) if half else (0, max(1, frames // 2))
        free = self.free_frames()
        busy = any(key[0] == which and (key[1] == first * FRAME or frames == 1) for key in self.mapped)
        if busy or len(free) < count:
            return
        runs = fragmented_runs(self.rng, free, count)
        self.arena.space.map(range_, first * FRAME, runs)
        self.mapped[which, first * FRAME] = range_, runs

    @precondition(lambda self: self.mapped)
    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.mapped)))
        range_, runs = self.mapped.pop(key)
        self.arena.space.unmap(range_, key[1], runs)

    @precondition(lambda self: self.mapped)
    @rule(data=st.data(), value=st.integers(1, 255))
    def write(self, data: st.DataObject, value: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.mapped)))
        range_, runs = self.mapped[key]
        numbers = [number for first, count in runs for number in range(first, first + count)]
        place = data.draw(st.integers(0, len(numbers) - 1))
        memory = memoryview(self.arena.space.as_buffer(range_, key[1] + place * FRAME, FRAME)).cast("B")
        memory[:] = bytes([value]) * FRAME
        self.contents[numbers[place]] = value

    @rule(value=st.integers(1, 255), number=st.integers(0, 23))
    def daemon_writes(self, value: int, number: int) -> None:
        self.arena.fill(number, value)
        self.contents[number] = value

    @rule(which=st.integers(0, 2))
    def renew(self, which: int) -> None:
        if any(key[0] == which for key in self.mapped):
            return
        nbytes = self.ranges[which].nbytes
        self.arena.space.release(self.ranges[which])
        self.ranges[which] = self.arena.space.reserve(nbytes)

    @invariant()
    def both_sides_see_the_same(self) -> None:
        self.arena.space.check_invariants()
        for number, value in self.contents.items():
            assert self.arena.daemon[number * FRAME] == self.arena.daemon[(number + 1) * FRAME - 1] == value
        for (_, offset), (range_, runs) in self.mapped.items():
            numbers = [number for first, count in runs for number in range(first, first + count)]
            seen = bytes(self.arena.space.as_buffer(range_, offset, len(numbers) * FRAME))
            assert seen[::FRAME] == bytes(self.contents[number] for number in numbers)
        for which, range_ in enumerate(self.ranges):
            if not any(key[0] == which for key in self.mapped):
                assert permissions(range_.address) == "---p"

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.arena.close()


class FallbackFrames(Frames):
    mechanism = Mechanism.MMAP


Frames.TestCase.settings = FallbackFrames.TestCase.settings = settings(max_examples=25, stateful_step_count=30)
TestFrames = Frames.TestCase
TestFallbackFrames = FallbackFrames.TestCase
