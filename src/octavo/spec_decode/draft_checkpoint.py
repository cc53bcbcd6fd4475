"""Reads a draft model's file, and refuses one that does not suit the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import octavo.loader
from octavo.executor.base import check_weights
from octavo.executor.registry import executor_class
from octavo.kv_cache.layout import KvLayout
from octavo.loader import pull
from octavo.loader.base import Checkpoint
from octavo.loader.rounding import rounded
from octavo.models.config import ModelConfig
from octavo.models.families import program
from octavo.models.program import Program


class DraftModel(NamedTuple):
    """A draft model that was read and suits the target, but is not in memory yet."""

    checkpoint: Checkpoint
    program: Program
    layout: KvLayout
    weight_bytes: int  # packed


def read(
    model: str,
    quantization: str | None,
    target: Checkpoint,
    layout_of: Callable[[ModelConfig], KvLayout],
    *,
    threads: int,
    executor: str,
    isa: str | None,
) -> DraftModel:
    """Read a draft model, known by a name, a path or a hub id, that ``executor`` will run.

    Raises `CheckpointError`, also for weights that do not fit together, and `ValueError` if its
    vocabulary is not the target's.
    """
    checkpoint = octavo.loader.load(Path(pull.resolve(model)))
    check_vocabulary(checkpoint, target)
    if quantization is not None:
        checkpoint = rounded(checkpoint, quantization, threads)
    compute, source = program(checkpoint.config), str(checkpoint.path)
    weights = checkpoint.weights
    held = executor_class(executor).held_bytes(weights.values(), compute, source, isa)
    check_weights(compute, weights, source)
    return DraftModel(checkpoint, compute, layout_of(checkpoint.config), held)


def check_vocabulary(draft: Checkpoint, target: Checkpoint) -> None:
    """Compare the vocabularies. Raises `ValueError` naming the first token that differs."""
    ours, theirs = draft.config.vocab_size, target.config.vocab_size
    if ours != theirs:
        raise ValueError(
            f"speculative_config: the draft model {draft.path} has a vocabulary of {ours} tokens, "
            f"the model one of {theirs}"
        )
    one, other = draft.tokenizer, target.tokenizer
    for token in range(ours):
        mine, its = one.spelling(token), other.spelling(token)
        if mine != its:
            raise ValueError(
                f"speculative_config: the draft model {draft.path} has another vocabulary: token "
                f"{token} is {mine!r}, the model's is {its!r}"
            )
        if one.is_special(token) != other.is_special(token):
            ordinary = draft.path if other.is_special(token) else target.path
            raise ValueError(
                f"speculative_config: token {token}, {mine!r}, is a special token, but not in "
                f"{ordinary}"
            )
    if one.kind != other.kind:
        raise ValueError(
            f"speculative_config: the draft model's tokens are {one.kind}, the model's {other.kind}"
        )
