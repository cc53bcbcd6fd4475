"""A roofline as a picture: the roof and what lies under it; and intensity against batch."""

from __future__ import annotations

from itertools import groupby
from math import atan2, degrees, hypot
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.tools.plan.roofline import Point, Roofline, levels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOF, _GREY, _GRID, _PREFILL = "#222222", "#555555", "#e4e4e4", "#8c3b9e"
_CONTEXTS = ("#1f77b4", "#e07b00", "#2a9d3a", "#c23b3b", "#7a5c45", "#1aa5a5")
_NEAR = 17  # points on the page under which labels are joined


def draw(found: Roofline, path: Path) -> None:
    """Left: operations a second, as predicted, over operations a byte. A point is a whole step;
    those below their roof have parts with different bounds. Right: operations a byte of decode
    over its sequences, a line a context. All logarithmic; the file's suffix says what kind it is.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 5.8), layout="constrained", width_ratios=(1.65, 1)
    )
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.grid(True, which="major", color=_GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: _amount(value)))
            axis.set_minor_locator(NullLocator())
    right.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    decode = [list(group) for _, group in groupby(found.decode, lambda point: point.context)]
    _limits(left, found)
    for color, points in zip(_cycle(len(decode)), decode, strict=True):
        label = f"decode, {points[0].context:,} tokens in each cache (sequences)"
        _series(left, points, label, color, "o")
    _series(left, list(found.prefill), "prefill of one prompt (tokens)", _PREFILL, "s")
    left.set_xlabel("operations a byte moved")
    left.set_ylabel("operations a second")
    left.set_title("a step under the roof", loc="left", fontsize=11)

    batches = sorted({point.sequences for point in found.decode})
    right.set_xlim(batches[0] / 1.3, batches[-1] * 1.3 + (len(batches) == 1))
    for color, points in zip(_cycle(len(decode)), decode, strict=True):
        right.plot(
            [point.sequences for point in points],
            [point.phase.intensity for point in points],
            color=color, marker="o", markersize=5, linewidth=1.4,
            label=f"{points[0].context:,} tokens in each cache",
        )  # fmt: skip
    for names, roof in levels(found.roofs):
        right.axhline(roof.ridge, color=_ROOF, linewidth=1.4)
        right.annotate(
            f"from {roof.ridge:.3g} on bound by operations ({names})",
            (right.get_xlim()[0], roof.ridge), (4, 3), textcoords="offset points",
            fontsize=8.5, color=_ROOF, path_effects=_halo(),
        )  # fmt: skip
    right.set_ylim(top=2.4 * max(*(roof.ridge for roof in found.roofs), right.get_ylim()[1] / 2.4))
    right.set_xticks(batches, [f"{count:,}" for count in batches])
    right.set_xlabel("sequences that decode together")
    right.set_ylabel("operations a byte moved")
    right.set_title("decode: operations a byte, by batch", loc="left", fontsize=11)
    right.legend(loc="lower right", framealpha=0.95, edgecolor="none", fontsize=9)
    device = found.device
    figure.suptitle(
        f"{found.subject.name}, {found.stored.name} weights, {found.layout.dtype} cache, on "
        f"{device.name} ({device.standing.partition(' (')[0]})"
        + (f"; {device.assumption.partition(',')[0]}" if device.assumption else ""),
        fontsize=10,
        color=_GREY,
    )
    _roof(left, found)
    left.legend(loc="lower right", framealpha=0.95, edgecolor="none", fontsize=9)
    figure.draw_without_rendering()  # from here on the places on the page are known
    _slope_name(left, found)
    for points in decode:
        batch = [f"{point.sequences:,}" for point in points]
        row = decode.index(points)
        _labels(left, points, batch, _cycle(len(decode))[row], row)
    prompts = [f"{point.context:,}" for point in found.prefill]
    _labels(left, list(found.prefill), prompts, _PREFILL, 0)
    plt.rcParams["svg.hashsalt"] = "octavo"  # the same file for the same figures
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _cycle(count: int) -> list[str]:
    return [_CONTEXTS[index % len(_CONTEXTS)] for index in range(count)]


def _limits(axes: Axes, found: Roofline) -> None:
    points = found.decode + found.prefill
    ridges = [roof.ridge for roof in found.roofs]
    intensities = [point.phase.intensity for point in points]
    low, high = min(*intensities, *ridges) / 2.2, max(*intensities, *ridges) * 2.2
    axes.set_xlim(low, high)
    rates = [point.ops_per_second for point in points]
    peaks = [roof.ops_per_second for roof in found.roofs]
    axes.set_ylim(min(*rates, low * found.rates.bytes_per_second) / 1.4, max(peaks) * 1.9)


def _roof(axes: Axes, found: Roofline) -> None:
    """The flat parts have their names in the margin, where no point is."""
    low, high = axes.get_xlim()
    bandwidth = found.rates.bytes_per_second
    top = found.roofs[0]
    slope = [(x, x * bandwidth) for x in (low, top.ridge)]
    axes.plot(*zip(*slope, strict=True), color=_ROOF, linewidth=1.6, zorder=1)
    for names, roof in levels(found.roofs):
        axes.plot([roof.ridge, high], [roof.ops_per_second] * 2, color=_ROOF, linewidth=1.6,
                  zorder=1)  # fmt: skip
        axes.annotate(
            f"{names}\n{_amount(roof.ops_per_second)}op/s", (high, roof.ops_per_second), (5, 0),
            textcoords="offset points", va="center", fontsize=9, color=_ROOF,
        )  # fmt: skip
    if found.device.assumption:
        expected, label = found.expected, "the share assumed of the roof"
        for _, roof in levels(found.roofs):
            peak = expected.peak(roof.arithmetic)
            ridge = peak / expected.bytes_per_second
            axes.plot(
                [low, ridge, high], [low * expected.bytes_per_second, peak, peak],
                color=_ROOF, linewidth=1, linestyle=(0, (4, 3)), zorder=1,
                label=label,
            )  # fmt: skip
            label = ""  # once


def _slope_name(axes: Axes, found: Roofline) -> None:
    """Along the slope, as steep as it is on the page."""
    low, bandwidth = axes.get_xlim()[0], found.rates.bytes_per_second
    ridge = found.roofs[0].ridge
    (x0, y0), (x1, y1) = axes.transData.transform([(x, x * bandwidth) for x in (low, ridge)])
    x = low * (ridge / low) ** 0.5
    axes.annotate(
        f"memory: {bandwidth / 1e9:,.4g} GB/s", (x, x * bandwidth), (-5, 5),
        textcoords="offset points", rotation=degrees(atan2(y1 - y0, x1 - x0)),
        rotation_mode="anchor", ha="center", va="bottom", fontsize=9, color=_ROOF,
    )  # fmt: skip


def _series(axes: Axes, points: list[Point], label: str, color: str, marker: str) -> None:
    axes.plot(
        [point.phase.intensity for point in points],
        [point.ops_per_second for point in points],
        color=color, marker=marker, markersize=6, linewidth=1, label=label,
    )  # fmt: skip


def _labels(axes: Axes, points: list[Point], texts: list[str], color: str, row: int) -> None:
    """Beside each point; of points that lie close together, "first–last". ``row`` 1 keeps clear of
    row 0.
    """
    places = axes.transData.transform(
        [(point.phase.intensity, point.ops_per_second) for point in points]
    ) * (72 / axes.figure.dpi)
    groups: list[list[int]] = []
    for index, (x, y) in enumerate(places):
        if groups:
            last_x, last_y = places[groups[-1][-1]]
            if hypot(x - last_x, y - last_y) < _NEAR:
                groups[-1].append(index)
                continue
        groups.append([index])
    for group in groups:
        text = texts[group[0]] if len(group) == 1 else f"{texts[group[0]]}–{texts[group[-1]]}"
        point = points[group[len(group) // 2]]
        axes.annotate(
            text, (point.phase.intensity, point.ops_per_second), (6, -9 - 10 * row),
            textcoords="offset points", fontsize=8, color=color, va="center",
            path_effects=_halo(), zorder=4,
        )  # fmt: skip


def _halo() -> list[Any]:
    """White around letters that lie on lines."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]


def _amount(value: float) -> str:
    """ "20 T": with a letter for a power of a thousand."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= factor:
            return f"{value / factor:g} {letter}"
    return f"{value:g}"
