"""Every state of a small `World`, breadth first, up to renaming of serials, epochs, versions, bundle ids and frames."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from tiermem.errors import TiermemError
from tiermem.grants.messages import ClientBody, Commit, DaemonBody, Demand, Discard, Done, Grant
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
    """Visit states until all are seen or time is up. Raises Violation with a shortest trace; for I7 too: states where
    only a thread could go on have no open demand, and queues and mover cannot go in circles.
    """
    deadline_s = time.monotonic() + seconds
    numbers: dict[Hashable, int] = {key(start): 0}
    parents: list[tuple[int, Action | None]] = [(-1, None)]
    inevitable: list[tuple[int, ...]] = []
    todo = deque([start.clone()])
    transitions = 0
    while todo and time.monotonic() < deadline_s:
        blob = todo.popleft()
        here, world = len(inevitable), pickle.loads(blob)
        next_by_itself = []
        for action in list(world.actions()):
            after: World = pickle.loads(blob)
            try:
                after.apply(action)
            except (AssertionError, TiermemError, LookupError, ValueError) as error:
                raise Violation(f"{type(error).__name__}: {error}", _trace(parents, here, action)) from error
            transitions += 1
            name = key(after)
            number = numbers.setdefault(name, len(parents))
            if number == len(parents):
                parents.append((here, action))
                todo.append(after.clone())
            if world.must(action):
                next_by_itself.append(number)
        if world.waiters and not next_by_itself:
            raise Violation(f"I7: stuck with open demands: {list(world.waiters.values())}", _trace(parents, here))
        inevitable.append(tuple(next_by_itself))
    complete = not todo
    return Exploration(len(parents), transitions, complete, _longest_way(inevitable) if complete else 0)


def _trace(parents: list[tuple[int, Action | None]], state: int, *last: Action) -> list[Action]:
    backwards = list(last)
    while (action := parents[state][1]) is not None:
        backwards.append(action)
        state = parents[state][0]
    return backwards[::-1]


def _longest_way(edges: list[tuple[int, ...]]) -> int:
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
        raise Violation("I7: queues and mover can go in circles", [])
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
            [*ledger.pins.granted, *world.holds, *(m.serial for m in messages if isinstance(m, Grant | Done))]
        )
        self.epochs = _ranks(
            [
                *(w.demand.epoch for w in world.waiters.values()),
                *(d.demand.epoch for d in ledger.pins.open),
                *(m.epoch for m in world.up if isinstance(m, Demand)),
                *(m.answers for m in world.down),
            ]
        )
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
        held = tuple(sorted(self.serials.get(s, -1) for s in demand.held))
        target = (
            ("form", demand.target) if demand.mode.name == "CREATE" else ("bundle", self.ids.get(demand.target, -1))
        )
        return self.epochs[demand.epoch], held, target, demand.mode

    def message(self, message: ClientBody | DaemonBody | Exit) -> Hashable:
        match message:
            case Demand():
                return self.demand(message)
            case Commit(updated, consumed):
                return (
                    tuple((self.serials.get(s, -1), self.ids[b], self.version(b, v)) for s, b, v in updated),
                    tuple((self.serials.get(s, -1), self.ids.get(b, -1)) for s, b in consumed),
                )
            case Done(serial):
                return "done", self.serials[serial]
            case Discard(bundles):
                return "discard", tuple(self.ids.get(b, -1) for b in bundles)
            case Grant():
                return (
                    self.serials[message.serial],
                    self.ids.get(message.bundle, -1),
                    message.mode,
                    self.epochs[message.answers],
                )
            case Exit():
                return "exit"
            case _:
                return message.code, self.epochs[message.answers]

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
            tuple((self.serials[s], self.ids[p.bundle], p.mode) for s, p in sorted(ledger.pins.granted.items())),
            tuple((self.demand(d.demand), self.ids[d.bundle]) for d in ledger.pins.open),
        )
        client = (
            tuple(
                (self.serials[s], self.ids[h.lease.grant.bundle], h.thread, h.lease.mode, h.use)
                for s, h in sorted(world.holds.items())
            ),
            tuple((t, self.demand(w.demand)) for t, w in sorted(world.waiters.items())),
        )
        queues = tuple(self.message(m) for m in world.up), tuple(self.message(m) for m in world.down)
        left = world.alive, world.commits, world.creates, world.discards, world.faults, world.deaths
        return bundles, truth, daemon, client, queues, left


def _ranks(values: Iterable[int]) -> dict[int, int]:
    return {value: rank for rank, value in enumerate(sorted(set(values)))}
