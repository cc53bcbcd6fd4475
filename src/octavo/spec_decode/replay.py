"""Verification by replay: which tokens of a draft stand."""

from __future__ import annotations

from collections.abc import Sequence


def replay(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many tokens of ``drawn`` stand.

    ``drawn`` are the target's own draws behind the sequence's last token and then behind each token
    of the draft; -1 where the logits allowed no draw.

    A draw stands if every draft token before it equals the target's draw at that place: the logits,
    the sampler's state and its random number are then those of decoding token by token, so the
    output is exactly the one without drafts, for any sampling parameters. (Speculative sampling in
    Leviathan et al., 2023, and Chen et al., 2023, keeps the distribution; this keeps the bits.)
    """
    for count, (guess, token) in enumerate(zip(draft, drawn, strict=False)):
        if token != guess:
            return count if token < 0 else count + 1
    return len(drawn) if drawn[-1] >= 0 else len(drawn) - 1


def agreement(draft: Sequence[int], run: Sequence[int]) -> int:
    """Return the length of the longest common prefix of ``draft`` and ``run``."""
    for count, (guess, token) in enumerate(zip(draft, run, strict=False)):
        if guess != token:
            return count
    return min(len(draft), len(run))
