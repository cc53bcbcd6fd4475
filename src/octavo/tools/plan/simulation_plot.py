"""A simulation over time as a picture: latencies, queue and running sequences, cache, tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _GREEN, _RED, _GREY, _GRID = (
    "#1f77b4", "#e07b00", "#2a9d3a", "#c23b3b", "#555555", "#e4e4e4",
)  # fmt: skip


def draw(result: Mapping[str, Any], path: Path) -> None:
    """``result`` as `report.figures` has it; the file's suffix says what kind it is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    over = result["over_time"]
    times = np.array(over["time"])
    width = times[0]
    centres = times - width / 2
    unit, title = (60.0, "minutes") if times[-1] > 600 else (1.0, "seconds")
    x = centres / unit
    figure, panels = plt.subplots(5, 1, figsize=(11, 12), layout="constrained", sharex=True)
    for axes in panels:
        axes.grid(True, which="major", color=_GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.margins(x=0)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)

    ttft, tpot, sequences, cache, tokens = panels
    for axes, name in ((ttft, "ttft"), (tpot, "tpot")):
        for percentile, color in ((50, _BLUE), (99, _RED)):
            _line(axes, x, over[f"{name}_ms_p{percentile}"], color, f"p{percentile}")
        if (limit := result["slo"].get(f"{name}_ms")) is not None:
            axes.axhline(
                limit, color=_GREY, linestyle="--", linewidth=1, label=f"limit {limit:g} ms"
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    came = "are sent" if result["saturation"]["held"] else "arrive"
    _title(ttft, f"time to first token, ms, of requests that {came} then")
    _title(tpot, "time per output token, ms, of the same")

    _line(sequences, x, over["running"], _BLUE, "running")
    _line(sequences, x, over["waiting"], _RED, "in the queue")
    most = result["settings"]["max_num_seqs"]
    if result["running"]["max"] > most / 2:
        sequences.axhline(most, color=_GREY, linestyle="--", linewidth=1, label=f"limit {most}")
    sequences.set_ylim(bottom=0)
    _title(sequences, "sequences")

    used = 100 * np.array(over["kv_usage"])
    cache.fill_between(x, used, step="mid", color=_BLUE, alpha=0.25, linewidth=0)
    _line(cache, x, used, _BLUE, "in use")
    unfilled = used * np.array(over["kv_waste"])
    if result["kv_waste"] > 0.05:
        cache.fill_between(x, used - unfilled, used, step="mid", color=_RED, alpha=0.4,
                           linewidth=0, label="of it allocated, not filled")  # fmt: skip
    cache.set_ylim(0, max(5.0, 1.08 * float(used.max(initial=0))))
    _title(cache, "KV cache, % of blocks")

    _line(tokens, x, over["output_throughput"], _GREEN, "output tokens/s")
    computed = np.array(over["computed_throughput"])
    right = tokens.twinx()
    _line(right, x, computed, _ORANGE, "tokens/s through the model (right)")
    right.spines["top"].set_visible(False)
    for axes in (tokens, right):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _title(tokens, "throughput")
    tokens.set_xlabel(f"{title} from the first arrival")
    handles = [line for axes in (tokens, right) for line in axes.get_legend_handles_labels()[0]]
    tokens.legend(handles=handles, **_LEGEND)
    for axes in panels[:-1]:
        if last_arrival_inside(result):
            axes.axvline(result["last_arrival"] / unit, color=_GREY, linestyle=":", linewidth=1)
        axes.legend(**_LEGEND)
    if last_arrival_inside(result):
        tokens.axvline(result["last_arrival"] / unit, color=_GREY, linestyle=":", linewidth=1)
        ttft.annotate(
            "last arrival", (result["last_arrival"] / unit, 1), (4, -2),
            xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="left", va="top", fontsize=8.5, color=_GREY,
        )  # fmt: skip
    verdict = "BEYOND SATURATION" if result["saturated"] else "not saturated"
    figure.suptitle(
        f"{result['model']} ({result['format']}) on {result['device']}: "
        f"{result['requests']:,} requests, {result['output_throughput']:,.0f} output tokens/s, "
        f"{100 * result['good'] / max(result['requests'], 1):.0f} % good, {verdict}",
        fontsize=11,
    )
    plt.rcParams["svg.hashsalt"] = "octavo"  # the same file for the same figures
    figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


_LEGEND: dict[str, Any] = {
    "loc": "lower right", "bbox_to_anchor": (1, 0.98), "edgecolor": "none", "fontsize": 9,
    "ncols": 3,
}  # fmt: skip


def last_arrival_inside(result: Mapping[str, Any]) -> bool:
    """Whether a good part of the time comes after the last arrival."""
    return bool(result["duration"] - result["last_arrival"] > 0.02 * result["duration"])


def _line(axes: Axes, x: Any, values: Any, color: str, label: str) -> None:
    drawn = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    axes.plot(x, drawn, color=color, linewidth=1.5, label=label, drawstyle="steps-mid")


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10)
