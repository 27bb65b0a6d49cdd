"""The daemon's end of the grant protocol for one session: a pure machine (notes of the protocol: ARCHITECTURE.md).

One message or one finished transfer at a time goes in, effects come out; no clock, thread, lock, socket or I/O. The
store calls it under its job lock. A demand waits for transfers, never for a client (no hold-and-wait): what is not
pinned can always be dropped or written back, and a lane never pins more than its budget.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tiermem.bundle import BundleSpec, Mode
from tiermem.errors import Code, ProtocolError, ResourceExhausted, TiermemError
from tiermem.grants.effects import Effect, Send
from tiermem.grants.messages import (
    Accessed,
    ClientBody,
    Commit,
    Demand,
    Discard,
    Done,
    Supersede,
    Surrender,
    Used,
    Void,
)
from tiermem.grants.pins import Lane, OpenDemand, Pins
from tiermem.grants.serving import GRANTS_AHEAD, Serving
from tiermem.residency import BundleRecord, Event, State

MAX_SPECS = 1 << 18  # in a session
MAX_LANES = 64


class GrantLedger(Serving):
    """Takes one message or one finished transfer at a time; returns what is to be done."""

    # -- declarations

    def declare(self, specs: list[BundleSpec]) -> None:
        """Register forms of bundles. Raises ProtocolError for a number that is taken, and beyond `MAX_SPECS` of them;
        nothing is changed then.
        """
        new: dict[int, BundleSpec] = {}
        for spec in specs:
            if spec.spec_id in self.specs or spec.spec_id in new:
                raise ProtocolError(f"spec {spec.spec_id} is declared twice")
            if spec.heir_of and self._spec(spec.heir_of).nbytes != spec.nbytes:
                raise ProtocolError(
                    f"spec {spec.spec_id} is not as large as spec {spec.heir_of}, whose heir it is to be"
                )
            new[spec.spec_id] = spec
        if len(self.specs) + len(new) > MAX_SPECS:
            raise ProtocolError(f"{len(self.specs) + len(new)} specs are declared, the most are {MAX_SPECS}")
        self.specs.update(new)
        self.heirs.update((spec.heir_of, spec.spec_id) for spec in new.values() if spec.heir_of)

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
        self._look_far = True
        if lane.target_frames is not None and lane.target_frames < floor:
            lane.target_frames = None
        return lane

    def adopt(self, spec_id: int) -> int:
        """The id of a new bundle whose bytes, version 1, are in a file of the client's. It takes neither frames nor
        flash room. Raises ProtocolError for a spec that is unknown or was adopted before (so adoptions are bounded).
        """
        spec = self._spec(spec_id)
        if spec_id in self.adopted:
            raise ProtocolError(f"spec {spec_id} is adopted twice")
        self.adopted.add(spec_id)
        record = self._new_bundle(spec)
        self._apply(record, Event.ADOPT)
        record.version = record.flash_version = 1
        record.external, record.charged = True, False
        self._enter(record)
        return record.bundle_id

    # -- messages

    def receive(self, message: ClientBody) -> list[Effect]:
        """Raises ProtocolError for what no correct client sends; the session is then closed. Nothing is changed before
        it raises.
        """
        self._take(message)
        return self._go_on()

    def receive_all(self, messages: Iterable[ClientBody]) -> list[Effect]:
        """Messages that came together, in order; who waits is served once. Raises as `receive` for the first that no
        correct client sends.
        """
        for message in messages:
            self._take(message)
        return self._go_on()

    def _take(self, message: ClientBody) -> None:
        match message:
            case Demand():
                self._demand(message)
            case Void():
                self._void(message)
            case Used():
                self._used(message)
            case Accessed(name, access):
                if name not in self.lanes:
                    raise ProtocolError(f"lane {name!r} was never admitted")
                if self.foresight.accessed(name, access):
                    self._look_far = True
            case Commit():
                self._commit(message)
            case Done(serials):
                self.pins.check_done(serials)
                for serial in serials:
                    self._unpin(serial)
            case Discard():
                self._discard_idle(message.bundles)
            case Supersede():
                self._supersede(message)

    def _go_on_after(self, bundle: int) -> list[Effect]:
        """The transfer of a bundle has ended. Serve whom that matters to: mostly nobody, as what runs ahead comes long
        before it is used.
        """
        if bundle in self._awaited:
            self._awaited.remove(bundle)
            self._arrived += 1
            few = any(lane.unused - lane.used <= GRANTS_AHEAD for lane in self.lanes.values())
            self._look_near = self._look_near or few or self._arrived >= len(self._awaited)
        if self.pins.open or self._look_near or self._sees_far():
            return self._go_on()
        return self._take_effects()

    def _go_on(self) -> list[Effect]:
        self._settle_budgets()
        self._serve()
        return self._take_effects()

    def _demand(self, demand: Demand) -> None:
        lane = self._lane(demand.lane, demand.epoch)
        self.pins.check_held(demand.lane, demand.held)
        if demand.mode == Mode.CREATE:
            spec = self._spec(demand.target)
            record = self._new_bundle(spec)
        else:
            known = self.bundles.get(demand.target)
            if known is None or known.version == 0 or known.state == State.DOOMED:
                self._begin_epoch(lane, demand.epoch, demand.held)
                text = f"bundle {demand.target} does not exist in this session, or holds no bytes yet"
                self._refuse(demand, Code.NOT_FOUND, text)
                return
            record = known
        self._begin_epoch(lane, demand.epoch, demand.held)
        if refusal := self._refusal(lane, record, demand.mode):
            self._refuse(demand, *refusal)
            return
        if demand.mode == Mode.CREATE:
            self._enter(record)
        if demand.mode.writes:
            self._charge(record, True)
        if demand.mode == Mode.CREATE:
            self.creates += 1
        elif self._grantable(record, demand.mode):
            self.hits += 1
        else:
            self.misses += 1
        self.pins.open.append(OpenDemand(demand, record.bundle_id))
        self.ahead_paused = False
        self.foresight.used(demand.lane, record.spec, demand.mode)

    def _lane(self, name: str, epoch: int) -> Lane:
        """The lane that begins an epoch. Raises ProtocolError unless there is one, and the epoch is new."""
        lane = self.lanes.get(name)
        if lane is None:
            raise ProtocolError(f"lane {name!r} was never admitted")
        if epoch <= lane.epoch:
            raise ProtocolError(f"epoch {epoch} of lane {name!r} is not newer than {lane.epoch}")
        return lane

    def _begin_epoch(self, lane: Lane, epoch: int, held: Collection[int]) -> None:
        """The lane's unused grants are void; answers on their way are not (C1)."""
        self._look_far = True  # something was not as foreseen
        lane.epoch = epoch
        for serial in self.pins.void(lane.name, held):
            self._unpin(serial)

    def _void(self, void: Void) -> None:
        lane = self._lane(void.lane, void.epoch)
        self.pins.check_held(void.lane, void.held)
        self._begin_epoch(lane, void.epoch, void.held)

    def _used(self, used: Used) -> None:
        for serial in used.serials:
            self.pins.grant(serial)
        for serial in used.serials:
            pin = self.pins.granted[serial]
            self.pushes_used += pin.pushed
            self.lanes[pin.lane].used += pin.pushed
            pin.pushed = False
            self.foresight.used(pin.lane, self.bundles[pin.bundle].spec, pin.mode)
            self._placement.used(pin.bundle)

    def shrink(self, name: str, target_frames: int) -> list[Effect]:
        """Lower a lane's budget to `target_frames` as soon as what it holds allows; its unused grants are asked back
        where they are in the way. A demand that needs more cancels it, and so does a target that is not lower than the
        budget. Raises ResourceExhausted below the floor.
        """
        lane = self.lanes[name]
        if target_frames < lane.floor_frames:
            raise ResourceExhausted(
                f"lane {name!r} cannot shrink to {self._size(target_frames)}: it uses {self._size(lane.floor_frames)} "
                "at once"
            )
        lane.target_frames = target_frames if target_frames < lane.budget_frames else None
        if self._pinned_frames(name) > target_frames:
            self._effects.append(Send(Surrender(name)))
        return self._go_on()

    def _settle_budgets(self) -> None:
        for lane in self.lanes.values():
            if lane.target_frames is not None and self._pinned_frames(lane.name) <= lane.target_frames:
                lane.budget_frames, lane.target_frames = lane.target_frames, None

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
        if lane.target_frames is not None and need > lane.target_frames:
            lane.target_frames = None
        flash = self._flash_refusal(record, mode)
        return None if flash is None else (Code.TIER_FULL, flash)

    def _commit(self, commit: Commit) -> None:
        self.pins.check_commit(commit)
        for _, bundle, version in commit.updated:
            known = self.bundles[bundle].version
            if version <= known:
                raise ProtocolError(f"commit of version {version} of bundle {bundle}, which has version {known}")
        for serial, bundle, version in commit.updated:
            record = self.bundles[bundle]
            self._apply(record, Event.COMMIT)
            record.version = version
            self._hand_on(record)
            self.pins.granted[serial].mode = Mode.READ
        for serial, bundle in commit.consumed:
            del self.pins.granted[serial]
            self._end(bundle)
        self.commits += 1

    def _discard_idle(self, bundles: tuple[int, ...]) -> None:
        self.pins.check_unused(bundles, "discard")
        for bundle in bundles:
            self._check_exists(bundle)
        for bundle in bundles:
            self._end(bundle)

    def _supersede(self, message: Supersede) -> None:
        bundles = [bundle for pair in message.pairs for bundle in pair]
        self.pins.check_unused(bundles, "supersede")
        for bundle in bundles:
            self._check_exists(bundle)
        for old, new in message.pairs:
            one, other = self.bundles[old].spec, self.bundles[new].spec
            if one.nbytes != other.nbytes or self.bundles[new].version == 0:
                raise ProtocolError(
                    f"bundle {new} ({other.nbytes} bytes, version {self.bundles[new].version}) cannot supersede "
                    f"bundle {old} ({one.nbytes} bytes)"
                )
        for old, new in message.pairs:
            form, record = self.bundles[old].spec, self.bundles[new]
            self._end(old)
            self._rename(record, form)
            self._placement.used(new)  # its next use is that of its form
        self._look_far = True

    def _check_exists(self, bundle: int) -> None:
        if bundle not in self.bundles or self.bundles[bundle].state == State.DOOMED:
            raise ProtocolError(f"bundle {bundle} does not exist in this session")

    def _end(self, bundle: int) -> None:
        """The client has no more use for it; grants of it that it has not used are void on both sides."""
        for serial in self.pins.pushed_on(bundle):
            del self.pins.granted[serial]
        self._hand_on(self.bundles[bundle])
        self._discard(self.bundles[bundle])

    # -- transfers

    def loaded(self, bundle: int) -> list[Effect]:
        """The frames hold the newest version."""
        record = self.bundles[bundle]
        if record.state == State.DOOMED:
            self._drain(record)
        else:
            self._apply(record, Event.LOADED)
        return self._go_on_after(bundle)

    def load_failed(self, bundle: int, error: TiermemError) -> list[Effect]:
        """The flash copy could not be read; it stays the newest one, and who waits is told."""
        record = self.bundles[bundle]
        self.ahead_paused = True
        if record.state == State.DOOMED:
            self._drain(record)
            return self._go_on()
        self._apply(record, Event.LOAD_FAILED)
        self._release_frames(record)
        for waiting in [d for d in self.pins.open if d.bundle == bundle]:
            self._give_up(waiting, error.code, str(error))
        return self._go_on()

    def written(self, bundle: int) -> list[Effect]:
        """Flash holds the version that the frames hold; the older flash copy is free already."""
        record = self.bundles[bundle]
        if record.state == State.DOOMED:
            self._drain(record)
        else:
            self._apply(record, Event.WRITTEN)
            record.flash_version = record.version
            record.external = False
            self._stirred += record.frames
        return self._go_on_after(bundle)

    def write_failed(self, bundle: int, error: TiermemError) -> list[Effect]:
        """The bytes stay dirty in DRAM. Demands that wait for room are told why there is none."""
        record = self.bundles[bundle]
        self.ahead_paused = True
        if record.state == State.DOOMED:
            self._drain(record)
            return self._go_on()
        self._apply(record, Event.WRITE_FAILED)
        for waiting in [d for d in self.pins.open if self.bundles[d.bundle].state in (State.FLASH, State.ABSENT)]:
            self._give_up(waiting, error.code, f"no room for {self.bundles[waiting.bundle].spec}: {error}")
        return self._go_on()

    def _give_up(self, waiting: OpenDemand, code: Code, message: str) -> None:
        self.pins.open.remove(waiting)
        self._refuse(waiting.demand, code, message)
        record = self.bundles[waiting.bundle]
        self._settle_charge(record)
        self._forget_if_absent(record)

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
        return not self._moving
