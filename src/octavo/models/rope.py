"""Rotary scaling rules, as divisors of the plain frequencies (`Rope.factors`).

A rule gives one divisor for each pair of dimensions: 1 leaves a frequency as it is, ``factor``
stretches its wavelength to the longer context.
"""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt


def llama3_factors(
    theta: float, dim: int, factor: float, low: float, high: float, original: int
) -> tuple[float, ...]:
    """Return the divisors of Llama 3.1 (Grattafiori et al., 2024): short wavelengths stay, long
    ones stretch.

    ``low`` and ``high`` are rotations over the ``original`` context between which it is blended.
    """
    factors = []
    for pair in range(dim // 2):
        rotations = original / (2 * pi * theta ** (2 * pair / dim))
        kept = min(max((rotations - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / (kept + (1.0 - kept) / factor))
    return tuple(factors)


def yarn_factors(
    theta: float,
    dim: int,
    factor: float,
    original: int,
    fast: float = 32.0,
    slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, ...]:
    """Return the divisors of YaRN (Peng et al., 2023, section 3.2), its ramp over the pairs as
    `transformers` has it.

    Pairs that rotate more than ``fast`` times over the ``original`` context stay, those below
    ``slow`` stretch.
    """

    def pair_of(rotations: float) -> float:
        return dim * log(original / (rotations * 2 * pi)) / (2 * log(theta))

    low, high = pair_of(fast), pair_of(slow)
    if truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    factors = []
    for pair in range(dim // 2):
        stretched = min(max((pair - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / (1.0 - stretched + stretched / factor))
    return tuple(factors)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's temperature as a magnitude of queries and keys (section 3.3)."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * log(factor) + 1.0


def longrope_magnitude(factor: float, original: int) -> float:
    """Return LongRoPE's magnitude (Ding et al., 2024) at ``factor`` times the ``original``
    context.
    """
    return 1.0 if factor <= 1.0 else sqrt(1.0 + log(factor) / log(original))
