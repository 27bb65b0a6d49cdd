"""`tiermem doctor`: what this machine lets tiermem do. `probe_*` measure, `judge_*` say what that means."""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tiermem.config import FlashDirectory, LoadedConfig
from tiermem.layout import MAX_FRAMES, PAGE_BYTES
from tiermem.units import GIB, format_size

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MREMAP_MAYMOVE, _MREMAP_DONTUNMAP = 1, 4
_DEFAULT_MAP_COUNT = 65_530
_NOT_FLASH = {
    "tmpfs": "its files are memory",
    "ramfs": "its files are memory",
    "overlay": "a container's own layer; often no O_DIRECT",
    "nfs": "a network",
    "nfs4": "a network",
    "cifs": "a network",
    "9p": "a network",
    "fuse.sshfs": "a network",
}
_NVIDIA_VERSION = Path("/proc/driver/nvidia/version")


class Level(enum.Enum):
    """WARN: works, slower or with less. FAIL: the daemon would not start, or not run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`text` says what was found and what it means, `remedy` what to do (empty where nothing)."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def diagnose(loaded: LoadedConfig) -> Iterator[Finding]:
    """Every check of the machine, then of each flash directory. Writes and removes one small file in each directory."""
    yield judge_sealing(probe_sealing())
    yield judge_page_moves(probe_page_moves())
    yield judge_map_count(int(Path("/proc/sys/vm/max_map_count").read_text()))
    yield judge_memory(loaded.dram_bytes, psutil.virtual_memory().available)
    gpu = _NVIDIA_VERSION.read_text().partition("\n")[0] if _NVIDIA_VERSION.exists() else ""
    yield judge_gpu(gpu)
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit_bytes == resource.RLIM_INFINITY or os.getuid() == 0
    yield judge_memlock(None if unlimited else limit_bytes, loaded.dram_bytes, bool(gpu))
    if not loaded.config.flash:
        yield Finding(
            "flash",
            Level.WARN,
            "no directory is configured; `serve` needs one",
            "give --flash DIR on a local disk",
        )
    for directory in loaded.config.flash:
        yield from examine_directory(directory)


def judge_sealing(error: OSError | None) -> Finding:
    """Whether the arena's memory can be shared safely: a sealed memfd cannot be truncated under the daemon."""
    if error is None:
        return Finding("shared memory", Level.OK, "memfd with seals works; the size of /dev/shm does not matter")
    remedy = "run outside the sandbox or seccomp profile that forbids memfd_create, on Linux 3.17 or newer"
    return Finding("shared memory", Level.FAIL, f"no sealed memfd: {error.strerror}; arenas cannot be shared", remedy)


def judge_page_moves(error: OSError | None) -> Finding:
    """Whether frames enter a tensor's range by moving page tables, or by mapping them again."""
    if error is None:
        return Finding("page moves", Level.OK, "mremap(DONTUNMAP) moves shared memory: no byte is copied")
    text = f"no mremap(DONTUNMAP) of shared memory: {error.strerror}; frames are mapped again, 2 to 5 times slower"
    return Finding("page moves", Level.WARN, text, "use Linux 5.13 or newer")


def judge_map_count(count: int) -> Finding:
    """A frame may be one mapping of the trainer's, and leaves one behind where it was."""
    text = f"vm.max_map_count is {count}"
    remedy = f"sysctl -w vm.max_map_count={_DEFAULT_MAP_COUNT}"
    if count < 2 * MAX_FRAMES:
        return Finding("mappings", Level.FAIL, f"{text}; a large arena needs {2 * MAX_FRAMES}", remedy)
    if count < _DEFAULT_MAP_COUNT:
        return Finding("mappings", Level.WARN, f"{text}; little is left for the trainer's own", remedy)
    return Finding("mappings", Level.OK, text)


def judge_memory(dram_bytes: int, available_bytes: int) -> Finding:
    """Whether the DRAM tier fits into what is available now."""
    text = f"the DRAM tier takes {format_size(dram_bytes)} of {format_size(available_bytes)} available"
    if dram_bytes > available_bytes:
        return Finding("memory", Level.FAIL, f"{text}; the machine would swap or kill", "give a smaller --dram SIZE")
    if dram_bytes > 0.9 * available_bytes:
        return Finding("memory", Level.WARN, f"{text}; the trainer needs some for itself", "give a smaller --dram SIZE")
    return Finding("memory", Level.OK, text)


def judge_gpu(driver: str) -> Finding:
    """`driver`: the NVIDIA driver's version line, empty where there is none."""
    if driver:
        return Finding("gpu", Level.OK, driver)
    return Finding("gpu", Level.OK, "no NVIDIA driver: training runs on the CPU, with tensors in DRAM and flash")


def judge_memlock(limit_bytes: int | None, dram_bytes: int, has_gpu: bool) -> Finding:
    """`limit_bytes` None: no limit. Only memory that a GPU copies from is locked."""
    if limit_bytes is None or limit_bytes >= dram_bytes:
        limit = "unlimited" if limit_bytes is None else format_size(limit_bytes)
        return Finding("locked memory", Level.OK, f"limit: {limit}")
    text = f"limit: {format_size(limit_bytes)}, below the DRAM tier's {format_size(dram_bytes)}"
    if not has_gpu:
        return Finding("locked memory", Level.OK, f"{text}; nothing is locked without a GPU")
    return Finding("locked memory", Level.WARN, f"{text}; pinning may be refused", "ulimit -l unlimited")


def examine_directory(directory: FlashDirectory) -> Iterator[Finding]:
    """Existence, permission, filesystem, room, preallocation and direct I/O of one flash directory."""
    path, name = directory.path, f"flash {directory.path}"
    if not path.is_dir():
        yield Finding(name, Level.FAIL, "is not a directory", f"mkdir -p {path}, or mount the disk")
        return
    if not os.access(path, os.W_OK | os.X_OK):
        yield Finding(name, Level.FAIL, "is not writable by this user", f"chown {os.getuid()} {path}")
        return
    yield judge_filesystem(name, filesystem_of(path))
    status = os.statvfs(path)
    yield judge_room(name, directory, status.f_bavail * status.f_frsize)
    try:
        yield from _probe_io(path, name)
    except OSError as error:
        yield Finding(name, Level.FAIL, f"a test file failed: {error.strerror}", "look at the disk and its mount")


def judge_filesystem(name: str, kind: str) -> Finding:
    """Whether the filesystem keeps its files on a local disk."""
    if kind in _NOT_FLASH:
        remedy = "use a directory on a local disk (ext4 or xfs)"
        return Finding(name, Level.WARN, f"filesystem {kind}: {_NOT_FLASH[kind]}", remedy)
    return Finding(name, Level.OK, f"filesystem {kind}")


def judge_room(name: str, directory: FlashDirectory, free_bytes: int) -> Finding:
    """Whether the configured size is there."""
    limit_bytes = directory.limit_bytes(free_bytes)
    text = f"may take {format_size(limit_bytes)} of {format_size(free_bytes)} free"
    if limit_bytes > free_bytes:
        return Finding(name, Level.FAIL, text, "give a smaller size, or free the disk")
    if limit_bytes < GIB:
        return Finding(name, Level.WARN, f"{text}; training takes 16 bytes and more per parameter", "free the disk")
    return Finding(name, Level.OK, text)


def judge_direct_io(name: str, error: OSError | None) -> Finding:
    """Whether transfers bypass the page cache."""
    if error is None:
        return Finding(name, Level.OK, "O_DIRECT works")
    text = f"no O_DIRECT ({error.strerror}): I/O goes through the page cache, with 4 to 8 times the CPU time"
    return Finding(name, Level.WARN, text, "use a directory on ext4 or xfs")


def judge_preallocation(name: str, error: OSError | None) -> Finding:
    """Whether room on the disk can be taken before it is written."""
    if error is None:
        return Finding(name, Level.OK, "fallocate works: room is taken when it is promised")
    text = f"no fallocate ({error.strerror}): a full disk is noticed at the write only"
    return Finding(name, Level.WARN, text, "use a directory on ext4 or xfs")


def filesystem_of(path: Path) -> str:
    """Type of the filesystem that holds `path`; "unknown" where no mount point contains it."""
    real = path.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if real.is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else "unknown"


def probe_sealing() -> OSError | None:
    """What the kernel says to a sealed memfd."""
    try:
        fd = os.memfd_create("tiermem-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return error
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        return error
    finally:
        os.close(fd)
    return None


def probe_page_moves() -> OSError | None:
    """What the kernel says to mremap(DONTUNMAP) of a page of shared memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mremap.restype = ctypes.c_void_p
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with mmap.mmap(-1, PAGE_BYTES) as page:  # anonymous and MAP_SHARED: shared memory
        first = ctypes.c_char.from_buffer(page)
        flags = _MREMAP_MAYMOVE | _MREMAP_DONTUNMAP
        moved = libc.mremap(ctypes.addressof(first), PAGE_BYTES, PAGE_BYTES, flags, None)
        code = ctypes.get_errno()
        del first  # the mapping cannot be closed while it is exported
        if moved == ctypes.c_void_p(-1).value:
            return OSError(code, os.strerror(code))
        libc.munmap(moved, PAGE_BYTES)
    return None


def _probe_io(directory: Path, name: str) -> Iterator[Finding]:
    """Raises OSError where not even plain I/O works."""
    path = directory / f".tiermem-doctor-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield judge_preallocation(name, _refusal(lambda: os.posix_fallocate(fd, 0, PAGE_BYTES)))
        os.pwrite(fd, b"\0" * PAGE_BYTES, 0)
        yield judge_direct_io(name, _refusal(lambda: _direct_round_trip(path)))
    finally:
        os.close(fd)
        path.unlink()


def _refusal(attempt: Callable[[], object]) -> OSError | None:
    """The error where the filesystem does not offer what was tried; any other error is raised."""
    try:
        attempt()
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return error
    return None


def _direct_round_trip(path: Path) -> None:
    pattern = bytes(range(256)) * (PAGE_BYTES // 256)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:  # aligned, as direct I/O asks
            page[:] = pattern
            written = os.pwritev(fd, [page], 0)
            page[:] = bytes(PAGE_BYTES)
            if written != PAGE_BYTES or os.preadv(fd, [page], 0) != PAGE_BYTES or page[:] != pattern:
                raise OSError(errno.EIO, "what was read is not what was written")
    finally:
        os.close(fd)
