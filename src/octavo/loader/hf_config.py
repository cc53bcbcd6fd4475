"""Hugging Face's config.json to `ModelConfig`: what the keys of each ``model_type`` mean.

The reference is the `transformers` class of the model type: `hf_defaults` says what it makes of the
file, with nothing missing. Each key that its model then reads is used here or refused by name, and
keys that it passes over are passed over; those that mean something elsewhere are named in a note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import sqrt
from typing import Any, NoReturn

from octavo.loader.base import CheckpointError
from octavo.loader.hf_defaults import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigClass,
    completed,
    config_classes,
)
from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.loader.section import Section
from octavo.models import rope as scaling
from octavo.models.config import (
    Activation,
    DynamicNtk,
    Experts,
    Layer,
    LongRope,
    ModelConfig,
    Rope,
)

MAX_HEAD_DIM = 1024
ORIGINAL = "original_max_position_embeddings"
# Several names of the same function.
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_accurate": Activation.GELU_TANH,
}
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
ATTENTION = QKV | {"attn_output"}
FFN = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
LAYER_TYPES = {FULL: False, SLIDING: True, "attention": False}  # whether it has a window
# Keys that every model class reads beside its own, and what they must not be.
REFUSED: dict[str, Callable[[Any], bool]] = {
    "per_layer_config": lambda value: value is not None,
    "is_causal": lambda value: value is not None and not value,
    "use_bidirectional_attention": bool,
    "configuration_files": bool,  # another file for other versions of transformers
    "transformers_weights": bool,  # another file for the weights
}


def model_config(folder: HfFolder) -> ModelConfig:
    """The model's shape. Raises `CheckpointError` for what is wrong or unsupported."""
    return _Reader(folder).config()


def sizes_left_out(folder: HfFolder) -> str:
    """The sizes that config.json leaves out, and what they are then: for an error's text."""
    file = folder.json(CONFIG)
    kind = kind_of(file)
    found = []
    for key, value in kind.defaults.items():
        shown = kind.computed.get(key, str(value)).removeprefix("null: ")
        sized = type(value) is int or (value is None and key in kind.computed)
        if sized and key not in file and not key.endswith("_token_id"):
            found.append(f"{key}: {shown} in {kind.config_class}")
    return ", ".join(found)


def default_of(folder: HfFolder, key: str) -> Any:
    """What config.json means by leaving a key out, or None if it has it."""
    file = folder.json(CONFIG)
    if key in file or file.get("model_type") not in _classes():
        return None
    return kind_of(file).defaults.get(key)


class _Reader:
    def __init__(self, folder: HfFolder) -> None:
        self.folder = folder
        file = folder.json(CONFIG)
        model_type = Section(self.fail, file).text("model_type")
        if model_type not in FAMILIES:
            self.fail(
                f"model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}"
            )
        self.kind = kind_of(file)
        self.family, self.specifics = FAMILIES[self.kind.model_type]
        architectures = file.get("architectures")
        named = _classes()[model_type]
        models = [named.causal_lm, named.base_model]
        if architectures and architectures not in ([model] for model in models):
            self.fail(
                f"architectures {architectures!r} is not supported, only {' and '.join(models)}"
            )
        for key, refused in REFUSED.items():
            if refused(file.get(key)):
                self.fail(f"{key} {file[key]!r:.80} is not supported")
        self.values = completed(file, self.kind, self.fail, folder.note)
        self.section = Section(self.fail, self.values)
        others = _others(self.kind) & file.keys()
        if not file.get("use_sliding_window"):
            others.discard("max_window_layers")  # Qwen's files have it beside
        for key in sorted(others):
            if file[key]:
                folder.note(
                    f"{CONFIG}: {key} is passed over, as transformers does for "
                    f"{self.kind.config_class}"
                )

    def config(self) -> ModelConfig:
        self.hidden = self.count("hidden_size")
        self.heads = self.count("num_attention_heads")
        # Some classes have no such key, or leave it null, and their models heed it nevertheless.
        if self.values.get("head_dim") is None and self.kind.defaults.get("head_dim") is None:
            self.values["head_dim"] = self.hidden // self.heads
        self.head_dim = self.count("head_dim")
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
            "family": self.family,
            "name": self.folder.path.name,
            "vocab_size": self.count("vocab_size"),
            "hidden_size": self.hidden,
            "num_heads": self.heads,
            "num_kv_heads": self.count("num_key_value_heads"),
            "head_dim": self.head_dim,
            "intermediate_size": self.count("intermediate_size"),
            "norm_eps": self.section.real("rms_norm_eps"),
            "activation": self.activation(),
            "attention_scale": 1.0 / sqrt(self.head_dim),
            "tied_embeddings": self.section.flag("tie_word_embeddings"),
        } | self.specifics(self)
        try:
            return ModelConfig(**{"context_length": self.context} | values)
        except ValueError as error:
            self.fail(str(error))

    # ── What a model type adds ──────────────────────────────────────────────────────────────────

    def llama(self) -> dict[str, Any]:
        return {"layers": self.same_layers(None), "biases": self.biases(ffn=True)}

    def mistral(self) -> dict[str, Any]:
        return {"layers": self.same_layers(self.window())}

    def ministral(self) -> dict[str, Any]:
        return {"layers": self.layers_of_types()}

    def qwen2(self) -> dict[str, Any]:
        return {"layers": self.layers_of_types(), "biases": QKV}

    def qwen3(self) -> dict[str, Any]:
        return {"layers": self.layers_of_types(), "biases": self.biases()}

    def mixtral(self) -> dict[str, Any]:
        experts = self.experts(self.count("intermediate_size"), renormalize=True)
        layers = self.same_layers(self.window())
        return {"layers": tuple(replace(layer, experts=experts) for layer in layers)}

    def qwen3_moe(self) -> dict[str, Any]:
        experts = self.experts(
            self.count("moe_intermediate_size"), self.section.flag("norm_topk_prob")
        )
        step = self.count("decoder_sparse_step")
        dense = self.values["mlp_only_layers"]
        if not isinstance(dense, list) or any(type(index) is not int for index in dense):
            self.fail("mlp_only_layers is not a list of integers")
        layers = [
            layer if index in dense or (index + 1) % step else replace(layer, experts=experts)
            for index, layer in enumerate(self.same_layers(self.window()))
        ]
        return {"layers": tuple(layers), "biases": self.biases()}

    def experts(self, size: int, renormalize: bool) -> Experts:
        return Experts(
            self.count("num_local_experts"), self.count("num_experts_per_tok"), size, renormalize
        )

    def gemma2(self) -> dict[str, Any]:
        rope = self.rope(self.values["rope_parameters"])
        window = self.window()
        layers = tuple(Layer(rope, window if sliding else None) for sliding in self.layer_types())
        return self.gemma() | {
            "layers": layers,
            "attention_softcap": self.cap("attn_logit_softcapping"),
        }

    def gemma3(self) -> dict[str, Any]:
        # transformers reads attn_logit_softcapping of Gemma 3 and does not apply it.
        if self.values["attn_logit_softcapping"]:
            self.folder.note(
                f"{CONFIG}: attn_logit_softcapping is passed over, as transformers does for Gemma 3"
            )
        ropes = self.values["rope_parameters"]
        everywhere = Layer(self.rope(ropes[FULL]))
        local = Layer(self.rope(ropes[SLIDING]), self.window())
        layers = tuple(local if sliding else everywhere for sliding in self.layer_types())
        return self.gemma() | {"layers": layers}

    def gemma(self) -> dict[str, Any]:
        return {
            "attention_scale": 1.0 / sqrt(self.section.positive("query_pre_attn_scalar")),
            "embedding_scale": sqrt(self.hidden),
            "logits_softcap": self.cap("final_logit_softcapping"),
            "biases": self.biases(),
        }

    def phi3(self) -> dict[str, Any]:
        return {"layers": self.same_layers(self.window())}

    def granite(self) -> dict[str, Any]:
        return {
            "layers": self.same_layers(None),
            "biases": self.biases(ffn=True),
            "embedding_scale": self.section.positive("embedding_multiplier"),
            "attention_scale": self.section.positive("attention_multiplier"),
            "residual_scale": self.section.positive("residual_multiplier"),
            "logits_scale": 1.0 / self.section.positive("logits_scaling"),
        }

    def olmo2(self) -> dict[str, Any]:
        return {"layers": self.same_layers(None), "biases": self.biases()}

    # ── Layers ──────────────────────────────────────────────────────────────────────────────────

    def same_layers(self, window: int | None) -> tuple[Layer, ...]:
        return (Layer(self.rope(self.values["rope_parameters"]), window),) * self.num_layers

    def layers_of_types(self) -> tuple[Layer, ...]:
        window, types = self.window(), self.layer_types()
        if any(types) and window is None:
            key = "use_sliding_window"
            why = f"{key} is false" if key in self.values else "sliding_window is null"
            self.fail(f"layer_types has {SLIDING}, but {why}")
        rope = self.rope(self.values["rope_parameters"])
        return tuple(Layer(rope, window if sliding else None) for sliding in types)

    def window(self) -> int | None:
        """``sliding_window``: null is none."""
        return None if self.values["sliding_window"] is None else self.count("sliding_window")

    def layer_types(self) -> list[bool]:
        """Which layers have a window."""
        types = self.values["layer_types"]
        if not isinstance(types, list) or len(types) != self.num_layers:
            self.fail(f"layer_types is not a list of {self.num_layers} types")
        for kind in types:
            if not isinstance(kind, str) or kind not in LAYER_TYPES:
                self.fail(f"layer type {kind!r} is not supported, only {FULL} and {SLIDING}")
        return [LAYER_TYPES[kind] for kind in types]

    def biases(self, *, ffn: bool = False) -> frozenset[str]:
        """The projections with a bias; those of the feed-forward layer have a key of their own."""
        found = ATTENTION if self.section.flag("attention_bias") else frozenset()
        return found | FFN if ffn and self.section.flag("mlp_bias") else found

    # ── Rotary positions ────────────────────────────────────────────────────────────────────────

    def rope(self, values: dict[str, Any]) -> Rope:
        """One rotary embedding. Only here are the section's keys interpreted."""
        section = Section(self.fail, values)
        theta = section.real("rope_theta")
        kind = section.text("rope_type")
        part = section.real("partial_rotary_factor", 1.0)
        if part != 1.0 and not self.kind.partial_rotary:
            if kind != "default":
                self.fail(
                    f"partial_rotary_factor {part:g} is not supported for {self.kind.config_class}"
                )
            self.folder.note(
                f"{CONFIG}: partial_rotary_factor is passed over, as transformers does for "
                f"{self.kind.config_class}"
            )
            part = 1.0
        if not 0.0 < part <= 1.0:
            self.fail(f"partial_rotary_factor is {part:g}, outside 0 to 1")
        dim = int(self.head_dim * part)
        if dim % 2 and theta > 0.0:  # one more turns, with the frequencies of an odd number
            theta, dim = theta ** ((dim + 1) / dim), dim + 1
        plain = {"theta": theta, "dim": dim, "interleaved": False}
        rules: dict[str, Callable[[Section, dict[str, Any]], Rope]] = {
            "default": lambda _, plain: Rope(**plain),
            "linear": self.linear_rope,
            "dynamic": self.dynamic_rope,
            "llama3": self.llama3_rope,
            "yarn": self.yarn_rope,
            "longrope": self.longrope,
        }
        try:
            return rules[kind](section, plain)
        except CheckpointError:
            raise
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
            section.count(ORIGINAL),
        )
        return Rope(**plain, factors=factors)

    def yarn_rope(self, section: Section, plain: dict[str, Any]) -> Rope:
        original = section.count(ORIGINAL)
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
            bool(section.values.get("truncate", True)),
        )
        self.context = max(self.context, int(original * factor))
        magnitude = section.real("attention_factor", magnitude)
        return Rope(**plain, factors=factors, magnitude=magnitude)

    def longrope(self, section: Section, plain: dict[str, Any]) -> Rope:
        original = section.count(ORIGINAL)
        factor = section.real("factor", self.positions / original)
        magnitude = section.real("attention_factor", scaling.longrope_magnitude(factor, original))
        pairs = plain["dim"] // 2
        short, long = (section.reals(key, pairs) for key in ("short_factor", "long_factor"))
        return Rope(**plain, factors=short, magnitude=magnitude, by_length=LongRope(original, long))

    # ── Keys ────────────────────────────────────────────────────────────────────────────────────

    def fail(self, reason: str) -> NoReturn:
        self.folder.fail(CONFIG, reason)

    def activation(self) -> Activation:
        key = "hidden_act" if "hidden_act" in self.kind.defaults else "hidden_activation"
        name = self.section.text(key)
        if name not in ACTIVATIONS:
            self.fail(f"{key} {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def cap(self, key: str) -> float:
        """A soft-cap: null is none, and 0 would make no number of anything."""
        return 0.0 if self.values[key] is None else self.section.positive(key)

    def count(self, key: str) -> int:
        return self.section.count(key)


# Of each model_type: Octavo's family, and what the type adds.
FAMILIES: dict[str, tuple[str, Callable[[_Reader], dict[str, Any]]]] = {
    "llama": ("llama", _Reader.llama),
    "mistral": ("llama", _Reader.mistral),
    "ministral": ("llama", _Reader.ministral),
    "qwen2": ("qwen2", _Reader.qwen2),
    "qwen3": ("qwen3", _Reader.qwen3),
    "mixtral": ("mixtral", _Reader.mixtral),
    "qwen3_moe": ("qwen3moe", _Reader.qwen3_moe),
    "gemma2": ("gemma2", _Reader.gemma2),
    "gemma3_text": ("gemma3", _Reader.gemma3),
    "phi3": ("phi3", _Reader.phi3),
    "granite": ("granite", _Reader.granite),
    "olmo2": ("olmo2", _Reader.olmo2),
}


def kind_of(file: dict[str, Any]) -> ConfigClass:
    """The class that transformers takes for a file of a known ``model_type``."""
    # A Mistral whose layers have types is a Ministral, even if they are null.
    ministral = file["model_type"] == "mistral" and "layer_types" in file
    return _classes()["ministral" if ministral else file["model_type"]]


@cache
def _classes() -> dict[str, ConfigClass]:
    return config_classes()


def _others(kind: ConfigClass) -> set[str]:
    """Keys that mean something for other model types, but not for this one."""
    known = {key for each in _classes().values() for key in each.defaults}
    return (
        known
        - kind.defaults.keys()
        - kind.aliases.keys()
        - set(kind.aliases.values())
        - {
            "head_dim",
            ORIGINAL,
        }
    )
