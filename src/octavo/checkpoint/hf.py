"""Opens a Hugging Face model folder: config, tensors by role, tokenizer and chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from octavo.checkpoint.base import ChatTemplate, Checkpoint, Weight
from octavo.checkpoint.bind import bind, experts, trim_heap, vector
from octavo.checkpoint.chat_template import JinjaChatTemplate, several_templates
from octavo.checkpoint.files import read_file
from octavo.checkpoint.hf_config import model_config
from octavo.checkpoint.hf_folder import CONFIG, HfFolder, HfWeights
from octavo.checkpoint.hf_special_tokens import TOKENIZER_CONFIG
from octavo.checkpoint.hf_tokenizer import hf_tokenizer
from octavo.checkpoint.quantization import ModelTensors
from octavo.model.config import ModelConfig
from octavo.model.families import program

TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"  # a folder
MAX_TEMPLATE = 1 << 20  # bytes

_TOP = {
    "model.embed_tokens.weight": "token_embd",
    "model.norm.weight": "output_norm",
    "lm_head.weight": "output",
}
_LAYER = re.compile(r"model\.layers\.(\d{1,4})\.([\w.]+)\.(weight|bias)")
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# An expert's matrices: Mixtral's w1, w2 and w3, elsewhere by the names of the dense layer's.
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d{1,4})\.(\w+)")
_OF_EXPERT = {
    "w1": "ffn_gate_exps",
    "w2": "ffn_down_exps",
    "w3": "ffn_up_exps",
    "gate_proj": "ffn_gate_exps",
    "down_proj": "ffn_down_exps",
    "up_proj": "ffn_up_exps",
}
# All experts' in one tensor, as transformers 5 has them in memory.
_STACK = re.compile(r"model\.layers\.(\d{1,4})\.mlp\.experts\.(gate_up_proj|down_proj)")
_STACKS = {"gate_up_proj": "ffn_gate_up_exps", "down_proj": "ffn_down_exps"}
# Where it follows attention in truth, as its name says, and is not the feed-forward's own norm.
_AFTER_ATTENTION = ("gemma2", "gemma3", "olmo2")
# Matrices that are several in one, and the outputs' order.
_FUSED = {
    "self_attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
    "mlp.gate_up_proj": ("ffn_gate", "ffn_up"),
}
# Frequencies that old files carry along; they follow from config.json.
_COMPUTED = ".rotary_emb.inv_freq"


def load_folder(path: Path) -> Checkpoint:
    """Raises `CheckpointError` naming the file and what is wrong with it."""
    folder = HfFolder(path)
    stored = HfWeights(folder)
    tensors = ModelTensors(stored)
    config = model_config(folder, tensors.names)
    weights = _bind(tensors, config)
    tokenizer = hf_tokenizer(folder, config.vocab_size)
    trim_heap()
    return Checkpoint(
        path,
        config,
        weights,
        tokenizer,
        _chat_template(folder, tokenizer.special_tokens_map),
        release=lambda: _release(stored),
        file_bytes=stored.file_bytes,
        quantization=tensors.quantization,
    )


def _release(stored: HfWeights) -> None:
    stored.release()
    trim_heap()


def _bind(tensors: ModelTensors, config: ModelConfig) -> dict[str, Weight]:
    folder = tensors.stored.folder
    shapes = program(config).weights
    weights: dict[str, Weight] = {}
    for name in tensors.names:
        if name.endswith(_COMPUTED) or _nothing(tensors, name, shapes, config.family):
            continue
        for role, weight in _weights(tensors, name, shapes, config):
            if role in weights:
                file = tensors.stored.place[tensors.first(name)]
                folder.fail(file, f"has {role} both fused and by itself: {name!r}")
            weights[role] = weight
    if config.tied_embeddings and "output" in weights:
        # Some writers store the head that they share. It is no other, or the file contradicts.
        head, embedding = weights.pop("output"), weights.get("token_embd")
        if embedding is None or not _same(head, embedding):
            folder.fail(
                CONFIG,
                f"tie_word_embeddings is true, but {head.name!r} is not the embedding's matrix",
            )
    if not config.tied_embeddings and "output" not in weights:
        folder.fail(CONFIG, "tie_word_embeddings is false, but there is no tensor 'lm_head.weight'")
    bound = bind(str(folder.path), weights, shapes)
    if config.family in ("gemma2", "gemma3"):
        bound = {role: _plus_one(w) if role.endswith("norm") else w for role, w in bound.items()}
    return bound


def _weights(
    tensors: ModelTensors, name: str, shapes: dict[str, tuple[int, ...]], config: ModelConfig
) -> list[tuple[str, Weight]]:
    """What a tensor is in the Program, by role; by its own name if it is nothing there."""
    if match := _STACK.fullmatch(name):
        stack = tensors.stored.weight(name)
        try:
            found = experts(f"layers.{int(match[1])}", _STACKS[match[2]], stack, config)
        except ValueError as error:
            tensors.stored.folder.fail(tensors.stored.place[name], str(error))
        return list(found.items())
    roles = _roles(name, config.family)
    if any(role not in shapes for role in roles):
        if name in tensors.modules:
            tensors.stored.refuse(tensors.first(name), "is not used by this model family")
        role = roles[0] if len(roles) == 1 else name
        return [(role, tensors.stored.weight(name))]
    rows = [shapes[role][0] for role in roles]
    weight = tensors.weight(name, sum(rows), shapes[roles[0]][-1])
    if len(roles) == 1:
        return [(roles[0], weight)]
    if not weight.shape or weight.shape[0] != sum(rows):
        tensors.stored.refuse(
            name, f"has shape {list(weight.shape)}; config.json asks for {rows} rows"
        )
    return list(zip(roles, weight.split(rows), strict=True))


def _roles(name: str, family: str) -> list[str]:
    """The roles whose rows a tensor has, one after another; its own name if it is unknown."""
    if name in _TOP:
        return [_TOP[name]]
    match = _LAYER.fullmatch(name)
    if match is None:
        return [name]
    layer, part, kind = int(match[1]), match[2], match[3]
    prefix, ending = f"layers.{layer}.", ".bias" if kind == "bias" else ""
    if part == "post_attention_layernorm" and family in _AFTER_ATTENTION:
        return [prefix + "post_attention_norm" + ending]
    if part in _PARTS:
        return [prefix + _PARTS[part] + ending]
    expert = _EXPERT.fullmatch(part)
    if expert is not None and expert[2] in _OF_EXPERT:
        return [f"{prefix}{_OF_EXPERT[expert[2]]}.{int(expert[1])}{ending}"]
    return [prefix + each + ending for each in _FUSED.get(part, ())] or [name]


def _nothing(
    tensors: ModelTensors, name: str, shapes: dict[str, tuple[int, ...]], family: str
) -> bool:
    """Whether it is a bias of zeros that some GPTQ writers give modules that have none."""
    module, _, part = name.rpartition(".")
    return (
        part == "bias"
        and f"{module}.weight" in tensors.modules
        and not any(role in shapes for role in _roles(name, family))
        and not tensors.stored.weight(name).data.any()
    )


def _same(a: Weight, b: Weight) -> bool:
    return a.format is b.format and a.shape == b.shape and bool(np.array_equal(a.data, b.data))


def _plus_one(weight: Weight) -> Weight:
    """Gemma stores its norms' weights less one."""
    data = vector(weight).data.view("<f4") + np.float32(1.0)
    data.flags.writeable = False
    return weight._replace(source=data.view(np.uint8))


def _chat_template(folder: HfFolder, tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template in a file of its own, else the one in tokenizer_config.json; of several, the one
    called default. ``tokens``: the special ones by name."""
    found = {name: _template_file(folder, file) for name, file in _template_files(folder)}
    source: object = found
    if not found:
        source = folder.json_if_any(TOKENIZER_CONFIG).get("chat_template")
    if isinstance(source, list):
        pairs = [
            (each.get("name"), each.get("template")) for each in source if isinstance(each, dict)
        ]
        source = {name: template for name, template in pairs if isinstance(name, str)}
    if isinstance(source, dict):
        if source and "default" not in source:
            return several_templates(source)
        source = source.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        folder.fail(TOKENIZER_CONFIG, f"chat_template is a {type(source).__name__}, not a string")
    return JinjaChatTemplate(source, tokens)


def _template_files(folder: HfFolder) -> Iterator[tuple[str, str]]:
    """(name, file) of each."""
    if folder.has(TEMPLATE):
        yield "default", TEMPLATE
    for path in sorted((folder.path / TEMPLATES).glob("*.jinja")):
        yield path.stem, f"{TEMPLATES}/{path.name}"


def _template_file(folder: HfFolder, name: str) -> str:
    try:
        return read_file(folder.path / name, MAX_TEMPLATE).decode()
    except UnicodeDecodeError:
        folder.fail(name, "is not UTF-8")
