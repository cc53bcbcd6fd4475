"""What alternatives are worth as it is learned, and the choice among drafts and alternatives."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.spec_decode.branches import BranchRates, Offer
from octavo.spec_decode.length import choose, choose_tree
from spec_decode.test_length import SEASONED, seasoned


def test_rates_are_learned_by_rank_and_by_what_speaks_for_the_draft() -> None:
    rates, rng = BranchRates(), random.Random(1)
    draft, alternatives = [1, 2, 3], [[4, 5, 6], [7, 8, 9]]
    for _ in range(2000):
        # Of wrong drafts the first alternative has 60 in 100, the second 30; half go on.
        roll = rng.random()
        turn = 4 if roll < 0.6 else 7 if roll < 0.9 else 0
        goes_on = rng.random() < 0.5
        rates.learn(3, draft, alternatives, [turn, turn + 1 if goes_on else 0])
    first, second = rates.offers(0, 3, draft, alternatives, [0.2, 0.1, 0.1])
    assert first.gains[0] == pytest.approx(0.8 * 0.6, rel=0.15)
    assert second.gains[0] == pytest.approx(0.8 * 0.3, rel=0.25)
    assert first.gains[1] == pytest.approx(first.gains[0] / 2, rel=0.2)
    other, _ = rates.offers(0, 2, draft, alternatives, [0.2, 0.1, 0.1])
    assert other.gains[0] < 0.8 * 0.3  # of another class nothing is known


def test_an_alternative_is_right_or_wrong_where_it_leaves_the_draft() -> None:
    rates = BranchRates()
    for _ in range(100):
        rates.learn(0, [1, 2, 3], [[1, 5, 6]], [9])  # wrong before
        rates.learn(0, [1, 2, 3], [[1, 5, 6]], [1, 2, 3, 4])  # never wrong
        rates.learn(0, [1, 2, 3], [[1, 5, 6]], [1, 2])  # nor here: no more is known
    gains = [0.9, 0.4, 0.2]
    (untaught,) = BranchRates().offers(0, 0, [1, 2, 3], [[1, 5, 6]], gains)
    (taught,) = rates.offers(0, 0, [1, 2, 3], [[1, 5, 6]], gains)
    assert taught == untaught
    assert taught.start == 1
    assert taught.gains[0] == pytest.approx(0.5 * 0.25)
    for _ in range(100):
        rates.learn(0, [1, 2, 3], [[1, 5, 6]], [1, 5])
    (taught,) = rates.offers(0, 0, [1, 2, 3], [[1, 5, 6]], gains)
    assert taught.gains[0] > 0.5 * 0.8


def test_nothing_is_offered_where_the_draft_itself_is_not_worth_a_row() -> None:
    assert BranchRates().offers(0, 0, [1, 2], [[1, 3]], [0.5]) == []
    assert BranchRates().offers(0, 0, [1, 2], [[1, 2]], [0.5, 0.4]) == []
    assert BranchRates().offers(0, 0, [1], [[2, 3]], [0.98]) == []  # it is next to certain


def test_as_much_of_an_alternative_is_taken_as_gives_most_for_a_row() -> None:
    assert Offer(0, 0, 0, [0.4, 0.38, 0.02]).best == (pytest.approx(0.78 / 3), 2)
    assert Offer(0, 0, 1, [0.4, 0.1]).best == (pytest.approx(0.4 / 3), 2)
    assert Offer(0, 0, 0, [0.4, 0.1]).best == (pytest.approx(0.2), 1)


@given(st.data())
def test_what_is_chosen_fits_and_is_no_worse_than_drafts_alone(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    sequences = data.draw(st.integers(1, 6))
    gains, offers = [], []
    for sequence in range(sequences):
        each: list[float] = []
        for _ in range(rng.randint(0, 8)):
            each.append((each[-1] if each else 1.0) * rng.random())
        gains.append(each)
        for rank in range(rng.randint(0, 3) if each else 0):
            start = rng.randrange(len(each))
            gain = ((each[start - 1] if start else 1.0) - each[start]) * rng.random()
            own = [gain * 0.5**at for at in range(rng.randint(1, 6))]
            offers.append(Offer(sequence, rank, start, own))
    room = data.draw(st.integers(1, 40))
    counts, branches = choose_tree(SEASONED, gains, offers, sequences, room)
    rows = sum(counts) + sum(1 + length for _, length in branches)
    assert rows <= room
    for offer, length in branches:
        assert offer.start < length <= offer.start + len(offer.gains)
        assert counts[offer.sequence] > offer.start  # the draft goes as far

    def speed(counts: list[int], branches: list[tuple[Offer, int]], rows: int) -> float:
        expected = sequences + sum(sum(g[:n]) for g, n in zip(gains, counts, strict=True))
        expected += sum(sum(offer.gains[: n - offer.start]) for offer, n in branches)
        return expected / SEASONED.predict(sequences + rows)

    alone = choose(SEASONED, gains, sequences, room)
    assert choose_tree(SEASONED, gains, [], sequences, room) == (alone, [])
    plain = sequences / SEASONED.predict(sequences)
    assert rows == 0 or speed(counts, branches, rows) > plain


def test_alternatives_are_checked_where_rows_are_cheap_and_not_where_they_are_dear() -> None:
    """On a machine that takes eight rows in the time of one, and one for which each row counts."""
    gains = [[0.4, 0.1, 0.02]]
    offers = [Offer(0, 0, 0, [0.3, 0.2])]
    counts, branches = choose_tree(SEASONED, gains, offers, 1, 15)
    assert branches == [(offers[0], 2)]
    assert counts[0] >= 1
    many = seasoned(random.Random(0), [32, 33, 34, 36, 40, 48], noise=0)
    assert choose_tree(many, gains * 32, offers, 32, 15)[1] == []
