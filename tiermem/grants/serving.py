"""Who is granted what, when: open demands oldest first, then the predicted uses as far ahead as there is room.

Demands never wait for what runs ahead: a demand voids the unused grants of its lane, and loads that nobody has asked
for end by themselves. While a demand lacks room nothing is loaded or created ahead (C11).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tiermem.bundle import BundleSpec, Mode
from tiermem.grants.effects import Expedite, Load, WriteBack
from tiermem.grants.holdings import Holdings
from tiermem.grants.pins import Lane, OpenDemand
from tiermem.grants.room import Room, flash_frames
from tiermem.residency import IDLE, IN_TRANSFER, BundleRecord, Event, State
from tiermem.stats import EvictReason, StallCause

ROOMS_AT_ONCE = 4
"""Predicted uses for which room is made at a time, or a part of the window (`WINDOW_PARTS`), if that is more. Room that
is made long before it is needed is taken from what could have stayed.
"""

GRANTS_AHEAD = 8
"""Unused grants of a lane, or all of the access under way and the next one, or of a part of the window (`NEAR_PARTS`),
if that is more. More are sent as these are used, and where there are many, when half of them have been; a demand voids
them all, so many would be sent in vain.
"""

NEAR_PARTS = 4

WINDOW_PARTS = 8
"""Looking for what to load ahead takes a look at every predicted use in the window, so it is done when so large a part
of it is new.
"""

_MOST_GRANTS_AHEAD = 256
_SMALL_FRAMES = 32  # of a window


class Serving(Holdings):
    """Holdings, and the rules by which they are handed out."""

    def _sees_far(self) -> bool:
        """Whether the whole window is to be looked through now: always, where it is small."""
        return self._look_far or self._small or self._stirred * WINDOW_PARTS >= self.ahead_frames

    @property
    def _small(self) -> bool:
        return self.ahead_frames < _SMALL_FRAMES or len(self.lanes) > 1

    def _serve(self) -> None:
        """Answer what can be answered, oldest first; make room for the oldest that lacks it; run ahead."""
        starved = False
        for waiting in list(self.pins.open):
            record, mode = self.bundles[waiting.bundle], waiting.demand.mode
            if self._grantable(record, mode):
                self._answer(waiting, record)
            elif record.state in (State.FLASH, State.ABSENT) and not starved:
                if self._make_room(record.frames, waiting):
                    record.runs = self._frames.take(record.frames)
                    if record.state == State.ABSENT:
                        self._apply(record, Event.CREATE)
                        self._answer(waiting, record)
                    else:
                        self._apply(record, Event.LOAD)
                        waiting.waited_for = StallCause.LOAD
                        self._effects.append(Load(record.bundle_id))
                else:
                    starved = True  # a younger demand must not take the frames that this one waits for
                    waiting.waited_for = StallCause.ROOM
            elif waiting.waited_for is None:
                waiting.waited_for = StallCause.LOAD if record.state == State.LOADING else StallCause.ROOM
                if record.state in IN_TRANSFER:
                    self._effects.append(Expedite(record.bundle_id))
        if not starved and not self.ahead_paused:
            far = self._sees_far()
            for lane in self.lanes.values():
                if far or self._look_near or lane.unused <= GRANTS_AHEAD or 2 * lane.used >= lane.unused:
                    lane.unused, lane.used = self._run_ahead(lane), 0
            self._look_near = False
            if far:
                self._stirred, self._look_far = 0, False

    def _answer(self, waiting: OpenDemand, record: BundleRecord) -> None:
        demand = waiting.demand
        self.pins.open.remove(waiting)
        self._grant(demand.lane, record, demand.mode, demand.epoch, waiting.waited_for)

    def _make_room(self, need: int, waiting: OpenDemand) -> bool:
        """Drop clean bundles and start write-backs until `need` frames are free or on their way; True if they are free
        now. What was begun at leisure is hastened when the demand begins to wait for it.
        """
        free = self._frames.free_frames
        if free < need:
            chosen = self._room().evictions(need, free, self.pins.stay())
            assert chosen is not None, f"{need} frames demanded, but {free} and all that can leave are fewer"
            if waiting.waited_for is None:
                self._effects.extend(map(Expedite, chosen.awaited))
            self._evict(chosen.drop, chosen.write, EvictReason.DEMAND, -math.inf)
        return self._frames.free_frames >= need

    def _evict(self, drop: Iterable[int], write: Iterable[int], reason: EvictReason, due_s: float) -> None:
        for bundle in drop:
            self._apply(self.bundles[bundle], Event.DROP)
            self._release_frames(self.bundles[bundle])
            self.evictions[reason] += 1
        for bundle in write:
            self._apply(self.bundles[bundle], Event.WRITE)
            self._effects.append(WriteBack(bundle, due_s))

    # -- ahead of demands

    def _room(self) -> Room:
        return Room(self.bundles, self._idle, self._moving, self._placement, self._flash_free_frames)

    def _flash_free_frames(self) -> int:
        """For copies that write-backs make; at least so much where there is plenty, as counting takes a look at every
        bundle.
        """
        plenty = self._flash_quota_frames - 2 * self._bundle_frames
        if plenty > self._frames.frames:
            return plenty
        return self._flash_quota_frames - flash_frames(self.bundles.values())

    def _run_ahead(self, lane: Lane) -> int:
        """Grant what is resident and load or create what is not, in the predicted order, each bundle for its next use.
        Returns the number of grants that are unused then.

        Only bundles that are needed later may leave for it. A use that lacks frames does not hold up those behind it
        that are resident already; frames for it come first. Where little has changed since the whole window was looked
        through, only the nearest uses are, nothing is loaded, and created only in frames that are free.
        """
        bundles, specs, frames_for = self.bundles, self.specs, self._frames_for
        newest = self.expected if self.heirs else self.newest.get
        far, most_frames, room_frames = self._sees_far(), self.ahead_frames, lane.room_frames
        rooms_frames, near_frames = most_frames // WINDOW_PARTS, most_frames // NEAR_PARTS
        unused = self.pins.unused(lane.name)
        mine = self.pins.of_lane(lane.name)
        pinned = sum(bundles[b].frames for b in mine)
        stay = self.pins.stay()  # and, as the walk goes on, what is needed sooner
        seen: set[int] = set()  # forms
        awaited: set[int] = set()
        if not self._small:
            self._awaited, self._arrived = awaited, 0
        ahead = short = lacking = 0  # frames; uses without frames, and what they and such as are to be made will take
        sent, first, near = len(unused), None, True
        room: Room | None = None
        for spec_id, used_in, due_s, place in self.foresight.upcoming(lane.name):
            if spec_id in seen:
                continue
            seen.add(spec_id)
            record = bundles.get(newest(spec_id) or 0)
            writes = used_in is Mode.UPDATE or used_in is Mode.CREATE  # a property costs more than the rest here
            if record is not None:
                frames = record.frames
            elif writes and spec_id in specs:
                frames = frames_for(specs[spec_id].nbytes)
            else:
                continue  # nothing to read: another prediction that is wrong
            ahead += frames
            if ahead > most_frames:
                break
            first = place if first is None else first
            near = near and (
                sent < GRANTS_AHEAD or (sent < _MOST_GRANTS_AHEAD and (place == first or ahead <= near_frames))
            )
            crowded = short >= ROOMS_AT_ONCE and lacking >= rooms_frames
            if (not near and (not far or crowded)) or (not far and len(seen) > _MOST_GRANTS_AHEAD):
                break
            if record is not None:
                bundle = record.bundle_id
                stay.add(bundle)
                granted = unused.get(bundle)
                if record.version == 0 or (
                    granted is not None and granted.covers(Mode.UPDATE if writes else Mode.READ)
                ):
                    continue
            if (record is None or (writes and not record.charged)) and not self._fits_flash(frames):
                continue  # before anything is done for it: what is loaded is granted, or it could leave and come again
            if record is None or bundle not in mine:
                if pinned + frames > room_frames:
                    break
                pinned += frames  # whether it is granted now or when its transfer has ended
            elif pinned > room_frames:
                break
            if record is None or record.state is State.FLASH:
                if crowded:
                    continue
                lacking += frames
                if far:
                    room = room or self._room()
                    if not self._clear(room, lacking, stay, due_s):
                        break
                    if record is None and not near:
                        continue  # its frames are kept free: what is made is granted
                if short or self._frames.free_frames < lacking or (record is not None and not far):
                    short += 1
                    continue
                lacking -= frames
                record = self._fetch(record, specs[spec_id], due_s)
            if not near:
                continue
            if record.state is not State.BLANK and record.state not in IDLE:
                awaited.add(record.bundle_id)
                continue  # it comes, or leaves for a use that is nearer: a grant would hold it
            if writes:
                self._charge(record, True)
            stay.add(record.bundle_id)
            self.pushes += 1
            sent += 1
            mode = Mode.CREATE if record.state is State.BLANK else Mode.UPDATE if writes else Mode.READ
            self._grant(lane.name, record, mode, 0, None)
        return sent

    def _fetch(self, record: BundleRecord | None, spec: BundleSpec, due_s: float) -> BundleRecord:
        """Take frames for a bundle and have them filled, or make it."""
        if record is not None:
            record.runs = self._frames.take(record.frames)
            self._apply(record, Event.LOAD)
            self._placement.used(record.bundle_id)
            self._effects.append(Load(record.bundle_id, due_s))
            return record
        made = self._new_bundle(spec)
        made.runs = self._frames.take(made.frames)
        self._apply(made, Event.CREATE)
        self._enter(made)
        self.creates += 1
        return made

    def _clear(self, room: Room, need: int, stay: set[int], due_s: float) -> bool:
        """Send bundles that are needed later on their way, for `need` frames; False where they are too few."""
        if self._frames.free_frames >= need:
            return True
        chosen = room.evictions(need, self._frames.free_frames, stay)
        if chosen is None:
            return False
        self._evict(chosen.drop, chosen.write, EvictReason.LOOKAHEAD, due_s)
        return True
