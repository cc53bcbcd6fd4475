"""Hugging Face's config.json to `ModelConfig`: what the keys of each ``model_type`` mean.

The reference is the `transformers` class of the model type: each key that it reads is used here or
refused by name, and keys that it passes over are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from math import inf, isfinite, sqrt
from typing import Any, NoReturn

from octavo.checkpoint.hf_folder import CONFIG, HfFolder
from octavo.model import rope as scaling
from octavo.model.config import (
    Activation,
    DynamicNtk,
    Experts,
    Layer,
    LongRope,
    ModelConfig,
    Rope,
)

MAX_LAYERS = 512
MAX_HEAD_DIM = 1024
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
ATTENTION = QKV | {"attn_output"}
FFN = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen3_moe": 4}  # what files without the key mean
FULL, SLIDING = "full_attention", "sliding_attention"


def model_config(folder: HfFolder, tensors: Collection[str]) -> ModelConfig:
    """The model's shape. ``tensors`` are the names of those stored.

    Raises `CheckpointError` for what is missing, wrong or unsupported.
    """
    return _Reader(folder, tensors).config()


class _Reader:
    def __init__(self, folder: HfFolder, tensors: Collection[str]) -> None:
        self.folder = folder
        self.values = folder.json(CONFIG)
        self.tensors = tensors

    def config(self) -> ModelConfig:
        model_type = self.text("model_type", "")
        if model_type not in FAMILIES:
            self.fail(
                f"model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}"
            )
        architecture, family, specifics = FAMILIES[model_type]
        architectures = self.values.get("architectures")
        if architectures is not None and architectures != [architecture]:
            self.fail(f"architectures {architectures!r} is not supported, only {architecture}")
        self.hidden = self.count("hidden_size")
        self.heads = self.count("num_attention_heads")
        default = 128 if model_type == "qwen3" else 256 if model_type.startswith("gemma") else 0
        if not (self.has("head_dim") or default) and self.hidden % self.heads:
            self.fail(f"hidden_size {self.hidden} is not a multiple of {self.heads} heads")
        self.head_dim = self.count("head_dim", default or self.hidden // self.heads)
        self.num_layers = self.count("num_hidden_layers")
        # Bounded before anything is computed for each of them.
        for name, value, most in (
            ("head_dim", self.head_dim, MAX_HEAD_DIM),
            ("num_hidden_layers", self.num_layers, MAX_LAYERS),
        ):
            if value > most:
                self.fail(f"{name} is {value}, above {most}")
        self.positions = self.count("max_position_embeddings")
        self.context = self.positions  # until a rope's scaling lengthens it
        values: dict[str, Any] = {
            "family": family,
            "name": self.folder.path.name,
            "vocab_size": self.count("vocab_size"),
            "hidden_size": self.hidden,
            "num_heads": self.heads,
            "num_kv_heads": self.count("num_key_value_heads", KV_HEADS.get(model_type, self.heads)),
            "head_dim": self.head_dim,
            "intermediate_size": self.count("intermediate_size"),
            "norm_eps": self.real("rms_norm_eps"),
            "activation": self.activation(),
            "attention_scale": 1.0 / sqrt(self.head_dim),
            "tied_embeddings": self.flag("tie_word_embeddings", not self.has_head),
        } | specifics(self)
        try:
            return ModelConfig(**{"context_length": self.context} | values)
        except ValueError as error:
            self.fail(str(error))

    @property
    def has_head(self) -> bool:
        return "lm_head.weight" in self.tensors

    # ── What a model type adds ──────────────────────────────────────────────────────────────────

    def llama(self) -> dict[str, Any]:
        return {"layers": self.same_layers(None), "biases": self.biases(ffn=True)}

    def mistral(self) -> dict[str, Any]:
        return {"layers": self.same_layers(self.window(4096))}

    def qwen2(self) -> dict[str, Any]:
        return {"layers": self.qwen_layers(), "biases": QKV}

    def qwen3(self) -> dict[str, Any]:
        return {"layers": self.qwen_layers(), "biases": self.biases()}

    def mixtral(self) -> dict[str, Any]:
        experts = self.experts(8, 2, self.count("intermediate_size"), renormalize=True)
        layers = self.same_layers(self.window(None), theta=1e6)
        return {"layers": tuple(replace(layer, experts=experts) for layer in layers)}

    def qwen3_moe(self) -> dict[str, Any]:
        size = self.count("moe_intermediate_size", 768)
        experts = self.experts(128, 8, size, self.flag("norm_topk_prob", False))
        step = self.count("decoder_sparse_step", 1)
        dense = self.values.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(index) is not int for index in dense):
            self.fail("mlp_only_layers is not a list of integers")
        window = self.window(4096) if self.flag("use_sliding_window", False) else None
        layers = [
            layer if index in dense or (index + 1) % step else replace(layer, experts=experts)
            for index, layer in enumerate(self.same_layers(window))
        ]
        return {"layers": tuple(layers), "biases": self.biases()}

    def experts(self, count: int, chosen: int, size: int, renormalize: bool) -> Experts:
        """The numbers are those of files that do not say."""
        key = "num_experts" if self.has("num_experts") else "num_local_experts"
        return Experts(
            self.count(key, count), self.count("num_experts_per_tok", chosen), size, renormalize
        )

    def gemma2(self) -> dict[str, Any]:
        rope = self.rope(self.rope_values())
        types = self.layer_types([index % 2 == 0 for index in range(self.num_layers)])
        window = self.window(4096)
        layers = tuple(Layer(rope, window if sliding else None) for sliding in types)
        return self.gemma() | {
            "layers": layers,
            "attention_softcap": self.cap("attn_logit_softcapping", 50.0),
            "logits_softcap": self.cap("final_logit_softcapping", 30.0),
        }

    def gemma3(self) -> dict[str, Any]:
        # Two ropes: of layers with a window, and of global ones, which alone are ever scaled.
        if FULL in self.rope_values() or SLIDING in self.rope_values():
            far, near = (self.nested(self.rope_values(), key) for key in (FULL, SLIDING))
        else:
            far = {"rope_theta": 1e6} | self.rope_values()
            near = {"rope_theta": self.real("rope_local_base_freq", 10000.0)}
        far, near = {"rope_theta": 1e6} | far, {"rope_theta": 10000.0} | near
        period = self.count("sliding_window_pattern", 6)
        types = self.layer_types([(index + 1) % period != 0 for index in range(self.num_layers)])
        local = Layer(self.rope(near), self.window(4096))
        everywhere = Layer(self.rope(far))
        # transformers reads attn_logit_softcapping of Gemma 3 and does not apply it.
        self.refuse("attn_logit_softcapping")
        return self.gemma() | {
            "layers": tuple(local if sliding else everywhere for sliding in types),
            "logits_softcap": self.cap("final_logit_softcapping", 0.0),
        }

    def gemma(self) -> dict[str, Any]:
        self.refuse("use_bidirectional_attention")
        return {
            "attention_scale": 1.0 / sqrt(self.positive("query_pre_attn_scalar", 256.0)),
            "embedding_scale": sqrt(self.hidden),
            "biases": self.biases(),
        }

    def phi3(self) -> dict[str, Any]:
        return {"layers": self.same_layers(self.window(None))}

    def granite(self) -> dict[str, Any]:
        return {
            "layers": self.same_layers(None),
            "biases": self.biases(ffn=True),
            "embedding_scale": self.positive("embedding_multiplier", 1.0),
            "attention_scale": self.positive("attention_multiplier", 1.0),
            "residual_scale": self.positive("residual_multiplier", 1.0),
            "logits_scale": 1.0 / self.positive("logits_scaling", 1.0),
        }

    def olmo2(self) -> dict[str, Any]:
        return {"layers": self.same_layers(None), "biases": self.biases()}

    # ── Layers ──────────────────────────────────────────────────────────────────────────────────

    def same_layers(self, window: int | None, theta: float = 10000.0) -> tuple[Layer, ...]:
        rope = self.rope({"rope_theta": theta} | self.rope_values())
        return (Layer(rope, window),) * self.num_layers

    def qwen_layers(self) -> tuple[Layer, ...]:
        window = self.window(4096) if self.flag("use_sliding_window", False) else None
        first = self.count("max_window_layers", 28, least=0)
        default = [window is not None and index >= first for index in range(self.num_layers)]
        types = self.layer_types(default)
        if any(types) and window is None:
            self.fail(f"layer_types has {SLIDING}, but use_sliding_window is false")
        rope = self.rope(self.rope_values())
        return tuple(Layer(rope, window if sliding else None) for sliding in types)

    def window(self, default: int | None) -> int | None:
        """``sliding_window``: null is none; ``default`` is what a file without the key means."""
        window = self.values.get("sliding_window", default)
        return None if window is None else self.count("sliding_window", default)

    def layer_types(self, default: list[bool]) -> list[bool]:
        """Which layers have a window."""
        types = self.values.get("layer_types")
        if types is None:
            return default
        if not isinstance(types, list) or len(types) != self.num_layers:
            self.fail(f"layer_types is not a list of {self.num_layers} types")
        for kind in types:
            if kind not in (FULL, SLIDING):
                self.fail(f"layer type {kind!r} is not supported, only {FULL} and {SLIDING}")
        return [kind == SLIDING for kind in types]

    def biases(self, *, ffn: bool = False) -> frozenset[str]:
        """The projections with a bias; those of the feed-forward layer have a key of their own."""
        found = ATTENTION if self.flag("attention_bias", False) else frozenset()
        return found | FFN if ffn and self.flag("mlp_bias", False) else found

    # ── Rotary positions ────────────────────────────────────────────────────────────────────────

    def rope_values(self) -> dict[str, Any]:
        """The keys of ``rope_scaling``, or of ``rope_parameters`` as it is called of late."""
        values: dict[str, Any] = {}
        for key in ("rope_theta", "partial_rotary_factor"):
            if self.has(key):
                values[key] = self.values[key]
        for key in ("rope_scaling", "rope_parameters"):
            if self.has(key):
                return values | self.nested(self.values, key)
        return values

    def rope(self, values: dict[str, Any]) -> Rope:
        """One rotary embedding. Only here are the sections' keys interpreted."""
        section = Section(self.fail, values)
        theta = section.real("rope_theta", 10000.0)
        part = section.real("partial_rotary_factor", 1.0)
        if part != 1.0 and self.values["model_type"] != "phi3":
            self.fail(f"partial_rotary_factor {part:g} is not supported for this model_type")
        if not 0.0 < part <= 1.0:
            self.fail(f"partial_rotary_factor is {part:g}, outside 0 to 1")
        plain = {"theta": theta, "dim": int(self.head_dim * part), "interleaved": False}
        kind = values.get("rope_type", values.get("type", "default")) or "default"
        if self.values["model_type"] == "phi3" and kind in ("su", "yarn"):
            kind = "longrope"  # what early Phi-3 files called it
        rules: dict[str, Callable[[Section, dict[str, Any]], Rope]] = {
            "default": lambda _, plain: Rope(**plain),
            "linear": self.linear_rope,
            "dynamic": self.dynamic_rope,
            "llama3": self.llama3_rope,
            "yarn": self.yarn_rope,
            "longrope": self.longrope,
        }
        if not isinstance(kind, str) or kind not in rules:
            self.fail(
                f"rope type {kind!r} is not supported; supported are {', '.join(map(str, rules))}"
            )
        try:
            return rules[kind](section, plain)
        except (ValueError, ArithmeticError) as error:
            self.fail(f"rope type {kind!r} cannot be computed from {values}: {error}")

    def linear_rope(self, section: Section, plain: dict[str, Any]) -> Rope:
        return Rope(**plain, scale=1.0 / section.at_least_one("factor"))

    def dynamic_rope(self, section: Section, plain: dict[str, Any]) -> Rope:
        factor = section.at_least_one("factor")
        self.context = max(self.context, int(self.positions * factor))
        return Rope(**plain, by_length=DynamicNtk(self.positions, factor))

    def llama3_rope(self, section: Section, plain: dict[str, Any]) -> Rope:
        low, high = section.real("low_freq_factor"), section.real("high_freq_factor")
        if not 0.0 < low < high:
            self.fail(f"low_freq_factor {low:g} and high_freq_factor {high:g} are no range")
        factors = scaling.llama3_factors(
            plain["theta"],
            plain["dim"],
            section.at_least_one("factor"),
            low,
            high,
            self.original(section),
        )
        return Rope(**plain, factors=factors)

    def yarn_rope(self, section: Section, plain: dict[str, Any]) -> Rope:
        original = self.original(section)
        factor = section.at_least_one("factor", self.positions / original)
        weight, everywhere = section.real("mscale", 0.0), section.real("mscale_all_dim", 0.0)
        magnitude = scaling.yarn_magnitude(factor)
        if weight and everywhere:
            magnitude = scaling.yarn_magnitude(factor, weight)
            magnitude /= scaling.yarn_magnitude(factor, everywhere)
        factors = scaling.yarn_factors(
            plain["theta"],
            plain["dim"],
            factor,
            original,
            section.real("beta_fast", 32.0) or 32.0,
            section.real("beta_slow", 1.0) or 1.0,
            section.flag("truncate", True),
        )
        self.context = max(self.context, int(original * factor))
        magnitude = section.real("attention_factor", magnitude)
        return Rope(**plain, factors=factors, magnitude=magnitude)

    def longrope(self, section: Section, plain: dict[str, Any]) -> Rope:
        original = self.original(section)
        factor = section.real("factor", self.positions / original)
        magnitude = section.real("attention_factor", scaling.longrope_magnitude(factor, original))
        pairs = plain["dim"] // 2
        short, long = (section.reals(key, pairs) for key in ("short_factor", "long_factor"))
        return Rope(**plain, factors=short, magnitude=magnitude, by_length=LongRope(original, long))

    def original(self, section: Section) -> int:
        """The context of training. transformers lets a key outside of the section win."""
        key = "original_max_position_embeddings"
        return self.count(key) if self.has(key) else section.count(key, self.positions)

    # ── Keys ────────────────────────────────────────────────────────────────────────────────────

    def fail(self, reason: str) -> NoReturn:
        self.folder.fail(CONFIG, reason)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def nested(self, values: dict[str, Any], key: str) -> dict[str, Any]:
        value = values.get(key) or {}
        if not isinstance(value, dict):
            self.fail(f"{key} is not an object")
        return value

    def refuse(self, *keys: str) -> None:
        """Keys that would change what is computed, were they set."""
        for key in keys:
            if self.values.get(key):
                self.fail(f"{key} {self.values[key]!r} is not supported for this model_type")

    def activation(self) -> Activation:
        gemma = self.values["model_type"].startswith("gemma")
        key = "hidden_activation" if gemma else "hidden_act"
        name = self.text(key, "gelu_pytorch_tanh" if gemma else "silu")
        if name not in ACTIVATIONS:
            self.fail(f"{key} {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def cap(self, key: str, default: float) -> float:
        """A soft-cap: null is none."""
        return 0.0 if key in self.values and self.values[key] is None else self.real(key, default)

    def positive(self, key: str, default: float) -> float:
        value = self.real(key, default)
        if not 0.0 < value < inf:
            self.fail(f"{key} is {value:g}, not a positive number")
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        return Section(self.fail, self.values).count(key, default, least)

    def real(self, key: str, default: float | None = None) -> float:
        return Section(self.fail, self.values).real(key, default)

    def flag(self, key: str, default: bool) -> bool:
        return Section(self.fail, self.values).flag(key, default)

    def text(self, key: str, default: str) -> str:
        return Section(self.fail, self.values).text(key, default)


class Section:
    """Typed access to an object of a file. A null is a missing key.

    ``fail`` raises `CheckpointError` naming the file.
    """

    def __init__(self, fail: Callable[[str], NoReturn], values: dict[str, Any]) -> None:
        self.fail = fail
        self.values = values

    def get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            self.fail(f"{key} is missing")
        return default

    def object(self, key: str) -> Section:
        """An object inside of it, whose faults are named after ``key``."""
        value = self.get(key, None)
        if not isinstance(value, dict):
            self.fail(f"{key} is not an object")

        def fail(reason: str) -> NoReturn:
            self.fail(f"{key}: {reason}")

        return Section(fail, value)

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if type(value) is int and value >= 1 << 31:
            self.fail(f"{key} is above {(1 << 31) - 1}")
        if type(value) is not int or value < least:
            self.fail(f"{key} is {value!r}, not an integer from {least}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or abs(value) > 1e38 or not isfinite(value):
            self.fail(f"{key} is {value!r}, not a number")
        return float(value)

    def at_least_one(self, key: str, default: float | None = None) -> float:
        value = self.real(key, default)
        if value < 1.0:
            self.fail(f"rope {key} is {value:g}, below 1")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            self.fail(f"{key} is {value!r}, not a boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            self.fail(f"{key} is {value!r}, not a string")
        return value

    def reals(self, key: str, length: int) -> tuple[float, ...]:
        values = self.get(key, None)
        if not isinstance(values, list) or len(values) != length:
            self.fail(f"{key} is not a list of {length} numbers")
        numbers = Section(self.fail, {f"{key}[{i}]": v for i, v in enumerate(values)})
        return tuple(numbers.real(name) for name in numbers.values)


# Of each model_type: the class in transformers, Octavo's family, and what the type adds.
FAMILIES: dict[str, tuple[str, str, Callable[[_Reader], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "llama", _Reader.llama),
    "mistral": ("MistralForCausalLM", "llama", _Reader.mistral),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _Reader.qwen2),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _Reader.qwen3),
    "mixtral": ("MixtralForCausalLM", "mixtral", _Reader.mixtral),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen3moe", _Reader.qwen3_moe),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _Reader.gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", "gemma3", _Reader.gemma3),
    "phi3": ("Phi3ForCausalLM", "phi3", _Reader.phi3),
    "granite": ("GraniteForCausalLM", "granite", _Reader.granite),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", _Reader.olmo2),
}
