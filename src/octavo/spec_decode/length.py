"""How much to draft: as many tokens as make the step give most tokens a second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from octavo.spec_decode.branches import Offer
from octavo.spec_decode.draft_times import DraftTimes
from octavo.spec_decode.step_times import StepTimes

_LEAST = 0.04  # a gain below this is within what can be known …
_DOUBT = 0.3  # … and so is this much of the steps' noise: of many sizes, the luckiest looks best


def _worth(times: StepTimes) -> float:
    return 1 + _LEAST + _DOUBT * times.noise


def worthwhile(times: StepTimes, num_sequences: int, num_tokens: int, most: int) -> bool:
    """Whether ``most`` drafts or fewer could pay if all were right."""
    if not times.known:
        return False
    least = _worth(times) * num_sequences / times.predict(num_sequences)
    return any(
        num_sequences + size - num_tokens > least * seconds
        for size, seconds in _sizes(times, num_sequences, num_tokens, most)
    )


def _sizes(
    times: StepTimes, num_sequences: int, num_tokens: int, most: int
) -> Iterator[tuple[int, float]]:
    """Sizes with up to ``most`` drafts, and the seconds of such a step, without those of prompts in
    it: they are no reason for a draft, nor against one.
    """
    if num_tokens == num_sequences:
        return times.hoped(num_tokens, num_tokens + most)
    return times.beside(num_sequences, num_tokens, num_tokens + most)


def choose(
    times: StepTimes,
    gains: Sequence[Sequence[float]],
    num_tokens: int,
    room: int,
    drafting: DraftTimes | None = None,
) -> list[int]:
    """How many tokens of each sequence's draft to check, to get most tokens for the time.

    ``gains`` are, for each sequence, the probabilities that its tokens become output: they do not
    rise. The step has ``num_tokens`` tokens without drafts and room for so many more. Whatever the
    number of drafts, the likeliest are the ones to take. ``drafting``: what they cost to be made;
    None: they have been made.
    """
    return choose_tree(times, gains, (), num_tokens, room, drafting)[0]


def choose_tree(
    times: StepTimes,
    gains: Sequence[Sequence[float]],
    offers: Sequence[Offer],
    num_tokens: int,
    room: int,
    drafting: DraftTimes | None = None,
) -> tuple[list[int], list[tuple[Offer, int]]]:
    """As `choose`, with alternatives to choose among too: which of them to check and how many of
    their tokens, the most promising first. One takes a row for the sequence's last token and one
    for each of its own, and is taken or left as a whole, by its gain for a row.
    """
    ranked: list[tuple[float, int, tuple[Offer, int] | None]] = [
        (gain, sequence, None) for sequence, each in enumerate(gains) for gain in each
    ]
    most = len(ranked)
    for offer in offers:
        worth, length = offer.best
        # Not before the draft's own token there.
        place = min(worth, gains[offer.sequence][offer.start])
        ranked.append((place, offer.sequence, (offer, length)))
        most += 1 + length
    ranked.sort(key=itemgetter(0), reverse=True)
    best = _worth(times) * len(gains) / times.predict(len(gains))
    taken = done = rows = 0
    expected = float(len(gains))
    lengths: dict[int, int] = {}
    for size, seconds in _sizes(times, len(gains), num_tokens, min(room, most)):
        left = size - num_tokens - rows
        while done < len(ranked):
            gain, sequence, branch = ranked[done]
            cost = 1 if branch is None else 1 + branch[1]
            if cost > left:
                break
            if branch is not None:
                gain = branch[0].best[0] * cost
            elif drafting is not None:
                lengths[sequence] = lengths.get(sequence, 0) + 1
            expected += gain
            left -= cost
            rows += cost
            done += 1
        if drafting is not None:
            seconds += drafting.predict(len(lengths), max(lengths.values()))
        speed = expected / seconds
        if speed > best:
            best, taken = speed, done
    counts = [0] * len(gains)
    chosen: list[tuple[Offer, int]] = []
    for _, sequence, branch in ranked[:taken]:
        if branch is None:
            counts[sequence] += 1
        else:
            chosen.append(branch)
    return counts, chosen
