"""N-gram and suffix drafts are those that a search of the whole text finds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.spec_decode.drafter import NO_DRAFT, Draft, Drafter
from octavo.spec_decode.ngram import NgramDrafter, continued
from octavo.spec_decode.suffix import SuffixDrafter

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def pieces(text: list[int], data: st.DataObject) -> list[list[int]]:
    """The text as it comes, several tokens at a time."""
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=8)) | {len(text)})
    return [text[low:high] for low, high in zip([0, *cuts], cuts, strict=False)]


def after(drafter: Drafter, parts: list[list[int]], count: int, *, asking: bool = True) -> Draft:
    drafter.start(0, parts[0], None)
    for part in parts[1:]:
        if asking:
            drafter.propose([0], [count])
        drafter.extend(0, part)
    return drafter.propose([0], [count])[0]


@given(TEXT, st.data(), st.integers(1, 12))
def test_ngrams_are_looked_up_in_their_latest_place(
    text: list[int], data: st.DataObject, count: int
) -> None:
    lowest = data.draw(st.integers(1, 3))
    highest = data.draw(st.integers(lowest, 5))
    expected = NO_DRAFT
    for order in range(highest, lowest - 1, -1):
        ends = [end for end in range(order, len(text)) if text[end - order : end] == text[-order:]]
        if ends:
            expected = Draft(continued(text, ends[-1], count), order)
            break
    assert after(NgramDrafter(lowest, highest), pieces(text, data), count) == expected


@pytest.mark.parametrize("order", [1, 2, 4])
def test_a_long_text_is_entered_as_a_short_one(order: int) -> None:
    text = [at * at % 23 for at in range(200)]
    at_once, by_one = NgramDrafter(order, order), NgramDrafter(order, order)
    assert after(at_once, [text], 9) == after(by_one, [[token] for token in text], 9)


@given(TEXT, st.data(), st.integers(1, 12), st.booleans())
def test_suffix_is_the_longest_match(
    text: list[int], data: st.DataObject, count: int, asking: bool
) -> None:
    """The match is among the text's 16 latest places after its last two tokens; with up to 40
    tokens of 4, these are nearly always all.
    """
    draft = after(SuffixDrafter(), pieces(text, data), count, asking=asking)
    places = [place for place in range(2, len(text)) if text[place - 2 : place] == text[-2:]]
    if len(text) < 2 or not places:
        assert draft == NO_DRAFT
        return

    def agreement(place: int) -> int:
        length = 0
        while length < place and text[place - length - 1] == text[-length - 1]:
            length += 1
        return length

    if len(places) <= 16:
        best = max(map(agreement, places))
        assert list(draft.token_ids) in [
            continued(text, place, count) for place in places if agreement(place) == best
        ]


def test_of_equal_matches_what_followed_most_often_counts() -> None:
    text = [1, 2, 5, 1, 2, 6, 1, 2, 5, 9, 1, 2, 6, 8, 1, 2, 5, 7, 1, 2]
    drafter = SuffixDrafter()
    drafter.start(0, text, None)
    assert drafter.propose([0], [2])[0].token_ids == [5, 7]


@given(TEXT, st.data(), st.integers(1, 12), st.integers(1, 3))
def test_alternatives_go_on_as_the_text_has_otherwise_gone_on(
    text: list[int], data: st.DataObject, count: int, most: int
) -> None:
    parts = pieces(text, data)
    alone = after(SuffixDrafter(), parts, count)
    draft = after(SuffixDrafter(alternatives=most), parts, count)
    assert draft._replace(alternatives=()) == alone
    if not draft.token_ids:
        assert not draft.alternatives
        return
    places = [place for place in range(2, len(text)) if text[place - 2 : place] == text[-2:]]
    others = {text[place] for place in places[-16:]} - {draft.token_ids[0]}
    begun = [each[0] for each in draft.alternatives]
    assert len(set(begun)) == len(begun) == min(most, len(others))
    assert set(begun) <= others
    for each in draft.alternatives:
        assert list(each) in [continued(text, place, count) for place in places]


def test_the_longest_matches_are_the_first_alternatives() -> None:
    text = [4, 1, 2, 6, 5, 1, 2, 7, 3, 5, 1, 2, 8, 9, 3, 5, 1, 2]
    drafter = SuffixDrafter(alternatives=2)
    drafter.start(0, text, None)
    draft = drafter.propose([0], [2])[0]
    assert draft.token_ids == [8, 9]
    assert draft.alternatives == [[7, 3], [6, 5]]


def test_earlier_answers_serve_the_same_salt_only() -> None:
    drafter = SuffixDrafter(max_cached_requests=4)
    drafter.start(0, [1, 2, 3], "a")
    drafter.extend(0, [4, 5, 6, 7])
    drafter.end(0)
    for number, salt in ((1, "a"), (2, "b"), (3, None)):
        drafter.start(number, [9, 4, 5], salt)
    drafts = drafter.propose([1, 2, 3], [2, 2, 2])
    assert [list(draft.token_ids) for draft in drafts] == [[6, 7], [], []]


def test_earlier_answers_are_forgotten_in_time() -> None:
    drafter = SuffixDrafter(max_cached_requests=4)
    for number in range(7):
        drafter.start(number, [0], None)
        drafter.extend(number, [10 * number + at for at in range(5)])
        drafter.end(number)
    drafter.start(100, [1, 2], None)  # of answer 0
    drafter.start(101, [61, 62], None)  # of answer 6
    assert [list(d.token_ids) for d in drafter.propose([100, 101], [2, 2])] == [[], [63, 64]]


def test_earlier_answers_are_counted_over_all_salts() -> None:
    drafter = SuffixDrafter(max_cached_requests=6)
    for number in range(50):
        drafter.start(number, [0], str(number % 17))
        drafter.extend(number, list(range(number)))
        drafter.end(number)
        held = [*drafter._answers.values()]
        assert all(held)
        assert sum(len(text.tokens) for texts in held for text in texts) == drafter._held_tokens
        assert drafter._held <= 6
    assert len(drafter._answers) == 6


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_a_draft_goes_on_where_the_text_ends(text: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text) - 1))
    count = data.draw(st.integers(0, 30))
    draft = continued(text, at, count)
    assert len(draft) == count
    whole = text + draft
    assert all(draft[i] == whole[at + i] for i in range(count))
