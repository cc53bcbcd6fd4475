"""How often drafts and alternatives are right is learned, and the choice among them."""

import random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.spec_decode.acceptance import Acceptance, Offer
from octavo.spec_decode.draft_length import choose_lengths
from octavo.spec_decode.drafter import Draft
from spec_decode.test_draft_length import SEASONED, seasoned


def test_acceptance_is_learned_by_position_and_evidence() -> None:
    rng = random.Random(2)
    acceptance, seq = Acceptance(), cast(Any, object())
    rates = {1: 0.3, 5: 0.9}
    for _ in range(3000):
        evidence = rng.choice((1, 5))
        run = list(range(9))
        draft = [token if rng.random() < rates[evidence] else -1 for token in run[:8]]
        acceptance.learn(("lookup", evidence), seq, draft, run)
    for evidence, rate in rates.items():
        gains = acceptance.gains(("lookup", evidence), None, 2)
        assert gains == pytest.approx([rate, rate**2], rel=0.25)
    assert len(acceptance.gains(("lookup", 1), None, 8)) < 5  # what is negligible is left out


def test_who_guesses_worse_than_others_is_trusted_less() -> None:
    rng = random.Random(3)
    acceptance = Acceptance()
    seqs = {0.9: cast(Any, object()), 0.2: cast(Any, object())}
    for _ in range(500):
        for rate, seq in seqs.items():
            draft = [at if rng.random() < rate else -1 for at in range(4)]
            acceptance.learn(("model", 3), seq, draft, range(5))
    good, bad = (acceptance.gains(("model", 3), seq, 1)[0] for seq in seqs.values())
    assert good > 0.7
    assert bad < 0.4


def test_alternatives_are_learned_by_rank() -> None:
    acceptance, rng = Acceptance(), random.Random(1)
    draft = Draft([1, 2, 3], 3, [[4, 5, 6], [7, 8, 9]])
    for _ in range(2000):
        # Of wrong drafts the first alternative has 60 in 100, the second 30; half go on.
        roll = rng.random()
        turn = 4 if roll < 0.6 else 7 if roll < 0.9 else 0
        goes_on = rng.random() < 0.5
        acceptance.learn_alternatives(draft, [1, 2, 3], [turn, turn + 1 if goes_on else 0])
    first, second = acceptance.offers(0, draft, [0.2, 0.1, 0.1])
    assert first.gains[0] == pytest.approx(0.8 * 0.6, rel=0.15)
    assert second.gains[0] == pytest.approx(0.8 * 0.3, rel=0.25)
    assert first.gains[1] == pytest.approx(first.gains[0] / 2, rel=0.2)


def test_an_alternative_is_right_or_wrong_where_it_leaves_the_draft() -> None:
    acceptance, draft = Acceptance(), Draft([1, 2, 3], 0, [[1, 5, 6]])
    gains = [0.9, 0.4, 0.2]
    for run in ([9], [1, 2, 3, 4], [1, 2]):  # wrong before, never, and not as far as is known
        for _ in range(100):
            acceptance.learn_alternatives(draft, [1, 2, 3], run)
    (untaught,) = Acceptance().offers(0, draft, gains)
    (taught,) = acceptance.offers(0, draft, gains)
    assert taught == untaught
    assert taught.start == 1
    assert taught.gains[0] == pytest.approx(0.5 * 0.25)
    for _ in range(100):
        acceptance.learn_alternatives(draft, [1, 2, 3], [1, 5])
    (taught,) = acceptance.offers(0, draft, gains)
    assert taught.gains[0] > 0.5 * 0.8


def test_nothing_is_offered_where_the_draft_itself_is_not_worth_a_row() -> None:
    acceptance = Acceptance()
    assert acceptance.offers(0, Draft([1, 2], 0, [[1, 3]]), [0.5]) == []
    assert acceptance.offers(0, Draft([1, 2], 0, [[1, 2]]), [0.5, 0.4]) == []
    assert acceptance.offers(0, Draft([1], 0, [[2, 3]]), [0.98]) == []  # it is next to certain


def test_as_much_of_an_alternative_is_taken_as_gives_most_for_a_row() -> None:
    assert Offer(0, 0, 0, [0.4, 0.38, 0.02]).best == (pytest.approx(0.78 / 3), 2)
    assert Offer(0, 0, 1, [0.4, 0.1]).best == (pytest.approx(0.4 / 3), 2)
    assert Offer(0, 0, 0, [0.4, 0.1]).best == (pytest.approx(0.2), 1)
    assert Offer(0, 0, 0, [0.0]).best == (0.0, 0), "nothing to gain"
    assert Offer(0, 0, 0, [0.5, 0.25]).best == (0.25, 1), "as much a row with fewer rows"


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
    counts, branches = choose_lengths(SEASONED, gains, sequences, room, offers)
    rows = sum(counts) + sum(1 + length for _, length in branches)
    assert rows <= room
    for offer, length in branches:
        assert offer.start < length <= offer.start + len(offer.gains)
        assert counts[offer.sequence] > offer.start  # the draft goes as far

    def speed(counts: list[int], branches: list[tuple[Offer, int]], rows: int) -> float:
        expected = sequences + sum(sum(g[:n]) for g, n in zip(gains, counts, strict=True))
        expected += sum(sum(offer.gains[: n - offer.start]) for offer, n in branches)
        return expected / SEASONED.predict(sequences + rows)

    plain = sequences / SEASONED.predict(sequences)
    assert rows == 0 or speed(counts, branches, rows) > plain


def test_alternatives_are_checked_where_rows_are_cheap_and_not_where_they_are_dear() -> None:
    """On a machine that takes eight rows in the time of one, and one for which each row counts."""
    gains = [[0.4, 0.1, 0.02]]
    offers = [Offer(0, 0, 0, [0.3, 0.2])]
    counts, branches = choose_lengths(SEASONED, gains, 1, 15, offers)
    assert branches == [(offers[0], 2)]
    assert counts[0] >= 1
    many = seasoned(random.Random(0), [32, 33, 34, 36, 40, 48], noise=0)
    assert choose_lengths(many, gains * 32, 32, 15, offers)[1] == []
