"""Numbers and names that options take, and what is said of those they do not."""

import math
from enum import Enum

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.values import EnumChoice, Number


class Fruit(Enum):
    apple = "apple"
    pear = "pear"


class Bits(Enum):
    three = "3"
    four = "4"
    eight = "8"


@pytest.mark.parametrize(
    ("number", "text", "said"),
    [
        (Number(int, 1), "0", "0 is below 1"),
        (Number(int, 1, 65535), "70000", "70000 is outside 1 to 65,535"),
        (Number(int, 1, 65535), "x", "'x' is not a whole number, 1 to 65,535"),
        (Number(int), "1.5", "'1.5' is not a whole number"),
        (Number(int, 1), "9" * 5000, f"'{'9' * 60}…' is not a whole number, at least 1"),
        (Number(float, None, 2), "3", "3 is above 2"),
        (Number(float, 0.1, 2), "nan", "'nan' is not a number, 0.1 to 2"),
        (Number(float), "9x", "'9x' is not a number"),
    ],
)
def test_what_is_no_such_number(number: Number, text: str, said: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        number.parse(text)
    assert refused.value.message == said


@given(st.floats(allow_nan=True), st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_a_number_is_taken_where_it_is_in_its_range(value: float, low: float, high: float) -> None:
    number = Number(float, low, high)
    if low <= value <= high:
        assert number.parse(repr(value)) == number.parse(value) == value
    else:
        with pytest.raises(typer.BadParameter):
            number.parse(repr(value))


def test_any_number_will_do() -> None:
    assert Number(float).parse("inf") == math.inf
    assert Number(int).parse("-3") == -3
    assert Number(int).range == ""


def test_one_of_a_set() -> None:
    assert EnumChoice(Fruit).parse("pear") is EnumChoice(Fruit).parse(Fruit.pear) is Fruit.pear
    with pytest.raises(typer.BadParameter, match="'plum' is neither apple nor pear"):
        EnumChoice(Fruit).parse("plum")
    with pytest.raises(typer.BadParameter, match="'5' is none of 3, 4, 8"):
        EnumChoice(Bits).parse("5")
