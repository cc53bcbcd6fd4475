"""A command's help page: its options by what they are about, in words, in 80 columns; and what is
said to the flags and commands of other servers.
"""

from __future__ import annotations

import difflib
from enum import Enum
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from octavo.cli.elsewhere import COMMANDS, MODEL, Given, adapted

_HYPHEN = "\ue000"  # in place of a hyphen: lines are not broken there


class Page:
    """Help in which no name is broken at a hyphen."""

    def get_help(self, ctx: Any) -> str:
        formatter = ctx.make_formatter()
        write_text, write_dl = formatter.write_text, formatter.write_dl
        formatter.write_text = lambda text: write_text(_unbroken(text))
        names = min(30, formatter.width * 2 // 5)  # columns
        formatter.write_dl = lambda rows: write_dl(
            [(name, _unbroken(is_)) for name, is_ in rows], names
        )
        self.format_help(ctx, formatter)  # type: ignore[attr-defined]
        text: str = formatter.getvalue()
        return text.rstrip("\n").replace(_HYPHEN, "-")


def _unbroken(text: str) -> str:
    return text.replace("-", _HYPHEN)


class Group(Page, TyperGroup):
    """Commands. Those of other servers are answered with what stands for them here."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name in COMMANDS and name not in self.commands:
            ctx.fail(f"No such command '{name}'. Here: {COMMANDS[name]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, each.get_short_help_str(1000)) for name, each in self.commands.items()]
            )


class Command(Page, TyperCommand):
    """A command whose page has a section for each group of options. Flags of other servers are
    answered with what stands for them here.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if ctx.resilient_parsing:  # a shell asks for completions: nothing is refused
            return super().parse_args(ctx, args)
        parameters: list[Any] = self.get_params(ctx)
        known = {
            flag: not parameter.is_flag
            for parameter in parameters
            if parameter.param_type_name == "option"
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        own: list[str] = []
        for word in adapted(args, known):
            if not isinstance(word, Given):
                own.append(word)
            elif word.flag is MODEL and word.value and _arguments(parameters) == ["MODEL"]:
                own.insert(0, word.value)
            elif word.value in word.flag.same:
                typer.echo(f"octavo: {word} changes nothing here: {word.flag.here}", err=True)
            else:
                here = word.flag.here
                if difflib.get_close_matches(word.name, known, n=1, cutoff=0.95):  # mistyped
                    own += [word.name, *([word.value] if word.value else [])]
                    continue
                if word.flag is MODEL and "MODEL" not in _arguments(parameters):
                    here = "--model" if "--model" in known else "no model is asked for"
                ctx.fail(f"No such option: {word.name}. Here: {here}")
        return super().parse_args(ctx, own)

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
            if getattr(parameter, "hidden", False):
                continue
            help = _help(parameter)
            if parameter.param_type_name == "argument":
                title, name = "Arguments", parameter.metavar or parameter.name.upper()
            else:
                title = getattr(parameter, "rich_help_panel", None) or "Options"
                name = _flags(parameter)
            if parameter.metavar == "MODEL" and _arguments(self.get_params(ctx)) == ["MODEL"]:
                help = f"{help}  Also: --model MODEL."
            sections.setdefault(title, []).append((name, help))
        for title, rows in sections.items():
            if not rows:
                continue
            with formatter.section(title):
                formatter.write_dl(rows)


def _arguments(parameters: list[Any]) -> list[str]:
    """Their names."""
    return [each.metavar for each in parameters if each.param_type_name == "argument"]


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
