"""Bundles as the trainer sees them: one address range for life, leases by count, commits before releases.

A bundle is readable exactly while it is leased; otherwise its addresses are PROT_NONE. Everything here is guarded by
the session's lock, the client lock; waiting for the daemon releases it, so state is looked at again afterwards.

[Note: idle leases] Where all declared bundles fit into the lane's budget together, nothing will ever have to leave,
and a lease that nobody holds is kept: it costs no message and no page move to take it up again. What was written under
it is committed when it ends. A bundle that is discarded under such a lease is only *blank*: creating it again asks
nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from tiermem.bundle import BundleSpec, Kind, Mode, TensorSpec
from tiermem.errors import TiermemError
from tiermem.file_pieces import Adoption
from tiermem.grants.table import Lease
from tiermem.plan import Access, Phase
from tiermem_client.memory import Bundle, Memory
from tiermem_client.session import Session
from tiermem_client.unit_spans import Costs, UnitSpans


@dataclass(slots=True)
class ResidencyStats:
    """Counts since attach: acquisitions answered here (by a lease that was held already, or a copy on the device), by a
    grant that had come ahead, and those that asked the daemon.
    """

    local: int = 0
    ahead: int = 0
    demands: int = 0
    commits: int = 0


@dataclass(slots=True)
class Residency:
    """All methods take the client lock themselves; it is reentrant, so a caller may hold it over several of them."""

    session: Session
    memory: Memory = field(repr=False)
    stats: ResidencyStats = field(default_factory=ResidencyStats)
    budget_frames: int = 0  # 0 until admitted
    units: UnitSpans = field(init=False)
    _specs: int = 0
    _declared_frames: int = 0
    _access: Access | None = None
    _idle: dict[Bundle, None] = field(default_factory=dict)
    _outdated: dict[Bundle, Callable[[], None]] = field(default_factory=dict)
    _unreferenced: deque[Callable[[], None]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        session = self.session
        self.units = UnitSpans(session.trace, lambda: Costs(session.stall_s, *session.address_space.moved))

    def new_bundles(
        self, requests: Sequence[tuple[Kind, str, int, tuple[TensorSpec, ...]]], heirs_of: Sequence[Bundle] = ()
    ) -> list[Bundle]:
        """Declare bundles side by side in one range, in order; all but the last must be whole frames long. `heirs_of`:
        those whose place each of them is to take (`supersede`).
        """
        frame_bytes = self.memory.frame_bytes
        with self.session.lock:
            total = sum(nbytes for _, _, nbytes, _ in requests)
            range_ = self.memory.reserve(total)
            bundles, offset = [], 0
            for (kind, unit, nbytes, tensors), old in zip_longest(requests, heirs_of):
                if offset % frame_bytes:
                    raise TiermemError(
                        f"a tile of {unit!r} begins at byte {offset}, which is not a whole frame of {frame_bytes}"
                    )
                self._specs += 1
                heir_of = 0 if old is None else old.spec.spec_id
                bundles.append(Bundle(BundleSpec(self._specs, kind, unit, nbytes, tensors, heir_of), range_, offset))
                offset += nbytes
                self._declared_frames += self._frames(nbytes)
            if not self.keeps_idle:
                self.release_idle()
            self.session.declare([bundle.spec for bundle in bundles])
            return bundles

    @property
    def keeps_idle(self) -> bool:
        """Whether everything that is declared fits, so that leases may idle."""
        return self._declared_frames <= self.budget_frames

    @property
    def flash_room_bytes(self) -> int:
        """What the job's flash has room for beside all that is declared, and one bundle's write-back."""
        opened = self.session.opened
        return opened.flash_quota_bytes - opened.bundle_cap_bytes - self._declared_frames * opened.frame_bytes

    def room_for(self, bundle: Bundle) -> int:
        """Bytes that the bundle takes up in a tier."""
        return self._frames(bundle.spec.nbytes) * self.session.opened.frame_bytes

    def _frames(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self.session.opened.frame_bytes))

    def release_idle(self) -> None:
        """End every lease that nobody holds."""
        with self.session.lock:
            idle, self._idle = list(self._idle), {}
            self._end(idle)

    def acquire(self, bundles: Iterable[Bundle], mode: Mode) -> None:
        """Lease each bundle in READ, UPDATE or CREATE mode, one holder more. On an error none of them is held."""
        held: list[Bundle] = []
        wanted = list(bundles)
        if self._outdated:
            self.bring_up_to_date(wanted)
        with self.session.lock:
            self.session.check_usable()
            self.run_unreferenced()
            taken: set[Bundle] = set()
            try:
                self._take_ahead(wanted, mode, taken)
                for bundle in wanted:
                    self._acquire_one(bundle, mode, taken)
                    held.append(bundle)
            except BaseException:
                self.release(held)
                self._let_go([bundle for bundle in taken if bundle.holders == 0 and bundle.lease is not None])
                raise

    def _take_ahead(self, bundles: Sequence[Bundle], mode: Mode, taken: set[Bundle]) -> None:
        """Lease at one go what grants that are here allow; a demand for the others would void them."""
        create = mode is Mode.CREATE
        free = {
            (b.spec.spec_id if create else b.bundle_id): b
            for b in bundles
            if b.lease is None and not b.asking and (b.bundle_id is None) is create
        }
        if mode is Mode.READ and self.memory.keeps_copies:
            free = {target: b for target, b in free.items() if not self.memory.is_here(b)}
        targets = [target for target in free if target is not None]
        if not targets:
            return
        leases = self.session.take(targets, mode)
        left = deque((bundle, lease) for bundle, lease in zip(free.values(), leases, strict=True) if lease is not None)
        self.stats.ahead += len(left)
        try:
            while left:
                bundle, lease = left.popleft()
                self._begin(bundle, lease)
                taken.add(bundle)
        except TiermemError:
            self.session.done([lease.grant.serial for _, lease in left])
            raise

    def _acquire_one(self, bundle: Bundle, mode: Mode, taken: Collection[Bundle]) -> None:
        while bundle.asking:  # another thread's demand for it is open
            self.session.lock.wait(1.0)
            if not self.session.alive:
                break
        if self._leased_for(bundle, mode) or (
            bundle.lease is None and mode is Mode.READ and self.memory.is_here(bundle)
        ):
            self.stats.local += bundle not in taken
        else:
            self._lease(bundle, mode)
        if bundle.holders == 0:
            try:
                self.memory.entered(bundle, mode)
            except TiermemError:
                self._let_go([bundle])
                raise
        bundle.blank = bundle.blank and mode != Mode.CREATE
        bundle.holders += 1
        self._idle.pop(bundle, None)
        if self.memory.keeps_copies and not self.keeps_idle and bundle.lease is not None and not bundle.writable:
            self._end_leases([bundle])

    def _leased_for(self, bundle: Bundle, mode: Mode) -> bool:
        wanted = Mode.UPDATE if bundle.blank and mode == Mode.CREATE else mode
        return bundle.lease is not None and bundle.lease.mode.covers(wanted)

    def _lease(self, bundle: Bundle, mode: Mode) -> None:
        create = bundle.bundle_id is None
        if create and mode != Mode.CREATE:
            raise TiermemError(f"{bundle.spec} holds no bytes and was asked for {mode.name}")
        target = bundle.spec.spec_id if create else self._id(bundle)
        [lease] = self.session.take([target], mode)
        if lease is not None:
            self.stats.ahead += 1
        else:
            lease = self._demand(bundle, target, mode)
        self._begin(bundle, lease)

    def _begin(self, bundle: Bundle, lease: Lease) -> None:
        old, grant = bundle.lease, lease.grant
        before = bundle.bundle_id, bundle.version
        bundle.lease, bundle.bundle_id, bundle.version = lease, grant.bundle, grant.version
        if old is not None:  # an upgrade: the reading lease of the same frames ends
            self.session.done([old.grant.serial])
            return
        try:
            self.memory.leased(bundle)
        except TiermemError:
            bundle.lease, (bundle.bundle_id, bundle.version) = None, before
            self.session.done([grant.serial])
            raise

    def _demand(self, bundle: Bundle, target: int, mode: Mode) -> Lease:
        self.stats.demands += 1
        bundle.asking = True
        try:
            return self.session.demand(target, mode, bundle.spec)
        finally:
            bundle.asking = False
            self.session.lock.notify_all()

    def outdate(self, bundles: Iterable[Bundle], update: Callable[[], None]) -> None:
        """From now on `update` is called before one of these is acquired, until `updated`."""
        with self.session.lock:
            self._outdated.update(dict.fromkeys(bundles, update))

    def updated(self, bundles: Iterable[Bundle]) -> None:
        """They are what they ought to be."""
        with self.session.lock:
            for bundle in bundles:
                self._outdated.pop(bundle, None)

    def is_outdated(self, bundles: Iterable[Bundle]) -> bool:
        return any(bundle in self._outdated for bundle in bundles)

    def bring_up_to_date(self, bundles: Iterable[Bundle]) -> None:
        """Apply what stands on these. Computes, so without the lock where the caller has not taken it."""
        for update in dict.fromkeys(u for b in bundles if (u := self._outdated.get(b)) is not None):
            update()

    def accessed(self, unit: str, phase: Phase, training: bool = True) -> None:
        """What is acquired from now on belongs to this. Not said where nothing will ever have to move, and once for all
        nodes of a unit's backward; the trace has it in any case. Raises as `Session.check_usable`.
        """
        self.session.check_usable()  # first: a forked child may have the trace's lock from a thread that is not there
        with self.session.lock:
            self.units.began(unit, phase)
            if self.keeps_idle and not self.memory.keeps_copies:
                return
            access = Access(unit, phase, training)
            if phase != Phase.BACKWARD or access != self._access:
                self._access = access
                self.memory.accessed(access)
                if not self.keeps_idle:
                    self.session.accessed(access)

    def left(self, unit: str) -> None:
        """The forward of the unit, or its recomputation, has ended; for the trace."""
        with self.session.lock:
            self.units.left(unit)

    def rests(self) -> None:
        """No unit computes now: backward or the step has ended; for the trace."""
        with self.session.lock:
            self.units.rest()

    def _id(self, bundle: Bundle) -> int:
        assert bundle.bundle_id is not None
        return bundle.bundle_id

    def adopt(self, bundles: Sequence[Bundle], adoptions: Sequence[Adoption]) -> None:
        """Give new bundles bytes that are in files; none of them is leased then. Raises as Session.adopt."""
        with self.session.lock:
            for bundle, bundle_id in zip(bundles, self.session.adopt(adoptions), strict=True):
                bundle.bundle_id, bundle.version = bundle_id, 1

    def commit(self, bundles: Iterable[Bundle]) -> None:
        """Make what was written under the present leases the newest version, as one transaction. They stay leased for
        reading.
        """
        with self.session.lock:
            owed = [bundle for bundle in bundles if bundle.written or bundle.owed]
            if not owed:
                return
            self.memory.store(owed)
            updated = []
            for bundle in owed:
                assert bundle.lease is not None and bundle.lease.mode.writes, (
                    f"{bundle.spec} was written without a lease for it"
                )
                bundle.version += 1
                bundle.written = bundle.owed = False
                updated.append((bundle.lease.grant.serial, bundle.version))
            self.session.commit(updated)
            self.stats.commits += 1

    def conclude(self, bundles: Iterable[Bundle]) -> None:
        """A transaction ends: commit it, unless its leases may idle; then they stay writable, and it is committed when
        they end.
        """
        if not self.keeps_idle:
            self.commit(bundles)

    def release(self, bundles: Iterable[Bundle]) -> None:
        """One holder less. When nobody is left, the lease idles where all fits; otherwise what was written is
        committed, the lease ends, and the addresses are PROT_NONE again.
        """
        with self.session.lock:
            let_go = []
            for bundle in bundles:
                bundle.holders -= 1
                assert bundle.holders >= 0, f"{bundle.spec} is released more often than acquired"
                if bundle.holders == 0:
                    self.memory.left(bundle)
                    let_go.append(bundle)
            self._let_go(let_go)

    def _let_go(self, bundles: Sequence[Bundle]) -> None:
        """Nobody holds them. What was written stays owed, where their leases may idle."""
        for bundle in bundles:
            bundle.written, bundle.owed = False, bundle.owed or bundle.written
        leased = [bundle for bundle in bundles if bundle.lease is not None]
        if self.keeps_idle:
            self._idle.update(dict.fromkeys(leased))
        else:
            self._end(leased)

    def _end(self, bundles: list[Bundle]) -> None:
        if not self.session.alive:  # nothing can be sent any more, and nothing that was written is lost by us
            return
        self.commit(bundles)
        self._end_leases(bundles)
        for bundle in bundles:
            if bundle.version == 0:  # created, but nothing was written: the store has forgotten it
                self.memory.forget(bundle)
                bundle.bundle_id, bundle.blank = None, False
            elif bundle.blank:
                self.memory.forget(bundle)
                self.session.discard([self._id(bundle)])
                bundle.bundle_id, bundle.version, bundle.blank = None, 0, False

    def _end_leases(self, bundles: Iterable[Bundle]) -> None:
        serials = []
        for bundle in bundles:
            lease = bundle.lease
            assert lease is not None
            self.memory.ended(bundle)
            bundle.lease = None
            serials.append(lease.grant.serial)
        if serials:
            self.session.done(serials)

    def discard(self, bundles: Iterable[Bundle]) -> None:
        """Free bundles that nobody holds; they may be created again. Bundles without bytes are passed over."""
        with self.session.lock:
            gone = []
            for bundle in bundles:
                assert bundle.holders == 0, f"{bundle.spec} is discarded while it is held"
                if bundle in self._idle and bundle.writable:
                    self.memory.forget(bundle)
                    bundle.blank, bundle.written, bundle.owed = True, False, False
                    continue
                if bundle in self._idle:
                    del self._idle[bundle]
                    self._end([bundle])
                self.memory.forget(bundle)
                if bundle.bundle_id is not None:
                    gone.append(bundle.bundle_id)
                    bundle.bundle_id, bundle.version, bundle.blank = None, 0, False
            if gone and self.session.alive:
                self.session.discard(gone)

    def supersede(self, pairs: Sequence[tuple[Bundle, Bundle]]) -> None:
        """Of each pair (old, new), both of one size and held by nobody: the old one has the new one's bytes from now
        on, and the new one none. One transaction; no byte moves.
        """
        with self.session.lock:
            idle = [bundle for pair in pairs for bundle in pair if bundle in self._idle]
            for bundle in idle:
                del self._idle[bundle]
            self._end(idle)
            for bundle in (bundle for pair in pairs for bundle in pair):
                assert bundle.holders == 0 and bundle.stored, f"{bundle.spec} is held, or holds nothing"
                self.memory.forget(bundle)
            self.session.supersede([(self._id(old), self._id(new)) for old, new in pairs])
            for old, new in pairs:
                old.bundle_id, old.version = new.bundle_id, new.version
                new.bundle_id, new.version = None, 0

    def free_range(self, bundles: Sequence[Bundle]) -> None:
        """Give the addresses of discarded bundles back; they share one range."""
        with self.session.lock:
            idle = [bundle for bundle in bundles if bundle in self._idle]
            for bundle in idle:
                del self._idle[bundle]
            self._end(idle)
            if bundles:
                self.memory.release(bundles[0].range)
                self._declared_frames -= sum(self._frames(bundle.spec.nbytes) for bundle in bundles)

    def later(self, action: Callable[[], None]) -> None:
        """Run `action` under the lock at the next acquire. For finalizers, which may run anywhere, also inside a
        critical section.
        """
        self._unreferenced.append(action)

    def run_unreferenced(self) -> None:
        """Do what finalizers left behind."""
        while self._unreferenced:
            self._unreferenced.popleft()()
