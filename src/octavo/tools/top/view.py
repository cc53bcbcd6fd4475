"""Figures as lines of text, for a terminal of any size or for a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from rich.text import Text

from octavo.engine.snapshot import PoolSnapshot
from octavo.scheduler.request import RequestSnapshot
from octavo.tools.top.figures import LatencyStats, ServerStats, Sort, sorted_requests

NAMES = {"ttft": "TTFT", "itl": "ITL", "e2e": "E2E", "queue": "queue"}
_STATE_STYLES = {"decode": "green", "prefill": "cyan", "waiting": "yellow", "paused": "magenta"}
_BARS = {True: "█▒░", False: "#=."}  # used, cached, free; whether the terminal has such characters
_LONGEST_BAR = 60
_WIDE = 120  # columns
_FEWEST_ROWS = 3  # of requests, before lines of the head give way


class Column(NamedTuple):
    """``keep``: how long it stays when there is little room; the highest goes last."""

    title: str
    width: int
    keep: int
    cell: Callable[[RequestSnapshot], str]
    align: Literal["<", ">"] = ">"
    style: Callable[[RequestSnapshot], str] = lambda row: ""
    most: int = 0  # it may grow so far


def _tokens_done(row: RequestSnapshot) -> str:
    if row.state == "decode":
        return count(row.prompt_tokens)
    return f"{count(row.prompt_tokens_done)}/{count(row.prompt_tokens)}"


def _kept(row: RequestSnapshot) -> str:
    return {None: "", True: "kept", False: "late"}[row.on_target]


COLUMNS = (
    Column("REQUEST", 11, 99, lambda row: row.id, "<", most=43),
    Column("CLIENT", 8, 60, lambda row: row.client, "<", most=20),
    Column("PRI", 3, 40, lambda row: str(row.priority), most=6),
    Column("N", 3, 10, lambda row: str(row.n)),
    Column("STATE", 7, 90, lambda row: row.state, "<", lambda row: _STATE_STYLES[row.state]),
    Column("PROMPT", 9, 80, _tokens_done),
    Column("CACHED", 6, 20, lambda row: count(row.cached_tokens)),
    Column("OUT", 6, 85, lambda row: count(row.output_tokens)),
    Column("MAX", 6, 15, lambda row: count(row.max_tokens)),
    Column("AGE", 6, 75, lambda row: span(row.age)),
    Column("QUEUED", 6, 25, lambda row: span(row.queue_time)),
    Column("TTFT", 6, 65, lambda row: span(row.ttft)),
    Column("TOK/S", 6, 70, lambda row: rate(row.tokens_per_second)),
    Column("PRE", 3, 30, lambda row: str(row.preemptions or "")),
    Column("SLO", 4, 50, _kept, "<", lambda row: "red" if row.on_target is False else "green"),
)


# --- numbers -------------------------------------------------------------------------------------


def count(number: float) -> str:
    """At most five characters: 9999, 12.3k, 123k, 4.5M."""
    if number < 10_000:
        return f"{number:.0f}"
    for scale, letter in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
        if number < 999.5 * scale:
            return f"{number / scale:.{1 if number < 99.95 * scale else 0}f}{letter}"
    return f"{number:.0e}"


def rate(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:.1f}" if number < 99.95 else count(number)


def span(seconds: float | None) -> str:
    """At most six characters: 8ms, 1.25s, 59.9s, 3m07, 2h05, 4d11."""
    if seconds is None:
        return ""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f}s"
    for long, short, between, limit in (
        (60, 1, "m", 3600),
        (3600, 60, "h", 86400),
        (86400, 3600, "d", 100 * 86400),
    ):
        if seconds < limit:
            return f"{int(seconds) // long}{between}{int(seconds) % long // short:02d}"
    return f"{seconds / 86400:.0f}d"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.{1 if 0 < share < 0.0995 else 0}f} %"


def plain(text: str) -> str:
    """What comes from elsewhere, without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


# --- the screen ----------------------------------------------------------------------------------


class ViewState(NamedTuple):
    """What the user has chosen, and what is wrong: when the server was last heard, and why not."""

    url: str
    sort: Sort = "order"
    paused: bool = False
    trouble: str = ""
    live: bool = True  # there are keys to press
    unicode: bool = True


def screen(
    figures: ServerStats | None, state: ViewState, width: int, height: int | None
) -> list[Text]:
    """Lines of at most ``width`` cells; ``height`` None: as many as there are requests."""
    if figures is None:
        return _fit(
            [_title(None, state, width), Text(plain(state.trouble), "bold red")], width, height
        )
    head, foot = _head(figures, state, width), _foot(figures, state, width)
    rows = sorted_requests(figures.engine.requests, state.sort)
    if height is None:
        table = _table(figures, rows, state, width)
        return _fit([*head, Text(), *table, foot], width, None)
    while len(head) > 1 and len(head) + 3 + _FEWEST_ROWS > height:
        head.pop()
    room = height - len(head) - 3  # an empty line, the titles and the foot
    lines = [*head, Text(), *_table(figures, rows, state, width, max(0, room))]
    lines += [Text()] * (height - len(lines) - 1) + [foot]
    return _fit(lines, width, height)


def _fit(lines: list[Text], width: int, height: int | None) -> list[Text]:
    for line in lines:
        line.no_wrap = True
        line.truncate(width)
    return lines[:height]


def _title(figures: ServerStats | None, state: ViewState, width: int) -> Text:
    line = Text.assemble(("octavo top", "bold"))
    if figures is not None:
        line.append(f"  {plain(figures.model)}")
    line.append(f" at {plain(state.url)}")
    if figures is not None:
        line.append(f", up {span(figures.uptime)}", "dim")
        if figures.draining:
            line.append(" draining", "bold yellow")
    if state.paused:
        line.append(" paused", "bold yellow")
    clock = time.strftime("%H:%M:%S", time.localtime(None if figures is None else figures.at))
    if width - line.cell_len > len(clock):
        line.append(" " * (width - line.cell_len - len(clock)))
        line.append(clock, "dim")
    return line


def _head(figures: ServerStats, state: ViewState, width: int) -> list[Text]:
    engine, wide = figures.engine, width >= _WIDE
    rejected = sum(figures.rejected.values())
    reasons = ", ".join(f"{n} {plain(name)}" for name, n in figures.rejected.items() if n)
    lines = [
        _title(figures, state, width),
        _line(
            "requests",
            f"{engine.running} running of {engine.max_num_seqs}",
            f"{engine.waiting} waiting"
            + (f" ({count(engine.waiting_tokens)} tokens)" if engine.waiting else ""),
            f"{count(sum(figures.ended.values()))} ended",
            f"{count(figures.preemptions)} preempted" if figures.preemptions else "",
            f"{count(rejected)} rejected" + (f" ({reasons})" if width >= _WIDE and reasons else ""),
        ),
        _pool(engine.pool, figures.hit_rate, state, width),
        _line("batch", *_batch(figures), wide=wide),
        _line("p50/p99", *_latencies(figures), wide=wide),
    ]
    if state.trouble:
        lines.insert(1, Text(plain(state.trouble), "bold red"))
    if promises := list(_promises(figures)):
        lines.append(_line("promises", *promises))
    return lines


def _line(name: str, *parts: str, wide: bool = True) -> Text:
    between = "   " if wide else "  "
    return Text.assemble((f"{name:<10}", "bold"), between.join(part for part in parts if part))


def _batch(figures: ServerStats) -> Iterator[str]:
    batch = figures.batch
    predicted = batch.predicted_seconds
    yield f"{batch.tokens:.0f} tokens in {1e3 * batch.seconds:.1f} ms" + (
        f" ({1e3 * predicted:.1f} predicted)" if predicted is not None else ""
    )
    yield f"in {rate(batch.prompt_tokens_per_second)}/s"
    yield f"out {rate(batch.output_tokens_per_second)}/s"
    yield f"busy {percent(batch.busy)}"


def _latencies(figures: ServerStats) -> Iterator[str]:
    for name, title in NAMES.items():
        yield f"{title} {_pair(figures.latency[name])}"


def _pair(latency: LatencyStats) -> str:
    if latency.p50 is None or latency.p99 is None:
        return "-"
    if latency.p50_bound and (latency.p50, latency.p50_bound) == (latency.p99, latency.p99_bound):
        return f"{latency.p50_bound}{span(latency.p50)}"
    return f"{latency.p50_bound}{span(latency.p50)}/{latency.p99_bound}{span(latency.p99)}"


def _window(figures: ServerStats) -> str:
    if figures.window is None:
        return "latencies since the server's start"
    return f"latencies of the last {figures.window:.0f} s"


def _promises(figures: ServerStats) -> Iterator[str]:
    """Yield what is known of latency promises, where there are any, and of drafters."""
    attained = figures.slo_attainment
    if attained is not None and (
        attained < 1 or any(row.on_target is not None for row in figures.engine.requests)
    ):
        yield f"{percent(attained)} kept"
        yield f"goodput {rate(figures.goodput)} requests/s"
    if figures.acceptance is not None:
        yield f"{percent(figures.acceptance)} of drafts accepted"


def _pool(pool: PoolSnapshot, hit_rate: float | None, state: ViewState, width: int) -> Text:
    line = _line("pool", "")
    used, cached = pool.used / pool.blocks, pool.cached / pool.blocks
    facts = "   ".join(
        (
            f"{percent(used)} used",
            f"{percent(cached)} cached",
            f"{percent(pool.free / pool.blocks)} free",
            f"waste {percent(pool.waste)}",
            f"hits {percent(hit_rate)}",
        )
    )
    if width >= _WIDE:
        facts += f"   of {count(pool.blocks)} blocks of {pool.block_size}"
    room = min(_LONGEST_BAR, width - line.cell_len - len(facts) - 3)
    if room >= 8:
        cells = [math.ceil(used * room), 0]
        cells[1] = min(room - cells[0], round(cached * room))
        for cell, number, style in zip(
            _BARS[state.unicode], (*cells, room - sum(cells)), ("green", "cyan", "dim"), strict=True
        ):
            line.append(cell * number, style)
        line.append("   ")
    line.append(facts)
    return line


def _table(
    figures: ServerStats,
    rows: list[RequestSnapshot],
    state: ViewState,
    width: int,
    room: int | None = None,
) -> list[Text]:
    """Titles, then a line a request, then how many more there are."""
    columns = _columns(width)
    titles = " ".join(f"{column.title:{column.align}{column.width}}" for column in columns)
    lines = [Text(f"{titles:<{width}}", "reverse")]
    unlisted = figures.engine.unlisted
    shown = len(rows)
    if room is not None and len(rows) + bool(unlisted) > room:
        shown = max(0, room - 1)
    lines += [_row(columns, row) for row in rows[:shown]]
    if room != 0 and (more := len(rows) - shown + unlisted):
        lines.append(Text(f"… and {more:,} more" if state.unicode else f"+ {more:,} more", "dim"))
    return lines


def _columns(width: int) -> list[Column]:
    """Those there is room for; what is left goes to those that may grow."""
    columns = list(COLUMNS)

    def missing() -> int:
        return sum(column.width + 1 for column in columns) - 1 - width

    while missing() > 0 and len(columns) > 1:
        columns.remove(min(columns, key=lambda column: column.keep))
    left = -missing()
    for index, column in enumerate(columns):
        if (more := min(left, column.most - column.width)) > 0:
            columns[index] = column._replace(width=column.width + more)
            left -= more
    return columns


def _row(columns: list[Column], row: RequestSnapshot) -> Text:
    line = Text()
    for place, column in enumerate(columns):
        cell = plain(column.cell(row))
        if column.title == "REQUEST":
            cell = _short_id(cell, column.width)
        elif len(cell) > column.width:
            cell = cell[: column.width]
        line.append(" " if place else "")
        line.append(f"{cell:{column.align}{column.width}}", column.style(row))
    return line


def _short_id(name: str, width: int) -> str:
    """What an id begins with is the same for all, so that goes first."""
    if len(name) > width:
        name = name.removeprefix("chatcmpl-").removeprefix("cmpl-")
    return name[:width]


def _foot(figures: ServerStats, state: ViewState, width: int) -> Text:
    if not state.live:
        return Text(_window(figures), "dim")
    line = Text()
    for key, does in (
        ("q", "quit"), ("s", f"sort: {state.sort}"), ("p", "go on" if state.paused else "pause"),
    ):  # fmt: skip
        line.append(key, "bold")
        line.append(f" {does}   ")
    window = _window(figures)
    line.append(" " * max(0, width - line.cell_len - len(window)))
    line.append(window, "dim")
    return line
