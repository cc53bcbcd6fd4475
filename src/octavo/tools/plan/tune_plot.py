"""A search as a picture: throughput against latency, and the best setting under other loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.tools.plan.slo import Slo
from octavo.tools.plan.tune import Tuned
from octavo.tools.plan.tune_trial import TuneTrial, kept

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LIMIT, _BEST, _GREY, _GRID = "#c23b3b", "#1f77b4", "#9a9a9a", "#e4e4e4"


def draw(
    tuned: Tuned,
    speeds: Sequence[tuple[float, TuneTrial]],
    rate: float,
    slo: Slo,
    title: str,
    path: Path,
) -> None:
    """A panel for each latency of the SLO: its 99th percentile over output tokens a second, a point
    a setting, those that no other beats joined; and the best setting under the load at other
    speeds. Last: the share of good requests over the rate at
    which they come, with the best setting; ``rate``: at speed 1. The file's suffix says what kind
    it is.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    names = list(slo.limits)
    count = len(names) + bool(speeds)
    figure, grid = plt.subplots(
        1, count, figsize=(5 * count, 4.8), layout="constrained", squeeze=False
    )
    panels = grid[0]
    for axes in panels:
        axes.grid(True, which="major", color=_GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes, name in zip(panels, names, strict=False):
        served = [trial for trial in tuned.trials if trial.figures.completed]
        points = {
            id(trial): (trial.figures.output_throughput, trial.figures.latencies[name].p99)
            for trial in served
        }
        for rounds, label in ((False, "a setting"), (True, "a setting that rounds further")):
            some = [points[id(t)] for t in served if bool(t.choice.rounding) is rounds]
            if some:
                axes.plot(
                    *zip(*some, strict=True), "o", color=_GREY, markersize=5,
                    markerfacecolor="none" if rounds else _GREY, label=label,
                )  # fmt: skip
        # Joined is what is best in these two; a setting may be on the frontier for another latency.
        edge: list[tuple[float, float]] = []
        for point in sorted(points.values(), key=lambda point: (-point[0], point[1])):
            if not edge or point[1] < edge[-1][1]:
                edge.append(point)
        if edge:
            axes.plot(
                *zip(*edge, strict=True), "o-", color="#222222", markersize=5, linewidth=1.2,
                label="frontier",
            )  # fmt: skip
        slower = [
            (other.figures.output_throughput, other.figures.latencies[name].p99)
            for _, other in speeds
            if other.figures.completed
        ]
        if slower:
            axes.plot(
                *zip(*slower, strict=True), ".-", color=_BEST, markersize=5, linewidth=0.8,
                alpha=0.6, label="best, at other loads",
            )  # fmt: skip
        if tuned.default is not None and id(tuned.default) in points:
            axes.plot(
                *points[id(tuned.default)], "D", color="#e07b00", markersize=7,
                label="engine's defaults",
            )  # fmt: skip
        if id(tuned.best) in points:
            axes.plot(*points[id(tuned.best)], "*", color=_BEST, markersize=15, label="best")
        limit = slo.limits[name]
        axes.axhline(limit, color=_LIMIT, linestyle="--", linewidth=1.2, label="limit")
        axes.set_yscale("log")
        everything = [*points.values(), *slower]
        latencies = [limit, *(y for _, y in everything if y > 0)]
        axes.set_ylim(min(latencies) / 1.5, max(latencies) * 1.5)
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlim(0, 1.1 * max((x for x, _ in everything), default=1.0))
        axes.set_xlabel("output tokens a second")
        axes.set_title(f"{name.upper()}, 99th percentile, ms", loc="left", fontsize=11)
    labelled = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(  # beside the axes: among the points it would lie on some
        labelled.values(), labelled.keys(), loc="outside lower center",
        ncols=min(len(labelled), 3 * count), fontsize=9, frameon=False,
    )  # fmt: skip

    if speeds:
        _loads(panels[-1], speeds, rate, slo)
    figure.suptitle(title, fontsize=9, color="#444444")
    plt.rcParams["svg.hashsalt"] = "octavo"  # the same file for the same figures
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _loads(axes: Axes, speeds: Sequence[tuple[float, TuneTrial]], rate: float, slo: Slo) -> None:
    """The share of good requests over the rate of arrival; hollow: the SLO is not kept."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    xs = [speed * rate for speed, _ in speeds]
    ys = [100 * trial.figures.attainment for _, trial in speeds]
    axes.plot(xs, ys, "-", color=_BEST, linewidth=1.2)
    for x, y, (_, trial) in zip(xs, ys, speeds, strict=True):
        filled = _BEST if kept(trial, slo) else "white"
        axes.plot(x, y, "o", color=_BEST, markerfacecolor=filled)
    axes.axhline(100 * slo.attainment, color=_LIMIT, linestyle="--", linewidth=1.2)
    axes.axvline(rate, color=_GREY, linestyle=":", linewidth=1.2)
    axes.annotate(
        "this load", (rate, 2), xytext=(4, 0), textcoords="offset points", color="#555555",
        fontsize=9,
    )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(0, 104)
    axes.set_xlabel("requests a second, arriving")
    axes.set_title("good requests with the best setting, %", loc="left", fontsize=11)
