"""How good heads are, on answers that they have not learned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.tools.train.texts import Texts

Int = npt.NDArray[np.integer[Any]]
# Hidden rows [places, width] and the tokens drawn from them [places] → the tokens guessed to follow
# those [heads, places], each head going on from the guesses of those before it.
Guess = Callable[[npt.NDArray[np.float16], Int], Int]

_PIECE = 4096  # places that are guessed for at once


def measure(texts: Texts, guess: Guess) -> dict[str, Any]:
    """``top1``: how often each head is right, of all places; ``top1_if_right_before``: of those
    where the heads before it were; ``tokens_per_pass``: decoding with drafts of all heads.
    """
    here = np.flatnonzero(texts.left >= 2)
    pieces = [here[at : at + _PIECE] for at in range(0, max(1, len(here)), _PIECE)]
    guessed = np.concatenate(
        [guess(texts.hidden[piece], texts.tokens[piece + 1]) for piece in pieces], axis=1
    )
    behind = 2 + np.arange(len(guessed))[:, None]  # how far from a place what each head guesses is
    told = texts.left[here] >= behind
    right = told & (guessed == np.pad(texts.tokens, (0, len(guessed) + 1))[here + behind])
    all_right = np.logical_and.accumulate(right, axis=0)
    tried = told & np.concatenate([np.ones_like(told[:1]), all_right[:-1]])
    passes = produced = following = 0
    for place, accepted in zip(here.tolist(), all_right.sum(axis=0).tolist(), strict=True):
        if place >= following:  # not accepted before
            passes += 1
            produced += 1 + accepted
            following = place + 1 + accepted
    return {
        "top1": _shares(right, told),
        "top1_if_right_before": _shares(all_right, tried),
        "tokens_per_pass": round(produced / max(1, passes), 3),
    }


def _shares(part: npt.NDArray[np.bool_], whole: npt.NDArray[np.bool_]) -> list[float]:
    shares = part.sum(axis=1) / np.maximum(1, whole.sum(axis=1))
    return [round(share, 4) for share in shares.tolist()]
