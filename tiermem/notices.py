"""What a trainer tells the daemon about itself, for metrics and for who looks at the daemon only."""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_NOTICES = 64
"""Messages with notices in one session: a trainer sends one of each kind at attach, and few later."""

MAX_COUNT = 1 << 20
MAX_TEXT = 1000


class NoticeKind(enum.StrEnum):
    """As they are called in metrics. All but the last two are fallbacks: the result is the same, the way another.

    COMPILED_ACROSS_UNITS: what torch.compile makes of the model is cut at the units, so results may differ in the last
    bits. ACCUMULATION_ORDER: so may they where microbatches are added up in another order.
    """

    PAGE_MOVES = "page_moves"
    STORAGE_SWITCH = "storage_switch"
    FILE_REFUSED = "file_refused"
    FILE_CHANGED = "file_changed"
    COMPILE_UNSEEN = "compile_unseen"
    PAGEABLE_COPIES = "pageable_copies"
    UPDATE_BARRIER = "update_barrier"
    UPDATE_NOT_EARLY = "update_not_early"
    ACTIVATIONS_KEPT = "activations_kept"
    COMPILED_ACROSS_UNITS = "compiled_across_units"
    ACCUMULATION_ORDER = "accumulation_order"

    @property
    def exact(self) -> bool:
        """Whether the result is bit for bit that of the plain script all the same."""
        return self not in (NoticeKind.COMPILED_ACROSS_UNITS, NoticeKind.ACCUMULATION_ORDER)


@dataclass(frozen=True, slots=True)
class Notice:
    """Something of this kind happened `count` times (1 .. MAX_COUNT); `text` (at most MAX_TEXT characters) says what,
    the first time.
    """

    kind: NoticeKind
    text: str
    count: int = 1
