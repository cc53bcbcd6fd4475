"""The model families: a file for each, with its computation and its record (`Family`).

Every module of this folder that has a ``FAMILY`` is one; there is no other list.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from octavo import models
from octavo.models.config import ModelConfig
from octavo.models.family import Family
from octavo.models.hf_type import HfType, HfWrapper
from octavo.models.program import Program, Shapes

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for name in sorted(module.name for module in iter_modules(models.__path__))
    if hasattr(module := import_module(f"{models.__name__}.{name}"), "FAMILY")
}
# By ``model_type``.
HF_TYPES: dict[str, tuple[Family, HfType]] = {
    kind.model_type: (family, kind) for family in FAMILIES.values() for kind in family.hf
}
# By the ``model_type`` beside a ``text_config``.
HF_WRAPPERS: dict[str, HfWrapper] = {
    each.model_type: each for family in FAMILIES.values() for each in family.wrappers
}
# By GGUF's architecture: dense, with experts, or either, as the file has it.
ARCHITECTURES: dict[str, list[Family]] = {}
for _family in FAMILIES.values():
    if _family.gguf:
        ARCHITECTURES.setdefault(_family.gguf, []).append(_family)


def program(config: ModelConfig, max_model_len: int | None = None) -> Program:
    """Return the Program of a model, for sequences of up to ``max_model_len`` tokens (None: as many
    as it admits by default).

    The length matters only to rotary positions that depend on it (`Rope.for_length`). Raises
    `ValueError` when the family is not supported.
    """
    if config.family not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ValueError(
            f"model family {config.family!r} is not supported; supported are {supported}"
        )
    family = FAMILIES[config.family]
    return family.program(config.for_length(max_model_len or config.default_length))


def mtp_program(config: ModelConfig, max_model_len: int | None = None) -> Program:
    """Return the Program of a model's layer for multi-token prediction, for sequences of up to
    ``max_model_len`` tokens. Raises `ValueError` where there is none, or several.
    """
    build, count = FAMILIES[config.family].mtp, config.mtp_layers
    name = config.name or config.family
    if build is None or not count:
        raise ValueError(f"{name} has no layer for multi-token prediction (MTP)")
    if count > 1:
        raise ValueError(
            f"{name} has {count} layers for multi-token prediction (MTP), and only one is supported"
        )
    return build(config.for_length(max_model_len or config.default_length))


def mtp_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of the weights that only this layer has. Raises as `mtp_program`."""
    own = program(config).weights
    return {role: s for role, s in mtp_program(config).weights.items() if role not in own}
