"""Typed access to a JSON object of a file."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, NoReturn


class Section:
    """An object's values by key. A null counts as a missing key; both are named in the error.

    ``fail`` raises `CheckpointError` naming the file.
    """

    def __init__(self, fail: Callable[[str], NoReturn], values: dict[str, Any]) -> None:
        self.fail = fail
        self.values = values

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            self.fail(f"{key} is {'null' if key in self.values else 'missing'}")
        return default

    def object(self, key: str) -> Section:
        """An object inside of it, whose faults are named after ``key``."""
        value = self.get(key, None)
        if not isinstance(value, dict):
            self.fail(f"{key} is not an object")

        def fail(reason: str) -> NoReturn:
            self.fail(f"{key}: {reason}")

        return Section(fail, value)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if type(value) is int and value >= 1 << 31:
            self.fail(f"{key} is above {(1 << 31) - 1}")
        if type(value) is not int or value < least:
            self.fail(f"{key} is {value!r:.80}, not an integer from {least}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or abs(value) > 1e38 or not isfinite(value):
            self.fail(f"{key} is {value!r:.80}, not a number")
        return float(value)

    def positive(self, key: str) -> float:
        value = self.real(key)
        if value <= 0.0:
            self.fail(f"{key} is {value:g}, not a positive number")
        return value

    def at_least_one(self, key: str, default: float | None = None) -> float:
        value = self.real(key, default)
        if value < 1.0:
            self.fail(f"rope {key} is {value:g}, below 1")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            self.fail(f"{key} is {value!r:.80}, not a boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            self.fail(f"{key} is {value!r:.80}, not a string")
        return value

    def reals(self, key: str, length: int) -> tuple[float, ...]:
        values = self.get(key, None)
        if not isinstance(values, list) or len(values) != length:
            self.fail(f"{key} is not a list of {length} numbers")
        numbers = Section(self.fail, {f"{key}[{i}]": v for i, v in enumerate(values)})
        return tuple(numbers.real(name) for name in numbers.values)
