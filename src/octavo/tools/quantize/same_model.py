"""Whether a model that was written is the one that was meant."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from octavo.models.config import Layer, LongRope, ModelConfig, Temperature

_CLOSE = 1e-6  # relative: files have numbers in fp32


def difference(wanted: ModelConfig, found: ModelConfig) -> str | None:
    """What of it differs, or None. Names do not matter, nor does the order of rotated rows; layers
    for multi-token prediction are not written.
    """
    for field in fields(ModelConfig):
        ours, theirs = getattr(wanted, field.name), getattr(found, field.name)
        match ours:
            case _ if field.name in ("name", "mtp_layers"):
                same = True
            case tuple():
                if len(ours) != len(theirs):
                    return "the number of layers would differ"
                for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                    if wanted.heads_of(a) != found.heads_of(b) or a.shares != b.shares:
                        return f"the KV cache of layer {index} would differ"
                    if _values_of(a) != _values_of(b):
                        return f"the values of layer {index} would differ"
                    if _width(wanted, a) != _width(found, b):
                        return f"the feed-forward layer {index} would differ"
                    if not _same_layer(a, b):
                        return f"{_part(a, b)} of layer {index} would differ"
                continue
            case Temperature() if isinstance(theirs, Temperature):
                same = ours.original == theirs.original and _close(ours.beta, theirs.beta)
            case float():
                same = _close(ours, theirs)
            case _:
                same = ours == theirs
        if not same:
            return f"{field.name} would differ"
    return None


def _values_of(layer: Layer) -> bool:
    return layer.shares is None and layer.keys_as_values


def _width(config: ModelConfig, layer: Layer) -> int:
    return layer.intermediate_size or config.intermediate_size


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _CLOSE * abs(a)


def _part(a: Layer, b: Layer) -> str:
    if a.window != b.window:
        return "the window"
    if a.recurrence != b.recurrence:
        return "the recurrence"
    return "the experts" if a.experts != b.experts else "the rotary positions"


def _same_layer(a: Layer, b: Layer) -> bool:
    x, y = a.rope, b.rope
    same_factors = len(x.factors) == len(y.factors) and np.allclose(
        x.factors, y.factors, rtol=1e-5, atol=0.0
    )
    close = all(
        _close(getattr(x, name), getattr(y, name)) for name in ("scale", "magnitude", "theta")
    )
    return (
        same_factors
        and close
        and x.dim == y.dim
        and _same_by_length(x.by_length, y.by_length)
        and (a.window, a.experts, a.recurrence) == (b.window, b.experts, b.recurrence)
    )


def _same_by_length(a: object, b: object) -> bool:
    if isinstance(a, LongRope) and isinstance(b, LongRope):
        alike = len(a.factors) == len(b.factors) and np.allclose(a.factors, b.factors, rtol=1e-5)
        return a.original == b.original and alike
    return a == b
