from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermem.errors import InvalidArgument
from tiermem.units import GIB, KIB, MIB, TIB, format_size, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (0, 0),
        (123, 123),
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("64K", 64 * KIB),
        ("64KB", 64_000),
        ("64KiB", 64 * KIB),
        ("512MiB", 512 * MIB),
        ("1.5 GiB", 3 * GIB // 2),
        (" 2 gib ", 2 * GIB),
        ("3T", 3 * TIB),
        ("0.5MB", 500_000),
        ((1 << 60) - 1, (1 << 60) - 1),
    ],
)
def test_a_size_is_read(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "4 bananas", "-1", "1e3", "4,5GiB", "1 2", "0x10", "1.GiB", "inf"])
def test_text_that_is_no_size_is_refused_with_the_value(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", [-1, 1 << 60, "2000000T"])
def test_sizes_outside_the_machine_are_refused(value: int | str) -> None:
    with pytest.raises(InvalidArgument, match="outside"):
        parse_size(value)


@pytest.mark.parametrize("value", [True, None, 1.5, b"4MiB"])
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match=type(value).__name__):
        parse_size(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (27 * MIB // 2, "13.5 MiB"),
        (512 * MIB, "512 MiB"),
        (3 * GIB // 2, "1.5 GiB"),
        (5 * TIB, "5.0 TiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_a_size_is_printed(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, (1 << 60) - 1))
def test_bytes_are_read_as_they_are(nbytes: int) -> None:
    assert parse_size(str(nbytes)) == parse_size(f"{nbytes}B") == nbytes


@given(st.integers(0, (1 << 59) - 1))
def test_a_printed_size_is_read_back_to_its_digit(nbytes: int) -> None:
    assert abs(parse_size(format_size(nbytes)) - nbytes) <= nbytes * 0.05


@given(st.integers(0, 1 << 60), st.integers(1, 1 << 30))
def test_rounding_up_is_the_least_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple
