"""A drafter may be anybody's code: its answer as plain integers, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np

from octavo.executor.base import Float32
from octavo.spec_decode.acceptance import NUM_CLASSES
from octavo.spec_decode.drafter import Draft

BRANCHES = 16  # most alternatives that a step checks
_ROUNDING = 1e-3  # that probabilities may be off one in all


def checked(answer: Draft, most: int, vocab_size: int, *, drawn: bool) -> Draft:
    """The draft, of at most so many tokens. Where it gives only alternatives the first of them is
    the draft; those that only repeat another's beginning are left out. ``drawn``: whether its
    probabilities must be distributions that the tokens can have been drawn from. Raises
    `ValueError` or `TypeError`.
    """
    given, evidence, alternatives, probabilities = Draft(*answer)
    token_ids = _tokens(given, most, vocab_size)
    evidence = index(evidence)
    if not 0 <= evidence < NUM_CLASSES:
        raise ValueError(f"evidence is {evidence}, outside 0 to {NUM_CLASSES - 1}")
    others = [_tokens(each, most, vocab_size) for each in alternatives[:BRANCHES]]
    if not token_ids and others:
        token_ids, *others = others
    others = _distinct(token_ids, others)
    if probabilities is not None:
        if len(probabilities) < len(token_ids):
            raise ValueError(f"probabilities of {len(probabilities)} of {len(token_ids)} tokens")
        # Each row by itself: drafters that compute have them here and there, large as they are.
        rows = [np.asarray(row, np.float32) for row in probabilities]
        for row in rows:
            if row.shape != (vocab_size,):
                raise ValueError(f"probabilities of a token have shape {row.shape}")
        if drawn:
            _check_drawn(token_ids, rows)
        probabilities = rows
    return Draft(token_ids, evidence, tuple(others), probabilities)


def _tokens(given: Sequence[int], most: int, vocab_size: int) -> list[int]:
    token_ids = [index(token) for token in given[:most]]
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise ValueError(f"a draft has a token outside 0 to {vocab_size - 1}")
    return token_ids


def _check_drawn(token_ids: list[int], probabilities: list[Float32]) -> None:
    """`ValueError` where these cannot be the distributions that the tokens were drawn from."""
    for token, row in zip(token_ids, probabilities, strict=False):
        if not ((row >= 0).all() and abs(row.sum(dtype=np.float64) - 1) < _ROUNDING):
            raise ValueError("the probabilities of a draft are no distributions")
        if not row[token]:
            raise ValueError("a draft has a token whose probability it says is 0")


def _distinct(draft: list[int], alternatives: list[list[int]]) -> list[list[int]]:
    """The alternatives that are not the beginning of the draft or of another before."""
    paths = [draft]
    for each in alternatives:
        if not any(path[: len(each)] == each for path in paths):
            paths.append(each)
    return paths[1:]
