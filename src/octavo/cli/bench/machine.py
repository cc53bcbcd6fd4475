"""octavo bench machine: what this machine can do at best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import json_text, on_stderr
from octavo.cli.fold import show_report
from octavo.machine.memory import as_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.machine.limits import Limits, Rate

    Rows = Sequence[tuple[str, tuple[Rate, ...]]]

EXAMPLES = (
    "octavo bench machine",
    "octavo bench machine --threads 4 --json",
)


def command(
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            metavar="N",
            help="Most threads.",
            show_default="one per core this process may use",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="All threads only, in two seconds; nothing is stored.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as one JSON object, in units a second.")
    ] = False,
) -> None:
    """Measure this machine's limits.

    Arithmetic, reading memory, the thread pool. Takes some ten seconds and is stored beside the
    model cache: every share of a limit that Octavo shows is of these. Run it on an otherwise idle
    machine.
    """
    from octavo.machine.cpu import usable_cpus
    from octavo.machine.limits import Limits

    with on_stderr() as progress:
        limits = Limits.measure(threads, quick=quick, progress=progress)
    try:
        show_report(
            json_text(limits.as_dict(), indent=2) if as_json else as_text(limits), as_json=as_json
        )
    finally:  # also when nobody reads on
        if not quick and threads in (None, usable_cpus()[0]):
            typer.echo(f"stored in {limits.save()}", err=True)


def as_text(limits: Limits) -> str:
    """The same for people."""

    lines = [f"{limits.cpu}, {limits.cores} cores, {limits.date}", ""]

    def table(title: str, rows: Rows, scale: float, unit: str) -> None:
        lines.append(f"{title:<26}{'threads':>8}{'median':>10}{'best':>10}")
        for name, rates in rows:
            for rate in rates:
                lines.append(
                    f"  {name if rate is rates[0] else '':<24}{rate.threads:>8}"
                    f"{rate.median * scale:>10,.1f}{rate.best * scale:>10,.1f} {unit:<7} {rate.how}"
                )
        lines.append("")

    arithmetic = [("int8", limits.int8), ("bf16", limits.bf16), ("fp32", limits.fp32)]
    table("arithmetic", arithmetic, 1e-9, "Gop/s")
    reads = [(f"{as_size(read.bytes)} ({read.level})", (read.rate,)) for read in limits.read]
    table("reading, over and over", reads, 1e-9, "GB/s")
    table("thread pool", [("from job to job", limits.barrier)], 1e9, "ns")
    if not limits.bf16:
        lines.insert(-1, "This CPU has no bf16 arithmetic of its own.")
    lines.append("The median is the limit. A multiply-add is two operations; 1 GB is 10^9 bytes.")
    return "\n".join(lines)
