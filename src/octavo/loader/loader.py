"""Opens a GGUF file or a Hugging Face folder and binds its tensors to the roles of its Program."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from octavo.loader.base import ChatTemplate, Checkpoint, Weight
from octavo.loader.bind import STACKS, bind, experts, listed, trim_heap
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
from octavo.models.families import FAMILIES, program

# Tensors that are read into the ModelConfig and are no weights of the Program.
_CONFIG_TENSORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
# A tensor an expert, as files had them before there was one for all.
_OLD_EXPERT = re.compile(r"(layers\.\d+\.ffn_(?:gate|up|down))(\.\d+)")


def load(path: Path) -> Checkpoint:
    """Reads a model file or folder. Raises `CheckpointError` naming the file and what is wrong."""
    checkpoint = load_folder(path) if path.is_dir() else load_gguf(path)
    if pulled := known_at(path):  # people know it by this name
        checkpoint = replace(checkpoint, config=replace(checkpoint.config, name=pulled.name))
    return checkpoint


def load_gguf(path: Path) -> Checkpoint:
    file = open_gguf(path)
    config = model_config(file)
    shapes = program(config).weights
    weights = bind(str(file.path), _by_role(file, config, shapes), shapes)
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


def role(tensor: str) -> str:
    """``blk.3.attn_q.weight`` → ``layers.3.attn_q``; biases keep their ending."""
    name = re.sub(r"^blk\.", "layers.", tensor).removesuffix(".weight")
    return _OLD_EXPERT.sub(r"\1_exps\2", name)


def _by_role(
    file: GgufFile, config: ModelConfig, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    fused = FAMILIES[config.family].gguf_fusions
    for name in file.tensors:
        if name in _CONFIG_TENSORS:
            continue
        weight, key = file.weight(name), role(name)
        prefix, _, part = key.rpartition(".")
        roles = [f"{prefix}.{each}" for each in fused.get(part, ())]
        rows = [shapes[each][0] for each in roles if each in shapes]
        if part in STACKS:
            try:
                found = experts(prefix, part, weight, config)
            except ValueError as error:
                file.fail(str(error))
        # An ffn_up of its usual size is no fused one.
        elif roles and len(rows) == len(roles) and weight.shape[0] == sum(rows):
            found = dict(zip(roles, weight.split(rows), strict=True))
        else:
            found = {key: weight}
        if twice := sorted(found.keys() & weights.keys()):
            file.fail(f"has {listed(twice)} twice: tensor {name!r} is not the first")
        weights |= found
    return weights
