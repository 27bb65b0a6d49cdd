from __future__ import annotations

import pytest

from tiermem import errors
from tiermem.errors import Code, DaemonTimeout, InvalidArgument, TierIOError, TiermemError, error_for

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, TiermemError)]


def test_every_code_has_exactly_one_class() -> None:
    codes = [cls.code for cls in CLASSES]
    assert sorted(codes) == sorted(Code)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_survives_the_wire(cls: type[TiermemError]) -> None:
    received = error_for(cls.code.value, "frame 7 of 4; give more")
    assert type(received) is cls
    assert str(received) == "frame 7 of 4; give more"


def test_a_newer_peers_code_is_kept_in_the_text() -> None:
    received = error_for("TOO_SHINY", "polish less")
    assert type(received) is TiermemError
    assert received.code is Code.INTERNAL
    assert str(received) == "TOO_SHINY: polish less"


@pytest.mark.parametrize("code", Code)
def test_codes_are_their_own_names(code: Code) -> None:
    assert code.value == code.name


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(InvalidArgument, ValueError)
    assert issubclass(errors.NotFound, LookupError)
    assert issubclass(errors.DaemonUnavailable, ConnectionError)
    assert issubclass(DaemonTimeout, errors.DaemonUnavailable)
    assert issubclass(DaemonTimeout, TimeoutError)
    assert issubclass(TierIOError, OSError)
    assert issubclass(errors.WorkingSetTooLarge, errors.ResourceExhausted)
