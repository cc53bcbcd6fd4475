"""Draws config.json files of every supported family, and weights for them, from a seed.

Keys are present, missing, null, in old and new spellings, and rotary settings in both at once.
"""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from oracle.tiny_tokenizer import write_tokenizer

Config = dict[str, Any]

VOCAB = 96
MODEL_TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text",
    "phi3", "granite", "olmo2", "mixtral", "qwen3_moe",
)  # fmt: skip
ARCHITECTURES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "gemma2": "Gemma2", "gemma3_text": "Gemma3", "phi3": "Phi3", "granite": "Granite",
    "olmo2": "Olmo2", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe",
}  # fmt: skip
# Without these a class means a model of its own size.
SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "moe_intermediate_size", "num_experts", "num_local_experts",
}  # fmt: skip
# A null is no error to most classes.
NULLABLE = {
    "architectures", "num_key_value_heads", "head_dim", "sliding_window", "layer_types",
    "attn_logit_softcapping", "final_logit_softcapping", "mlp_only_layers", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "pad_token_id", "eos_token_id", "torch_dtype",
}  # fmt: skip
ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def complete(rng: random.Random, model_type: str) -> Config:
    """All keys of the family but the rotary ones."""
    gemma = model_type.startswith("gemma")
    layers = rng.choice([6, 7]) if model_type == "gemma3_text" else rng.choice([2, 3, 4])
    # Of several classes files without num_key_value_heads mean 4, 8 or 32.
    heads = rng.choice([2, 4, 4, 8, 8, 32])
    head_dim = rng.choice([8, 12, 16])
    config: Config = {
        "architectures": [f"{ARCHITECTURES[model_type]}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": heads * (4 if heads == 32 else rng.choice([8, 16])),
        "intermediate_size": rng.choice([40, 48]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([1, 2, heads]),
        "max_position_embeddings": rng.choice([96, 128, 256]),
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.choice([True, False]),
        "bos_token_id": 0,
        "eos_token_id": rng.choice([1, [1, 2]]),
        "pad_token_id": rng.choice([None, 0]),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        rng.choice(["torch_dtype", "dtype"]): rng.choice(["float32", "bfloat16"]),
    }
    config["hidden_activation" if gemma else "hidden_act"] = rng.choice(
        ["gelu_pytorch_tanh", "gelu_pytorch_tanh", "silu"] if gemma else ["silu", "silu", "swish"]
    )
    if model_type != "phi3" or rng.random() < 0.3:
        config["head_dim"] = head_dim
    if model_type in ("llama", "qwen3", "gemma2", "gemma3_text", "granite", "olmo2", "qwen3_moe"):
        config["attention_bias"] = rng.choice([True, False])
    if model_type in ("llama", "granite"):
        config["mlp_bias"] = rng.choice([True, False])
    types = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    window = rng.choice([7, 16, 30])
    if model_type in ("mistral", "mixtral", "phi3"):
        config["sliding_window"] = rng.choice([None, window])
    if model_type == "mistral" and rng.random() < 0.4:  # which transformers takes for Ministral
        config |= {"layer_types": rng.choice([types, None]), "sliding_window": window}
    if model_type in ("qwen2", "qwen3", "qwen3_moe"):
        used = rng.choice([True, False])
        config |= {"use_sliding_window": used, "sliding_window": window}
        config["max_window_layers"] = rng.choice([0, 1, 2, 28])
        if model_type != "qwen3_moe" and rng.random() < 0.4:
            config["layer_types"] = types if used else ["full_attention"] * layers
    if gemma:
        config |= {
            "sliding_window": window,
            "query_pre_attn_scalar": rng.choice([16, 24]),
            "attn_logit_softcapping": rng.choice([None, 5.0, 50.0]),
            "final_logit_softcapping": rng.choice([None, 3.0, 30.0]),
        }
        if rng.random() < 0.4:
            config["layer_types"] = types
        elif model_type == "gemma3_text" and rng.random() < 0.6:
            config["sliding_window_pattern"] = rng.choice([2, 3, 6])
    if model_type == "granite":
        config |= {
            "embedding_multiplier": rng.choice([1.0, 12.0, 12]),
            "residual_multiplier": rng.choice([1.0, 0.22]),
            "attention_multiplier": rng.choice([0.2, 0.35]),
            "logits_scaling": rng.choice([1.0, 6.0, 8]),
        }
    if model_type in ("mixtral", "qwen3_moe"):
        config[rng.choice(["num_experts", "num_local_experts"])] = rng.choice([4, 6, 8])
        config["num_experts_per_tok"] = rng.choice([1, 2, 3])
    if model_type == "qwen3_moe":
        config |= {
            "moe_intermediate_size": 20,
            "norm_topk_prob": rng.choice([True, False]),
            "decoder_sparse_step": rng.choice([1, 1, 2]),
            "mlp_only_layers": rng.choice([[], [1], None]),
        }
    return config


def rope_section(rng: random.Random, kind: str, dim: int) -> Config:
    """A rotary section's own keys, without type and base. ``dim``: of those that are rotated."""
    section: Config = {}
    original = {"original_max_position_embeddings": rng.choice([32, 48, 64, 256])}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        section["factor"] = rng.choice([1.0, 2.0, 4.0, 8])
    if kind == "llama3":
        section |= original | {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "yarn":
        section |= original if rng.random() < 0.7 else {}
        optional = {"attention_factor": rng.choice([0.8, None]), "beta_fast": rng.choice([4, 32.0]),
                    "beta_slow": 0.5, "truncate": rng.choice([True, False]),
                    "mscale": 1.2, "mscale_all_dim": rng.choice([0.7, None])}  # fmt: skip
        section |= {key: value for key, value in optional.items() if rng.random() < 0.4}
    if kind == "longrope":
        section |= original if rng.random() < 0.5 else {}
        section["short_factor"] = [1.0 + 0.1 * i for i in range(dim // 2)]
        section["long_factor"] = [1.0 + 0.7 * i for i in range(dim // 2)]
        optional = {"factor": rng.choice([4.0, None]), "attention_factor": rng.choice([1.1, None])}
        section |= {key: value for key, value in optional.items() if rng.random() < 0.3}
    return section


def rope(rng: random.Random, config: Config) -> Config:
    """The rotary keys, in some spelling."""
    model_type = config["model_type"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    part = rng.choice([None, None, 1.0, 0.5, 0.75]) if model_type == "phi3" else None
    dim = int(head_dim * (part or 1.0))
    kinds = ("default", "longrope", "longrope") if model_type == "phi3" else ROPES

    def section(kind: str, *names: str) -> Config:
        written = rng.choice(["longrope", "su", "yarn"]) if model_type == "phi3" else kind
        written = written if kind == "longrope" else kind
        return dict.fromkeys(names, written) | rope_section(rng, kind, dim)

    def base() -> Config:
        return {"rope_theta": rng.choice([500.0, 1000.0, 5000.0, 10000.0])}

    found: Config = {} if part is None else {"partial_rotary_factor": part}
    kind = rng.choice(kinds)
    name = rng.choice(["type", "rope_type", "rope_type"])
    if kind == "longrope" and rng.random() < 0.6:
        found["original_max_position_embeddings"] = rng.choice([32, 48, 64])
    if model_type == "gemma3_text":
        found |= base() if rng.random() < 0.5 else {}
        found |= {"rope_local_base_freq": 300.0} if rng.random() < 0.5 else {}
        style = rng.choice(["none", "old", "old", "nested", "nested", "both", "flat", "empty"])
        full = section(kind, name)
        local = {"rope_type": "default"} if rng.random() < 0.7 else section(rng.choice(kinds), name)
        nested = {
            "full_attention": full | (base() if rng.random() < 0.7 else {}),
            "sliding_attention": local | (base() if rng.random() < 0.7 else {}),
        }
        match style:
            case "old":
                found["rope_scaling"] = full
            case "nested":
                found["rope_parameters"] = nested
                found |= {"rope_scaling": rng.choice([None, {}])} if rng.random() < 0.3 else {}
            case "both":
                found |= {"rope_parameters": nested, "rope_scaling": section("linear", name)}
            case "flat":
                found["rope_parameters"] = full | base()
            case "empty":
                found[rng.choice(["rope_scaling", "rope_parameters"])] = rng.choice([None, {}])
        if style == "nested" and rng.random() < 0.3:
            nested[rng.choice(list(nested))] = rng.choice([None, {}])
        return found
    style = rng.choice(["none", "old", "old", "new", "new", "new", "both", "empties", "empty"])
    match style:
        case "none":
            found |= base() if rng.random() < 0.6 else {}
        case "old":
            found |= {"rope_scaling": section(kind, name)}
            found |= base() if rng.random() < 0.7 else {}
        case "new":
            found["rope_parameters"] = section(kind, name)
            where = rng.choice(["in", "in", "out", "both", "none"])
            if where in ("in", "both"):
                found["rope_parameters"] |= base()
            if where in ("out", "both"):
                found |= base()
        case "both":
            found |= {"rope_scaling": section(kind, name)}
            found["rope_parameters"] = section(rng.choice(kinds), "rope_type") | base()
            found |= base() if rng.random() < 0.3 else {}
        case "empties":
            one, other = rng.sample(["rope_scaling", "rope_parameters"], 2)
            found |= {one: rng.choice([{}, None]), other: section(kind, name) | base()}
        case "empty":
            for key in ("rope_scaling", "rope_parameters"):
                found |= {key: rng.choice([{}, None])} if rng.random() < 0.6 else {}
            found |= base() if rng.random() < 0.6 else {}
    if rng.random() < 0.1:
        (found.get("rope_parameters") or found)["type" if name == "rope_type" else "note"] = (
            "linear"
        )
    return found


def draw(rng: random.Random) -> Config:
    """A config.json. transformers may refuse it."""
    config = complete(rng, rng.choice(MODEL_TYPES))
    config |= rope(rng, config)
    for key in list(config):
        if key == "model_type":
            continue
        chance = rng.random()
        if chance < (0.02 if key in SIZES else 0.12):
            del config[key]
        elif chance > (0.92 if key in NULLABLE else 0.995):
            config[key] = None
    if rng.random() < 0.1:  # what another family reads
        config |= rng.choice([{"sliding_window": 16}, {"layer_types": None}, {"num_experts": 4}])
    return config


def ids_of(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.RandomState(seed).randint(2, VOCAB, count)]


# Mean and deviation of weights whose names end so, where they are not the usual ones.
Around = Mapping[str, tuple[float, float]]
GEMMA: Around = {"norm.weight": (0.0, 0.2)}  # which stores them less one


def around(model_type: str) -> Around:
    return GEMMA if model_type.startswith("gemma") else {}


def make_weights(
    shapes: Mapping[str, Sequence[int]], seed: int, around: Around
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights that keep activations near one, and norms and biases that do something."""
    generator = np.random.RandomState(seed)
    weights = {}
    for name in sorted(shapes):
        shape = tuple(shapes[name])
        mean, deviation = 1.0, 0.2
        if len(shape) >= 2:
            mean, deviation = 0.0, 1.5 / shape[-1] ** 0.5
        elif name.endswith("bias"):
            mean, deviation = 0.0, 0.3
        own = next((numbers for ending, numbers in around.items() if name.endswith(ending)), None)
        mean, deviation = own or (mean, deviation)
        values = np.asarray(generator.standard_normal(shape), np.float32) * np.float32(deviation)
        weights[name] = values + np.float32(mean)
    return weights


def write_folder(path: Path, config: Config, weights: dict[str, Any], vocab: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    write_tokenizer(path, min(vocab, VOCAB))
