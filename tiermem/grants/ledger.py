"""The daemon's end of the grant protocol for one session: a pure machine (notes of the protocol: ARCHITECTURE.md).

One message or one finished transfer at a time goes in, effects come out; no clock, thread, lock, socket or I/O. The
store calls it under its job lock. A demand waits for transfers, never for a client (no hold-and-wait): what is not
pinned can always be dropped or written back, and a lane never pins more than its budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tiermem.allocator import FrameAllocator
from tiermem.bundle import BundleSpec, Mode
from tiermem.errors import Code, ProtocolError, ResourceExhausted, TiermemError
from tiermem.grants.effects import Effect, FreeFlash, Load, Send, WriteBack
from tiermem.grants.messages import ClientBody, Commit, Demand, Discard, Done, Grant, Refuse
from tiermem.grants.pins import Lane, OpenDemand, Pin, Pins
from tiermem.grants.room import choose_evictions, flash_frames
from tiermem.placement.base import Placement
from tiermem.residency import FRAMED, IN_TRANSFER, RESIDENT, BundleRecord, Event, State
from tiermem.stats import EvictReason, StallCause
from tiermem.units import format_size

MAX_SPECS = 1 << 18  # in a session
MAX_LANES = 64


class GrantLedger:
    """Pins, residency and budgets of one session's arena.

    `frames_for` gives an extent's frames for a size, `flash_quota_frames` bounds live bundles plus one spare (a
    write-back never overwrites the only copy). Invariant: every frame is free or has one owner; pins of a lane <= its
    budget; Σ budgets <= arena.
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
    ) -> None:
        self._frames = frames
        self._frame_bytes = frame_bytes
        self._frames_for = frames_for
        self._flash_quota_frames = flash_quota_frames
        self._spare_frames = spare_frames
        self._placement = placement
        self._next_bundle_id = first_bundle_id
        self._flash_name = flash_name  # its directories, for people
        self._serial = 0
        self.specs: dict[int, BundleSpec] = {}
        self.bundles: dict[int, BundleRecord] = {}
        self.lanes: dict[str, Lane] = {}
        self.pins = Pins()
        self._adopted: set[int] = set()  # specs
        self.hits = self.misses = self.creates = self.commits = 0
        self.evictions: Counter[EvictReason] = Counter()
        self.refusals: Counter[str] = Counter()
        self._effects: list[Effect] = []

    # -- declarations

    def declare(self, specs: list[BundleSpec]) -> None:
        """Register forms of bundles. Raises ProtocolError for a number that is taken, and beyond `MAX_SPECS` of them;
        nothing is changed then.
        """
        new: dict[int, BundleSpec] = {}
        for spec in specs:
            if spec.spec_id in self.specs or spec.spec_id in new:
                raise ProtocolError(f"spec {spec.spec_id} is declared twice")
            new[spec.spec_id] = spec
        if len(self.specs) + len(new) > MAX_SPECS:
            raise ProtocolError(f"{len(self.specs) + len(new)} specs are declared, the most are {MAX_SPECS}")
        self.specs.update(new)

    def admit(self, name: str, floor_specs: list[int]) -> Lane:
        """Own a budget for a lane whose largest set used together is `floor_specs`. Raises ResourceExhausted naming the
        set.
        """
        if name not in self.lanes and len(self.lanes) == MAX_LANES:
            raise ProtocolError(f"lane {name!r} would be one more than {MAX_LANES}")
        specs = [self._spec(spec_id) for spec_id in floor_specs]
        floor = sum(self._frames_for(spec.nbytes) for spec in specs)
        others = sum(lane.budget_frames for lane in self.lanes.values() if lane.name != name)
        room = self._frames.frames - others
        if floor > room:
            largest = sorted(specs, key=lambda s: -s.nbytes)[:4]
            raise ResourceExhausted(
                f"lane {name!r} uses {len(specs)} bundles of together {self._size(floor)} at once, the arena has "
                f"{self._size(room)} for it (largest: {'; '.join(map(str, largest))}); "
                f"give the job at least {self._size(floor + others)} of DRAM"
            )
        lane = self.lanes.setdefault(name, Lane(name, room, floor))
        lane.budget_frames, lane.floor_frames = room, floor
        return lane

    def adopt(self, spec_id: int) -> int:
        """The id of a new bundle whose bytes, version 1, are in a file of the client's. It takes neither frames nor
        flash room. Raises ProtocolError for a spec that is unknown or was adopted before (so adoptions are bounded).
        """
        spec = self._spec(spec_id)
        if spec_id in self._adopted:
            raise ProtocolError(f"spec {spec_id} is adopted twice")
        self._adopted.add(spec_id)
        record = BundleRecord(self._next_bundle_id(), spec, self._frames_for(spec.nbytes))
        record.apply(Event.ADOPT)
        record.version = record.flash_version = 1
        record.external, record.charged = True, False
        self.bundles[record.bundle_id] = record
        return record.bundle_id

    # -- messages

    def receive(self, message: ClientBody) -> list[Effect]:
        """Raises ProtocolError for what no correct client sends; the session is then closed. Nothing is changed before
        it raises.
        """
        match message:
            case Demand():
                self._demand(message)
            case Commit():
                self._commit(message)
            case Done():
                self._unpin(message.serial)
            case Discard():
                self._discard_idle(message.bundles)
        return self._serve()

    def _demand(self, demand: Demand) -> None:
        lane = self.lanes.get(demand.lane)
        if lane is None:
            raise ProtocolError(f"lane {demand.lane!r} was never admitted")
        if demand.epoch <= lane.epoch:
            raise ProtocolError(f"epoch {demand.epoch} of lane {lane.name!r} is not newer than {lane.epoch}")
        self.pins.check_held(demand)
        if demand.mode == Mode.CREATE:
            spec = self._spec(demand.target)
            record = BundleRecord(self._next_bundle_id(), spec, self._frames_for(spec.nbytes))
        else:
            known = self.bundles.get(demand.target)
            if known is None or known.version == 0 or known.state == State.DOOMED:
                lane.epoch = demand.epoch
                text = f"bundle {demand.target} does not exist in this session, or holds no bytes yet"
                self._refuse(demand, Code.NOT_FOUND, text)
                return
            record = known
        lane.epoch = demand.epoch
        if refusal := self._refusal(lane, record, demand.mode):
            self._refuse(demand, *refusal)
            return
        self.bundles[record.bundle_id] = record
        record.charged = record.charged or demand.mode.writes
        if demand.mode == Mode.CREATE:
            self.creates += 1
        elif self._grantable(record, demand.mode):
            self.hits += 1
        else:
            self.misses += 1
        self.pins.open.append(OpenDemand(demand, record.bundle_id))

    def _refusal(self, lane: Lane, record: BundleRecord, mode: Mode) -> tuple[Code, str] | None:
        pinned = self.pins.of_lane(lane.name)
        need = sum(self.bundles[b].frames for b in pinned - {record.bundle_id}) + record.frames
        if need > lane.budget_frames:
            largest = sorted(pinned, key=lambda b: -self.bundles[b].frames)[:6]
            holders = ", ".join(str(self.bundles[b].spec) for b in largest)
            return Code.WORKING_SET_TOO_LARGE, (
                f"{record.spec} does not fit beside what lane {lane.name!r} holds: {self._size(need)} of "
                f"{self._size(lane.budget_frames)} (held: {holders or 'nothing'}); give the job more DRAM"
            )
        live = sum(r.frames for r in self.bundles.values() if r.charged)
        new = mode == Mode.CREATE or (mode.writes and not record.charged)
        if new and live + record.frames + self._spare_frames > self._flash_quota_frames:
            return Code.TIER_FULL, (
                f"{record.spec} does not fit: the job's bundles take {self._size(live)} of a flash quota of "
                f"{self._size(self._flash_quota_frames)}, of which {self._size(self._spare_frames)} stay spare, "
                f"in {self._flash_name}; raise the flash size"
            )
        return None

    def _commit(self, commit: Commit) -> None:
        self.pins.check_commit(commit)
        for _, bundle, version in commit.updated:
            known = self.bundles[bundle].version
            if version <= known:
                raise ProtocolError(f"commit of version {version} of bundle {bundle}, which has version {known}")
        for serial, bundle, version in commit.updated:
            record = self.bundles[bundle]
            record.apply(Event.COMMIT)
            record.version = version
            self.pins.granted[serial].mode = Mode.READ
        for serial, bundle in commit.consumed:
            del self.pins.granted[serial]
            self._discard(self.bundles[bundle])
        self.commits += 1

    def _discard_idle(self, bundles: tuple[int, ...]) -> None:
        self.pins.check_discard(bundles)
        for bundle in bundles:
            if bundle not in self.bundles or self.bundles[bundle].state == State.DOOMED:
                raise ProtocolError(f"bundle {bundle} does not exist in this session")
        for bundle in bundles:
            self._discard(self.bundles[bundle])

    # -- transfers

    def loaded(self, bundle: int) -> list[Effect]:
        """The frames hold the newest version."""
        record = self.bundles[bundle]
        if record.state == State.DOOMED:
            self._drain(record)
        else:
            record.apply(Event.LOADED)
        return self._serve()

    def load_failed(self, bundle: int, error: TiermemError) -> list[Effect]:
        """The flash copy could not be read; it stays the newest one, and who waits is told."""
        record = self.bundles[bundle]
        if record.state == State.DOOMED:
            self._drain(record)
            return self._serve()
        record.apply(Event.LOAD_FAILED)
        self._release_frames(record)
        for waiting in [d for d in self.pins.open if d.bundle == bundle]:
            self.pins.open.remove(waiting)
            self._refuse(waiting.demand, error.code, str(error))
        return self._serve()

    def written(self, bundle: int) -> list[Effect]:
        """Flash holds the version that the frames hold; the older flash copy is free already."""
        record = self.bundles[bundle]
        if record.state == State.DOOMED:
            self._drain(record)
        else:
            record.apply(Event.WRITTEN)
            record.flash_version = record.version
            record.external = False
        return self._serve()

    def write_failed(self, bundle: int, error: TiermemError) -> list[Effect]:
        """The bytes stay dirty in DRAM. Demands that wait for room are told why there is none."""
        record = self.bundles[bundle]
        if record.state == State.DOOMED:
            self._drain(record)
            return self._serve()
        record.apply(Event.WRITE_FAILED)
        for waiting in [d for d in self.pins.open if self.bundles[d.bundle].state in (State.FLASH, State.ABSENT)]:
            self.pins.open.remove(waiting)
            self._refuse(waiting.demand, error.code, f"no room for {self.bundles[waiting.bundle].spec}: {error}")
            self._forget_if_absent(self.bundles[waiting.bundle])
        return self._serve()

    def exit(self) -> list[Effect]:
        """The client is gone, proven: every pin, demand and bundle ends; frames in transfer are freed when it has
        drained.
        """
        self.pins = Pins()
        self.lanes.clear()
        for record in list(self.bundles.values()):
            if record.state != State.DOOMED:
                self._discard(record)
        return self._take_effects()

    @property
    def drained(self) -> bool:
        """No frames are in transfer."""
        return not any(r.state in IN_TRANSFER for r in self.bundles.values())

    # -- obligatory work

    def _serve(self) -> list[Effect]:
        """Answer what can be answered, oldest first; make room for the oldest that lacks it."""
        starved = False
        for waiting in list(self.pins.open):
            record, mode = self.bundles[waiting.bundle], waiting.demand.mode
            if self._grantable(record, mode):
                self._answer(waiting, record)
            elif record.state in (State.FLASH, State.ABSENT) and not starved:
                if self._make_room(record.frames):
                    record.runs = self._frames.take(record.frames)
                    if record.state == State.ABSENT:
                        record.apply(Event.CREATE)
                        self._answer(waiting, record)
                    else:
                        record.apply(Event.LOAD)
                        waiting.waited_for = StallCause.LOAD
                        self._effects.append(Load(record.bundle_id))
                else:
                    starved = True  # a younger demand must not take the frames that this one waits for
                    waiting.waited_for = StallCause.ROOM
            elif waiting.waited_for is None:
                waiting.waited_for = StallCause.LOAD if record.state == State.LOADING else StallCause.ROOM
        return self._take_effects()

    def _make_room(self, need: int) -> bool:
        """Drop clean bundles and start write-backs until `need` frames are free or on their way; True if they are free
        now.
        """
        free = self._frames.free_frames
        if free < need:
            bundles, stay = self.bundles.values(), self.pins.stay()
            evictions = choose_evictions(need, free, bundles, stay, self._placement, self._flash_quota_frames)
            for bundle in evictions.drop:
                self.bundles[bundle].apply(Event.DROP)
                self._release_frames(self.bundles[bundle])
                self.evictions[EvictReason.DEMAND] += 1
            for bundle in evictions.write:
                self.bundles[bundle].apply(Event.WRITE)
                self._effects.append(WriteBack(bundle))
        return self._frames.free_frames >= need

    def _grantable(self, record: BundleRecord, mode: Mode) -> bool:
        return record.state in RESIDENT and (mode == Mode.READ or record.state != State.WRITING)

    def _answer(self, waiting: OpenDemand, record: BundleRecord) -> None:
        demand = waiting.demand
        self.pins.open.remove(waiting)
        self._serial += 1
        self.pins.granted[self._serial] = Pin(demand.lane, record.bundle_id, demand.mode)
        self._placement.used(record.bundle_id)
        grant = Grant(
            self._serial,
            demand.lane,
            self.lanes[demand.lane].epoch,
            record.bundle_id,
            demand.mode,
            record.version,
            record.runs,
            demand.epoch,
        )
        self._effects.append(Send(grant, waiting.waited_for))

    def _refuse(self, demand: Demand, code: Code, message: str) -> None:
        self.refusals[code] += 1
        self._effects.append(Send(Refuse(demand.lane, demand.epoch, code, message)))

    def _unpin(self, serial: int) -> None:
        bundle = self.pins.grant(serial).bundle
        del self.pins.granted[serial]
        record = self.bundles[bundle]
        self._placement.used(bundle)
        if record.state == State.BLANK and bundle not in self.pins.leased():
            record.apply(Event.ABANDON)
            self._release_frames(record)
            self._forget_if_absent(record)

    def _discard(self, record: BundleRecord) -> None:
        record.apply(Event.DISCARD)
        if record.state == State.GONE:
            self._bury(record)

    def _drain(self, record: BundleRecord) -> None:
        record.apply(Event.DRAINED)
        self._bury(record)

    def _bury(self, record: BundleRecord) -> None:
        self._release_frames(record)
        self._placement.forget(record.bundle_id)
        del self.bundles[record.bundle_id]
        self._effects.append(FreeFlash(record.bundle_id))

    def _forget_if_absent(self, record: BundleRecord) -> None:
        if record.state == State.ABSENT:
            self._placement.forget(record.bundle_id)
            del self.bundles[record.bundle_id]

    def _release_frames(self, record: BundleRecord) -> None:
        if record.runs:
            self._frames.give(record.runs)
            record.runs = ()

    # -- look-ups

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
            pinned = sum(self.bundles[b].frames for b in self.pins.of_lane(lane.name))
            assert pinned <= lane.budget_frames, f"lane {lane.name!r} pins {pinned} of {lane.budget_frames} frames"
        budgets = sum(lane.budget_frames for lane in self.lanes.values())
        assert budgets <= self._frames.frames, "budgets exceed the arena"
        copies = flash_frames(r for r in self.bundles.values() if r.state != State.DOOMED)
        assert copies <= self._flash_quota_frames, f"{copies} flash frames of a quota of {self._flash_quota_frames}"
        for pin in self.pins.granted.values():
            state = self.bundles[pin.bundle].state
            assert state in FRAMED and state not in (State.LOADING, State.DOOMED), (
                f"pin on bundle {pin.bundle}, which is {state}"
            )
            assert not (pin.mode.writes and state == State.WRITING), (
                f"bundle {pin.bundle} is writable during its write-back"
            )
