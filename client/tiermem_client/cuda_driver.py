"""What the rest of the client asks of CUDA: memory that is mapped where it is wanted, streams and moments in them.

The driver's virtual memory management is called through NVIDIA's `cuda.bindings` (a dependency of torch's CUDA builds),
everything else through torch, so that copies and marks are in the order of the streams that the script computes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from tiermem.errors import InvalidArgument, ResourceExhausted, TiermemError, Unsupported
from tiermem.units import format_size
from tiermem_client.copy_engine import Moment, Piece
from tiermem_client.storage_swap import alias


class TimedMoment(Moment, Protocol):
    """A moment whose time is known when it has come."""

    def seconds_until(self, later: Any) -> float: ...


class Driver(Protocol):
    """One device. Addresses are those of the process's one address space; `Any` is a value that only this driver knows.

    Every method may raise ResourceExhausted, Unsupported or TiermemError with the name of CUDA's error. Threading: the
    caller holds the client lock.
    """

    @property
    def device(self) -> str:
        """Its name as torch writes it."""

    @property
    def granularity_bytes(self) -> int:
        """Sizes of allocations and places of mappings are multiples of it."""

    def free_bytes(self) -> int: ...

    def reserve(self, nbytes: int) -> int:
        """Addresses in which nothing is mapped."""

    def free(self, address: int, nbytes: int) -> None:
        """Give addresses back, as `reserve` gave them."""

    def create(self, nbytes: int) -> Any:
        """A handle for physical memory, mapped nowhere."""

    def destroy(self, handle: Any) -> None:
        """Physical memory is gone when it is mapped nowhere either."""

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """All of the handle's memory appears there, not yet to be used. It may be mapped in several places."""

    def allow(self, address: int, nbytes: int) -> None:
        """What is mapped there can be read and written."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Of whole mappings, side by side."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that copies from and to it need no other."""

    def unregister(self, address: int) -> None: ...

    def stream(self) -> Any:
        """A new stream."""

    def copy(self, stream: Any, pieces: Sequence[Piece], inward: bool) -> None:
        """To the device, or from it, in the order of the stream."""

    def follow(self, stream: Any, moment: Moment) -> None:
        """What is asked of the stream from now on comes after the moment. None: the stream that computes now."""

    def mark(self, stream: Any = None) -> TimedMoment:
        """When all that was asked of the stream until now is done. None: the stream that computes now."""

    def synchronize(self) -> None:
        """Wait for everything."""


class _Mark:
    """A torch event that was recorded."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_set(self) -> bool:
        with _cuda_errors("a query"):
            return bool(self.event.query())

    def wait(self) -> None:
        with _cuda_errors("work that was waited for"):
            self.event.synchronize()

    def seconds_until(self, later: _Mark) -> float:
        return float(self.event.elapsed_time(later.event)) / 1e3


def require_cuda(index: int) -> Any:
    """The bindings of the driver. Raises Unsupported, InvalidArgument unless torch and they can use that device."""
    if not torch.cuda.is_available():
        raise Unsupported(
            f"device='cuda': torch {torch.__version__} sees no CUDA device; install a CUDA build of torch and "
            "NVIDIA's driver, or leave device out to train on the CPU"
        )
    if not 0 <= index < torch.cuda.device_count():
        raise InvalidArgument(f"device='cuda:{index}' is not there; torch sees {torch.cuda.device_count()} of them")
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise Unsupported(
            f"device='cuda' needs NVIDIA's Python bindings ({error}); install them with pip install 'tiermem[gpu]'"
        ) from error
    return driver


class CudaDriver:
    """CUDA device number `index` of this process. Raises as `require_cuda`."""

    def __init__(self, index: int) -> None:
        driver = require_cuda(index)
        self.device = f"cuda:{index}"
        self._index, self._cuda = index, driver
        torch.cuda.mem_get_info(index)  # makes the context, in which the driver's calls work
        memory = driver.CUmemAllocationProp()
        memory.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        memory.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        memory.location.id = index
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._memory, self._access = memory, access
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity_bytes = int(self._ask("cuMemGetAllocationGranularity", memory, least))

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Call the driver; its value, if it has one."""
        error, *values = getattr(self._cuda, function)(*arguments)
        if int(error) != 0:
            name = f"{getattr(error, 'name', error)} from {function} on {self.device}"
            if error == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise ResourceExhausted(f"{name}; {format_size(self.free_bytes())} are free there")
            if error == self._cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED:
                raise Unsupported(f"{name}: this GPU or driver cannot map memory where it is wanted")
            raise TiermemError(name)
        return values[0] if values else None

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._index)[0])

    def reserve(self, nbytes: int) -> int:
        return int(self._ask("cuMemAddressReserve", nbytes, self.granularity_bytes, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        self._ask("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Any:
        return self._ask("cuMemCreate", nbytes, self._memory, 0)

    def destroy(self, handle: Any) -> None:
        self._ask("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._ask("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int) -> None:
        self._ask("cuMemSetAccess", address, nbytes, [self._access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self._ask("cuMemUnmap", address, nbytes)

    def register(self, address: int, nbytes: int) -> None:
        with torch.cuda.device(self._index):
            self._ask("cuMemHostRegister", address, nbytes, 0)

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._index):
            self._ask("cuMemHostUnregister", address)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(device=self._index)

    def copy(self, stream: torch.cuda.Stream, pieces: Sequence[Piece], inward: bool) -> None:
        devices = ("cpu", self.device) if inward else (self.device, "cpu")
        with _cuda_errors("a copy"), torch.cuda.stream(stream):
            for piece in pieces:
                source, target = (
                    alias(address, piece.nbytes, torch.uint8, (piece.nbytes,), device=device)
                    for address, device in zip((piece.source, piece.target), devices, strict=True)
                )
                target.copy_(source, non_blocking=True)

    def follow(self, stream: torch.cuda.Stream | None, moment: Moment) -> None:
        assert isinstance(moment, _Mark), f"{moment} is no moment of CUDA"
        (stream or torch.cuda.current_stream(self._index)).wait_event(moment.event)

    def mark(self, stream: torch.cuda.Stream | None = None) -> _Mark:
        event = torch.cuda.Event(enable_timing=True)
        with _cuda_errors("a mark"):
            event.record(stream or torch.cuda.current_stream(self._index))
        return _Mark(event)

    def synchronize(self) -> None:
        with _cuda_errors("work that was waited for"):
            torch.cuda.synchronize(self._index)


@contextlib.contextmanager
def _cuda_errors(what: str) -> Iterator[None]:
    """Errors of CUDA (torch raises RuntimeError) as our own."""
    try:
        yield
    except RuntimeError as error:
        raise TiermemError(f"{what} failed on the device: {error}") from error
