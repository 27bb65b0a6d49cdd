"""Worlds of the grant protocol: small ones that are explored whole, larger ones for long runs, and walks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tiermem.bundle import Mode
from tiermem.grants.ledger import GrantLedger
from tiermem.grants.table import GrantTable
from tiermem.testing.grants_world import World
from tiermem.testing.grants_world_state import MAIN, WORKER, Config, Prediction

READ, UPDATE, CREATE, CONSUME = Mode.READ, Mode.UPDATE, Mode.CREATE, Mode.CONSUME

ONE = Config(2, 4, (1,), (1, 1, 1), (("M", 1),))
TWO = replace(ONE, threads=(("M", 1), ("W", 1)), commits=1)
NO_SPARE = Config(2, 5, (1,), (1, 1, 1, 1), (("M", 1), ("W", 1)), (UPDATE,), 1)
"""Flash has room for one write-back at a time."""

NOTHING: Prediction = ()
BOTH: Prediction = (("", 2, UPDATE), ("", 1, READ))
AHEAD = Config(2, 4, (1, 1), (1, 2), (("M", 1),), (UPDATE,), 1, predictions=(NOTHING, BOTH), ahead_frames=2)
"""What exists is foreseen, or it is not."""

TIGHT = replace(AHEAD, arena_frames=1, predictions=(NOTHING, (("", 2, UPDATE),), (("", 1, READ),)))
"""What is foreseen does not fit beside what is used."""

LANES = replace(AHEAD, threads=(("M", 1), ("W", 1)), workers=("W",), worker_frames=1)
"""Two lanes that foresee the same."""

RIVALS = Config(
    *(2, 5, (1, 1, 1), (1, 2, 3), (("M", 1), ("W", 1)), (READ,), 0),
    predictions=(((MAIN, 1, READ), (MAIN, 2, READ), (WORKER, 3, READ), (WORKER, 1, READ)),),
    ahead_frames=2,
    workers=("W",),
    worker_frames=1,
)
"""Two lanes that foresee different uses, more of them than fit."""

MAKES = Config(
    *(2, 5, (1, 1), (1,), (("M", 1),), (READ, CONSUME), 1),
    creates=1,
    discards=1,
    predictions=(NOTHING, (("", 2, CREATE), ("", 1, READ))),
    ahead_frames=2,
)
"""Bundles are created, used up and discarded, and granted ahead meanwhile."""

REPLACES = Config(
    *(2, 5, (1, 1), (1, 2), (("M", 1),), (READ, UPDATE), 0),
    supersedes=1,
    heirs=((2, 1),),
    predictions=(NOTHING, (("", 2, READ), ("", 1, READ))),
    ahead_frames=2,
)
"""A bundle takes the place of another, while both are granted ahead."""

SMALL: dict[str, tuple[Config, int]] = {
    "3 bundles, 2 frames, read and update": (ONE, 1_500),
    "a thread that holds two": (replace(ONE, threads=(("M", 2),), modes=(READ,), commits=0), 600),
    "I/O error and death anywhere": (replace(ONE, commits=1, faults=1, deaths=1), 3_500),
    "create beside what is read": (Config(2, 4, (1,), (1,), (("M", 2),), (READ, CONSUME), 1, 1, 1), 1_000),
    "sizes in frames, any policy": (Config(3, 7, (1, 2), (2, 1, 2), (("M", 2),), (UPDATE,), 1, either_order=True), 300),
    "more asked for than there is": (Config(1, 4, (1,), (1, 1), (("M", 2),), commits=1), 1_000),
    "ahead, read and update": (replace(TIGHT, modes=(READ, UPDATE)), 2_500),
    "ahead of three bundles": (
        Config(2, 6, (1, 1, 1), (1, 2, 3), (("M", 1),), (READ,), 0, predictions=(NOTHING, BOTH), ahead_frames=2),
        1_800,
    ),
    "ahead, I/O errors without end": (replace(TIGHT, faults=-1, predictions=(NOTHING, BOTH, (("", 1, READ),))), 800),
    "ahead, a shrink": (replace(AHEAD, shrinks=1), 4_000),
    "ahead, two at one go": (replace(AHEAD, threads=(("M", 2),), modes=(READ,), commits=0), 4_500),
    "ahead, death anywhere": (replace(TIGHT, deaths=1), 1_300),
    "ahead, one takes the place of another": (REPLACES, 1),
}
"""By name: a world, and the least number of its states."""

LARGER: dict[str, Config] = {
    "a thread that holds two": replace(ONE, threads=(("M", 2),)),
    "two threads, reading": replace(TWO, modes=(READ,), commits=0),
    "two threads, updating": TWO,
    "two threads, updating, one I/O error": Config(2, 3, (1,), (1, 1), TWO.threads, (UPDATE,), 1, faults=1),
    "create, consume, discard, I/O error, death": Config(
        *(2, 4, (1,), (1, 1), (("M", 1),), (READ, CONSUME), 1), creates=1, discards=1, faults=1, deaths=1
    ),
    "sizes in frames, any policy": Config(3, 7, (1, 2), (2, 1, 2), (("M", 3),), commits=1, either_order=True),
    "one write-back at a time": NO_SPARE,
    "ahead, two threads": replace(AHEAD, threads=TWO.threads),
    "ahead, two lanes": LANES,
    "ahead, two lanes, one bundle": replace(
        LANES, forms=(1,), kept=(1,), modes=(READ,), commits=0, predictions=((("", 1, UPDATE),),)
    ),
    "ahead, rivals": RIVALS,
    "ahead, create, consume, discard": MAKES,
    "ahead, create, consume, discard, I/O error, death": replace(MAKES, faults=1, deaths=1),
    "ahead, two lanes and a shrink": replace(LANES, arena_frames=3, shrinks=1),
    "ahead, sizes in frames": Config(
        *(3, 7, (1, 2, 2), (1, 2, 3), (("M", 2),), (READ,), 0),
        either_order=True,
        predictions=(NOTHING, (("", 3, READ), ("", 1, UPDATE)), (("", 2, READ), ("", 1, READ))),
        ahead_frames=3,
    ),
}
"""Complete where time allows."""

_FORESEEN: tuple[Prediction, ...] = (
    NOTHING,
    tuple(("", form, READ) for form in (1, 2, 3, 4)),
    tuple(("", form, UPDATE) for form in (4, 3, 2, 1)),
    ((MAIN, 2, READ), (MAIN, 5, CREATE), (WORKER, 1, UPDATE), (WORKER, 5, CREATE)),
    (("", 3, UPDATE), (MAIN, 3, READ), ("", 9, READ)),
)

WALKED = [
    Config(9, 15, (1, 2, 3), (1, 2, 3, 3, 2, 1), (("M", 5), ("A", 2), ("W", 2)), (READ, UPDATE), 60, 0, 0, 3, 1, True),
    Config(8, 19, (1, 2, 3), (3, 3, 3, 1), (("M", 5), ("W", 3)), (READ, UPDATE, CONSUME), 60, 8, 6, 3, 1, True),
    Config(6, 16, (1, 2, 3), (3, 3, 3, 3, 1), (("M", 3), ("W", 3)), (READ, UPDATE), 60, 0, 2, 0, 0, True),
    Config(4, 10, (1, 2), (2, 2, 2, 2), (("M", 4), ("W", 4)), (READ, UPDATE), 60, 0, 0, 2, 0, True),
    Config(
        *(6, 14, (1, 2, 3, 1), (1, 2, 3, 4), (("M", 3), ("A", 2)), (READ, UPDATE), 60, 0, 2, 3, 1, True),
        predictions=_FORESEEN,
        ahead_frames=5,
        shrinks=2,
        supersedes=3,
    ),
    Config(
        *(8, 24, (1, 2, 3, 1, 2), (1, 2, 3, 4), (("M", 4), ("W", 3)), (READ, UPDATE, CONSUME), 60, 12, 6, 3, 1, True),
        ("W",),
        3,
        _FORESEEN,
        6,
        1,
        4,
    ),
    Config(
        *(6, 40, (1, 2, 3, 1), (1, 2, 3, 4), (("M", 1), ("W", 3)), (UPDATE,), 60, 6, 2, -1, 0, True),
        ("W",),
        3,
        _FORESEEN,
        4,
    ),
]
"""Several threads, sizes that do not fit together, flash with room for one write-back; the fourth asks for too much.
The last three run ahead: with shrinks, with two lanes, and with a disk that may always fail.
"""


def walk(
    seed: int,
    steps: int,
    config: Config | None = None,
    table: Callable[[list[str]], GrantTable] = GrantTable,
    ledger: Callable[..., GrantLedger] = GrantLedger,
) -> int:
    """A random walk, slow or fast channels, then the drain. Returns the actions done. Raises AssertionError, or what a
    machine raises, where an invariant is broken.
    """
    choice = random.Random(seed)
    world = World(config or choice.choice(WALKED), table, ledger)
    haste = choice.choice([0.05, 0.3, 0.9])
    done = 0
    for _ in range(steps):
        actions = [action for action in world.actions() if action[0] != "die" or choice.random() < 0.02]
        urgent = [action for action in actions if world.must(action)]
        if not actions:
            break
        world.apply(choice.choice(urgent if urgent and choice.random() < haste else actions))
        done += 1
    return done + world.drain(choice.choice, choice.randrange(len(world.config.predictions)))
