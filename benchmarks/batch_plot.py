"""Tokens a second against batch size, with the machine's limit drawn in.

    octavo bench throughput MODEL --batch-size 1,2,4,8,16,32,64,128 --json > rows.json
    python benchmarks/batch_plot.py NAME=rows.json … --out docs/batch.svg

A panel each for decode and prefill, a colour a model: points with their deviation, and the limit as
a dashed line. Without files the known models are measured first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from _models import models
from _script import as_script

Rows = list[dict[str, Any]]
SIZES = "1,2,4,8,16,32,64,128"
COLORS = ("#0b6e99", "#c2571a", "#3f7d3f", "#7b4fa3")


def measured(path: Path) -> Rows:
    """The rows of a run on a model file."""
    octavo = [sys.executable, "-c", "from octavo.cli import main; main()"]
    command = [*octavo, "bench", "throughput", str(path), "--batch-size", SIZES, "--json"]
    rows: Rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return rows


def panel(axes: Axes, results: dict[str, Rows], phase: str, title: str) -> None:
    """Decode on two logarithmic axes, where a rate that grows with the batch is a straight line;
    prefill, which hardly depends on it, from zero.
    """
    for (name, rows), color in zip(results.items(), COLORS, strict=False):
        batch = [row["batch"] for row in rows]
        rate = [row[f"{phase}_tok_s"] for row in rows]
        deviation = [row[f"{phase}_tok_s_deviation"] for row in rows]
        limit = [row[f"{phase}_limit_tok_s"] for row in rows]
        axes.plot(batch, limit, "--", color=color, linewidth=1.2, label=f"{name}, limit")
        axes.errorbar(
            batch, rate, yerr=deviation, fmt="o-", color=color, linewidth=1.8, markersize=5,
            capsize=3, label=f"{name}, measured",
        )  # fmt: skip
        for row, x, y in zip(rows, batch, rate, strict=True):
            share = f"{row[f'{phase}_of_limit']:.0%}"
            axes.annotate(
                share, (x, y), xytext=(0, -14), textcoords="offset points", ha="center",
                fontsize=7.5, color=color,
            )  # fmt: skip
    sizes = sorted({row["batch"] for rows in results.values() for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    if phase == "decode":
        axes.set_yscale("log")
        axes.set_ylim(axes.get_ylim()[0] / 1.15)
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(True, which="major", color="#d8d8d8", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("sequences in the batch")
    axes.set_title(title, loc="left", fontsize=11)


def draw(results: dict[str, Rows], out: Path) -> None:
    first = next(iter(results.values()))[0]
    figure, (decode, prefill) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    panel(decode, results, "decode", f"decode, from a context of {first['context']}")
    panel(prefill, results, "prefill", f"prefill, prompts of {first['prompt_len']}")
    decode.set_ylabel("tokens a second (logarithmic)")
    prefill.set_ylabel("tokens a second")
    handles, labels = decode.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=2 * min(2, len(results)), frameon=False
    )
    limits = [limit for rows in results.values() for row in rows for limit in row["limits"]]
    memory = [limit["memory_bytes_per_second"] / 1e9 for limit in limits]
    figure.suptitle(
        f"{first['threads']} threads, {first['isa']}; int8 peak "
        f"{max(limit['int8_ops_per_second'] for limit in limits) / 1e9:.0f} Gop/s, memory "
        f"{min(memory):.0f}–{max(memory):.0f} GB/s during the runs; percentages: of the limit; "
        f"{limits[0]['date'][:10]}",
        fontsize=9, color="#444444",
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    plt.rcParams["svg.hashsalt"] = "octavo"  # the same file for the same figures
    figure.savefig(out, dpi=160, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="NAME=ROWS.json")
    parser.add_argument("--out", type=Path, default=Path("docs/batch.svg"))
    arguments = parser.parse_args()
    results: dict[str, Rows] = {}
    for name, _, path in (text.partition("=") for text in arguments.rows):
        results[name] = json.loads(Path(path).read_text())
    if not arguments.rows:
        results = {name: measured(path) for name, path in models(None).items()}
    if not results:
        parser.error("no rows, and no known model has been pulled")
    draw(results, arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    as_script(main)
