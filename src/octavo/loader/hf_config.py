"""Hugging Face's config.json to `ModelConfig`: what the keys of each ``model_type`` mean.

The reference is the `transformers` class of the model type: `hf_defaults` says what it makes of the
file, with nothing missing. Each key that its model then reads is used here or refused by name, and
keys that it passes over are passed over; those that mean something elsewhere are named in a note.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, NoReturn

from octavo.loader.base import CheckpointError
from octavo.loader.hf_defaults import completed
from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.models import rope as scaling
from octavo.models.config import (
    MAX_LAYERS,
    UNROTATED,
    Activation,
    DynamicNtk,
    Experts,
    Layer,
    LongRope,
    ModelConfig,
    Rope,
)
from octavo.models.families import HF_TYPES
from octavo.models.family import Key
from octavo.models.hf_type import FULL, SLIDING, HfType
from octavo.models.section import Section

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
        shown = kind.computed[key].says if key in kind.computed else value
        sized = type(value) is int or (value is None and key in kind.computed)
        if sized and key not in file and not key.endswith("_token_id"):
            found.append(f"{key}: {shown} in {kind.config_class}")
    return ", ".join(found)


def default_of(folder: HfFolder, key: str) -> Any:
    """What config.json means by leaving a key out, or None if it has it."""
    file = folder.json(CONFIG)
    if key in file or file.get("model_type") not in HF_TYPES:
        return None
    return kind_of(file).defaults.get(key)


class _Reader:
    def __init__(self, folder: HfFolder) -> None:
        self.folder = folder
        file = folder.json(CONFIG)
        model_type = Section(self.fail, file).text("model_type")
        if model_type not in HF_TYPES:
            self.fail(
                f"model_type {model_type!r} is not supported; supported are {', '.join(HF_TYPES)}"
            )
        self.family, named = HF_TYPES[model_type]
        self.kind = kind_of(file)
        architectures = file.get("architectures")
        models = named.model_classes
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
            "family": self.family.name,
            "name": self.folder.path.name,
            "vocab_size": self.count("vocab_size"),
            "hidden_size": self.hidden,
            "num_heads": self.heads,
            "num_kv_heads": self.count("num_key_value_heads"),
            "head_dim": self.head_dim,
            "intermediate_size": self.count("intermediate_size"),
            "norm_eps": self.section.real(self.family.eps.hf),
            "activation": self.activation(),
            "attention_scale": 1.0 / sqrt(self.head_dim),
            "tied_embeddings": self.section.flag("tie_word_embeddings"),
            "layers": self.layers(),
            "biases": self.biases(),
        }
        if self.family.embedding_root:
            values["embedding_scale"] = sqrt(self.hidden)
        values |= {key.field: self.number(key) for key in self.family.keys if key.hf}
        for value, key, _, otherwise in self.family.fixed:
            if key and self.section.flag(key) is not value:
                self.fail(f"{key} {self.values[key]!r} {otherwise}is not supported")
        for name in self.family.passed_over:
            if self.values[name]:
                self.folder.note(
                    f"{CONFIG}: {name} is passed over, as transformers does for {self.family.title}"
                )
        try:
            return ModelConfig(context_length=self.context, **values)
        except ValueError as error:
            self.fail(str(error))

    # ── Layers ──────────────────────────────────────────────────────────────────────────────────

    def layers(self) -> tuple[Layer, ...]:
        """What the layers have follows from the keys that the class has."""
        ropes = self.values["rope_parameters"]
        if len(self.kind.rope_theta) > 1:
            rope, local = self.rope(ropes[FULL]), self.rope(ropes[SLIDING])
        else:
            rope = local = self.rope(ropes)
        window = self.window() if self.has("sliding_window") else None
        types = [window is not None] * self.num_layers
        if self.has("layer_types"):
            types = self.layer_types()
            if any(types) and window is None and not self.kind.null_window:
                key = "use_sliding_window"
                why = f"{key} is false" if self.has(key) else "sliding_window is null"
                self.fail(f"layer_types has {SLIDING}, but {why}")
        return tuple(
            Layer(local if sliding else rope, window if sliding else None, experts)
            for sliding, experts in zip(types, self.experts(), strict=True)
        )

    def experts(self) -> list[Experts | None]:
        """The experts of each layer; those of the class that has any are in every layer, but for
        the dense ones that it may name.
        """
        if not self.has("num_experts_per_tok"):
            return [None] * self.num_layers
        size = "moe_intermediate_size" if self.has("moe_intermediate_size") else "intermediate_size"
        experts = Experts(
            self.count("num_local_experts"),
            self.count("num_experts_per_tok"),
            self.count(size),
            self.section.flag("norm_topk_prob") if self.has("norm_topk_prob") else True,
        )
        step = self.count("decoder_sparse_step") if self.has("decoder_sparse_step") else 1
        dense = self.values["mlp_only_layers"] if self.has("mlp_only_layers") else []
        if not isinstance(dense, list) or any(type(index) is not int for index in dense):
            self.fail("mlp_only_layers is not a list of integers")
        return [
            None if index in dense or (index + 1) % step else experts
            for index in range(self.num_layers)
        ]

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

    def biases(self) -> frozenset[str]:
        """The projections with a bias."""
        keys = self.family.bias_keys.items()
        found = (roles for key, roles in keys if self.has(key) and self.section.flag(key))
        return self.family.biases.union(*found)

    # ── Rotary positions ────────────────────────────────────────────────────────────────────────

    def rope(self, values: dict[str, Any]) -> Rope:
        """One rotary embedding. Only here are the section's keys interpreted."""
        section = Section(self.fail, values)
        theta = section.real("rope_theta")
        kind = section.text("rope_type")
        part = section.real("partial_rotary_factor", self.kind.partial_rotary or 1.0)
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
        if part == 0.0 and kind == "default":
            return UNROTATED
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
        key = activation_key(self.kind)
        name = self.section.text(key)
        if name not in ACTIVATIONS:
            self.fail(f"{key} {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def number(self, key: Key) -> float:
        if key.null is not None and self.values[key.hf] is None:
            return key.null
        return key.form.read(self.section.positive(key.hf))

    def has(self, key: str) -> bool:
        """Whether the class has a key; a file may have others."""
        return key in self.kind.defaults

    def count(self, key: str) -> int:
        return self.section.count(key)


def kind_of(file: dict[str, Any]) -> HfType:
    """The class that transformers takes for a file of a known ``model_type``."""
    # A Mistral whose layers have types is a Ministral, even if they are null.
    ministral = file["model_type"] == "mistral" and "layer_types" in file
    return HF_TYPES["ministral" if ministral else file["model_type"]][1]


def activation_key(kind: HfType) -> str:
    return "hidden_act" if "hidden_act" in kind.defaults else "hidden_activation"


def _others(kind: HfType) -> set[str]:
    """Keys that mean something for other model types, but not for this one."""
    known = {key for _, each in HF_TYPES.values() for key in each.defaults}
    own = {*kind.defaults, *kind.aliases, *kind.aliases.values()}
    return known - own - {"head_dim", ORIGINAL}
