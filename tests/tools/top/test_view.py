"""What stands where on the screen, read back from its lines."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import request, sample

from octavo.scheduler.request import RequestSnapshot
from octavo.tools.top.figures import History, ServerStats
from octavo.tools.top.view import COLUMNS, ViewState, count, percent, rate, screen, span

URL = "http://127.0.0.1:8000"
ROWS = [
    request(
        "chatcmpl-0123456789abcdef0123456789abcdef",
        client="ann",
        priority=-2,
        prompt_tokens=20_000,
        output_tokens=130,
        age=3725.0,
        ttft=0.418,
        tokens_per_second=24.61,
        preemptions=2,
        on_target=True,
    ),
    request(
        "cmpl-fedcba9876543210fedcba9876543210-0",
        client="batch-jobs",
        state="prefill",
        prompt_tokens=2000,
        prompt_tokens_done=512,
        cached_tokens=256,
        output_tokens=0,
        age=12.34,
        ttft=None,
        tokens_per_second=None,
        on_target=False,
    ),
    request(
        "cmpl-w-0",
        state="waiting",
        prompt_tokens=77,
        prompt_tokens_done=0,
        output_tokens=0,
        age=0.05,
        queue_time=None,
        ttft=None,
        tokens_per_second=None,
    ),
]


def figures(rows: list[RequestSnapshot] = ROWS, **more: Any) -> ServerStats:
    history = History()
    history.add(sample(0))
    facts: dict[str, Any] = {
        "waiting": 1,
        "waiting_tokens": 77,
        "steps": 100,
        "computed": 2100,
        "busy": 3.6,
        "prompt_tokens": 840,
        "generation_tokens": 4936,
        "queries": 200,
        "hits": 90,
        "predicted": (3.0, 100.0),
        "actual": (3.6, 100.0),
        "ttft": {0.001: 0.0, 0.1: 90.0, 2.0: 100.0, math.inf: 100.0},
        "itl": {0.01: 5.0, math.inf: 5.0},
        "ended": {"stop": 800.0, "length": 12.0},
        "rejected": {"capacity": 3.0, "quota": 1.0},
    }
    history.add(sample(4, requests=rows, **(facts | more)))
    return history.figures()


def lines(
    width: int, height: int | None = 24, shown: ServerStats | None = None, **state: Any
) -> list[str]:
    found = screen(shown or figures(), ViewState(URL, **state), width, height)
    assert all(line.cell_len <= width for line in found)
    return [line.plain for line in found]


def cells(found: list[str], width: int) -> list[dict[str, str]]:
    """Rows by title, cut where the titles stand."""
    at = next(index for index, line in enumerate(found) if line.startswith("REQUEST"))
    titles = [column for column in COLUMNS if re.search(rf"(?<!\S){column.title}(?!\S)", found[at])]
    edges: list[tuple[str, int, int]] = []
    start = 0
    for column in titles:
        place = re.compile(rf"(?<!\S){column.title}(?!\S)").search(found[at], start)
        edges.append((column.title, place.start(), place.end()))
        start = place.end()
    rows = []
    for line in found[at + 1 :]:
        if not line.strip() or line.startswith(("…", "+", "q quit", "latencies")):
            break
        row = {}
        for index, (title, begin, end) in enumerate(edges):
            if COLUMNS[[c.title for c in COLUMNS].index(title)].align == "<":
                upto = edges[index + 1][1] if index + 1 < len(edges) else width
                following = [c for c in COLUMNS if index + 1 < len(edges)
                             and c.title == edges[index + 1][0]]  # fmt: skip
                if following and following[0].align == ">":
                    upto = edges[index + 1][2] - max(following[0].width, following[0].most and 3)
                row[title] = line[begin:upto].strip()
            else:
                begin = edges[index - 1][2] if index else 0
                row[title] = line[:end][begin:].split(" ")[-1]
        rows.append(row)
    return rows


def test_the_head() -> None:
    head = lines(100)
    assert head[0].startswith(f"octavo top  smollm2 at {URL}, up 1m44")
    assert re.search(r"\d\d:\d\d:\d\d$", head[0])
    assert head[1] == (
        "requests  2 running of 256   1 waiting (77 tokens)   812 ended   4 rejected"
    )
    assert head[2].startswith("pool      █")
    assert head[2].endswith("50 % used   30 % cached   20 % free   waste 2.1 %   hits 45 %")
    bar = head[2].split()[1]
    assert (bar.count("█"), bar.count("▒")) == (math.ceil(0.5 * len(bar)), round(0.3 * len(bar)))
    assert head[3] == (
        "batch     21 tokens in 36.0 ms (30.0 predicted)  in 210/s  out 1234/s  busy 90 %"
    )
    # TTFT: 50 of the 100 are at 50/90 of 1 … 100 ms; the 99th at 9/10 of 0.1 … 2 s.
    assert head[4] == "p50/p99   TTFT 56ms/1.81s  ITL <10ms  E2E -  queue -"
    assert head[5] == ""


def test_a_wide_terminal_says_more() -> None:
    head = lines(160)
    assert "4 rejected (3 capacity, 1 quota)" in head[1]
    assert head[2].endswith("of 100 blocks of 16")


def test_every_figure_is_in_its_column() -> None:
    first, second, third = cells(lines(160), 160)
    assert first == {
        "REQUEST": ROWS[0].id,
        "CLIENT": "ann",
        "PRI": "-2",
        "N": "1",
        "STATE": "decode",
        "PROMPT": "20.0k",
        "CACHED": "0",
        "OUT": "130",
        "MAX": "400",
        "AGE": "1h02",
        "QUEUED": "10ms",
        "TTFT": "418ms",
        "TOK/S": "24.6",
        "PRE": "2",
        "SLO": "kept",
    }
    assert second | {"REQUEST": ""} == {
        "REQUEST": "",
        "CLIENT": "batch-jobs",
        "PRI": "0",
        "N": "1",
        "STATE": "prefill",
        "PROMPT": "512/2000",
        "CACHED": "256",
        "OUT": "0",
        "MAX": "400",
        "AGE": "12.3s",
        "QUEUED": "10ms",
        "TTFT": "",
        "TOK/S": "",
        "PRE": "",
        "SLO": "late",
    }
    assert (third["STATE"], third["PROMPT"], third["AGE"]) == ("waiting", "0/77", "50ms")
    assert (third["QUEUED"], third["SLO"]) == ("", "")


def test_eighty_columns() -> None:
    found = lines(80)
    first, second, _ = cells(found, 80)
    assert first["REQUEST"] == "0123456789ab"[: len(first["REQUEST"])]  # what differs
    assert (first["STATE"], first["OUT"], first["AGE"]) == ("decode", "130", "1h02")
    assert (first["TTFT"], first["TOK/S"], first["SLO"]) == ("418ms", "24.6", "kept")
    assert second["PROMPT"] == "512/2000"
    assert "CACHED" not in first
    assert "busy 90 %" in found[3]
    assert found[4].endswith("queue -")


def test_the_foot_tells_keys_and_window() -> None:
    foot = lines(80, sort="tok/s")[-1]
    assert re.fullmatch(r"q quit   s sort: tok/s   p pause +latencies of the last 4 s", foot)
    assert len(foot) == 80
    assert "p go on" in lines(80, paused=True)[-1]
    assert "paused" in lines(80, paused=True)[0]


def test_what_is_not_shown_is_counted() -> None:
    rows = [request(f"cmpl-{index}-0") for index in range(300)]
    found = lines(80, 24, figures(rows, unlisted=9700))
    table = cells(found, 80)
    assert found[-2] == f"… and {10_000 - len(table):,} more"
    assert len(table) == 24 - 5 - 1 - 1 - 1 - 1  # head, empty, titles, more, foot
    everything = lines(80, None, figures(rows, unlisted=9700), live=False)
    assert everything[-2] == "… and 9,700 more"
    assert everything[-1] == "latencies of the last 4 s"
    assert len(cells(everything, 80)) == 300


def test_sorted_rows() -> None:
    assert [row["STATE"] for row in cells(lines(160, sort="age"), 160)] == [
        "decode",
        "prefill",
        "waiting",
    ]
    assert cells(lines(160, sort="client"), 160)[-1]["STATE"] == "waiting"


def test_promises_and_drafts_have_a_line_where_there_are_any() -> None:
    rows = [request("a")]
    plain = lines(100, shown=figures(rows, gauges={"slo_attainment_perc": 1.0}))
    assert not any(line.startswith("promises") for line in plain)
    gauges = {"slo_attainment_perc": 0.96, "goodput_requests_per_second": 3.1}
    [line] = [
        line
        for line in lines(100, shown=figures(rows, gauges=gauges, drafts=100, accepted=71))
        if line.startswith("promises")
    ]
    assert line == "promises  96 % kept   goodput 3.1 requests/s   71 % of drafts accepted"


def test_trouble() -> None:
    assert lines(80, trouble="no answer for 3.00s: refused")[1] == "no answer for 3.00s: refused"
    nothing = screen(None, ViewState(URL, trouble="no answer for 1.00s: refused"), 80, 24)
    assert [line.plain for line in nothing][1] == "no answer for 1.00s: refused"
    assert "draining" in lines(100, shown=figures(draining=True))[0]


def test_without_unicode() -> None:
    found = lines(100, shown=figures(unlisted=5), unicode=False)
    assert "=" in found[2]
    assert "+ 5 more" in found
    assert all(line.isascii() for line in found)


def test_what_comes_from_elsewhere_cannot_drive_the_terminal() -> None:
    hostile = [request("cmpl-\x1b[2J\x07", client="a\x1b]0;x\x07\n")]
    for line in lines(160, shown=figures(hostile), trouble="\x1b[31m\r\n"):
        assert line.isprintable()


@given(st.integers(1, 220), st.integers(1, 60), st.integers(0, 40))
def test_every_size(width: int, height: int, number: int) -> None:
    rows = [request(f"cmpl-{index}", client="c" * index) for index in range(number)]
    found = lines(width, height, figures(rows, unlisted=3))
    assert len(found) <= height
    assert found[0] == "octavo top"[:width] or width > 10


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (span(None), ""),
        (span(0.0004), "0ms"),
        (span(0.418), "418ms"),
        (span(0.99951), "1.00s"),
        (span(9.996), "10.0s"),
        (span(59.94), "59.9s"),
        (span(59.96), "0m59"),
        (span(187), "3m07"),
        (span(3599.9), "59m59"),
        (span(7500), "2h05"),
        (span(400_000), "4d15"),
        (span(1e9), "11574d"),
        (count(9999), "9999"),
        (count(12_345), "12.3k"),
        (count(99_960), "100k"),
        (count(4_500_000), "4.5M"),
        (rate(None), ""),
        (rate(24.61), "24.6"),
        (rate(1234), "1234"),
        (percent(None), "-"),
        (percent(0.0), "0 %"),
        (percent(0.021), "2.1 %"),
        (percent(0.996), "100 %"),
    ],
)
def test_numbers(shown: str, text: str) -> None:
    assert shown == text


@given(st.floats(0, 1e7))
def test_numbers_fit_their_columns(number: float) -> None:
    assert len(span(number)) <= 6
    assert len(count(number)) <= 5
    assert len(rate(number)) <= 6
