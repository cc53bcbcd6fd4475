"""A life that went wrong, made short enough to be read, and done again."""

import time
from collections.abc import Sequence
from typing import Any

from hypothesis import Phase, settings

from engine.world import Setting, World

Action = tuple[str, tuple[Any, ...], dict[str, Any]]


def play(setting: Setting, recipe: Sequence[Action]) -> BaseException | None:
    """Do it all again; what went wrong, if something did."""
    world = World(setting)
    try:
        for name, args, kwargs in recipe:
            getattr(world, name)(*args, **kwargs)
        world.finish()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return error
    return None


def kind(failure: BaseException | None) -> tuple[type, int]:
    """What two failures have in common that are the same: their type and where they came from."""
    trace = failure.__traceback__ if failure else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return type(failure), trace.tb_lineno if trace else 0


def shrunk(setting: Setting, recipe: list[Action], seconds: float = 60.0) -> list[Action]:
    """Without the actions that make no difference, as far as that is found in the time."""
    if Phase.shrink not in settings().phases:
        return recipe
    failure = play(setting, recipe)
    if failure is None:
        return recipe  # it does not happen again: all that is known is how it happened
    until = time.monotonic() + seconds
    size = len(recipe) // 2
    while size and time.monotonic() < until:
        start = 0
        while start < len(recipe) and time.monotonic() < until:
            rest = recipe[:start] + recipe[start + size :]
            if kind(play(setting, rest)) == kind(failure):
                recipe = rest
            else:
                start += size
        size //= 2
    return recipe


def told(setting: Setting, recipe: Sequence[Action]) -> str:
    """As Python that does it again."""
    actions = ",\n    ".join(repr(each) for each in recipe)
    return f"play({setting!r}, [\n    {actions},\n])"
