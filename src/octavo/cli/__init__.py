"""The `octavo` command: one module a command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import codecs
import errno
import functools
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from octavo.cli import (
    bench,
    calibrate,
    chat,
    fidelity,
    generate,
    imatrix,
    inspect,
    list,
    plan,
    profile,
    pull,
    quantize,
    rm,
    search,
    serve,
    simulate,
    speculate,
    top,
    train,
    tune,
    verify,
)
from octavo.cli.console import tell
from octavo.cli.options import named_flags
from octavo.cli.page import Command, Group
from octavo.cli.values import checked
from octavo.machine.cpu import usable_cpus

app = typer.Typer(
    name="octavo",
    cls=Group,
    help="Serve language models from the CPU you have.",
    epilog="Start with: octavo chat smollm2, or octavo serve smollm2",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long option names, and rich takes 0.1 s to import
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(group: typer.Typer, module: ModuleType) -> None:
    # "\b" keeps click from joining the examples' lines.
    epilog = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in module.EXAMPLES)
    name = module.__name__.rpartition(".")[2].replace("_", "-")
    group.command(name, cls=Command, epilog=epilog)(_told(checked(module.command)))


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """The same command, which says so when Ctrl-C ends it, and no more."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        try:
            command(**values)
        except KeyboardInterrupt:
            # Behind the "^C" of a terminal, or what was written so far.
            print("\n" * sys.stderr.isatty() + "octavo: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return run


for _module in (
    *(
        serve,
        top,
        chat,
        generate,
        speculate,
        pull,
        list,
        rm,
        inspect,
        calibrate,
        profile,
        imatrix,
        quantize,
        fidelity,
        verify,
        tune,
    ),
    simulate,
):
    _add(app, _module)
for _room in (bench, plan, search, train):
    _group = typer.Typer(cls=Group, help=_room.HELP, no_args_is_help=True, rich_markup_mode=None)
    for _module in _room.COMMANDS:
        _add(_group, _module)
    app.add_typer(_group, name=_room.__name__.rpartition(".")[2])


def _version(wanted: bool) -> None:
    if wanted:
        from octavo import __version__

        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command. Whatever goes wrong is one line on standard error and exit code 1."""
    # Before numpy is imported: its BLAS would take all the machine's cores, whatever the quota.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(usable_cpus()[0]))
    # A terminal may not know what a model says. "surrogateescape", which is for paths that are not
    # UTF-8, gives their bytes back: only other encodings need more.
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and (
        out.errors == "strict"
        or (out.errors == "surrogateescape" and codecs.lookup(out.encoding).name != "utf-8")
    ):
        out.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="octavo")
    except Exception as error:
        if os.environ.get("OCTAVO_DEBUG") == "1":
            raise
        tell(_explain(error))
        sys.exit(1)


def _explain(error: Exception) -> str:
    # These have been imported by whatever raised one of them.
    from octavo.engine.config import SettingsError
    from octavo.loader.base import ChatTemplateError, CheckpointError
    from octavo.loader.pull import cache_dir
    from octavo.sampling.params import InvalidParameter
    from octavo.scheduler.request import AdmissionError

    text = " ".join(str(error).split())
    if isinstance(error, (SettingsError, InvalidParameter, AdmissionError)):
        return f"octavo: {named_flags(text)}"
    if isinstance(error, (CheckpointError, ChatTemplateError)) or type(error).__name__ in (
        "GenerationError",
        "VerificationError",
    ):
        return f"octavo: {text}"
    if isinstance(error, OSError) and error.strerror:
        # The output's, where that is redirected, or a file's.
        where = error.filename or ("a disk is full" if error.errno == errno.ENOSPC else "")
        advice = ""
        name = error.filename
        if isinstance(name, str) and Path(name).is_relative_to(cache_dir()):
            advice = " (OCTAVO_HOME moves what Octavo keeps)"
        return f"octavo: {where}: {error.strerror}{advice}".replace(": : ", ": ")
    if isinstance(error, MemoryError):
        return "octavo: out of memory (is there a limit on this process? see ulimit -v)"
    if isinstance(error, ImportError) and "nanobind_backend" in text:
        return f"octavo: {text}"  # it says what to install
    if isinstance(error, ImportError) and "_native" in text:
        return "octavo: the native module is not built here: run make native, or pip install ."
    return (
        f"octavo: internal error: {type(error).__name__}: {text} "
        "(OCTAVO_DEBUG=1 shows where; please report it)"
    )
