"""Multi-head latent attention (DeepSeek-AI, 2024, section 2.1): models that are planned for and not
served.

A token leaves one row in a layer's cache, whatever the number of heads: the latent of
``kv_lora_rank`` numbers, of which the keys and values of all heads are linear functions, and one
rotary key of ``qk_rope_head_dim`` numbers that the heads share. The functions need no keys and
values to be made: that of the keys is applied to the queries and that of the values to what
attention finds, so that every head's queries and results are as wide as the latent. This
*absorbed* form is what is counted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, ClassVar, NoReturn

from octavo.loader.hf_config import ACTIVATIONS
from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.models.build import Builder
from octavo.models.config import MAX_LAYERS, UNROTATED, Experts, Layer, ModelConfig
from octavo.models.program import (
    Evaluation,
    Linear,
    Op,
    PagedAttention,
    Program,
    Shapes,
    Work,
)
from octavo.models.section import Section

# What the config classes of transformers 5.24 take for keys that a file leaves out.
_DEEPSEEK_V3: dict[str, Any] = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _DEEPSEEK_V3
    | {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "moe_intermediate_size": 1407,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": None,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "max_position_embeddings": 2048,
    },
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "mistral4": _DEEPSEEK_V3
    | {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "max_position_embeddings": 1048576,
    },
    "glm4_moe_lite": _DEEPSEEK_V3
    | {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,  # where ``mlp_layer_types`` does not say
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
    },
}
# The routers with a bias for the choice alone, which balances the experts.
_BALANCED = {"deepseek_v3", "kimi_k2", "glm4_moe_lite"}


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The widths of latent attention, in numbers."""

    rank: int  # of the latent
    rope: int  # of the rotary key
    nope: int  # of a head's key without it
    value: int  # of a head's value
    query_rank: int  # of the queries' own latent; 0: they have none

    @property
    def width(self) -> int:
        """What a token leaves in a layer's cache."""
        return self.rank + self.rope


# --- config.json ---------------------------------------------------------------------------------


def latent_config(folder: HfFolder) -> dict[str, Any] | None:
    """The part of a config.json that describes a text model with latent attention, if there is
    one: the whole file or, of a model that also sees, its ``text_config``.
    """
    file = folder.json(CONFIG)
    if _is_latent(file):
        return file
    text = file.get("text_config")
    if not isinstance(text, dict) or not _is_latent(text):
        return None
    tied = "tie_word_embeddings"  # which the outer one decides
    return text | {tied: file[tied]} if tied in file else text


def _is_latent(file: Mapping[str, Any]) -> bool:
    model_type = file.get("model_type")
    return isinstance(model_type, str) and model_type in DEFAULTS


def latent_program(folder: HfFolder, file: Mapping[str, Any]) -> Program:
    """The Program of a config.json's `latent_config`. Raises `CheckpointError`."""
    return _Reader(folder, file).program()


class _Reader:
    def __init__(self, folder: HfFolder, file: Mapping[str, Any]) -> None:
        self.folder = folder
        self.model_type: str = file["model_type"]
        self.section = Section(self.fail, DEFAULTS[self.model_type] | dict(file))

    def fail(self, reason: str) -> NoReturn:
        self.folder.fail(CONFIG, reason)

    def count(self, key: str, most: int, least: int = 1) -> int:
        value = self.section.count(key, least=least)
        if value > most:
            self.fail(f"{key} is {value}, above {most}")
        return value

    def program(self) -> Program:
        section = self.section
        ranked = section.values["q_lora_rank"] is not None
        shape = LatentShape(
            rank=self.count("kv_lora_rank", 1 << 16),
            rope=self.count("qk_rope_head_dim", 1 << 16),
            nope=self.count("qk_nope_head_dim", 1 << 16),
            value=self.count("v_head_dim", 1 << 16),
            query_rank=self.count("q_lora_rank", 1 << 17) if ranked else 0,
        )
        activation = section.text("hidden_act")
        if activation not in ACTIVATIONS:
            self.fail(f"hidden_act {activation!r} is not supported")
        biased = section.flag("attention_bias")
        try:
            config = ModelConfig(
                family=self.model_type,
                name=self.folder.path.name,
                vocab_size=section.count("vocab_size"),
                hidden_size=section.count("hidden_size"),
                num_heads=section.count("num_attention_heads"),
                num_kv_heads=1,
                head_dim=shape.width,
                intermediate_size=section.count("intermediate_size"),
                context_length=section.count("max_position_embeddings"),
                norm_eps=section.real("rms_norm_eps"),
                activation=ACTIVATIONS[activation],
                attention_scale=1.0 / sqrt(shape.nope + shape.rope),
                tied_embeddings=section.flag("tie_word_embeddings"),
                layers=self.layers(),
                biases=frozenset(_BIASED if biased else ()),
            )
        except ValueError as error:
            self.fail(str(error))
        return _program(config, shape)

    def layers(self) -> tuple[Layer, ...]:
        """Dense ones first, then those with experts, unless the file has a list of them."""
        count = self.count("num_hidden_layers", MAX_LAYERS)
        types = self.section.values.get("mlp_layer_types")
        if types is None:
            first = self.count("first_k_dense_replace", MAX_LAYERS, least=0)
            types = ["dense"] * min(first, count) + ["sparse"] * (count - first)
        if not isinstance(types, list) or len(types) != count:
            self.fail(f"mlp_layer_types is not a list of {count} types")
        if other := [kind for kind in types if kind not in ("dense", "sparse")]:
            self.fail(f"mlp_layer_types: {other[0]!r} is neither dense nor sparse")
        dense = sparse = Layer(UNROTATED, latent=True)
        if "sparse" in types:
            size = self.section.count("moe_intermediate_size")
            experts = Experts(
                self.section.count("n_routed_experts"),
                self.section.count("num_experts_per_tok"),
                size,
                self.section.flag("norm_topk_prob"),
                selection_bias=self.model_type in _BALANCED,
            )
            shared = self.section.values["n_shared_experts"]  # side by side, as one
            if shared is not None:
                shared = self.section.count("n_shared_experts", least=0)
            sparse = replace(dense, experts=experts, shared_expert=(shared or 0) * size)
        return tuple(sparse if kind == "sparse" else dense for kind in types)


# --- the computation -----------------------------------------------------------------------------

_BIASED = ("attn_q_a", "attn_kv_a_mqa", "attn_output")  # where ``attention_bias`` is set


def _program(config: ModelConfig, shape: LatentShape) -> Program:
    """Write down what is counted."""
    b, heads = Builder(config), config.num_heads
    b.widths |= {
        "q_latent": shape.query_rank,
        "heads": heads * (shape.nope + shape.rope),
        "values": heads * shape.value,
    }
    b.embed(1.0)
    for index, layer in enumerate(b.layers()):
        b.norm("x", "attn_norm", "h")
        if shape.query_rank:
            b.linear("h", "attn_q_a", "q_latent")
            b.norm("q_latent", "attn_q_a_norm", "q_latent")
            b.linear("q_latent", "attn_q_b", "heads")
        else:
            b.linear("h", "attn_q", "heads")
        b.linear("h", "attn_kv_a_mqa", "k")
        b.append(StoreLatent("heads", "k", b.role("attn_kv_a_norm"), shape))
        b.append(Absorbed("heads", b.role("attn_kv_b"), "q", shape=shape))
        scale = config.attention_scale
        b.append(LatentAttention("q", "values", index, 1, shape.width, scale, shape=shape))
        b.linear("values", "attn_output", "h")
        b.add()
        b.norm("x", "ffn_norm", "h")
        b.add_feed_forward(layer, shared_gate=False)
    return b.head()


class _Planned(Op):
    """What is counted and not computed: no reader of weights makes a Program with it."""

    __slots__ = ()

    def compute(self, at: Evaluation) -> None:
        raise NotImplementedError("latent attention is planned for and not computed")


@dataclass(frozen=True, slots=True)
class StoreLatent(_Planned):
    """Normalize the latent, rotate queries and key by position, and store latent and key."""

    READS = ("q", "k")
    WRITES = ("q",)

    q: str
    k: str
    weight: str  # of the norm
    shape: LatentShape

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        return {self.weight: (self.shape.rank,)}

    def work(self, program: Program) -> Work:
        rotated = (program.config.num_heads + 1) * self.shape.rope
        return Work(4 * self.shape.rank + 6 * rotated, (self.weight,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Absorbed(_Planned, Linear):
    """Apply, head by head, the functions that make keys and values of a latent: one to the queries,
    the other to what attention finds. Together that is a multiply-add for each number of the
    matrix, [heads * (key + value), rank].
    """

    shape: LatentShape

    def weight_shapes(self, widths: Mapping[str, int], config: ModelConfig) -> Shapes:
        rows = config.num_heads * (self.shape.nope + self.shape.value)
        return {self.weight: (rows, self.shape.rank)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(_Planned, PagedAttention):
    """Attention of all heads over one key as wide as latent and rotary key, whose latent is the
    value, too.
    """

    latent: ClassVar[bool] = True

    shape: LatentShape

    def key_ops(self, num_heads: int) -> int:
        return 2 * num_heads * (self.shape.width + self.shape.rank)
