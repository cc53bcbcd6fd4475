"""What the server's speculation came to during a run, from its /metrics before and after; the
result's fields are those of ``vllm bench serve``.
"""

from __future__ import annotations

import math
import re
from typing import Any

_LINE = re.compile(r"(?:octavo|vllm):spec_decode_(\w+)(?:\{(.*)\})? (\S+)(?: \d+)?")
_POSITION = re.compile(r'(?:^|,)position="(\d+)"')

Counts = dict[tuple[str, int], float]  # by name and, of a draft, position; -1 without


def counts(text: str) -> Counts:
    """The counters and gauges of speculation in a Prometheus text, added up over their labels."""
    found: Counts = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        position = _POSITION.search(labels or "")
        key = name.removesuffix("_total"), int(position[1]) if position else -1
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            found[key] = found.get(key, 0.0) + number
    return found


def fields(before: Counts, after: Counts) -> dict[str, Any]:
    """Nothing where nothing was drafted."""

    def grown(name: str, position: int = -1) -> float:
        key = name, position
        return after.get(key, 0.0) - before.get(key, 0.0)

    drafts, tokens = grown("num_drafts"), grown("num_draft_tokens")
    if drafts <= 0 or tokens <= 0:
        return {}
    accepted = grown("num_accepted_tokens")
    per_position = "num_accepted_tokens_per_pos"
    positions = sorted(position for name, position in after if name == per_position)
    result: dict[str, Any] = {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            grown(per_position, position) / drafts for position in positions
        ],
    }
    if ("time_saved_seconds", -1) in after:  # Octavo's own
        result["spec_decode_drafting_s"] = grown("drafting_seconds")
        result["spec_decode_time_saved_s"] = grown("time_saved_seconds")
    return result
