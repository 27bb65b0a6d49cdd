"""Asking again only about what has been used gives the same order as asking about everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tiermem.bundle import BundleSpec, Kind, Mode
from tiermem.lookahead import Lookahead
from tiermem.placement.belady import Belady
from tiermem.plan import Access, Phase
from tiermem.testing.fakes import FakeClock

FORMS = range(8)
ACCESSES = st.tuples(
    st.sampled_from("ab"),
    st.sampled_from([("x", Phase.FORWARD), ("y", Phase.FORWARD), ("x", Phase.BACKWARD), ("z", Phase.UPDATE)]),
    st.lists(st.sampled_from(FORMS), max_size=3),
    st.sets(st.sampled_from(FORMS), max_size=2),
)


@given(st.lists(ACCESSES, min_size=1, max_size=8), st.integers(2, 5), st.booleans())
@settings(deadline=None, max_examples=200)
def test_the_order_is_the_same(
    accesses: list[tuple[str, tuple[str, Phase], list[int], set[int]]], times: int, one_lane: bool
) -> None:
    lookahead = Lookahead(FakeClock().now_s)
    quick, slow = Belady(lookahead.next_use, lookahead.moment), Belady(lookahead.next_use)
    for lane, (unit, phase), used, others in accesses * times:
        lookahead.accessed("a" if one_lane else lane, Access(unit, phase))
        for form in used:
            lookahead.used("a" if one_lane else lane, BundleSpec(form, Kind.PARAM, "unit", 1), Mode.READ)
            for placement in (quick, slow):
                placement.used(form)
        candidates = set(FORMS) - others
        assert list(quick.eviction_order(candidates)) == list(slow.eviction_order(candidates))
