"""What a GGUF file calls the tensors that a checkpoint's weights are in."""

from __future__ import annotations

from octavo.loader.base import Checkpoint
from octavo.loader.loader import parts_of
from octavo.models.families import FAMILIES
from octavo.models.family import Fused, Gather


def tensor_names(checkpoint: Checkpoint) -> dict[str, str]:
    """By role. What a file has in one tensor has one name: a layer's experts, and matrices that a
    family fuses or interleaves. Of a folder the names are those in a file that is made of it."""
    if not checkpoint.path.is_dir():
        return {role: weight.name for role, weight in checkpoint.weights.items()}
    family = FAMILIES[checkpoint.config.family]
    wholes: tuple[Fused | Gather, ...] = (*family.fused, *family.gathers)
    fused = {part: each.gguf for each in wholes if each.gguf for part in each.parts}
    found = {}
    for role in checkpoint.weights:
        prefix, part = parts_of(role)
        found[role] = tensor_name(prefix + fused.get(part, family.gguf_names.get(part, part)))
    return found


def tensor_name(role: str) -> str:
    """``layers.3.attn_q`` → ``blk.3.attn_q.weight``; biases and scales keep their ending, a
    recurrence's numbers a head have none, and experts lose their number."""
    prefix, _, part = role.rpartition(".")
    ending = "" if part in ("bias", "scale", "ssm_a", "ssm_d") else ".weight"
    return (prefix if part.isdecimal() else role).replace("layers.", "blk.", 1) + ending
