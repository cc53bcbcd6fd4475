"""Which matrices are rounded: of those of the layers, and embedding and head, the model's ends.

What reads small ends was tried with transformers 5.24, compressed-tensors 0.20.1 and GPTQModel 7.7
(benchmarks/quantized_readers.py): a head of its own is read in compressed-tensors' layout; an
embedding there is not, nor either in those of GPTQ and AWQ, whose head comes out random. vLLM takes
embeddings in compressed-tensors' layout from 0.29 on (its pull request 44340), unless they are the
head, too (45535). llama.cpp and what builds on it read both in GGUF files.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from octavo.loader.base import Checkpoint, WeightFormat
from octavo.tools.quantize.grid import Scheme
from octavo.tools.quantize.layouts import Format, module_bytes, scheme_of
from octavo.tools.quantize.mixes import BLOCK, Mix, block_scheme, mix_schemes
from octavo.tools.quantize.quantizer import Method, Recipe

EMBEDDING, HEAD = "token_embd", "output"
STAY = 16  # bits: what is not rounded
LARGE = 0.1  # of all weights: from this share on the ends are made small without being asked
FLOATS = frozenset({"F32", "F16", "BF16"})
# What is quantized already has lost once: it must get smaller by this share to lose again.
WORTH = 0.1


def worth(before: int, after: int, *, quantized: bool) -> bool:
    """Whether bytes saved are worth a loss."""
    return after <= (1.0 - WORTH) * before if quantized else after < before


def ends(
    checkpoint: Checkpoint, format: Format, bits: int | None, group: int | None, symmetric: bool
) -> dict[str, Scheme]:
    """What embedding and head are rounded to, by role; those that stay are left out.

    ``bits``: those that the layout has, or 16; None is 8 where they are a large part of the weights
    and the readers of the layout know them so. Raises `ValueError` for bits that the layout cannot
    have.
    """
    asked, own = bits is not None, bits or 8
    if own == STAY or not (asked or large(checkpoint)):
        return {}
    if format in (Format.GPTQ, Format.AWQ):
        if asked:
            raise ValueError(
                f"the {format.value} layout has embedding and head in 16 bits: transformers reads "
                "no others there; GGUF (-o NAME.gguf) and --format compressed-tensors have them "
                "small"
            )
        return {}
    roles = (EMBEDDING, HEAD) if asked or format is Format.GGUF else (HEAD,)
    scheme = scheme_of(format, own, group, symmetric or own == 8)
    return {
        role: scheme
        for role in roles
        if role in checkpoint.weights and not _stays(checkpoint, format, scheme, role)
    }


def kept(checkpoint: Checkpoint, recipe: Recipe, format: Format) -> frozenset[str]:
    """Matrices of the layers that stay byte for byte. AWQ scales what lies between them, so none
    does."""
    return frozenset(
        role
        for role, weight in checkpoint.weights.items()
        if role.startswith("layers.")
        and recipe.method is not Method.AWQ
        and (scheme := recipe.of(role, weight.shape))
        and _stays(checkpoint, format, scheme, role)
    )


def mixed(checkpoint: Checkpoint, method: Method, mix: Mix, bits: int | None = None) -> Recipe:
    """How the matrices of a mix are rounded. ``bits`` are those of embedding and head: 4, 5, 6 or 8
    in place of the mix's, or 16."""
    schemes = mix_schemes(checkpoint, mix)
    at_ends = {role: schemes.pop(role) for role in (EMBEDDING, HEAD) if role in schemes}
    if bits is not None:
        named = {4: "Q4_K", 5: "Q5_K", 6: "Q6_K", 8: "Q8_0"}
        at_ends = {
            role: block_scheme(WeightFormat[named[bits]], checkpoint.weights[role].shape[1])
            for role in at_ends
            if bits != STAY
        }
    at_ends = {
        role: scheme
        for role, scheme in at_ends.items()
        if not _stays(checkpoint, Format.GGUF, scheme, role)
    }
    recipe = Recipe(
        method,
        block_scheme(mix.base, BLOCK),
        ends=at_ends,
        schemes=schemes,
        mix=mix,
    )
    return replace(recipe, kept=kept(checkpoint, recipe, Format.GGUF))


def large(checkpoint: Checkpoint) -> bool:
    """Whether embedding and head are a large part of a model."""
    count = {role: prod(weight.shape) for role, weight in checkpoint.weights.items()}
    return count[EMBEDDING] + count.get(HEAD, 0) >= LARGE * sum(count.values())


def _stays(checkpoint: Checkpoint, format: Format, scheme: Scheme, role: str) -> bool:
    """Whether a GGUF file made of another one has a matrix as it was: one that is quantized and
    would hardly get smaller."""
    if format is not Format.GGUF or checkpoint.path.is_dir():
        return False
    weight = checkpoint.weights[role]
    quantized = weight.stored.format not in FLOATS
    after = module_bytes(format, scheme, *weight.shape)
    return quantized and not worth(weight.stored.nbytes, after, quantized=True)
