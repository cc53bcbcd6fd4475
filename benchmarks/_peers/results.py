"""From samples to the table: medians, spread, and ratios to the best peer."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = "octavo"
MIN_CALM = 2  # calm rounds that are enough to leave the others out


@dataclass
class Sample:
    """One figure of one round."""

    engine: str
    workload: str
    round: int
    tokens_per_second: float
    foreign: float  # share of the machine that others used meanwhile, 0 to 1
    settings: str = ""
    extra: dict[str, float] = field(default_factory=dict)


def summarize(
    samples: Sequence[Sample], engines: Iterable[str], quiet: float
) -> dict[str, dict[str, Any]]:
    """A row per workload.

    Each engine's median in tokens/s (None where it has no sample), ``best_peer``,
    ``ratio_to_best_peer`` (ours over the best median of a peer; None without either), the lowest
    and highest ratio of a round to that peer, and under ``details`` what is behind each median.
    Rounds in which others used more than ``quiet`` of the machine are left out where at least
    `MIN_CALM` remain; else the engine's row is not ``calm``.
    """
    engines = list(engines)
    rows: dict[str, dict[str, Any]] = {}
    for workload in dict.fromkeys(x.workload for x in samples):
        details: dict[str, dict[str, Any]] = {}
        rates: dict[str, dict[int, float]] = {}
        for engine in engines:
            all_rounds = [x for x in samples if (x.engine, x.workload) == (engine, workload)]
            if not all_rounds:
                continue
            calm = [x for x in all_rounds if x.foreign <= quiet]
            enough = len(calm) >= min(MIN_CALM, len(all_rounds))
            used = calm if enough else all_rounds
            rates[engine] = {x.round: x.tokens_per_second for x in used}
            values = list(rates[engine].values())
            details[engine] = {
                "median": statistics.median(values),
                "low": min(values),
                "high": max(values),
                "rounds": len(values),
                "calm": enough,
                "settings": used[0].settings,
            }
        row: dict[str, Any] = {
            engine: details[engine]["median"] if engine in details else None for engine in engines
        }
        peers = {engine: row[engine] for engine in details if engine != OURS}
        best = max(peers, key=lambda name: peers[name], default=None)
        row |= {
            "best_peer": best,
            "ratio_to_best_peer": None,
            "ratio_low": None,
            "ratio_high": None,
        }
        if best is not None and OURS in details:
            row["ratio_to_best_peer"] = row[OURS] / row[best]
            common = rates[OURS].keys() & rates[best].keys()
            each = [rates[OURS][i] / rates[best][i] for i in common]
            row["ratio_low"], row["ratio_high"] = min(each, default=None), max(each, default=None)
        rows[workload] = row | {"details": details}
    return rows


def table(title: str, rows: dict[str, dict[str, Any]], engines: Iterable[str]) -> str:
    """Tokens/s as median ± half the range; ``*`` marks rows that others disturbed."""
    engines = list(engines)
    lines = [f"{title:16}" + "".join(f"{engine:>19}" for engine in engines) + f"{'ratio':>18}"]
    for workload, row in rows.items():
        line = f"{workload:16}"
        for engine in engines:
            detail = row["details"].get(engine)
            cell = "-"
            if detail is not None:
                spread = (detail["high"] - detail["low"]) / 2
                cell = f"{detail['median']:.1f} ± {spread:.1f}" + " *"[not detail["calm"]]
            line += f"{cell:>19}"
        ratio = "-"
        if row["ratio_to_best_peer"] is not None:
            ratio = f"{row['ratio_to_best_peer']:.2f}"
            if row["ratio_low"] is not None:
                ratio += f" ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"
        lines.append(line + f"{ratio:>18}")
    return "\n".join(lines)
