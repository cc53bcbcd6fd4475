"""What stands of a draft is what decoding token by token gives."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.spec_decode.replay import replay

FEW = st.integers(0, 2)  # so that guesses are often right


@given(draft=st.lists(FEW, max_size=6), target=st.data())
def test_what_stands_is_what_would_have_come(draft: list[int], target: st.DataObject) -> None:
    """The target is any function of the tokens so far; it may give no token somewhere."""
    answers: dict[tuple[int, ...], int] = {}

    def draw(text: tuple[int, ...]) -> int:
        if text not in answers:
            answers[text] = target.draw(st.integers(-1, 2))
        return answers[text]

    drawn = [draw(tuple(draft[:count])) for count in range(len(draft) + 1)]
    expected: list[int] = []
    while len(expected) <= len(draft) and (token := draw(tuple(expected))) >= 0:
        expected.append(token)
        if tuple(expected) != tuple(draft[: len(expected)]):
            break
    assert drawn[: replay(draft, drawn)] == expected


def test_without_a_draft_the_draw_stands() -> None:
    assert replay((), [7]) == 1
    assert replay((), [-1]) == 0
