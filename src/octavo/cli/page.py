"""A command's help page: its options by what they are about, in words, in 80 columns."""

from __future__ import annotations

from enum import Enum
from typing import Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command whose page has a section for each group of options."""

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        arguments = [
            _argument(parameter)
            for parameter in self.get_params(ctx)
            if parameter.param_type_name == "argument"
        ]
        return ["[OPTIONS]", *arguments]

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "argument":
                title, name = "Arguments", parameter.metavar or parameter.name.upper()
            else:
                title = getattr(parameter, "rich_help_panel", None) or "Options"
                name = _flags(parameter)
            sections.setdefault(title, []).append((name, _help(parameter)))
        for title, rows in sections.items():
            if not rows:
                continue
            with formatter.section(title):
                formatter.write_dl(rows)


def _argument(parameter: Any) -> str:
    """MODEL, [URL], PROMPT..., as the usage line has them."""
    name = parameter.metavar or parameter.name.upper()
    if not parameter.required and not name.startswith("["):
        name = f"[{name}]"
    return f"{name}..." if parameter.nargs != 1 else name


def _flags(parameter: Any) -> str:
    flags = sorted(parameter.opts, key=lambda flag: flag.startswith("--"))
    if parameter.secondary_opts:
        return f"{flags[0]} / {parameter.secondary_opts[0]}"
    names = ", ".join(flags)
    return names if parameter.is_flag else f"{names} {parameter.metavar or 'TEXT'}"


def _help(parameter: Any) -> str:
    """What it is, then what holds when it is left out."""
    facts = []
    if parameter.envvar and getattr(parameter, "show_envvar", False):
        names = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar
        facts.append(f"env var: {', '.join(names)}")
    if shown := _default(parameter):
        facts.append(f"default: {shown}")
    if parameter.required:
        facts.append("required")
    help = parameter.help or ""
    return f"{help}  [{'; '.join(facts)}]" if facts else help


def _default(parameter: Any) -> str:
    default, shown = parameter.default, parameter.show_default
    if isinstance(shown, str):
        return shown
    if not shown or default is None or default == [] or callable(default):
        return ""
    if isinstance(default, bool):
        return _switch(default, parameter.opts[0], *parameter.secondary_opts)
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, list | tuple):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _switch(default: bool, on: str, off: str = "") -> str:
    """The one of two flags that is so anyway; on and off where the names say no more."""
    if off == f"--no-{on[2:]}":
        return "on" if default else "off"
    return (on if default else off)[2:] if off else ""
