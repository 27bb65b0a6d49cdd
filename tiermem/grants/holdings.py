"""What one session has where: bundles, frames, pins, lanes, and the steps that change them together. Pure; the parts of
the ledger build on it (`serving` decides what is granted, `ledger` takes messages and ends of transfers).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tiermem.allocator import FrameAllocator
from tiermem.bundle import BundleSpec, Mode
from tiermem.errors import Code, ProtocolError
from tiermem.grants.effects import Effect, FreeFlash, Send
from tiermem.grants.foresight import Foresight, NothingForeseen
from tiermem.grants.messages import Demand, Grant, Refuse
from tiermem.grants.pins import Lane, Pin, Pins
from tiermem.grants.room import flash_frames
from tiermem.placement.base import Placement
from tiermem.residency import FRAMED, IDLE, IN_TRANSFER, RESIDENT, BundleRecord, Event, State
from tiermem.stats import EvictReason, StallCause
from tiermem.units import format_size


class Holdings:
    """The state of one session's arena. `frames_for` gives an extent's frames for a size; `flash_quota_frames` bounds
    live bundles plus one spare (a write-back never overwrites the only copy). `ahead_frames` bounds how far predicted
    uses are granted: their frames, from the next use on.

    Invariant: every frame is free or has one owner; pins of a lane <= its budget; Σ budgets <= arena.
    """

    def __init__(
        self,
        frames: FrameAllocator,
        frame_bytes: int,
        frames_for: Callable[[int], int],
        flash_quota_frames: int,
        spare_frames: int,
        placement: Placement,
        first_bundle_id: Callable[[], int],
        flash_name: str = "flash",
        foresight: Foresight | None = None,
        ahead_frames: int = 0,
    ) -> None:
        self._frames = frames
        self._frame_bytes = frame_bytes
        self._frames_for = frames_for
        self._flash_quota_frames = flash_quota_frames
        self._spare_frames = spare_frames
        self._placement = placement
        self._next_bundle_id = first_bundle_id
        self._flash_name = flash_name  # its directories, for people
        self.foresight = foresight or NothingForeseen()
        self.ahead_frames = ahead_frames
        self.ahead_paused = False  # a transfer has failed; the next demand tries again, once
        self._stirred = 0  # frames that have become free or evictable since the window was looked through
        self._look_far = True  # the window is to be looked through
        self._look_near = True  # what is used next is, as something there has changed
        self._awaited: set[int] = set()  # bundles in transfer that would be granted if they were here
        self._arrived = 0  # of those
        self._serial = 0
        self.specs: dict[int, BundleSpec] = {}
        self.bundles: dict[int, BundleRecord] = {}
        self._idle: set[int] = set()  # bundles that could leave, but for pins: kept by `_apply`
        self._moving: set[int] = set()  # bundles in transfer: kept by `_apply`
        self._bundle_frames = 0  # of all bundles
        self._charged = 0  # frames that count against the flash quota
        self.newest: dict[int, int] = {}  # the live bundle of a form that was made last
        self.heirs: dict[int, int] = {}  # the form whose bundles are to take the place of one's
        self.adopted: set[int] = set()  # specs
        self.lanes: dict[str, Lane] = {}
        self.pins = Pins()
        self.hits = self.misses = self.creates = self.commits = self.pushes = self.pushes_used = 0
        self.evictions: Counter[EvictReason] = Counter()
        self.refusals: Counter[str] = Counter()
        self._effects: list[Effect] = []

    # -- bundles

    def _new_bundle(self, spec: BundleSpec) -> BundleRecord:
        return BundleRecord(self._next_bundle_id(), spec, self._frames_for(spec.nbytes))

    def _apply(self, record: BundleRecord, event: Event) -> None:
        """Every change of state goes through here."""
        record.apply(event)
        state, bundle = record.state, record.bundle_id
        if state in IDLE:
            self._idle.add(bundle)
            self._moving.discard(bundle)
        else:
            self._idle.discard(bundle)
            if state in IN_TRANSFER:
                self._moving.add(bundle)
            else:
                self._moving.discard(bundle)

    def _charge(self, record: BundleRecord, charged: bool) -> None:
        """Let a bundle that is held count against the flash quota, or not."""
        self._charged += (charged - record.charged) * record.frames
        record.charged = charged

    def _enter(self, record: BundleRecord) -> None:
        self.bundles[record.bundle_id] = record
        self._bundle_frames += record.frames
        self._charged += record.charged * record.frames
        self.newest[record.spec.spec_id] = record.bundle_id

    def _leave(self, record: BundleRecord) -> None:
        self._placement.forget(record.bundle_id)
        del self.bundles[record.bundle_id]
        self._bundle_frames -= record.frames
        self._charged -= record.charged * record.frames
        if self.newest.get(record.spec.spec_id) == record.bundle_id:
            del self.newest[record.spec.spec_id]

    def _rename(self, record: BundleRecord, form: BundleSpec) -> None:
        if self.newest.get(record.spec.spec_id) == record.bundle_id:
            del self.newest[record.spec.spec_id]
        record.spec = form
        self.newest[form.spec_id] = record.bundle_id

    def expected(self, form: int) -> int:
        """The bundle that the form's next use is expected to be of, 0 for none: its heir, as soon as there is one."""
        heir = self.newest.get(self.heirs.get(form, 0), 0)
        return heir if heir and self.bundles[heir].version else self.newest.get(form, 0)

    def form_expected(self, bundle: int) -> int:
        """The form whose uses are expected to be of this bundle; 0 for none."""
        spec = self.bundles[bundle].spec
        if spec.heir_of:
            return spec.heir_of if self.expected(spec.heir_of) == bundle else spec.spec_id
        return spec.spec_id if spec.spec_id not in self.heirs or self.expected(spec.spec_id) == bundle else 0

    def _hand_on(self, record: BundleRecord) -> None:
        """An heir has come to be, or ends: another bundle is expected to be used next."""
        if record.spec.heir_of:
            self._look_far = True
            self._placement.used(record.bundle_id)
            if (other := self.newest.get(record.spec.heir_of)) is not None:
                self._placement.used(other)

    def _discard(self, record: BundleRecord) -> None:
        self._apply(record, Event.DISCARD)
        if record.state == State.GONE:
            self._bury(record)

    def _drain(self, record: BundleRecord) -> None:
        self._apply(record, Event.DRAINED)
        self._bury(record)

    def _bury(self, record: BundleRecord) -> None:
        self._release_frames(record)
        self._leave(record)
        self._effects.append(FreeFlash(record.bundle_id))

    def _forget_if_absent(self, record: BundleRecord) -> None:
        if record.state == State.ABSENT:
            self._leave(record)

    def _release_frames(self, record: BundleRecord) -> None:
        if record.runs:
            self._frames.give(record.runs)
            record.runs = ()
            self._stirred += record.frames

    # -- grants

    def _grantable(self, record: BundleRecord, mode: Mode) -> bool:
        return record.state in RESIDENT and (mode == Mode.READ or record.state != State.WRITING)

    def _grant(self, lane: str, record: BundleRecord, mode: Mode, answers: int, waited: StallCause | None) -> None:
        self._serial += 1
        self.pins.granted[self._serial] = Pin(lane, record.bundle_id, mode, pushed=not answers)
        self._placement.used(record.bundle_id)
        epoch, spec = self.lanes[lane].epoch, record.spec.spec_id
        grant = Grant(self._serial, lane, epoch, spec, record.bundle_id, mode, record.version, record.runs, answers)
        self._effects.append(Send(grant, waited))

    def _refuse(self, demand: Demand, code: Code, message: str) -> None:
        self.refusals[code] += 1
        self._effects.append(Send(Refuse(demand.lane, demand.epoch, code, message)))

    def _unpin(self, serial: int) -> None:
        bundle = self.pins.grant(serial).bundle
        del self.pins.granted[serial]
        record = self.bundles[bundle]
        self._placement.used(bundle)
        self._stirred += record.frames
        if record.state == State.BLANK and bundle not in self.pins.leased():
            self._apply(record, Event.ABANDON)
            self._release_frames(record)
            self._forget_if_absent(record)
        self._settle_charge(record)

    def _settle_charge(self, record: BundleRecord) -> None:
        """An adopted bundle that nobody has written, and nobody may write any more, takes no flash room."""
        if record.external and record.flash_version == record.version:
            self._charge(record, self.pins.may_be_written(record.bundle_id))

    # -- look-ups

    def _pinned_frames(self, lane: str) -> int:
        return sum(self.bundles[b].frames for b in self.pins.of_lane(lane))

    def _flash_refusal(self, record: BundleRecord, mode: Mode) -> str | None:
        """Why flash has no room for what an access in `mode` may write; None where it has."""
        if mode != Mode.CREATE and (not mode.writes or record.charged):
            return None
        if self._fits_flash(record.frames):
            return None
        charged = self._size(self._charged)
        return (
            f"{record.spec} does not fit: the job's bundles take {charged} of a flash quota of "
            f"{self._size(self._flash_quota_frames)}, of which {self._size(self._spare_frames)} stay spare, "
            f"in {self._flash_name}; raise the flash size"
        )

    def _fits_flash(self, frames: int) -> bool:
        return self._charged + frames + self._spare_frames <= self._flash_quota_frames

    def _spec(self, spec_id: int) -> BundleSpec:
        spec = self.specs.get(spec_id)
        if spec is None:
            raise ProtocolError(f"spec {spec_id} was never declared")
        return spec

    def _size(self, frames: int) -> str:
        return format_size(frames * self._frame_bytes)

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def check_invariants(self) -> None:
        """Σ extents + free frames == arena; pins within budgets; states fit their frames; flash reservations within the
        quota.
        """
        for record in self.bundles.values():
            record.check_invariants()
        self._frames.check_invariants(run for record in self.bundles.values() for run in record.runs)
        for lane in self.lanes.values():
            pinned = self._pinned_frames(lane.name)
            assert pinned <= lane.budget_frames, f"lane {lane.name!r} pins {pinned} of {lane.budget_frames} frames"
        budgets = sum(lane.budget_frames for lane in self.lanes.values())
        assert budgets <= self._frames.frames, "budgets exceed the arena"
        copies = flash_frames(r for r in self.bundles.values() if r.state != State.DOOMED)
        assert copies <= self._flash_quota_frames, f"{copies} flash frames of a quota of {self._flash_quota_frames}"
        assert self._charged == sum(r.frames for r in self.bundles.values() if r.charged), "charges were miscounted"
        assert self._idle == {b for b, r in self.bundles.items() if r.state in IDLE}, f"idle: {self._idle}"
        assert self._moving == {b for b, r in self.bundles.items() if r.state in IN_TRANSFER}, f"moving: {self._moving}"
        for spec, bundle in self.newest.items():
            assert self.bundles[bundle].spec.spec_id == spec, f"bundle {bundle} is not of form {spec}"
        for pin in self.pins.granted.values():
            state = self.bundles[pin.bundle].state
            assert state in FRAMED and state not in (State.LOADING, State.DOOMED), (
                f"pin on bundle {pin.bundle}, which is {state}"
            )
            assert not (pin.mode.writes and state == State.WRITING), (
                f"bundle {pin.bundle} is writable during its write-back"
            )
