"""Numbers in sentences and tables, for people."""

from __future__ import annotations

import math


def plural(count: float, what: str, verb: str = "") -> str:
    """ "1 row", "2000 rows"; with a verb in the plural form, "1 request waits"."""
    shown = str(count) if isinstance(count, int) else number(count)
    one = shown == "1"
    said = f"{shown} {what}{'' if one else 's'}"
    if not verb:
        return said
    forms = {"have": "has", "are": "is", "do": "does", "were": "was"}
    return f"{said} {forms.get(verb, f'{verb}s') if one else verb}"


def number(value: float, digits: int = 4) -> str:
    """With so many digits that count, and never an exponent: 0.1234, 12.34, 12,345, 1,979,000."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    value = float(f"{value:.{digits}g}")
    after = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    shown = f"{value:,.{after}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown
