"""Places in the store for bytes that autograd has saved: bundles of kind ACTIVATION, declared once and created anew in
every step, so that the daemon learns which unit uses which of them and brings them ahead of their use.
"""

from __future__ import annotations

import ctypes
import heapq
from dataclasses import dataclass, field

from tiermem.bundle import Kind, Mode, TensorSpec
from tiermem_client.memory import Bundle
from tiermem_client.residency import Residency

_CLASSES_PER_OCTAVE = 16
"""Sizes are rounded up by less than 1/16, so that inputs of many lengths need few forms of bundles."""


@dataclass(slots=True, frozen=True, order=True)
class Slot:
    """`bundles` lie side by side; together they have room for `nbytes`. Ordered by age within a unit and size."""

    number: int
    unit: str = field(compare=False)
    nbytes: int = field(compare=False)
    bundles: list[Bundle] = field(compare=False)


def slot_bytes(nbytes: int, frame_bytes: int) -> int:
    """Bytes of a slot for `nbytes`: whole frames, and few different sizes."""
    step = max(frame_bytes, (1 << (nbytes.bit_length() - 1)) // _CLASSES_PER_OCTAVE)
    step = -(-step // frame_bytes) * frame_bytes
    return -(-nbytes // step) * step


@dataclass(slots=True, eq=False)
class ActivationSlots:
    """No slot is leased but while its bytes are copied, and no more than one bundle of it. Under the client lock.

    `bundle_bytes`: the largest bundle, of whole frames.
    """

    residency: Residency
    bundle_bytes: int
    _free: dict[tuple[str, int], list[Slot]] = field(default_factory=dict)
    _made: int = 0

    def store(self, unit: str, address: int, nbytes: int) -> Slot:
        """Copy `nbytes` from `address` into a slot. Raises WorkingSetTooLarge, TierFull, ResourceExhausted where there
        is no room; nothing is taken then.
        """
        with self.residency.session.lock:
            self.residency.run_unreferenced()  # slots that are free by now
            slot = self._take(unit, slot_bytes(nbytes, self.residency.memory.frame_bytes))
            try:
                for bundle in slot.bundles:
                    self.residency.acquire([bundle], Mode.CREATE)
                    offset = bundle.offset_bytes
                    ctypes.memmove(bundle.address, address + offset, min(bundle.spec.nbytes, nbytes - offset))
                    bundle.written = True
                    self.residency.release([bundle])
            except BaseException:
                self.free(slot)
                raise
            return slot

    def load(self, slot: Slot, address: int, nbytes: int) -> None:
        """Copy the slot's first `nbytes` to `address`. Raises as `Residency.acquire`."""
        with self.residency.session.lock:
            for bundle in slot.bundles:
                self.residency.acquire([bundle], Mode.READ)
                try:
                    offset = bundle.offset_bytes
                    ctypes.memmove(address + offset, bundle.address, min(bundle.spec.nbytes, nbytes - offset))
                finally:
                    self.residency.release([bundle])

    def free(self, slot: Slot) -> None:
        """Its bytes are wanted no more: they are discarded wherever they are, without I/O."""
        with self.residency.session.lock:
            self.residency.discard(slot.bundles)
            heapq.heappush(self._free.setdefault((slot.unit, slot.nbytes), []), slot)

    def _take(self, unit: str, nbytes: int) -> Slot:
        free = self._free.get((unit, nbytes))
        if free:
            return heapq.heappop(free)
        self._made += 1
        requests = []
        for start in range(0, nbytes, self.bundle_bytes):
            size = min(self.bundle_bytes, nbytes - start)
            tensor = TensorSpec(f"saved.{self._made}", "uint8", (size,), 0, size)
            requests.append((Kind.ACTIVATION, unit, size, (tensor,)))
        return Slot(self._made, unit, nbytes, self.residency.new_bundles(requests))
