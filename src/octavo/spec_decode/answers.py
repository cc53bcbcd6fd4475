"""Checks a drafter's answer, which may come from any code: plain integers, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np

from octavo.executor.base import Float32
from octavo.spec_decode.drafter import NUM_CLASSES, Draft

MAX_BRANCHES = 16  # alternatives verified in a step; each takes a row of the block tables
_ROUNDING = 1e-3  # tolerance for the sum of a distribution


def checked_draft(answer: Draft, most: int, vocab_size: int, *, drawn: bool) -> Draft:
    """Return the draft, cut to ``most`` tokens.

    If the draft has no tokens, its first alternative takes their place. Alternatives that repeat
    the beginning of another path are left out. With ``drawn``, the probabilities must be
    distributions that the tokens can have been drawn from. Raises `ValueError` or `TypeError`.
    """
    given, evidence, alternatives, probabilities = Draft(*answer)
    evidence = index(evidence)
    if not 0 <= evidence < NUM_CLASSES:
        raise ValueError(f"evidence is {evidence}, outside 0 to {NUM_CLASSES - 1}")
    token_ids = _tokens(given, most, vocab_size)
    paths = [token_ids] if token_ids else []
    for alternative in alternatives[:MAX_BRANCHES]:
        tokens = _tokens(alternative, most, vocab_size)
        if tokens and not any(path[: len(tokens)] == tokens for path in paths):
            paths.append(tokens)
    token_ids = paths[0] if paths else token_ids
    if probabilities is not None:
        if len(probabilities) < len(token_ids):
            raise ValueError(f"probabilities of {len(probabilities)} of {len(token_ids)} tokens")
        # Each row by itself: a model's rows are large and lie apart.
        probabilities = [np.asarray(row, np.float32) for row in probabilities]
        for row in probabilities:
            if row.shape != (vocab_size,):
                raise ValueError(f"probabilities of a token have shape {row.shape}")
        if drawn:
            _check_drawn(token_ids, probabilities)
    return Draft(token_ids, evidence, tuple(paths[1:]), probabilities)


def _tokens(given: Sequence[int], most: int, vocab_size: int) -> list[int]:
    token_ids = [index(token) for token in given[:most]]
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise ValueError(f"a draft has a token outside 0 to {vocab_size - 1}")
    return token_ids


def _check_drawn(token_ids: list[int], probabilities: list[Float32]) -> None:
    """Raise `ValueError` if the tokens cannot have been drawn from these distributions."""
    for token, row in zip(token_ids, probabilities, strict=False):
        if not ((row >= 0).all() and abs(row.sum(dtype=np.float64) - 1) < _ROUNDING):
            raise ValueError("the probabilities of a draft are no distributions")
        if not row[token]:
            raise ValueError("a draft has a token whose probability it says is 0")
