"""GGUF metadata to `ModelConfig`: what the keys of each architecture mean.

Every ``{architecture}.*`` key of a file is either used here, checked to be without effect, or
refused by name: a key that changes the computation must not be passed over.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt
from typing import Any, NoReturn

import numpy as np

from octavo.loader.base import WeightFormat
from octavo.loader.gguf import GgufFile
from octavo.models.config import (
    MAX_LAYERS,
    UNROTATED,
    Experts,
    Layer,
    LongRope,
    ModelConfig,
    Rope,
    Temperature,
    share_caches,
)
from octavo.models.families import ARCHITECTURES
from octavo.models.family import COUNT, Family, Key, Windows
from octavo.models.refused import refusal
from octavo.models.rope import yarn_factors, yarn_magnitude

KV = ("attn_k", "attn_v")
MTP = "nextn.eh_proj.weight"  # of every layer for multi-token prediction
PROJECTIONS = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    *("ffn_gate_inp", "ssm_conv1d"),
)
# Keys that may have a number for each layer, where llama.cpp takes one for all, too.
KV_HEADS = "attention.head_count_kv"
PER_LAYER = (
    "attention.head_count",
    "expert_feed_forward_length",
    "expert_used_count",
)
GATING = {"softmax": 1, "sigmoid": 2}  # by number: llama.cpp's
UNROTATED_FACTOR = 1e30  # and more: what llama.cpp has for pairs that are not rotated
LLAMA3_THETA, LLAMA3_CONTEXT = 500000.0, 8192  # of Llama 3, which 3.1 scales


def model_config(file: GgufFile) -> ModelConfig:
    """The model's shape. Raises `CheckpointError` for what is missing, wrong or unsupported."""
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        file.fail(refusal("architecture", architecture, ", ".join(ARCHITECTURES)))
    return _Reader(file, architecture).config()


class _Reader:
    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.prefix = architecture + "."
        self.used: set[str] = set()
        self.recurrent = False  # some layers are
        self.family, self.experts = self.family_of(ARCHITECTURES[architecture])

    def config(self) -> ModelConfig:
        file = self.file
        hidden = self.positive("embedding_length")
        heads = self.positive("attention.head_count")
        # Those behind the model's own, for multi-token prediction.
        mtp_layers = self.positive("nextn_predict_layers", 0, least=0)
        num_layers = self.positive("block_count", least=mtp_layers + 1) - mtp_layers
        if num_layers > MAX_LAYERS:
            self.fail("block_count", f"is above {MAX_LAYERS}")
        if not self.has("attention.key_length") and hidden % heads:
            self.fail("embedding_length", f"is not a multiple of attention.head_count {heads}")
        wide = self.head_dim("", hidden // heads)
        # Of layers with a window, where their heads are others: the model's then.
        head_dim = self.head_dim("_swa", wide)
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            file.fail("tensor 'token_embd.weight' is missing")
        vocab = embedding.shape[0]
        if self.positive("vocab_size", vocab) != vocab:
            self.fail("vocab_size", f"differs from the embedding's {vocab} rows")
        self.context = self.positive("context_length")
        values: dict[str, Any] = {key.field: self.number(key) for key in self.family.gguf_keys}
        if self.family.embedding_root:
            values["embedding_scale"] = sqrt(hidden)
        large = num_layers == self.family.hidden_scale_layers
        scale = self.family.attention_scale or 1.0 / sqrt(hidden / heads if large else head_dim)
        layers = self.with_recurrences(self.layers(num_layers, head_dim, wide))
        # Those of the model are the first layer's that has a window, if any has one.
        first = next((i for i, layer in enumerate(layers) if layer.window is not None), 0)
        kv_heads = self.each(KV_HEADS, num_layers, heads)
        widths = self.feed_forwards(num_layers)
        dense = self.dense_layers()
        temperature = self.temperature()
        values |= {
            "num_kv_heads": kv_heads[first],
            "intermediate_size": widths[0],
            "norm_eps": self.real(self.family.eps.gguf),
            "attention_scale": self.real("attention.scale", 0.0) or scale,
            "layers": self.sharing(
                [
                    replace(
                        layer,
                        experts=None if index < dense else self.experts,
                        shared_expert=0 if index < dense else self.shared_expert(),
                        num_kv_heads=None if of_kv == kv_heads[first] else of_kv,
                        intermediate_size=None if width == widths[0] else width,
                        keys_as_values=self.keys_as_values(index),
                    )
                    for index, (layer, of_kv, width) in enumerate(
                        zip(layers, kv_heads, widths, strict=True)
                    )
                ]
            ),
            "temperature": temperature,
            # Some writers leave them out.
            "mtp_layers": mtp_layers * (f"blk.{num_layers}.{MTP}" in file.tensors),
            "context_length": self.context,  # as the rotary scaling has it
            "biases": self.biases(num_layers),
        }
        self.refuse_other_switches()
        self.refuse_other_keys()
        try:
            return ModelConfig(
                **values,
                family=self.family.name,
                name=file.get("general.name", str, ""),
                vocab_size=vocab,
                hidden_size=hidden,
                num_heads=heads,
                head_dim=head_dim,
                activation=self.family.activation,
                sinks=self.family.sinks,
                tied_embeddings="output.weight" not in file.tensors,
            )
        except ValueError as error:
            file.fail(str(error))

    def feed_forwards(self, count: int) -> list[int]:
        """The width of each layer's dense feed-forward layer, or where there are none and the key
        is missing, that of the experts.
        """
        width = None if self.experts is None else self.experts.intermediate_size
        return self.each("feed_forward_length", count, width)

    def dense_layers(self) -> int:
        """How many layers come before the first that has experts."""
        key = "leading_dense_block_count"
        return self.positive(key, 0, least=0) if self.family.leading_dense else 0

    def shared_expert(self) -> int:
        """The width of the expert that every token goes to, or 0."""
        key = self.family.shared_expert_size
        self.used.add(key)
        return self.positive(key) if key and self.experts is not None else 0

    def biases(self, num_layers: int) -> frozenset[str]:
        """The projections with a bias, in any layer."""
        tensors = self.file.tensors
        found = {
            name
            for name in PROJECTIONS
            for index in range(num_layers)
            if f"blk.{index}.{name}.bias" in tensors
        }
        parts = (each.parts for each in self.family.gathers if each.gguf in found)
        return frozenset(found.union(*parts))

    def family_of(self, families: list[Family]) -> tuple[Family, Experts | None]:
        """Return the family of an architecture, and the experts of every layer. These
        architectures share out a token's weights over its own experts.
        """
        dense = [family for family in families if not family.expert_size]
        if any(family.windows for family in dense) and len(dense) > 1:
            window = self.positive("attention.sliding_window", 0, least=0)
            dense = [family for family in dense if bool(family.windows) == bool(window)]
        sparse = [family for family in families if family.expert_size]
        required = 0 if dense or any(family.also_dense for family in sparse) else None
        if not sparse or not (count := self.positive("expert_count", required, least=0)):
            return (dense or sparse)[0], None
        chosen = self.positive("expert_used_count")
        size = self.positive(sparse[0].expert_size)
        experts = Experts(count, chosen, size, renormalize=True, **sparse[0].experts)
        key, gating = "expert_gating_func", GATING[experts.gating]
        if self.positive(key, gating) != gating:
            self.fail(key, f"is not supported, only {gating} ({experts.gating})")
        return sparse[0], experts

    def layers(self, count: int, head_dim: int, wide: int) -> tuple[Layer, ...]:
        """The layers with their windows; those without have heads of ``wide`` elements."""
        far = Layer(self.rope(wide), head_dim=None if wide == head_dim else wide)
        if self.family.windows is None:
            layers = (far,) * count
        else:
            layers = self.windowed_layers(count, far, head_dim, self.family.windows)
        switch = self.family.rotary_switch
        if switch and not self.file.get(self.prefix + switch, bool, True):
            return tuple(replace(layer, rope=UNROTATED) for layer in layers)
        if self.family.rotates_windows:
            return tuple(
                replace(layer, rope=layer.rope if layer.window else UNROTATED) for layer in layers
            )
        period = self.family.unrotated_period or count + 1
        return tuple(
            replace(layer, rope=layer.rope if (index + 1) % period else UNROTATED)
            for index, layer in enumerate(layers)
        )

    def temperature(self) -> Temperature | None:
        """How queries grow with their position, beyond the context that scaled positions have."""
        if not self.family.temperature:
            return None
        beta = self.real("attention.temperature_scale", 0.0)
        original = self.positive("rope.scaling.original_context_length", self.context)
        return Temperature(beta, original) if beta else None

    def head_dim(self, ending: str, default: int) -> int:
        """The width of heads, by the keys of that ending: that of keys is that of values."""
        width = self.positive(f"attention.key_length{ending}", default)
        if self.positive(f"attention.value_length{ending}", width) != width:
            self.fail(f"attention.value_length{ending}", f"differs from the key length {width}")
        return width

    def keys_as_values(self, layer: int) -> bool:
        """Whether a layer has a projection to keys and none to values."""
        keys, values = (f"blk.{layer}.{name}.weight" in self.file.tensors for name in KV)
        return self.family.keys_as_values and keys and not values

    def sharing(self, layers: list[Layer]) -> tuple[Layer, ...]:
        """The layers, of which the last read others' keys and values."""
        key = "attention.shared_kv_layers"
        count = self.positive(key, 0, least=0)
        try:
            return share_caches(layers, count)
        except ValueError as error:
            self.fail(key, f"does not fit: {error}")

    def with_recurrences(self, layers: tuple[Layer, ...]) -> list[Layer]:
        """The layers, some of which are recurrent."""
        recurrent = self.family.recurrent
        if recurrent is None:
            return list(layers)
        flags = self.recurrent_flags(len(layers), recurrent.period)
        self.recurrent = any(flags)
        if not self.recurrent:
            return list(layers)
        shape = recurrent.gguf(self.positive)
        for key, value in recurrent.gguf_keys(shape).items():
            if self.positive(key) != value:
                self.fail(key, f"contradicts the others, which make it {value}")
        return [
            replace(layer, recurrence=shape) if flag else layer
            for layer, flag in zip(layers, flags, strict=True)
        ]

    def recurrent_flags(self, count: int, period: int) -> list[bool]:
        """Which layers are recurrent: a flag a layer, those without KV heads, or all but one in so
        many.
        """
        key = "attention.recurrent_layers"
        interval = self.positive("full_attention_interval", period, least=0)
        flags = self.file.metadata.get(self.prefix + key)
        heads = self.file.metadata.get(self.prefix + KV_HEADS)
        self.used.add(key)
        if isinstance(flags, np.ndarray):
            if flags.dtype.kind not in "biu" or len(flags) < count:
                self.fail(key, f"is not one bool for each of {count} layers")
            return [bool(flag) for flag in flags[:count]]
        if isinstance(heads, np.ndarray):
            self.each(KV_HEADS, count)  # refuses what is not a number for each layer
            return [bool(number == 0) for number in heads[:count]]
        return [interval > 0 and (index + 1) % interval != 0 for index in range(count)]

    # ── Rotary positions and windows ────────────────────────────────────────────────────────────

    def rope(self, head_dim: int) -> Rope:
        """The rotary embedding of global layers."""
        theta = self.real("rope.freq_base", 10000.0)
        partial = any(kind.partial_rotary for kind in self.family.hf)
        dim = self.positive("rope.dimension_count", head_dim, least=0 if partial else 1)
        kind = self.text("rope.scaling.type", "linear")
        # Missing or 0 is no scaling; old converters wrote it under another name.
        factor = self.real("rope.scaling.factor", self.real("rope.scale_linear", 0.0)) or 1.0
        original = self.positive("rope.scaling.original_context_length", self.context)
        magnitude = self.real("rope.scaling.attn_factor", 1.0)
        self.used.add("rope.scaling.finetuned")
        if not factor >= 1.0:
            self.fail("rope.scaling.factor", "is below 1")
        if not dim:
            return UNROTATED
        if dim % 2 or dim > head_dim:
            self.fail("rope.dimension_count", f"does not fit heads of {head_dim}")
        factors = self.rope_factors(dim)
        plain = Rope(theta, dim, self.family.interleaved, factors=factors, magnitude=magnitude)
        if kind == "yarn":
            return self.yarn_rope(plain, factor, original)
        if kind not in ("none", "linear", "longrope"):
            self.fail(
                "rope.scaling.type", "is not supported; supported are none, linear, yarn, longrope"
            )
        if kind != "none":
            plain = replace(plain, scale=1.0 / factor)
        short = self.frequency_factors("rope_factors_short.weight", dim)
        long = self.frequency_factors("rope_factors_long.weight", dim)
        if not short and not long and kind != "longrope":
            self.note_unscaled(plain, original)
            return plain
        if not short or not long or plain.factors:
            self.file.fail("does not have rope_factors_short and rope_factors_long alone")
        return replace(plain, factors=short, by_length=LongRope(original, long))

    def yarn_rope(self, plain: Rope, factor: float, original: int) -> Rope:
        if self.real("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
            self.fail("rope.scaling.yarn_ext_factor", "is not supported, only 1")
        log_multiplier = self.real("rope.scaling.yarn_log_multiplier", 0.0)
        if log_multiplier and not self.family.temperature:
            self.fail("rope.scaling.yarn_log_multiplier", "is not supported, only 0")
        fast = self.real("rope.scaling.yarn_beta_fast", 32.0)
        slow = self.real("rope.scaling.yarn_beta_slow", 1.0)
        magnitude = yarn_magnitude(factor) / yarn_magnitude(factor, log_multiplier)
        magnitude = self.real("rope.scaling.yarn_attn_factor", magnitude)
        try:
            factors = yarn_factors(plain.theta, plain.dim, factor, original, fast, slow)
        except (ValueError, ArithmeticError) as error:
            self.fail("rope.scaling.type", f"cannot be computed: {error}")
        self.context = max(self.context, int(original * factor))
        return replace(plain, factors=factors, magnitude=plain.magnitude * magnitude)

    def rope_factors(self, dim: int) -> tuple[float, ...]:
        """Llama 3's frequency factors, which converters store as a tensor."""
        factors = self.frequency_factors("rope_freqs.weight", dim)
        return () if all(factor == 1.0 for factor in factors) else factors

    def frequency_factors(self, name: str, dim: int) -> tuple[float, ...]:
        """A tensor with one number for each rotated pair, or nothing if there is none."""
        info = self.file.tensors.get(name)
        if info is None:
            return ()
        if info.format is not WeightFormat.F32 or info.shape != (dim // 2,):
            self.file.fail(
                f"tensor {name!r} is {info.format.name} {list(info.shape)}, not F32 [{dim // 2}]"
            )
        factors = (float(value) for value in self.file.weight(name).data.view("<f4"))
        return tuple(inf if factor >= UNROTATED_FACTOR else factor for factor in factors)

    def note_unscaled(self, rope: Rope, original: int) -> None:
        """A file that looks like one of a scaled model and has no scaling."""
        if self.prefix != "llama." or rope.scale != 1.0 or rope.factors:
            return
        if original < self.context:
            why = f"training had {original}"
        elif self.context > LLAMA3_CONTEXT and rope.theta == LLAMA3_THETA:
            why = f"rope.freq_base {rope.theta:g} is that of Llama 3.1, which scales them"
        else:
            return
        self.file.notes.append(
            f"positions are not scaled, as in llama.cpp, since there is no rope_freqs.weight: but "
            f"the context has {self.context} tokens, and {why}"
        )

    def windowed_layers(
        self, count: int, far: Layer, head_dim: int, windows: Windows
    ) -> tuple[Layer, ...]:
        """Windows in all layers, or in a pattern, beside layers like ``far``. Those with a rotary
        base of their own are never scaled.
        """
        rope = far.rope
        key, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
        window = self.positive(key, windows.default, least=min(windows.default, 1))
        if not windows.period:
            return (replace(far, window=window or None),) * count
        base = self.real("rope.freq_base_swa", windows.theta or rope.theta)
        local = replace(rope, theta=base)
        if not windows.scaled:
            dim = self.positive("rope.dimension_count_swa", min(rope.dim, head_dim))
            local = Rope(base, dim, self.family.interleaved)
        if not window:
            self.used.add(pattern)
            self.file.notes.append(
                f"{self.prefix}{key} is missing or 0: no layer has a window, as in llama.cpp"
            )
            return (far,) * count
        windowed = self.window_pattern(count, pattern, windows.period)
        return tuple(Layer(local, window) if is_local else far for is_local in windowed)

    def window_pattern(self, count: int, key: str, period: int) -> list[bool]:
        """Which layers have a window: a flag a layer, or one global layer after period - 1."""
        if isinstance(flags := self.file.metadata.get(self.prefix + key), np.ndarray):
            self.used.add(key)
            if flags.dtype.kind not in "biu" or len(flags) != count:
                self.fail(key, f"is not one bool for each of {count} layers")
            return [bool(flag) for flag in flags]
        period = self.positive(key, period)
        return [(index + 1) % period != 0 for index in range(count)]

    # ── Keys ────────────────────────────────────────────────────────────────────────────────────

    def has(self, key: str) -> bool:
        return self.prefix + key in self.file.metadata

    def fail(self, key: str, reason: str) -> NoReturn:
        value = self.file.metadata.get(self.prefix + key)
        shown = "" if isinstance(value, np.ndarray) or value is None else f" is {value!r}, which"
        self.file.fail(f"metadata key {self.prefix}{key}{shown} {reason}")

    def positive(self, key: str, default: int | None = None, least: int = 1) -> int:
        self.used.add(key)
        value: int
        if key in PER_LAYER and isinstance(
            values := self.file.metadata.get(self.prefix + key), np.ndarray
        ):
            value = self.same(key, values)
        elif default is None:
            value = self.file.get(self.prefix + key, int)
        else:
            value = self.file.get(self.prefix + key, int, default)
        if value < least:
            self.fail(key, f"is below {least}")
        return value

    def each(self, key: str, count: int, default: int | None = None) -> list[int]:
        """A number for each layer, or one for all."""
        values = self.file.metadata.get(self.prefix + key)
        if not isinstance(values, np.ndarray):
            return [self.positive(key, default)] * count
        self.used.add(key)
        total = self.positive("block_count")
        if values.dtype.kind not in "iu" or values.shape != (total,):
            self.fail(key, f"is not one integer for each of {total} layers")
        numbers = [int(value) for value in values[:count]]
        if key == KV_HEADS and self.family.recurrent is not None:  # which has none: 0
            numbers = [number or max(numbers) for number in numbers]
        if not all(1 <= number < 1 << 31 for number in numbers):
            self.fail(key, f"is not from 1 to {(1 << 31) - 1} in every layer")
        return numbers

    def same(self, key: str, values: np.ndarray[Any, np.dtype[Any]]) -> int:
        """The number that every layer has."""
        count = self.positive("block_count")
        if values.dtype.kind not in "iu" or values.shape != (count,):
            self.fail(key, f"is not one integer for each of {count} layers")
        if len(np.unique(values)) != 1:
            self.fail(key, "differs from layer to layer, which is not supported")
        return int(values[0])

    def real(self, key: str, default: float | None = None) -> float:
        self.used.add(key)
        if default is None:
            return self.file.get(self.prefix + key, float)
        return self.file.get(self.prefix + key, float, default)

    def number(self, key: Key) -> float:
        if key.form is COUNT:
            return self.positive(key.gguf, int(key.default), least=0)
        return key.form.read(self.real(key.gguf, key.default))

    def text(self, key: str, default: str) -> str:
        self.used.add(key)
        return self.file.get(self.prefix + key, str, default)

    def refuse_other_switches(self) -> None:
        for value, _, key, otherwise in self.family.fixed:
            self.used.add(key)
            if key and self.file.get(self.prefix + key, bool, value) is not value:
                self.fail(key, f"{otherwise}is not supported")

    def refuse_other_keys(self) -> None:
        # A layout note of the converter, and switches that are off.
        # Text has one position a token, whichever of a head's dimensions count rows and columns.
        harmless = {"tensor_data_layout", "rope.dimension_sections"}
        off = {"expert_count", "expert_used_count", "use_parallel_residual"}
        for full, value in self.file.metadata.items():
            key = full.removeprefix(self.prefix)
            if key == full or key in self.used or key in harmless:
                continue
            if key in off and not isinstance(value, np.ndarray) and value == 0:
                continue
            if key.startswith(("ssm.", "shortconv.")) and not self.recurrent:  # of no layer
                continue
            self.fail(key, "is not supported")
