"""Hugging Face's config.json to `ModelConfig`: what the keys of each ``model_type`` mean.

The reference is the `transformers` class of the model type: `hf_defaults` says what it makes of the
file, with nothing missing. Each key that its model then reads is used here or refused by name, and
keys that it passes over are passed over; those that mean something elsewhere are named in a note.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, sqrt
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
    Temperature,
    share_caches,
)
from octavo.models.families import HF_TYPES, HF_WRAPPERS
from octavo.models.family import Key
from octavo.models.hf_type import FULL, LINEAR, PROPORTIONAL, SLIDING, HfType
from octavo.models.refused import refusal
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
LAYER_TYPES = {FULL: FULL, SLIDING: SLIDING, "attention": FULL}
OLD_LAYER_TYPES = {LINEAR: "mamba"}  # of recurrent layers
SHARED_EXPERT = ("shared_expert_intermediate_size", "shared_intermediate_size")
# Keys that every model class reads beside its own, and what they must not be.
REFUSED: dict[str, Callable[[Any], bool]] = {
    "per_layer_config": lambda value: value is not None,
    "is_causal": lambda value: value is not None and not value,
    # "vision" is for pictures, which are refused.
    "use_bidirectional_attention": lambda value: bool(value) and value != "vision",
    "configuration_files": bool,  # another file for other versions of transformers
    "transformers_weights": bool,  # another file for the weights
}


def model_config(folder: HfFolder, values: dict[str, Any] | None = None) -> ModelConfig:
    """The model's shape, by its config.json or by ``values`` in place of it. Raises
    `CheckpointError` for what is wrong or unsupported.
    """
    return _Reader(folder, folder.json(CONFIG) if values is None else values).config()


def text_config(folder: HfFolder, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """What config.json (or ``values``) says of the language model, as if the model were nothing
    else. Raises `CheckpointError`.
    """
    file = folder.json_if_any(CONFIG) if values is None else values
    wrapper = HF_WRAPPERS.get(str(file.get("model_type")))
    if wrapper is None:
        return file
    outer = Section(lambda reason: folder.fail(CONFIG, reason), file)
    inner = outer.object("text_config")
    model_type = inner.text("model_type", wrapper.texts[0])
    if model_type not in wrapper.texts:
        inner.fail(refusal("model_type", model_type, ", ".join(wrapper.texts)))
    for key in wrapper.passed_over:
        if inner.values.get(key) is not None:
            folder.note(
                f"{CONFIG}: text_config: {key} is passed over, as transformers does for "
                f"{wrapper.classes}Config"
            )
    kept = {key: value for key, value in inner.values.items() if key not in wrapper.passed_over}
    return kept | {
        "model_type": model_type,
        "architectures": [HF_TYPES[model_type][1].model_classes[0]],
        "tie_word_embeddings": outer.flag("tie_word_embeddings", wrapper.tied),
    }


def sizes_left_out(folder: HfFolder) -> str:
    """The sizes that config.json leaves out, and what they are then: for an error's text."""
    file = text_config(folder)
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
    file = text_config(folder)
    if key in file or file.get("model_type") not in HF_TYPES:
        return None
    return kind_of(file).defaults.get(key)


class _Reader:
    def __init__(self, folder: HfFolder, whole: dict[str, Any]) -> None:
        self.folder = folder
        self.within = ""  # the object of the file that is read
        model_type = Section(self.fail, whole).text("model_type")
        wrapper = HF_WRAPPERS.get(model_type)
        if model_type not in HF_TYPES and wrapper is None:
            supported = ", ".join((*HF_TYPES, *HF_WRAPPERS))
            self.fail(refusal("model_type", model_type, supported))
        file = text_config(folder, whole)
        self.family, named = HF_TYPES[file["model_type"]]
        self.kind = kind_of(file)
        architectures = whole.get("architectures")
        models = (wrapper or named).model_classes
        if architectures and architectures not in ([model] for model in models):
            self.fail(
                f"architectures {architectures!r} is not supported, only {' and '.join(models)}"
            )
        for key, refused in REFUSED.items():
            for values in (whole, file):
                if refused(values.get(key)) and not self.has(key):
                    self.fail(f"{key} {values[key]!r:.80} is not supported")
        self.within = "text_config: " if wrapper else ""
        self.mtp_layers = 0
        if self.family.mtp is not None:  # the class has no such key
            self.mtp_layers = Section(self.fail, file).count("mtp_num_hidden_layers", 0, least=0)
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
            "intermediate_size": self.feed_forward(),
            "norm_eps": self.section.real(self.family.eps.hf),
            "activation": self.activation(),
            "attention_scale": self.family.attention_scale or 1.0 / sqrt(self.head_dim),
            "per_layer_input": self.per_layer_input(),
            "tied_embeddings": self.section.flag("tie_word_embeddings"),
            "layers": self.layers(),
            "temperature": self.temperature(),
            "biases": self.biases(),
            "sinks": self.family.sinks,
            "mtp_layers": self.mtp_layers,
        }
        if self.family.embedding_root:
            values["embedding_scale"] = sqrt(self.hidden)
        values |= {key.field: self.number(key) for key in self.family.keys if key.hf}
        values |= {name: self.section.flag(key) for name, key in self.family.switches.items()}
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
        wide = self.count("global_head_dim") if self.has("global_head_dim") else self.head_dim
        if wide > MAX_HEAD_DIM:
            self.fail(f"global_head_dim is {wide}, above {MAX_HEAD_DIM}")
        if len(self.kind.rope_theta) > 1:
            rope = self.rope(ropes[FULL], wide)
            local = self.rope(ropes[SLIDING], self.head_dim)
        else:
            rope = local = self.rope(ropes, self.head_dim)
        window = self.window() if self.has("sliding_window") else None
        types = [SLIDING if window is not None else FULL] * self.num_layers
        if self.has("layer_types"):
            types = self.layer_types()
            if SLIDING in types and window is None and not self.kind.null_window:
                key = "use_sliding_window"
                why = f"{key} is false" if self.has(key) else "sliding_window is null"
                self.fail(f"layer_types has {SLIDING}, but {why}")
        far = Layer(rope)
        if self.has("global_head_dim"):
            far = self.global_layer(far, wide)
        kinds = {FULL: far, SLIDING: Layer(local, window)}
        if (recurrent := self.family.recurrent) is not None and recurrent.layer_type in types:
            kinds[recurrent.layer_type] = Layer(rope, recurrence=recurrent.hf(self.section))
        shared = next((self.count(key) for key in SHARED_EXPERT if self.has(key)), 0)
        layers = [
            replace(
                kinds[kind],
                rope=kinds[kind].rope if rotates else UNROTATED,
                experts=experts,
                shared_expert=shared if experts else 0,
            )
            for kind, rotates, experts in zip(
                types, self.rotated(types), self.experts(), strict=True
            )
        ]
        if self.has("layer_rope_theta") and self.values["layer_rope_theta"] is not None:
            layers = self.with_bases(layers, ropes)
        return self.sharing(layers) if self.has("num_kv_shared_layers") else tuple(layers)

    def with_bases(self, layers: list[Layer], ropes: dict[str, Any]) -> list[Layer]:
        """Return the layers with rotary bases of their own, or none where that is 0."""
        bases = self.section.reals("layer_rope_theta", len(layers))
        own = {
            base: self.rope(ropes | {"rope_theta": base}, self.head_dim) if base else UNROTATED
            for base in bases
        }
        return [replace(layer, rope=own[base]) for layer, base in zip(layers, bases, strict=True)]

    def rotated(self, types: list[str]) -> list[bool]:
        """Which layers have rotary positions."""
        if self.family.rotates_windows:
            return [kind == SLIDING for kind in types]
        if self.has("position_embedding_type"):
            return [self.values["position_embedding_type"] == "rope"] * self.num_layers
        if not self.has("no_rope_layers"):
            return [True] * self.num_layers
        flags = self.values["no_rope_layers"]  # which is 1 where there are any
        if not isinstance(flags, list) or any(flag not in (0, 1) for flag in flags):
            self.fail("no_rope_layers is not a list of 0 and 1")
        if len(flags) < self.num_layers:
            self.fail(f"no_rope_layers has {len(flags)} numbers for {self.num_layers} layers")
        return [bool(flag) for flag in flags[: self.num_layers]]

    def temperature(self) -> Temperature | None:
        """How queries grow with their position."""
        if not self.family.temperature:
            return None
        section = self.section.object("rope_parameters")
        beta, original = section.real("llama_4_scaling_beta"), section.count(ORIGINAL)
        return Temperature(beta, original) if beta else None

    def global_layer(self, layer: Layer, head_dim: int) -> Layer:
        """Return a layer that sees everything, where these have heads of their own."""
        kv_heads = self.values["num_global_key_value_heads"]
        return replace(
            layer,
            head_dim=head_dim,
            num_kv_heads=None if kv_heads is None else self.count("num_global_key_value_heads"),
            keys_as_values=self.section.flag("attention_k_eq_v"),
        )

    def sharing(self, layers: list[Layer]) -> tuple[Layer, ...]:
        """Return the layers of which the last read others' keys and values."""
        count = self.section.count("num_kv_shared_layers", least=0)
        if self.section.flag("use_double_wide_mlp"):
            wide = 2 * self.count("intermediate_size")
            first = len(layers) - count
            layers[first:] = [replace(layer, intermediate_size=wide) for layer in layers[first:]]
        try:
            return share_caches(layers, count)
        except ValueError as error:
            self.fail(f"num_kv_shared_layers is {count}: {error}")

    def per_layer_input(self) -> int:
        """The width of what each layer gets of a token's second embedding."""
        if not self.has("hidden_size_per_layer_input"):
            return 0
        width = self.section.count("hidden_size_per_layer_input", 0, least=0)
        rows, tokens = self.count("vocab_size_per_layer_input"), self.count("vocab_size")
        if width and rows != tokens:
            self.fail(f"vocab_size_per_layer_input {rows} differs from vocab_size {tokens}")
        return width

    def feed_forward(self) -> int:
        """The width of feed-forward layers."""
        if self.kind.feed_forward is None:
            return self.count("intermediate_size")
        return self.kind.feed_forward(self.section)

    def experts(self) -> list[Experts | None]:
        """The experts of each layer; those of the class that has any are in every layer, but for
        the dense ones that it may name.
        """
        switch = "enable_moe_block"
        off = self.has(switch) and not self.section.flag(switch)
        none = self.family.also_dense and self.values.get("num_local_experts") == 0
        if off or none or not self.has("num_experts_per_tok"):
            return [None] * self.num_layers
        size = "moe_intermediate_size" if self.has("moe_intermediate_size") else "intermediate_size"
        experts = Experts(
            self.count(
                "num_local_experts" if "num_local_experts" in self.values else "num_experts"
            ),
            self.count("num_experts_per_tok"),
            self.count(size),
            self.section.flag("norm_topk_prob") if self.has("norm_topk_prob") else True,
            **{**self.family.experts, **self.options_of_experts()},
        )
        first = 0
        if self.has("num_dense_layers"):
            first = self.section.count("num_dense_layers", least=0)
        step = self.count("decoder_sparse_step") if self.has("decoder_sparse_step") else 1
        dense = self.values["mlp_only_layers"] if self.has("mlp_only_layers") else []
        if not isinstance(dense, list) or any(type(index) is not int for index in dense):
            self.fail("mlp_only_layers is not a list of integers")
        return [
            None if index < first or index in dense or (index + 1) % step else experts
            for index in range(self.num_layers)
        ]

    def options_of_experts(self) -> dict[str, Any]:
        """What a class may have in its own keys, by field."""
        found: dict[str, Any] = {}
        if self.has("use_expert_bias"):
            found["selection_bias"] = self.section.flag("use_expert_bias")
        if self.has("routed_scaling_factor"):
            found["scale"] = self.section.positive("routed_scaling_factor")
        return found

    def window(self) -> int | None:
        """``sliding_window``: null is none."""
        return None if self.values["sliding_window"] is None else self.count("sliding_window")

    def layer_types(self) -> list[str]:
        """The type of each layer: one of hf_type's, or that of the family's recurrent layers."""
        known = dict(LAYER_TYPES)
        if (recurrent := self.family.recurrent) is not None:
            known[recurrent.layer_type] = recurrent.layer_type
            if old := OLD_LAYER_TYPES.get(recurrent.layer_type):
                known[old] = recurrent.layer_type
        types = self.values["layer_types"]
        if not isinstance(types, list) or len(types) != self.num_layers:
            self.fail(f"layer_types is not a list of {self.num_layers} types")
        for kind in types:
            if not isinstance(kind, str) or kind not in known:
                names = " and ".join(sorted(set(known.values())))
                self.fail(f"layer type {kind!r} is not supported, only {names}")
        return [known[kind] for kind in types]

    def biases(self) -> frozenset[str]:
        """The projections with a bias."""
        keys = self.family.bias_keys.items()
        found = (roles for key, roles in keys if self.has(key) and self.section.flag(key))
        return self.family.biases.union(*found)

    # ── Rotary positions ────────────────────────────────────────────────────────────────────────

    def rope(self, values: dict[str, Any], head_dim: int) -> Rope:
        """One rotary embedding. Only here are the section's keys interpreted."""
        section = Section(self.fail, values)
        theta = section.real("rope_theta")
        kind = section.text("rope_type")
        part = section.real("partial_rotary_factor", self.kind.partial_rotary or 1.0)
        if kind == PROPORTIONAL:
            return self.proportional_rope(section, part, head_dim)
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
        dim = int(head_dim * part)
        if dim % 2 and theta > 0.0:  # one more turns, with the frequencies of an odd number
            theta, dim = theta ** ((dim + 1) / dim), dim + 1
        plain = {"theta": theta, "dim": dim, "interleaved": self.family.hf_interleaved}
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

    def proportional_rope(self, section: Section, part: float, head_dim: int) -> Rope:
        """The first pairs with the frequencies that they have where all are rotated."""
        if not 0.0 <= part <= 1.0:
            self.fail(f"partial_rotary_factor is {part:g}, outside 0 to 1")
        pairs, rotated = head_dim // 2, int(part * head_dim // 2)
        if not rotated:
            return UNROTATED
        factors = (1.0,) * rotated + (inf,) * (pairs - rotated)
        scale = 1.0 / section.at_least_one("factor", 1.0)
        factors = factors if rotated < pairs else ()
        return Rope(section.real("rope_theta"), 2 * pairs, False, scale, factors)

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
        self.folder.fail(CONFIG, self.within + reason)

    def activation(self) -> Activation:
        key = activation_key(self.kind)
        if not key:
            return Activation.SILU
        name = self.section.text(key)
        if self.family.activation is Activation.SWIGLU_CLAMPED:
            return self.family.activation  # its class has the key, and its model does not heed it
        if name not in ACTIVATIONS:
            self.fail(f"{key} {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def number(self, key: Key) -> float:
        if key.null is not None and self.values[key.hf] is None:
            return key.null
        return key.form.read(self.section.positive(key.hf))

    def has(self, key: str) -> bool:
        """Whether the class has a key; a file may have others."""
        return key in self.kind.defaults or key in self.kind.aliases.values()

    def count(self, key: str) -> int:
        return self.section.count(key)


def kind_of(file: dict[str, Any]) -> HfType:
    """The class that transformers takes for a file of a known ``model_type``."""
    # A Mistral whose layers have types is a Ministral, even if they are null.
    ministral = file["model_type"] == "mistral" and "layer_types" in file
    return HF_TYPES["ministral" if ministral else file["model_type"]][1]


def activation_key(kind: HfType) -> str:
    """The key of the activation; "": the class has none, and its models have SiLU."""
    keys = ("hidden_act", "hidden_activation")
    return next((key for key in keys if key in kind.defaults), "")


def _others(kind: HfType) -> set[str]:
    """Keys that mean something for other model types, but not for this one."""
    known = {key for _, each in HF_TYPES.values() for key in each.defaults}
    own = {*kind.defaults, *kind.aliases, *kind.aliases.values()}
    return known - own - {"head_dim", ORIGINAL, "rope_parameters"}
