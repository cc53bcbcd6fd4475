"""Opens a Hugging Face model folder: config, tensors by role, tokenizer and chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.loader.base import (
    ChatTemplate,
    Checkpoint,
    CheckpointError,
    Weight,
    WeightFormat,
)
from octavo.loader.bind import bind, experts, gathered, taken, trim_heap, unread, vector
from octavo.loader.chat_template import JinjaChatTemplate, several_templates
from octavo.loader.files import read_file
from octavo.loader.hf_config import model_config, sizes_left_out, text_config
from octavo.loader.hf_folder import CONFIG, HfFolder, HfWeights
from octavo.loader.hf_special_tokens import TOKENIZER_CONFIG
from octavo.loader.hf_tokenizer import GENERATION, hf_tokenizer
from octavo.loader.interleaved_experts import interleaved_experts
from octavo.loader.quantization_config import ModelTensors
from octavo.models.config import ModelConfig
from octavo.models.families import FAMILIES, mtp_shapes, program
from octavo.models.family import ArrayForm, IntArray
from octavo.models.program import Shapes

TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"  # a folder
MAX_TEMPLATE = 1 << 20  # bytes

# What transformers takes off or puts before any name as it needs it: folders of a base model have
# no "model.", and those of a model that sees, too, say which part is the language model.
_PREFIX = re.compile(r"^(?:model\.language_model|language_model\.model|language_model|model)\.")
_TENSOR = re.compile(r"(?:layers\.(\d{1,4})\.)?([\w.]+?)(?:\.(weight|bias))?")
_EXPERT = re.compile(r"\bexperts\.(\d{1,4})\.")
# All experts' in one tensor, as transformers 5 has them in memory.
_STACK = re.compile(
    r"layers\.(\d{1,4})\.(?:mlp\.|feed_forward\.|block_sparse_moe\.)?"
    r"(experts\.gate_up_proj|experts\.down_proj|input_linear\.weight|output_linear\.weight)"
)
_STACKS = {
    "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "input_linear.weight": "ffn_gate_up_exps",
    "output_linear.weight": "ffn_down_exps",
}
# What belongs to layers for multi-token prediction, and which of them.
_MTP = "mtp."
_MTP_LAYER = re.compile(r"mtp\.layers\.(\d{1,4})\.")
# Frequencies that old files carry along; they follow from config.json.
_COMPUTED = "rotary_emb.inv_freq"
_FLOATS = (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16)
_CHUNK = 1 << 20  # numbers that are compared at a time


def load_folder(path: Path) -> Checkpoint:
    """Raises `CheckpointError` naming the file and what is wrong with it."""
    folder = HfFolder(path)
    stored = HfWeights(folder)
    tensors = ModelTensors(stored)
    config = model_config(folder)
    config = replace(config, mtp_layers=_mtp_layers(tensors, config))
    try:
        config, weights = _bind(tensors, config)
    except CheckpointError as error:
        if not (defaults := sizes_left_out(folder)):
            raise
        raise CheckpointError(f"{error} ({CONFIG} leaves out {defaults})") from None
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
        notes=tuple(folder.notes),
        generation_config=folder.json_if_any(GENERATION),
        mtp_weights=lambda: _mtp_weights(tensors, config),
    )


def _release(stored: HfWeights) -> None:
    stored.release()
    trim_heap()


def _bind(tensors: ModelTensors, config: ModelConfig) -> tuple[ModelConfig, dict[str, Weight]]:
    """The weights by role, and the config as they have it."""
    folder = tensors.stored.folder
    names, has_mtp = {}, FAMILIES[config.family].mtp is not None
    for name in tensors.names:
        plain = _plain(name)
        if name.removeprefix("model.").startswith(FAMILIES[config.family].ignored):
            folder.note("only the language model is loaded, not what sees pictures or hears")
        elif not (has_mtp and plain.startswith(_MTP)):
            names[name] = plain
    weights = weights_by_role(tensors, names, program(config).weights, config)
    config = _tie(folder, config, weights, tensors.names)
    return config, bound_weights(folder, weights, program(config).weights, config)


def _mtp_layers(tensors: ModelTensors, config: ModelConfig) -> int:
    """How many layers for multi-token prediction there are: some writers leave them out, and some
    models have no key for them.
    """
    found = {match[1] for name in tensors.names if (match := _MTP_LAYER.match(_plain(name)))}
    known = FAMILIES[config.family].mtp is not None and found
    return max(config.mtp_layers, len(found)) if known else 0


def _mtp_weights(tensors: ModelTensors, config: ModelConfig) -> dict[str, Weight]:
    """What such a layer has beside the model's weights. Its tensors are named as if its layer were
    the one behind the model's last, and what is around it were a part of it.
    """
    shapes, layer = mtp_shapes(config), f"layers.{len(config.layers)}."
    names = {
        name: _MTP_LAYER.sub(layer, plain) if _MTP_LAYER.match(plain) else layer + plain
        for name in tensors.names
        if (plain := _plain(name)).startswith(_MTP)
    }
    weights = weights_by_role(tensors, names, shapes, config)
    return bound_weights(tensors.stored.folder, weights, shapes, config)


def weights_by_role(
    tensors: ModelTensors, names: Mapping[str, str], shapes: Shapes, config: ModelConfig
) -> dict[str, Weight]:
    """``names`` are those of the tensors, and what they would be in a folder of a base model."""
    weights: dict[str, Weight] = {}
    passed_over = unread(config)
    for name, plain in names.items():
        if name.endswith(_COMPUTED) or _nothing(tensors, name, plain, shapes, config.family):
            continue
        for role, weight in _weights(tensors, name, plain, shapes, config):
            if role in passed_over:
                continue
            if role in weights:
                file = tensors.stored.place[tensors.first(name)]
                tensors.stored.folder.fail(file, f"has {role} twice: {name!r} is not the first")
            weights[role] = weight
    return weights


def bound_weights(
    folder: HfFolder, weights: dict[str, Weight], shapes: Shapes, config: ModelConfig
) -> dict[str, Weight]:
    """Exactly the weights of those shapes, with the numbers that are meant."""
    bound, family = bind(str(folder.path), weights, shapes), FAMILIES[config.family]
    shifts = {role: shift for role in bound if (shift := family.shift(role))}
    bound |= {role: _shifted(bound[role], shift) for role, shift in shifts.items()}
    forms = {role: form for role in bound if (form := family.form(role))}
    return bound | {role: _read(bound[role], form) for role, form in forms.items()}


def _tie(
    folder: HfFolder, config: ModelConfig, weights: dict[str, Weight], names: Iterable[str]
) -> ModelConfig:
    """Takes a head that is the embedding out of the weights, as transformers ties them."""
    head, embedding = weights.get("output"), weights.get("token_embd")
    key = "tie_word_embeddings"
    if not config.tied_embeddings:
        if head is None:
            what = "is false" if key in text_config(folder) else "is left out, which means false"
            other = next((name for name in names if name.endswith(".lm_head.weight")), None)
            only = f": only {other!r}, a name that this family does not have" if other else ""
            folder.fail(CONFIG, f"{key} {what}, but there is no tensor 'lm_head.weight'{only}")
        return config
    if head is None:
        return config
    if embedding is None:  # whichever of them is stored is both
        weights["token_embd"] = weights.pop("output")
        return config
    if head.format not in _FLOATS or embedding.format not in _FLOATS:
        folder.fail(
            CONFIG, f"{key} is true, but {head.name!r} is quantized apart from the embedding"
        )
    if _same(head, embedding):  # some writers store the head that they share
        del weights["output"]
        return config
    folder.note(
        f"{CONFIG}: {key} is true, but {head.name!r} is not the embedding's matrix: they are not "
        "tied, as in transformers"
    )
    return replace(config, tied_embeddings=False)


def _plain(name: str) -> str:
    return _PREFIX.sub("", name, count=1)


def _weights(
    tensors: ModelTensors, name: str, plain: str, shapes: Shapes, config: ModelConfig
) -> list[tuple[str, Weight]]:
    """What a tensor is in the Program, by role; by its own name if it is nothing there."""
    if FAMILIES[config.family].interleaved_experts:
        interleaved = interleaved_experts(tensors.stored, name, plain, config)
        if interleaved is not None:
            return list(interleaved.items())
    elif match := _STACK.fullmatch(plain):
        stack = tensors.stored.weight(name)
        try:
            found = experts(f"layers.{int(match[1])}", _STACKS[match[2]], stack, config)
        except ValueError as error:
            tensors.stored.folder.fail(tensors.stored.place[name], str(error))
        return list(found.items())
    roles = _roles(plain, shapes, config.family)
    if places := _gathered(plain, shapes, config):
        total = sum(map(len, places.values()))
        whole = tensors.weight(name, total, shapes[next(iter(places))][-1])
        try:
            return list(taken(whole, places).items())
        except ValueError as error:
            tensors.stored.folder.fail(tensors.stored.place[tensors.first(name)], str(error))
    if any(role not in shapes for role in roles):
        if name in tensors.modules:
            tensors.stored.refuse(tensors.first(name), "is not used by this model family")
        role = name if len(roles) != 1 or roles[0] == plain else roles[0]
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


def _gathered(plain: str, shapes: Shapes, config: ModelConfig) -> dict[str, IntArray]:
    """The roles whose rows are interleaved in a tensor, and where they are in it."""
    match = _TENSOR.fullmatch(plain)
    if match is None or match[1] is None:
        return {}
    ending = ".bias" if match[3] == "bias" else ""
    return gathered(f"layers.{int(match[1])}.", match[2], ending, shapes, config, gguf=False)


def _roles(plain: str, shapes: Shapes, family: str) -> list[str]:
    """The roles whose rows a tensor has, one after another; its own name if it is unknown."""
    record = FAMILIES[family]
    match = _TENSOR.fullmatch(plain)
    if match is None:
        return [plain]
    prefix = "" if match[1] is None else f"layers.{int(match[1])}."
    ending = ".bias" if match[3] == "bias" else ""
    part, number = match[2], ""
    if match[3] is None and part not in record.bare.values():
        return [plain]
    if expert := _EXPERT.search(part):
        part, number = _EXPERT.sub("experts.{}.", part, count=1), f".{int(expert[1])}"
    role = record.roles.get(part)
    choices = record.fusions.get(part, [() if role is None else (role,)])
    found = [[prefix + each + number + ending for each in parts] for parts in choices]
    return next((roles for roles in found if roles and roles[0] in shapes), found[0] or [plain])


def _nothing(tensors: ModelTensors, name: str, plain: str, shapes: Shapes, family: str) -> bool:
    """Whether it is a bias of zeros that some GPTQ writers give modules that have none."""
    module, _, part = name.rpartition(".")
    return (
        part == "bias"
        and f"{module}.weight" in tensors.modules
        and not any(role in shapes for role in _roles(plain, shapes, family))
        and not tensors.stored.weight(name).data.any()
    )


def _same(a: Weight, b: Weight) -> bool:
    """Whether two matrices of floats have the same values, of whichever types."""
    if a.shape != b.shape:
        return False
    if a.format is b.format and np.array_equal(a.data, b.data):
        return True
    x, y = _numbers(a), _numbers(b)
    return all(
        np.array_equal(_widened(a, x[at : at + _CHUNK]), _widened(b, y[at : at + _CHUNK]))
        for at in range(0, len(x), _CHUNK)
    )


def _numbers(weight: Weight) -> npt.NDArray[Any]:
    types = {WeightFormat.F32: "<f4", WeightFormat.F16: "<f2", WeightFormat.BF16: "<u2"}
    return weight.data.reshape(-1).view(types[weight.format])


def _widened(weight: Weight, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if weight.format is WeightFormat.BF16:
        return (values.astype("<u4") << np.uint32(16)).view("<f4")
    return values.astype("<f4")


def _shifted(weight: Weight, shift: float) -> Weight:
    return _with_values(weight, vector(weight).data.view("<f4") + np.float32(shift))


def _read(weight: Weight, form: ArrayForm) -> Weight:
    """The numbers that are meant, of those that a folder has."""
    return _with_values(weight, form.read(vector(weight).data.view("<f4")))


def _with_values(weight: Weight, values: npt.NDArray[np.float32]) -> Weight:
    values.flags.writeable = False
    return weight._replace(source=values.view(np.uint8))


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
