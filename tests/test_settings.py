"""What a setting may be, by each of its bounds alone."""

from dataclasses import dataclass
from math import inf, nan
from typing import Any

import pytest

from octavo.settings import check, setting


def refusal(value: Any, **bounds: Any) -> str | None:
    @dataclass
    class Config:
        size: Any = setting(None, **bounds)

    try:
        check(Config(value))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "said"),
    [
        ({"least": 1}, (1, inf), (0, nan), "below 1"),
        ({"above": 0}, (0.1, inf), (0, nan), "not above 0"),
        ({"most": 9}, (9, -inf), (10, nan), "above 9"),
        ({"below": 9}, (8.9, -inf), (9, nan), "not below 9"),
        ({"least": 1, "most": 9}, (1, 9), (0, 10, nan), "outside 1 to 9"),
        ({"above": 0, "most": 1}, (0.1, 1), (0, 1.1, nan), "outside 0 to 1"),
        ({"above": 0, "below": inf}, (0.1, 1e9), (0, inf, nan), "not above 0"),
        ({"choices": ("a", "b")}, ("a",), ("c",), "neither a nor b"),
        ({"choices": ("a", "b", "c")}, ("a",), ("d",), "none of a, b, c"),
    ],
)
def test_each_bound(
    bounds: dict[str, Any], inside: tuple[Any, ...], outside: tuple[Any, ...], said: str
) -> None:
    for value in (None, *inside):
        assert refusal(value, **bounds) is None
    for value in outside:
        assert str(refusal(value, unit="", **bounds)).endswith(f", {said}")


def test_a_misspelt_bound_is_refused() -> None:
    with pytest.raises(TypeError, match="minimum"):
        setting(1, minimum=1)
