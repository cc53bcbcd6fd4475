"""octavo top: a running server, live in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from octavo.cli.console import json_text

EXAMPLES = (
    "octavo top",
    "octavo top http://10.0.0.7:8000 --interval 5",
    "octavo top --once --json",
)

_PIPE_WIDTH = 120  # columns, where there is no terminal to fit


def command(
    url: Annotated[
        str, typer.Argument(help="The server's address.", metavar="URL")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The key to send.",
            envvar=["OCTAVO_API_KEY", "OPENAI_API_KEY"],
            metavar="TEXT",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.1, max=3600, metavar="X")
    ] = 1.0,
    limit: Annotated[
        int, typer.Option(help="Most requests to list.", min=0, max=1000, metavar="N")
    ] = 300,
    once: Annotated[
        bool, typer.Option("--once", help="Print one table; so it is without a terminal, too.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A line of JSON each interval; with --once, one.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Do not check certificates.")
    ] = False,
) -> None:
    """Watch a running server: requests, cache, batch, latencies.

    Keys: s sorts by another column, p pauses, q quits. Latencies are of the last minute; --once
    gives those since the server's start.
    """  # fmt: skip
    import asyncio
    import os

    from rich.console import Console

    from octavo.tools.top import live
    from octavo.tools.top.figures import ServerStats, trouble_as_json
    from octavo.tools.top.figures import as_json as facts
    from octavo.tools.top.source import Source, SourceError

    async def run() -> None:
        source = Source(url if "//" in url else f"http://{url}", api_key, limit, insecure=insecure)

        def show_json(figures: ServerStats) -> None:
            print(json_text(facts(figures, source.url)), flush=True)

        def miss_json(why: str) -> None:
            print(json_text(trouble_as_json(why, source.url)), flush=True)

        try:
            if as_json and not once:
                await live.tell(source, interval, show_json, miss_json)
            elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
                figures = await live.look(source, interval)
                if as_json:
                    show_json(figures)
                    return
                fits = sys.stdout.isatty() or "COLUMNS" in os.environ
                console = Console(width=None if fits else _PIPE_WIDTH)
                live.print_once(figures, console, source.url)
            else:
                await live.Screen(source, interval, Console()).run()
        finally:
            await source.close()

    try:
        asyncio.run(run())
    except SourceError as error:
        nobody = str(error).startswith("connection refused")
        advice = "; octavo serve MODEL starts a server" if nobody else ""
        typer.echo(f"octavo: {url}: {error}{advice}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except ValueError as error:  # no URL, no header
        raise typer.BadParameter(str(error)) from None
