"""Opens the folder of a Gemma 4 assistant: a small model for multi-token prediction that has no
keys and values of its own, and drafts for the one model that it was trained with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.loader.base import Weight
from octavo.loader.hf import bound_weights, weights_by_role
from octavo.loader.hf_config import model_config
from octavo.loader.hf_folder import CONFIG, HfFolder, HfWeights
from octavo.loader.quantization_config import ModelTensors
from octavo.models.config import ModelConfig
from octavo.models.gemma4 import ASSISTANT, FAMILY, assistant_program
from octavo.models.program import Program
from octavo.models.refused import refusal
from octavo.models.section import Section

# Its ``model_type``, and that of its ``text_config``.
MODEL_TYPES = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
# The tied head; keys and values of its own; which tokens are looked at, which is not heeded.
_PASSED_OVER = ("lm_head.", "masked_embedding.")
_UNREAD = ("k_proj.weight", "v_proj.weight", "k_norm.weight")


def load_assistant(path: Path, target: ModelConfig) -> tuple[Program, dict[str, Weight]]:
    """Return the Program of an assistant, and the weights that the target does not have.

    Raises `CheckpointError` naming the file and what is wrong with it, and `ValueError` for an
    assistant of another model.
    """
    folder = HfFolder(path)
    config = _config(folder, target)
    program = assistant_program(config, target)
    shapes = {
        role.removeprefix(ASSISTANT): shape
        for role, shape in program.weights.items()
        if role.startswith(ASSISTANT)
    }
    tensors = ModelTensors(HfWeights(folder))
    names = {
        name: name.removeprefix("model.")
        for name in tensors.names
        if not name.startswith(_PASSED_OVER) and not name.endswith(_UNREAD)
    }
    weights = weights_by_role(tensors, names, shapes, config)
    bound = bound_weights(folder, weights, shapes, config)
    return program, {f"{ASSISTANT}{role}": weight for role, weight in bound.items()}


def _config(folder: HfFolder, target: ModelConfig) -> ModelConfig:
    """The assistant's shape, as if its layers had caches of their own."""
    file = Section(lambda reason: folder.fail(CONFIG, reason), folder.json(CONFIG))
    model_type = file.text("model_type")
    if model_type not in MODEL_TYPES:
        file.fail(refusal("model_type", model_type, ", ".join(MODEL_TYPES)))
    if target.family != FAMILY.name:
        raise ValueError(f"{folder.path} is an assistant of Gemma 4, and the model is no Gemma 4")
    if file.count("backbone_hidden_size", 1536) != target.hidden_size:
        raise ValueError(
            f"{folder.path} is an assistant of a model with hidden rows of "
            f"{file.values['backbone_hidden_size']} elements; the model's have {target.hidden_size}"
        )
    inner = file.object("text_config")
    layers = inner.count("num_hidden_layers", 30)
    if inner.count("num_kv_shared_layers", 0, least=0) not in (0, layers):
        inner.fail("num_kv_shared_layers is not the number of all layers")
    if inner.text("model_type", MODEL_TYPES[model_type]) != MODEL_TYPES[model_type]:
        inner.fail(f"model_type {inner.values['model_type']!r} is not {MODEL_TYPES[model_type]!r}")
    values: dict[str, Any] = {
        **inner.values,
        "model_type": MODEL_TYPES[model_type],
        "num_kv_shared_layers": 0,
        "tie_word_embeddings": file.flag("tie_word_embeddings", True),
    }
    values.pop("architectures", None)
    if model_type == "gemma4_assistant":
        inputs = inner.count("hidden_size_per_layer_input", 256, least=0)
        if inputs or inner.flag("enable_moe_block", False):
            inner.fail("inputs of layers and experts are not supported in an assistant")
        values["vocab_size_per_layer_input"] = 1  # of no consequence
    config = model_config(folder, values)
    if not config.tied_embeddings:
        file.fail("tie_word_embeddings false is not supported in an assistant")
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"{folder.path} has a vocabulary of {config.vocab_size} tokens, the model one of "
            f"{target.vocab_size}"
        )
    return config
