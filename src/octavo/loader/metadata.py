"""GGUF metadata to `ModelConfig`: what the keys of each architecture mean.

Every ``{architecture}.*`` key of a file is either used here, checked to be without effect, or
refused by name: a key that changes the computation must not be passed over.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any, NoReturn

import numpy as np

from octavo.loader.base import WeightFormat
from octavo.loader.gguf import GgufFile
from octavo.models.config import MAX_LAYERS, UNROTATED, Experts, Layer, LongRope, ModelConfig, Rope
from octavo.models.families import ARCHITECTURES
from octavo.models.family import Family, Windows
from octavo.models.rope import yarn_factors, yarn_magnitude

PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
# Keys that may have a number for each layer, where llama.cpp takes one for all, too.
PER_LAYER = (
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_used_count",
)
LLAMA3_THETA, LLAMA3_CONTEXT = 500000.0, 8192  # of Llama 3, which 3.1 scales


def model_config(file: GgufFile) -> ModelConfig:
    """The model's shape. Raises `CheckpointError` for what is missing, wrong or unsupported."""
    architecture = file.get("general.architecture", str)
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        file.fail(f"architecture {architecture!r} is not supported; supported are {supported}")
    return _Reader(file, architecture).config()


class _Reader:
    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.prefix = architecture + "."
        self.used: set[str] = set()
        self.family, self.experts = self.family_of(ARCHITECTURES[architecture])

    def config(self) -> ModelConfig:
        file = self.file
        hidden = self.positive("embedding_length")
        heads = self.positive("attention.head_count")
        kv_heads = self.positive("attention.head_count_kv", heads)
        if not self.has("attention.key_length") and hidden % heads:
            self.fail("embedding_length", f"is not a multiple of attention.head_count {heads}")
        head_dim = self.positive("attention.key_length", hidden // heads)
        if self.positive("attention.value_length", head_dim) != head_dim:
            self.fail("attention.value_length", f"differs from the key length {head_dim}")
        num_layers = self.positive("block_count")
        if num_layers > MAX_LAYERS:
            self.fail("block_count", f"is above {MAX_LAYERS}")
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            file.fail("tensor 'token_embd.weight' is missing")
        vocab = embedding.shape[0]
        if self.positive("vocab_size", vocab) != vocab:
            self.fail("vocab_size", f"differs from the embedding's {vocab} rows")
        self.context = self.positive("context_length")
        values: dict[str, Any] = {
            key.field: key.form.read(self.real(key.gguf, key.default))
            for key in self.family.gguf_keys
        }
        if self.family.embedding_root:
            values["embedding_scale"] = sqrt(hidden)
        large = num_layers == self.family.hidden_scale_layers
        scale = 1.0 / sqrt(hidden / heads if large else head_dim)
        values |= {
            "intermediate_size": self.positive("feed_forward_length"),
            "norm_eps": self.real(self.family.eps.gguf),
            "attention_scale": self.real("attention.scale", 0.0) or scale,
            "layers": tuple(
                replace(layer, experts=self.experts) for layer in self.layers(num_layers, head_dim)
            ),
            "context_length": self.context,  # as the rotary scaling has it
            "biases": frozenset(n for n in PROJECTIONS if f"blk.0.{n}.bias" in file.tensors),
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
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                activation=self.family.activation,
                tied_embeddings="output.weight" not in file.tensors,
            )
        except ValueError as error:
            file.fail(str(error))

    def family_of(self, families: list[Family]) -> tuple[Family, Experts | None]:
        """Return the family of an architecture, and the experts of every layer. These
        architectures share out a token's weights over its own experts.
        """
        dense = [family for family in families if not family.expert_size]
        sparse = [family for family in families if family.expert_size]
        required = 0 if dense else None
        if not sparse or not (count := self.positive("expert_count", required, least=0)):
            return (dense or sparse)[0], None
        chosen = self.positive("expert_used_count")
        size = self.positive(sparse[0].expert_size)
        return sparse[0], Experts(count, chosen, size, renormalize=True)

    def layers(self, count: int, head_dim: int) -> tuple[Layer, ...]:
        rope = self.rope(head_dim)
        if self.family.windows is None:
            return (Layer(rope),) * count
        return self.windowed_layers(count, rope, self.family.windows)

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
        for key, value in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
            if self.real(f"rope.scaling.{key}", value) != value:
                self.fail(f"rope.scaling.{key}", f"is not supported, only {value:g}")
        fast = self.real("rope.scaling.yarn_beta_fast", 32.0)
        slow = self.real("rope.scaling.yarn_beta_slow", 1.0)
        magnitude = self.real("rope.scaling.yarn_attn_factor", yarn_magnitude(factor))
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
        return tuple(float(value) for value in self.file.weight(name).data.view("<f4"))

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

    def windowed_layers(self, count: int, rope: Rope, windows: Windows) -> tuple[Layer, ...]:
        """Windows in all layers, or in a pattern. Those with a rotary base of their own are never
        scaled.
        """
        key, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
        window = self.positive(key, windows.default, least=min(windows.default, 1))
        if not windows.period:
            return (Layer(rope, window or None),) * count
        base = self.real("rope.freq_base_swa", windows.theta or rope.theta)
        local = replace(rope, theta=base)
        if windows.theta is not None:
            local = Rope(base, rope.dim, rope.interleaved)
        if not window:
            self.used.add(pattern)
            self.file.notes.append(
                f"{self.prefix}{key} is missing or 0: no layer has a window, as in llama.cpp"
            )
            return (Layer(rope),) * count
        windowed = self.window_pattern(count, pattern, windows.period)
        return tuple(Layer(local, window) if is_local else Layer(rope) for is_local in windowed)

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

    def same(self, key: str, values: np.ndarray[Any, np.dtype[Any]]) -> int:
        """The number that every layer has."""
        count = self.positive("block_count")
        if values.dtype.kind not in "iu" or values.shape != (count,):
            self.fail(key, f"is not one integer for each of {count} layers")
        if (values != values[0]).any():
            self.fail(key, "differs from layer to layer, which is not supported")
        return int(values[0])

    def real(self, key: str, default: float | None = None) -> float:
        self.used.add(key)
        if default is None:
            return self.file.get(self.prefix + key, float)
        return self.file.get(self.prefix + key, float, default)

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
        harmless = {"tensor_data_layout"}
        off = {"expert_count", "expert_used_count", "use_parallel_residual"}
        for full, value in self.file.metadata.items():
            key = full.removeprefix(self.prefix)
            if key == full or key in self.used or key in harmless:
                continue
            if key in off and value == 0:
                continue
            self.fail(key, "is not supported")
