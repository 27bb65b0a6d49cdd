"""The memory of a device as frames that enter fixed ranges of addresses, as those of the arena do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tiermem.allocator import Run
from tiermem_client.address_space import AddressSpace, Range
from tiermem_client.copy_engine import Moment


class DeviceSpace(Protocol):
    """The caller holds the client lock around every method.

    What computes may be behind its caller (as kernels are): `unmap` says that nothing new will use a place, and
    `settled` what is to be waited for before its frames may be overwritten or read.
    """

    @property
    def device(self) -> str:
        """Torch's name of the memory."""

    @property
    def frame_bytes(self) -> int: ...

    @property
    def frames(self) -> int: ...

    @property
    def home(self) -> int:
        """Where frame 0 lies for copies; the others follow."""

    def reserve(self, nbytes: int) -> Range:
        """Raises InvalidArgument, ResourceExhausted."""

    def release(self, range_: Range) -> None:
        """Give the addresses back, in which no frame is mapped."""

    def map(self, range_: Range, offset_bytes: int, runs: Sequence[Run]) -> None:
        """The frames can be computed with at this place. All or nothing. Raises ResourceExhausted."""

    def unmap(self, range_: Range, offset_bytes: int, runs: Sequence[Run]) -> None:
        """Nothing that is asked for from now on uses them there."""

    def settled(self, runs: Sequence[Run]) -> Sequence[Moment]:
        """When everything that was asked for until now and uses these frames is done."""

    def vacate(self, range_: Range, offset_bytes: int) -> None:
        """What was mapped at this place last, and unmapped since, does not come back to it."""

    def close(self) -> None:
        """Give everything back, when all that computes is done. Idempotent."""


class HostSpace:
    """Frames of ordinary memory, in which computing is done when its caller goes on."""

    device = "cpu"

    def __init__(self, space: AddressSpace) -> None:
        self._space = space
        self.frame_bytes, self.frames, self.home = space.frame_bytes, space.frames, space.home
        self.reserve, self.release = space.reserve, space.release
        self.map, self.unmap, self.close = space.map, space.unmap, space.close

    def settled(self, runs: Sequence[Run]) -> Sequence[Moment]:
        return ()

    def vacate(self, range_: Range, offset_bytes: int) -> None:
        pass
