"""Quality against bytes: a point a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.engine.load import SettingsError

SUFFIXES = (".svg", ".png", ".pdf")


def check_suffix(path: Path) -> None:
    """Before anything is measured. Raises `SettingsError`."""
    if path.suffix.lower() not in SUFFIXES:
        raise SettingsError(f"{path}: a plot is a file of {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingsError("a plot needs matplotlib: pip install 'octavo[plot]'") from None


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """``rows`` as `octavo fidelity --json` has them. Mean KL and top-1 disagreement, both
    logarithmic, over the bytes that the engine holds a weight in: lower left is better.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    colors = [f"C{index % 10}" for index in range(len(rows))]
    quantities = (
        ("mean KL from the reference, nats", [row["kl_mean"] for row in rows]),
        ("positions that rank another token first", [1 - row["top1_agreement"] for row in rows]),
    )
    sizes = [row["held_bytes_per_weight"] for row in rows]
    for axes, (title, values) in zip(panels, quantities, strict=True):
        logarithmic = min(values) > 0
        for row, size, value, color in zip(rows, sizes, values, colors, strict=True):
            axes.plot(size, value, "o", color=color, markersize=7)
            axes.annotate(
                name_of(row), (size, value), xytext=(6, 5), textcoords="offset points", fontsize=8.5
            )
        if logarithmic:
            axes.set_yscale("log")
        else:  # a model that has lost nothing
            axes.set_ylim(bottom=0)
        axes.margins(x=0.25, y=0.2)
        axes.grid(True, which="major", color="#d8d8d8", linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_xlabel("bytes a weight, as held")
        axes.set_title(title, loc="left", fontsize=11)
    first = rows[0]
    figure.suptitle(
        f"against {Path(first['against']).name}, {first['reference']}; "
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
