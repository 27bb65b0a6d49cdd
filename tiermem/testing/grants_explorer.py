"""Every state of a small `World`, breadth first, up to renaming of serials, epochs, versions, bundle ids and frames."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tiermem.errors import TiermemError
from tiermem.grants.messages import (
    Accessed,
    ClientBody,
    Commit,
    DaemonBody,
    Demand,
    Discard,
    Done,
    Grant,
    Refuse,
    Supersede,
    Surrender,
    Used,
    Void,
)
from tiermem.stats import Link
from tiermem.testing.grants_world import World
from tiermem.testing.grants_world_state import Action, Content, Exit


class Violation(AssertionError):
    """A machine broke an invariant. `trace` are the actions that led there from the start, fewest first."""

    def __init__(self, text: str, trace: list[Action]) -> None:
        super().__init__("\n  ".join([text, *map(str, trace)]))
        self.trace = trace


@dataclass(frozen=True, slots=True)
class Exploration:
    """What was seen. `complete`: every reachable state. `drain_steps`: the longest way of queues and mover to rest."""

    states: int
    transitions: int
    complete: bool
    drain_steps: int


def explore(start: World, seconds: float) -> Exploration:
    """Visit states until all are seen, or `seconds` of this process's CPU time are spent. Raises Violation with a
    shortest trace; for I7 too: where only a thread could go on all is at rest, and while one thing is foreseen queues
    and mover cannot go in circles.
    """
    deadline_s = time.process_time() + seconds
    numbers: dict[Hashable, int] = {key(start): 0}
    parents: list[tuple[int, Action | None]] = [(-1, None)]
    predictions = range(len(start.config.predictions))
    inevitable: list[list[tuple[int, ...]]] = [[] for _ in predictions]
    todo = deque([start.clone()])
    transitions = here = 0
    while todo and (here % 64 or time.process_time() < deadline_s):  # a look at the clock is not cheap
        blob = todo.popleft()
        world: World = pickle.loads(blob)
        by_itself: list[tuple[Action, int]] = []
        for action in list(world.actions()):
            after: World = pickle.loads(blob)
            with _judged(parents, here, action):
                after.apply(action)
            transitions += 1
            number = numbers.setdefault(key(after), len(parents))
            if number == len(parents):
                parents.append((here, action))
                todo.append(after.clone())
            if world.must(action):
                by_itself.append((action, number))
        if not by_itself:
            with _judged(parents, here):
                world.check_rest()
        for i in predictions:
            inevitable[i].append(tuple({number for action, number in by_itself if world.foresees(action, i)}))
        here += 1
    steps = max(_longest_way(edges, parents) for edges in inevitable) if not todo else 0
    return Exploration(len(parents), transitions, not todo, steps)


@contextmanager
def _judged(parents: list[tuple[int, Action | None]], state: int, *last: Action) -> Iterator[None]:
    try:
        yield
    except (AssertionError, TiermemError, LookupError, ValueError) as error:
        raise Violation(f"{type(error).__name__}: {error}", _trace(parents, state, *last)) from error


def _trace(parents: list[tuple[int, Action | None]], state: int, *last: Action) -> list[Action]:
    backwards = list(last)[::-1]
    while (action := parents[state][1]) is not None:
        backwards.append(action)
        state = parents[state][0]
    return backwards[::-1]


def _longest_way(edges: list[tuple[int, ...]], parents: list[tuple[int, Action | None]]) -> int:
    """Length of the longest path. Raises Violation if there is a cycle (Kahn's topological order)."""
    incoming = [0] * len(edges)
    for targets in edges:
        for target in targets:
            incoming[target] += 1
    ready = [state for state, n in enumerate(incoming) if not n]
    depth = [0] * len(edges)
    seen = 0
    while ready:
        state = ready.pop()
        seen += 1
        for target in edges[state]:
            depth[target] = max(depth[target], depth[state] + 1)
            incoming[target] -= 1
            if not incoming[target]:
                ready.append(target)
    if seen < len(edges):
        first = next(state for state, n in enumerate(incoming) if n)
        raise Violation("I7: queues and mover can go in circles, from here:", _trace(parents, first))
    return max(depth)


def key(world: World) -> Hashable:
    """Equal for states that differ by names only. (A hash: states are many, and a wrong match only hides one.)"""
    return hash(_Key(world).whole())


class _Key:
    """Renames by rank: only the order of serials, epochs, versions and ids means anything."""

    def __init__(self, world: World) -> None:
        self.world, ledger = world, world.ledger
        messages = [*world.up, *world.down]
        self.serials = _ranks(
            [
                *ledger.pins.granted,
                *world.holds,
                *world.unused,
                *(m.serial for m in messages if isinstance(m, Grant)),
                *(serial for m in messages if isinstance(m, Done) for serial in m.serials),
            ]
        )
        epochs: dict[str, set[int]] = {lane: {0, epoch} for lane, epoch in world.epochs.items()}
        for lane in ledger.lanes.values():
            epochs[lane.name].add(lane.epoch)
        for demand in (*(w.demand for w in world.waiters.values()), *(d.demand for d in ledger.pins.open)):
            epochs[demand.lane].add(demand.epoch)
        for m in messages:
            match m:
                case Demand() | Void():
                    epochs[m.lane].add(m.epoch)
                case Grant() | Refuse():
                    epochs[m.lane].add(m.answers or _pushed_in(m))
        self.epochs = {lane: _ranks(known) for lane, known in epochs.items()}
        self.ids = _ranks([*ledger.bundles, *world.newest, *world.flash, *world.moving])
        versions: dict[int, set[int]] = {b: set() for b in self.ids}
        for b, record in ledger.bundles.items():
            versions[b] |= {record.version, record.flash_version}
        for b, version in world.newest.items():
            versions[b].add(version)
        contents = [*world.memory, *world.flash.values(), *(c for m in world.moving.values() for c in m.source)]
        for content in contents:
            if content is not None and content[0] in versions:
                versions[content[0]].add(content[1])
        for m in world.up:
            if isinstance(m, Commit):
                for _, b, version in m.updated:
                    versions[b].add(version)
        self.versions = {b: _ranks(v for v in known if v) for b, known in versions.items()}

    def version(self, bundle: int, version: int) -> int:
        return self.versions[bundle][version] if version else -1

    def content(self, content: Content) -> tuple[int, int] | None:
        if content is None or content[0] not in self.ids:
            return None
        return self.ids[content[0]], self.version(*content)

    def contents(self, contents: Iterable[Content]) -> tuple[tuple[int, int] | None, ...]:
        return tuple(self.content(c) for c in contents)

    def demand(self, demand: Demand) -> Hashable:
        target = (
            ("form", demand.target) if demand.mode.name == "CREATE" else ("bundle", self.ids.get(demand.target, -1))
        )
        return demand.lane, self.epochs[demand.lane][demand.epoch], self.held(demand.held), target, demand.mode

    def held(self, held: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self.serials.get(s, -1) for s in held))

    def grant(self, grant: Grant) -> Hashable:
        epochs = self.epochs[grant.lane]
        epoch = (epochs[grant.answers], -1) if grant.answers else (-1, epochs[grant.epoch])
        return self.serials[grant.serial], grant.lane, self.ids.get(grant.bundle, -1), grant.spec, grant.mode, epoch

    def message(self, message: ClientBody | DaemonBody | Exit) -> Hashable:
        match message:
            case Demand():
                return self.demand(message)
            case Commit(updated, consumed):
                return (
                    tuple((self.serials.get(s, -1), self.ids[b], self.version(b, v)) for s, b, v in updated),
                    tuple((self.serials.get(s, -1), self.ids.get(b, -1)) for s, b in consumed),
                )
            case Done(serials):
                return "done", self.held(serials)
            case Discard(bundles):
                return "discard", tuple(self.ids.get(b, -1) for b in bundles)
            case Supersede(pairs):
                return "supersede", tuple((self.ids.get(o, -1), self.ids.get(n, -1)) for o, n in pairs)
            case Grant():
                return self.grant(message)
            case Void(lane, epoch, held):
                return "void", lane, self.epochs[lane][epoch], self.held(held)
            case Used(serials):
                return "used", self.held(serials)
            case Accessed(lane, access):
                return "accessed", lane, access
            case Refuse(lane, answers, code):
                return "refuse", lane, self.epochs[lane][answers], code
            case Surrender(lane):
                return "surrender", lane
            case Exit():
                return "exit"

    def whole(self) -> Hashable:
        world, ledger = self.world, self.world.ledger
        bundles = tuple(
            (
                self.ids[b],
                r.spec.spec_id,
                r.state,
                self.version(b, r.version),
                self.version(b, r.flash_version),
                self.contents(self.world.memory[i] for first, n in r.runs for i in range(first, first + n)),
            )
            for b, r in sorted(ledger.bundles.items())
        )
        truth = (
            tuple((self.ids[b], self.version(b, v)) for b, v in sorted(world.newest.items())),
            tuple((self.ids[b], self.content(c)) for b, c in sorted(world.flash.items())),
            tuple(
                (self.ids[b], m.link == Link.FLASH_TO_DRAM, self.contents(m.source))
                for b, m in sorted(world.moving.items())
            ),
        )
        daemon = (
            tuple(
                (self.serials[s], p.lane, self.ids[p.bundle], p.mode, p.pushed)
                for s, p in sorted(ledger.pins.granted.items())
            ),
            tuple((self.demand(d.demand), self.ids[d.bundle], d.waited_for is None) for d in ledger.pins.open),
            tuple((s, self.ids[b]) for s, b in sorted(ledger.newest.items())),
            tuple(
                (lane.name, lane.budget_frames, lane.target_frames, self.epochs[lane.name][lane.epoch])
                for lane in ledger.lanes.values()
            ),
            ledger.ahead_paused,
        )
        client = (
            tuple(
                (self.serials[s], self.ids[h.lease.grant.bundle], h.thread, h.lease.mode, h.use, h.may_write)
                for s, h in sorted(world.holds.items())
            ),
            tuple((t, self.demand(w.demand)) for t, w in sorted(world.waiters.items())),
            tuple(self.grant(g) for _, g in sorted(world.unused.items())),
            tuple((lane, self.epochs[lane][epoch]) for lane, epoch in world.epochs.items()),
        )
        queues = tuple(self.message(m) for m in world.up), tuple(self.message(m) for m in world.down)
        made = world.commits, world.creates, world.discards, world.supersedes
        return bundles, truth, daemon, client, queues, (made, world.faults, world.deaths, world.shrinks, world.alive)


def _ranks(values: Iterable[int]) -> dict[int, int]:
    return {value: rank for rank, value in enumerate(sorted(set(values)))}


def _pushed_in(message: Grant | Refuse) -> int:
    return message.epoch if isinstance(message, Grant) else 0
