"""How good heads are: counted here one by one."""

from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.tools.train import measure as measure_module
from octavo.tools.train.measure import measure
from octavo.tools.train.texts import Texts


def decode(answer: list[int], guesses: list[list[int]]) -> list[list[bool]]:
    """Return which guesses of each pass at tokens of the answer are right. A pass begins at an
    entry, whose row gives the next token; a pass for the last token alone has nothing to guess.
    """
    at, passes = 0, []
    while at + 2 < len(answer):
        passes.append([g == t for g, t in zip(guesses[at], answer[at + 2 :], strict=False)])
        at += 1 + len(list(takewhile(bool, passes[-1])))
    return passes


@given(
    answers=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=12), min_size=1, max_size=6),
    heads=st.integers(1, 4),
    seed=st.integers(0, 1000),
    piece=st.integers(1, 9),
)
def test_rates(answers: list[list[int]], heads: int, seed: int, piece: int) -> None:
    total = sum(map(len, answers))
    guesses = np.random.default_rng(seed).integers(0, 3, (total, heads))
    left = np.concatenate([np.arange(len(answer))[::-1] for answer in answers]).astype(np.int32)
    tokens = np.concatenate(answers).astype(np.int32)
    # A row is known by its number.
    texts = Texts(tokens, np.arange(total, dtype=np.float16)[:, None], left)

    def guess(hidden: Any, drawn: Any) -> Any:
        numbers = hidden[:, 0].astype(int)
        assert drawn.tolist() == tokens[numbers + 1].tolist()
        return guesses[numbers].T

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_module, "_PIECE", piece)
        found = measure(texts, guess)

    runs = []
    starts = np.cumsum([0, *map(len, answers)])
    passes = []
    for start, answer in zip(starts, answers, strict=False):
        own = guesses[start : start + len(answer)].tolist()
        passes += decode(answer, own)
        for at in range(len(answer) - 2):
            runs.append([g == t for g, t in zip(own[at], answer[at + 2 :], strict=False)])
    for head in range(heads):
        told = [run for run in runs if len(run) > head]
        right = sum(run[head] for run in told)
        before = [run for run in told if all(run[:head])]
        assert found["top1"][head] == round(right / max(1, len(told)), 4)
        assert found["top1_if_right_before"][head] == round(
            sum(run[head] for run in before) / max(1, len(before)), 4
        )
    produced = sum(1 + len(list(takewhile(bool, run))) for run in passes)
    assert found["tokens_per_pass"] == round(produced / max(1, len(passes)), 3)
