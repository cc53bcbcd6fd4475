"""Chooses how many draft tokens to verify: as many as give the most tokens per second."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter

from octavo.spec_decode import tuning
from octavo.spec_decode.acceptance import Offer
from octavo.spec_decode.times import SpeculationTimes

# Seconds to make drafts for so many sequences, the longest of so many tokens.
Price = Callable[[int, int], float]


def could_pay(times: SpeculationTimes, num_sequences: int, num_tokens: int, most: int) -> bool:
    """Return whether ``most`` draft tokens or fewer could pay if all were accepted."""
    if not times.known:
        return False
    least = tuning.LEAST_GAIN * num_sequences / times.predict(num_sequences)
    return any(
        num_sequences + size - num_tokens > least * seconds
        for size, seconds in times.sizes(num_sequences, num_tokens, num_tokens + most)
    )


def choose_lengths(
    times: SpeculationTimes,
    gains: Sequence[Sequence[float]],
    num_tokens: int,
    room: int,
    offers: Sequence[Offer] = (),
    price: Price | None = None,
) -> tuple[list[int], list[tuple[Offer, int]]]:
    """Return how many tokens of each draft to verify, and the alternatives with their lengths.

    ``gains`` are for each sequence the probabilities that its draft's tokens become output; they do
    not rise. The step has ``num_tokens`` tokens without drafts and room for ``room`` more. Whatever
    the number of draft tokens, the likeliest are the best ones to take. An alternative is taken or
    left as a whole, by its gain per row. ``price`` is what making the drafts costs; None if they
    have been made.
    """
    # Gain per row, rows, sequence, and the alternative if it is one.
    ranked: list[tuple[float, int, int, Offer | None]] = [
        (gain, 1, sequence, None) for sequence, each in enumerate(gains) for gain in each
    ]
    for offer in offers:
        gain, length = offer.best
        # An alternative never comes before the draft's own token at the same place.
        gain = min(gain, gains[offer.sequence][offer.start])
        ranked.append((gain, 1 + length, offer.sequence, offer))
    ranked.sort(key=itemgetter(0), reverse=True)
    # For each number of these taken: rows, tokens expected, and sequences and longest draft.
    rows, expected, made = [0], [float(len(gains))], [(0, 0)]
    lengths: dict[int, int] = {}
    longest = 0
    for gain, count, sequence, branch in ranked:
        rows.append(rows[-1] + count)
        expected.append(expected[-1] + (branch.best[0] if branch else gain) * count)
        if price is not None:
            lengths[sequence] = lengths.get(sequence, 0) + 1
            longest = max(longest, lengths[sequence])
            made.append((len(lengths), longest))
    best, taken = tuning.LEAST_GAIN * len(gains) / times.predict(len(gains)), 0
    most = num_tokens + min(room, rows[-1])
    for size, seconds in times.sizes(len(gains), num_tokens, most):
        fitting = bisect_right(rows, size - num_tokens) - 1
        if price is not None:
            seconds += price(*made[fitting])
        if expected[fitting] > best * seconds:
            best, taken = expected[fitting] / seconds, fitting
    counts = [0] * len(gains)
    for _, _, sequence, branch in ranked[:taken]:
        counts[sequence] += branch is None
    return counts, [(branch, count - 1) for _, count, _, branch in ranked[:taken] if branch]
