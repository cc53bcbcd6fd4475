"""Opens a GGUF file or a Hugging Face folder and binds its tensors to the roles of its Program."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from octavo.loader.base import ChatTemplate, Checkpoint, Weight
from octavo.loader.bind import (
    STACKS,
    bind,
    expert_biases,
    experts,
    gathered,
    listed,
    taken,
    trim_heap,
    unread,
)
from octavo.loader.chat_template import JinjaChatTemplate, several_templates
from octavo.loader.generation_config import of_gguf
from octavo.loader.gguf import GgufFile
from octavo.loader.gguf_split import open_gguf
from octavo.loader.gguf_tokenizer import gguf_tokenizer
from octavo.loader.hf import load_folder
from octavo.loader.metadata import model_config
from octavo.loader.pull import known_at
from octavo.loader.tokenizer import BpeTokenizer
from octavo.models.config import ModelConfig
from octavo.models.families import FAMILIES, mtp_shapes, program
from octavo.models.family import Family
from octavo.models.program import Shapes

# Tensors that are read into the ModelConfig and are no weights of the Program.
_CONFIG_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_BLOCK = re.compile(r"blk\.(\d{1,4})\.")
_LAYER = re.compile(r"^layers\.\d+\.")
# A tensor an expert, as files had them before there was one for all.
_OLD_EXPERT = re.compile(r"(layers\.\d+\.ffn_(?:gate|up|down))(\.\d+)")
_STACKED_BIAS = re.compile(r"(layers\.\d+\.ffn_(?:gate|up|down)_exps)\.bias")


def load(path: Path) -> Checkpoint:
    """Reads a model file or folder. Raises `CheckpointError` naming the file and what is wrong."""
    checkpoint = load_folder(path) if path.is_dir() else load_gguf(path)
    if pulled := known_at(path):  # people know it by this name
        checkpoint = replace(checkpoint, config=replace(checkpoint.config, name=pulled.name))
    return checkpoint


def load_gguf(path: Path) -> Checkpoint:
    file = open_gguf(path)
    config = model_config(file)
    weights = _weights(file, config, program(config).weights)
    tokenizer = gguf_tokenizer(file, config.vocab_size)
    trim_heap()
    return Checkpoint(
        file.path,
        config,
        weights,
        tokenizer,
        _chat_template(file, tokenizer),
        release=lambda: _release(file),
        file_bytes=file.nbytes,
        notes=tuple(file.notes),
        generation_config=of_gguf(file),
        mtp_weights=lambda: _weights(file, config, mtp_shapes(config), mtp=True),
    )


def _chat_template(file: GgufFile, tokenizer: BpeTokenizer) -> ChatTemplate | None:
    key = "tokenizer.chat_template"
    source = file.get(key, str, None)
    if source is None:
        names = [
            each.removeprefix(key + ".") for each in file.metadata if each.startswith(key + ".")
        ]
        return several_templates(names) if names else None
    # As llama.cpp has it, where a file does not name them.
    tokens = {"bos_token": "", "eos_token": ""} | tokenizer.special_tokens_map
    return JinjaChatTemplate(source, tokens)


def _release(file: GgufFile) -> None:
    file.release()
    trim_heap()


def role(tensor: str, family: Family) -> str:
    """``blk.3.attn_q.weight`` → ``layers.3.attn_q``; biases keep their ending."""
    name = re.sub(r"^blk\.", "layers.", tensor).removesuffix(".weight")
    own = {called: role for role, called in family.gguf_names.items()}
    return own.get(name, _OLD_EXPERT.sub(r"\1_exps\2", name))


def parts_of(role: str) -> tuple[str, str]:
    """``layers.3.attn_q`` → (``layers.3.``, ``attn_q``)."""
    part = _LAYER.sub("", role)
    return role.removesuffix(part), part


def _drafts(tensor: str, config: ModelConfig) -> bool:
    """Whether a tensor is of layers behind the model's own: those for multi-token prediction."""
    match = _BLOCK.match(tensor)
    return match is not None and int(match[1]) >= len(config.layers)


def vectors_as_matrices(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The shapes of matrices that are vectors of a Program, by role without the layer's number."""
    recurrent = FAMILIES[config.family].recurrent
    shape = next((each.recurrence for each in config.layers if each.recurrence is not None), None)
    return {} if recurrent is None or shape is None else recurrent.gguf_matrices(shape)


def _weights(
    file: GgufFile, config: ModelConfig, shapes: Shapes, *, mtp: bool = False
) -> dict[str, Weight]:
    """The weights of the model, or of its layer for multi-token prediction."""
    names = [name for name in file.tensors if _drafts(name, config) is mtp]
    return bind(str(file.path), _by_role(file, names, config, shapes), shapes)


def _by_role(
    file: GgufFile, names: list[str], config: ModelConfig, shapes: Shapes
) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    family, passed_over = FAMILIES[config.family], unread(config)
    matrices = vectors_as_matrices(config)
    for name in names:
        if name in _CONFIG_TENSORS or role(name, family) in passed_over:
            continue
        weight, key = file.weight(name), role(name, family)
        prefix, part = parts_of(key)
        roles = [prefix + each for each in family.gguf_fusions.get(part, ())]
        rows = [shapes[each][0] for each in roles if each in shapes]
        called, ending = part.removesuffix(".bias"), ".bias" if part.endswith(".bias") else ""
        places = gathered(prefix, called, ending, shapes, config, gguf=True)
        if match := _STACKED_BIAS.fullmatch(key):
            try:
                found = expert_biases(match[1], weight, config)
            except ValueError as error:
                file.fail(str(error))
        elif places:
            try:
                found = taken(weight, places)
            except ValueError as error:
                file.fail(str(error))
        elif part in STACKS:
            try:
                found = experts(prefix.removesuffix("."), part, weight, config)
            except ValueError as error:
                file.fail(str(error))
        # An ffn_up of its usual size is no fused one.
        elif roles and len(rows) == len(roles) and weight.shape[0] == sum(rows):
            found = dict(zip(roles, weight.split(rows), strict=True))
        else:
            if key in shapes and weight.shape == matrices.get(part):
                weight = weight._replace(shape=shapes[key])
            found = {key: weight}
        if twice := sorted(found.keys() & weights.keys()):
            file.fail(f"has {listed(twice)} twice: tensor {name!r} is not the first")
        weights |= found
    return weights
