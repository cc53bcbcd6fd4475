"""Which of a sequence's drafts stand. Both what is drawn and what is learned rest on this."""

from __future__ import annotations

from collections.abc import Sequence


def replay(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of ``drawn`` stand. They are the target's own draws after the last token and, behind
    that, after each token of the draft; -1 where the logits gave none.

    A draw stands if every draft before it was what the target drew there: its logits, the sampler's
    state and its random number are then those of decoding token by token, so that the output is the
    very one that would have come without drafts, for any sampling parameters. (Speculative sampling
    in Leviathan et al., 2023, and Chen et al., 2023, keeps the distribution; this keeps the bits.)
    """
    for count, (guess, token) in enumerate(zip(draft, drawn, strict=False)):
        if token != guess:
            return count if token < 0 else count + 1
    return len(drawn) if drawn[-1] >= 0 else len(drawn) - 1


def agreement(guess: Sequence[int], run: Sequence[int]) -> int:
    """How many tokens ``guess`` and ``run`` have in common from the first on."""
    for count, (one, other) in enumerate(zip(guess, run, strict=False)):
        if one != other:
            return count
    return min(len(guess), len(run))
