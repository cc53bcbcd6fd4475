"""Settings, each declared once: a field of a config carries all there is to say of it.

Its default is the field's own. What it carries besides (`SettingInfo`) bounds its value (`check`)
and is its option of the command line (cli/options.py). A new setting is a field here, and a line
in the list of the options of its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import Any, NamedTuple


class SettingInfo(NamedTuple):
    help: str  # of its option; "": it has none
    # Bounds of a number, and what a text may be:
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""  # in refusals
    choices: Sequence[str] = ()
    # The option:
    name: str = ""  # if not the field's; "disable_…": a switch that turns the setting off
    flags: Sequence[str] = ()  # (): made of the name; a switch then has one to turn it off as well
    parse: str = ""  # what reads its text, of cli/options.py; "": its type says it
    keywords: Mapping[str, Any] = {}  # further ones of `typer.Option`


def setting(default: Any, help: str = "", **more: Any) -> Any:
    """Return a field of a dataclass. ``more``: fields of `SettingInfo`, and its ``keywords``. None
    is always allowed where the field's type allows it.
    """
    own = {name: more.pop(name) for name in SettingInfo._fields if name in more}
    if more and not help:
        raise TypeError(f"a setting without an option has no {', '.join(more)}")
    return field(default=default, metadata={"info": SettingInfo(help, **own, keywords=more)})


def setting_infos(config: Any) -> dict[str, SettingInfo]:
    """Return what the fields of a config, or of its class, carry, by name."""
    return {each.name: each.metadata["info"] for each in fields(config) if "info" in each.metadata}


def check(config: Any) -> None:
    """Raise `ValueError` naming the first setting that is out of its bounds."""
    for name, info in setting_infos(config).items():
        value = getattr(config, name)
        if value is None:
            continue
        if info.choices and value not in info.choices:
            if len(info.choices) == 2:
                raise ValueError(f"{name} is {value!r}, neither {' nor '.join(info.choices)}")
            raise ValueError(f"{name} is {value!r}, none of {', '.join(info.choices)}")
        # Not a number fails every comparison.
        inside = (
            (info.least is None or value >= info.least)
            and (info.above is None or value > info.above)
            and (info.most is None or value <= info.most)
            and (info.below is None or value < info.below)
        )
        if not inside:
            low = info.least if info.above is None else info.above
            if low is not None and info.most is not None:
                where = f"outside {low} to {info.most}"
            elif low is not None:
                where = f"below {low}" if info.above is None else f"not above {low}"
            else:
                where = f"not below {info.below}" if info.most is None else f"above {info.most}"
            raise ValueError(f"{name} is {value}{info.unit}, {where}")
