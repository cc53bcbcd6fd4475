"""GGUF metadata to `ModelConfig`: what the keys of each architecture mean.

Every ``{architecture}.*`` key of a file is either used here, checked to be without effect, or
refused by name: a key that changes the computation must not be passed over.
"""

from __future__ import annotations

from math import sqrt
from typing import NoReturn

import numpy as np

from octavo.checkpoint.base import WeightFormat
from octavo.checkpoint.gguf import GgufFile
from octavo.model.config import Activation, Layer, ModelConfig, Rope

ARCHITECTURES = ("llama", "gemma3")
MAX_LAYERS = 512
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
GEMMA3_27B_LAYERS = 62  # the one size whose attention scale is not 1/sqrt(head_dim)


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
        gemma = self.prefix == "gemma3."
        scale = self.real("attention.scale", 0.0)
        if scale == 0.0:
            per_head = hidden / heads if gemma and num_layers == GEMMA3_27B_LAYERS else head_dim
            scale = 1.0 / sqrt(per_head)
        layers = (
            self.gemma3_layers(num_layers, head_dim)
            if gemma
            else (Layer(self.rope(head_dim, interleaved=True)),) * num_layers
        )
        values = {
            "intermediate_size": self.positive("feed_forward_length"),
            "context_length": self.positive("context_length"),
            "norm_eps": self.real("attention.layer_norm_rms_epsilon"),
            "attention_softcap": self.real("attn_logit_softcapping", 0.0),
            "logits_softcap": self.real("final_logit_softcapping", 0.0),
        }
        biases = frozenset(name for name in PROJECTIONS if f"blk.0.{name}.bias" in file.tensors)
        self.refuse_other_keys()
        try:
            return ModelConfig(
                family=self.prefix[:-1],
                name=file.get("general.name", str, ""),
                vocab_size=vocab,
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                activation=Activation.GELU_TANH if gemma else Activation.SILU,
                attention_scale=scale,
                tied_embeddings="output.weight" not in file.tensors,
                layers=layers,
                embedding_scale=sqrt(hidden) if gemma else 1.0,
                biases=biases,
                **values,  # type: ignore[arg-type]
            )
        except ValueError as error:
            file.fail(str(error))

    # ── Rotary positions and windows ────────────────────────────────────────────────────────────

    def rope(self, head_dim: int, *, interleaved: bool) -> Rope:
        """The rotary embedding of global layers."""
        theta = self.real("rope.freq_base", 10000.0)
        dim = self.positive("rope.dimension_count", head_dim)
        kind = self.text("rope.scaling.type", "none")
        factor = self.real("rope.scaling.factor", 0.0)
        if not self.has("rope.scaling.type") and factor not in (0.0, 1.0):
            kind = "linear"  # as old converters wrote it
        if kind not in ("none", "linear"):
            self.fail("rope.scaling.type", "is not supported; supported are none, linear")
        if kind == "linear" and not factor >= 1.0:
            self.fail("rope.scaling.factor", "is below 1")
        if self.real("rope.scaling.attn_factor", 1.0) != 1.0:
            self.fail("rope.scaling.attn_factor", "is not supported")
        self.used |= {"rope.scaling.original_context_length", "rope.scaling.finetuned"}
        scale = 1.0 / factor if kind == "linear" else 1.0
        return Rope(theta, dim, interleaved, scale, self.rope_factors(dim))

    def rope_factors(self, dim: int) -> tuple[float, ...]:
        """Llama 3's frequency factors, which converters store as a tensor."""
        info = self.file.tensors.get("rope_freqs.weight")
        if info is None:
            return ()
        if info.format is not WeightFormat.F32 or info.shape != (dim // 2,):
            self.file.fail(
                f"tensor 'rope_freqs.weight' is {info.format.name} {list(info.shape)}, "
                f"not F32 [{dim // 2}]"
            )
        values = self.file.weight("rope_freqs.weight").data.view("<f4")
        factors = tuple(float(value) for value in values)
        return () if all(factor == 1.0 for factor in factors) else factors

    def gemma3_layers(self, count: int, head_dim: int) -> tuple[Layer, ...]:
        everywhere = Layer(self.rope(head_dim, interleaved=False))
        local_theta = self.real("rope.freq_base_swa", 10000.0)
        local = Layer(
            Rope(local_theta, everywhere.rope.dim, interleaved=False),
            self.positive("attention.sliding_window"),
        )
        windowed = self.window_pattern(count)
        return tuple(local if is_local else everywhere for is_local in windowed)

    def window_pattern(self, count: int) -> list[bool]:
        """Which layers have a window: a flag a layer, or one global layer after period - 1."""
        key = "attention.sliding_window_pattern"
        if isinstance(flags := self.file.metadata.get(self.prefix + key), np.ndarray):
            self.used.add(key)
            if flags.dtype != np.bool_ or len(flags) != count:
                self.fail(key, f"is not one bool for each of {count} layers")
            return [bool(flag) for flag in flags]
        period = self.positive(key, 6)
        return [(index + 1) % period != 0 for index in range(count)]

    # ── Keys ────────────────────────────────────────────────────────────────────────────────────

    def has(self, key: str) -> bool:
        return self.prefix + key in self.file.metadata

    def fail(self, key: str, reason: str) -> NoReturn:
        value = self.file.metadata.get(self.prefix + key)
        shown = "" if isinstance(value, np.ndarray) or value is None else f" is {value!r}, which"
        self.file.fail(f"metadata key {self.prefix}{key}{shown} {reason}")

    def positive(self, key: str, default: int | None = None) -> int:
        self.used.add(key)
        if default is None:
            value = self.file.get(self.prefix + key, int)
        else:
            value = self.file.get(self.prefix + key, int, default)
        if value < 1:
            self.fail(key, "is below 1")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        self.used.add(key)
        if default is None:
            return self.file.get(self.prefix + key, float)
        return self.file.get(self.prefix + key, float, default)

    def text(self, key: str, default: str) -> str:
        self.used.add(key)
        return self.file.get(self.prefix + key, str, default)

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
