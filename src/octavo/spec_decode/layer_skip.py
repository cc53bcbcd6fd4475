"""Drafts by some of the target's own layers.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding", 2023, and, with the target's cache, Elhoushi et al., "LayerSkip: Enabling Early Exit
Inference and Self-Speculative Decoding", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.models.program import Program
from octavo.models.subset import keep_layers
from octavo.spec_decode.cache_drafter import CacheDrafter
from octavo.spec_decode.drafter import Target


class LayerSkipDrafter(CacheDrafter):
    """Runs a pass of some layers for every token. It needs no memory: weights and cache are the
    target's.
    """

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        """Raises as `subset` does."""
        super().__init__(target, subset(target.program, layers))


def subset(target: Program, layers: Sequence[int]) -> Program:
    """Return the Program of the drafting layers. Raises `ValueError` for layers that the target
    does not have, or if they are all that it has.
    """
    count = len(target.config.layers)
    try:
        program = keep_layers(target, layers)
    except ValueError as error:
        raise ValueError(f"speculative_config: layers: {error}") from None
    if len(layers) == count:
        raise ValueError(f"speculative_config: layers are all {count} of the model")
    return program
