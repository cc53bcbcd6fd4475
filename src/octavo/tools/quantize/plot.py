"""Quality against bytes: a point a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.extras import install_command

SUFFIXES = (".svg", ".png", ".pdf")
MARKERS = ("o", "s", "^", "D")  # ten colours of each


class PlotError(ValueError):
    """A plot that cannot be drawn here; the message says why."""


def check_suffix(path: Path) -> None:
    """Before anything is measured. Raises `PlotError`."""
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(f"{path}: a plot is a file of {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError(f"a plot needs matplotlib: {install_command('plot')}") from None


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """``rows`` as `octavo fidelity --json` has them. Mean KL and top-1 disagreement, both
    logarithmic, over the bytes that the engine holds a weight in: lower left is better.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure, panels = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    quantities = (
        ("mean KL from the reference, nats", [row["kl_mean"] for row in rows], "{:g}"),
        ("positions that rank another token first, %",
         [100 * (1 - row["top1_agreement"]) for row in rows], "{:.3g}"),
    )  # fmt: skip
    for axes, (title, values, shown) in zip(panels, quantities, strict=True):
        for index, (row, value) in enumerate(zip(rows, values, strict=True)):
            axes.plot(
                row["held_bytes_per_weight"], value, MARKERS[index // 10 % len(MARKERS)],
                color=f"C{index % 10}", markersize=8, label=name_of(row),
            )  # fmt: skip
        if min(values) > 0:
            axes.set_yscale("log")
            # At least two labelled lines, however near the values are to each other.
            axes.set_ylim(min(values) / 1.6, max(values) * 1.6)
            axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
        else:  # a model that has lost nothing
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _, shown=shown: shown.format(y)))
        axes.margins(x=0.1)
        axes.grid(True, which="major", color="#d8d8d8", linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_xlabel("bytes a weight, as held")
        axes.set_title(title, loc="left", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(4, len(rows)), frameon=False
    )
    first = rows[0]
    figure.suptitle(
        f"against {Path(first['against']).name}, "
        f"{'computed exactly' if first['reference'] == 'exact' else 'as served'}; "
        f"{Path(first['text']).name}, {first['tokens']:,} tokens",
        fontsize=9,
        color="#444444",
    )
    plt.rcParams["svg.hashsalt"] = "octavo"  # the same file for the same figures
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def name_of(row: dict[str, Any]) -> str:
    settings = ", ".join(str(value) for value in row["settings"].values())
    return Path(row["model"]).name + (f" ({settings})" if settings else "")
