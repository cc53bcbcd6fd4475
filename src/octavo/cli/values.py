"""What an option takes, checked in our own words: numbers in their range, and names of a set.

Typer's come from whichever validator it stands on ("Input should be greater than or equal to 1"),
and name neither the value nor the range.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from typer.models import ParameterInfo

METAVARS = {int: "N", float: "X", str: "TEXT"}
_SHOWN = 60  # characters of a wrong value


@dataclass(frozen=True, slots=True)
class Number:
    """Parses a number of a range; either end may be open."""

    kind: type[int] | type[float]
    least: float | None = None
    most: float | None = None

    @property
    def range(self) -> str:
        """In words; empty where any number will do."""
        if self.least is None:
            return "" if self.most is None else f"at most {_plain(self.most)}"
        if self.most is None:
            return f"at least {_plain(self.least)}"
        return f"{_plain(self.least)} to {_plain(self.most)}"

    @property
    def _beyond(self) -> str:
        """Where a number is that is not in the range, as the engine's rooms say it."""
        if self.least is None:
            return f"above {_plain(self.most or 0)}"
        return f"below {_plain(self.least)}" if self.most is None else f"outside {self.range}"

    def parse(self, text: Any) -> Any:
        """Raises `typer.BadParameter`, to which typer adds the option's name."""
        try:
            value = self.kind(text)
            if math.isnan(value) and self.range:
                raise ValueError("nan is in no range")
        except ValueError:
            what = "a whole number" if self.kind is int else "a number"
            allowed = f", {self.range}" if self.range else ""
            raise typer.BadParameter(f"{_cut(text)} is not {what}{allowed}") from None
        low = self.least is not None and value < self.least
        if low or (self.most is not None and value > self.most):
            raise typer.BadParameter(f"{text} is {self._beyond}")
        return value


@dataclass(frozen=True, slots=True)
class EnumChoice:
    """Parses the name of one of a set."""

    kind: type[Enum]

    @property
    def names(self) -> list[str]:
        return [str(each.value) for each in self.kind]

    def complete(self, incomplete: str) -> list[str]:
        """Return the names that begin like this: what a shell completes."""
        return [name for name in self.names if name.startswith(incomplete)]

    def parse(self, text: Any) -> Any:
        """Raises `typer.BadParameter`."""
        if isinstance(text, self.kind):
            return text
        try:
            return self.kind(text)
        except ValueError:
            *others, last = self.names
            known = f"neither {others[0]} nor {last}" if len(others) == 1 else None
            known = known or f"none of {', '.join(self.names)}"
            raise typer.BadParameter(f"{_cut(text)} is {known}") from None


def checked(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, with options whose numbers and names are parsed here."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [_checked(parameter) for parameter in signature.parameters.values()]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(**values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _checked(parameter: inspect.Parameter) -> inspect.Parameter:
    annotation = parameter.annotation
    if get_origin(annotation) is not Annotated:
        return parameter
    kind, info = get_args(annotation)
    assert isinstance(info, ParameterInfo)
    base = _base(kind)
    info = copy(info)
    if info.envvar is None:
        info.show_envvar = False  # click 8.2.1 would say "(env var: 'None')" in errors
    if info.metavar is None and base in METAVARS:
        info.metavar = METAVARS[base]
    if "MODEL" in (info.metavar or ""):
        info.autocompletion = model_names
    if info.parser is None and base in (int, float):
        number = Number(base, info.min, info.max)
        info.parser, info.min, info.max = number.parse, None, None
        info.help = _with_range(info.help or "", number.range)
    elif info.parser is None and isinstance(base, type) and issubclass(base, Enum):
        choice = EnumChoice(base)
        info.parser = choice.parse
        info.metavar = info.metavar or "|".join(choice.names)
        info.autocompletion = choice.complete
    else:
        return parameter.replace(annotation=Annotated[kind, info])
    # What has a parser is text to typer; "| None" is whether it may be left out.
    return parameter.replace(annotation=Annotated[str | None if base is not kind else str, info])


def model_names(incomplete: str) -> list[str]:
    """Return the known models whose names begin like this: what a shell completes. Where there is
    none, it completes the names of files.
    """
    from octavo.loader.pull import KNOWN

    return [name for name in KNOWN if name.startswith(incomplete)]


def _base(kind: Any) -> Any:
    """int of int | None; a list is none of these."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (each for each in get_args(kind) if each is not types.NoneType)
    return kind


def _with_range(help: str, range: str) -> str:
    """The range behind the first sentence, which says what the number is."""
    if not range:
        return help
    sentence, stop, rest = help.partition(". ")
    return f"{sentence.rstrip('.')} ({range}).{' ' if stop else ''}{rest}"


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _cut(text: Any) -> str:
    shown = str(text)
    return repr(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…")
