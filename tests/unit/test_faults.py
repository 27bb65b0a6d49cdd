from __future__ import annotations

import errno

import pytest

from tiermem.errors import ConfigError
from tiermem.testing.faults import Fault, Spoil, parse_fault_script


def test_a_script_is_parsed() -> None:
    script = parse_fault_script(" flash.write:3:EIO, flash.read:1+:flip,os.fallocate:2:ENOSPC ")
    assert script.faults == (
        Fault("flash", "write", 3, False, errno.EIO),
        Fault("flash", "read", 1, True, Spoil.FLIP),
        Fault("os", "fallocate", 2, False, errno.ENOSPC),
    )
    assert parse_fault_script("").faults == ()


def test_calls_are_counted_by_target_and_operation() -> None:
    script = parse_fault_script("a.write:2:EIO,a.write:3+:short,b.write:1:flip")
    assert [script.next("a", "write") for _ in range(4)] == [None, errno.EIO, Spoil.SHORT, Spoil.SHORT]
    assert script.next("a", "read") is None
    assert script.next("b", "write") is Spoil.FLIP
    assert script.calls("a", "write") == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("flash.write", "not understood"),
        ("flash.write:0:EIO", "not understood"),
        ("flash.write:-1:EIO", "not understood"),
        ("flash.write:1:EWHAT", "'EWHAT'"),
        ("flash.erase:1:EIO", "'erase'"),
        ("os.write:1:EIO", "'write'"),
        ("flash.reserve:1:flip", "moves none"),
        ("os.fallocate:1:short", "moves none"),
    ],
)
def test_a_script_that_would_do_nothing_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_fault_script(text)
