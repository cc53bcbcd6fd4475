"""Records what `transformers` computes for tiny random models of every family.

Run by hand, in an environment with torch, transformers and what Octavo's tests need:

    python tests/oracle/record_families.py [--llama-cpp SOURCE] [NAME ...]

A family is a base config and cases: the same config with other values, or with keys left out. Each
goes through `transformers` as a folder, of config.json and seeded weights (`make_weights`), so that
families/NAME keeps shapes and seed, and no weights. Numbers come from `transformers` in float32;
keys and values are rounded to float16 on their way into attention, because Octavo keeps them so.

With the folder of llama.cpp's source, its converter makes GGUF files of the same models. Of each
the header is kept, and which tensor of the folder, permuted or shifted how, each of its tensors
is: tests rebuild the file from that. See README.md here for what each output holds.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.numpy import load_file

from oracle.drawn_configs import GEMMA, Around
from oracle.tiny_folders import (
    BASE,
    FAMILIES,
    TEXT,
    changed,
    folder,
    gguf_labels,
    transformed,
    weights,
)

VOCAB = 96
PROMPT = 150  # tokens before the greedy ones: more than two chunks of 64, and than every window
STEPS = 64
KEPT = 6  # logits of a position that are kept: others at each
LEAST = 0.05  # by which a case must differ from the base somewhere, in shares of the deviation


@dataclass
class Case:
    """A config.json: the base's with ``changes`` (those in text_config are made inside of it) and
    without some keys. Its weights are the base's, or of the same seed where their shapes differ.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    gguf: bool = False  # the converter has words for it
    tokens: int = PROMPT + STEPS  # of the sequence, and the longest one that the engine accepts
    same: bool = False  # it says the same as the base in other words


@dataclass
class Tiny:
    """A family. ``around``: of weights that are no matrices, norms or biases (`make_weights`)."""

    config: Any
    cases: dict[str, Case] = field(default_factory=dict)
    gguf: bool = True  # the converter has words for the base
    around: Around = field(default_factory=dict)


def models() -> dict[str, Tiny]:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    scaled = {"factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    llama3 = scaled | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    linear = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}
    yarn = scaled | {"rope_type": "yarn", "rope_theta": 5000.0}
    pairs = 6  # 16 dimensions a head, of which three quarters are rotated
    long = {
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.7 * i for i in range(pairs)],
    }
    longrope = {
        "rope_scaling": long,
        "rope_parameters": None,
        "partial_rotary_factor": 0.75,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    }
    mistral = sizes | {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 24}
    # In layers of windows and without, several of each.
    gemma = sizes | {"head_dim": 16, "num_hidden_layers": 4, "sliding_window": 24}
    gemma |= {"num_key_value_heads": 1, "num_attention_heads": 2, "intermediate_size": 40}
    sparse = sizes | {"head_dim": 8, "num_experts": 6, "moe_intermediate_size": 20}
    return {
        "llama": Tiny(
            transformers.LlamaConfig(**sizes),
            {
                "llama3": Case({"rope_parameters": llama3}, gguf=True),
                "linear": Case({"rope_parameters": linear}, gguf=True),
                "yarn": Case({"rope_parameters": yarn}, gguf=True),
                "yarn-mscale": Case(
                    {
                        "rope_parameters": scaled
                        | {"rope_type": "yarn", "mscale": 1.2, "mscale_all_dim": 0.7}
                        | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}
                    }
                ),
                # For a sequence of exactly the longest length, where the rules agree; and written
                # as files of before transformers 5 have it.
                "dynamic": Case(
                    {
                        "rope_scaling": {"type": "dynamic", "factor": 4.0},
                        "max_position_embeddings": 40,
                    }
                ),
            },
        ),
        "llama-biases": Tiny(
            transformers.LlamaConfig(
                **sizes | {"head_dim": 12},
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=True,
            )
        ),
        "mistral": Tiny(
            transformers.MistralConfig(**mistral),
            {"no-window": Case({"sliding_window": None}, gguf=True)},
            gguf=False,  # the converter drops the window
        ),
        "mistral3": mistral3(sizes),
        "qwen2": Tiny(
            transformers.Qwen2Config(**sizes),
            {
                "window": Case(
                    {
                        "use_sliding_window": True,
                        "sliding_window": 20,
                        "max_window_layers": 1,
                        "layer_types": None,
                    }
                )
            },
        ),
        "qwen3": Tiny(transformers.Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)),
        "gemma2": Tiny(
            transformers.Gemma2Config(**gemma, query_pre_attn_scalar=16),
            {"scale": Case({"query_pre_attn_scalar": 24})},
            around=GEMMA,
        ),
        "gemma3": Tiny(
            transformers.Gemma3TextConfig(
                **gemma | {"num_hidden_layers": 6}, query_pre_attn_scalar=16
            ),
            {
                # As files of before transformers 5 have it: two bases, and scaling of one.
                "linear": Case(
                    {
                        "rope_parameters": None,
                        "rope_theta": 50000.0,
                        "rope_local_base_freq": 500.0,
                        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                        "layer_types": None,
                        "sliding_window_pattern": 2,
                        "final_logit_softcapping": 3.0,
                    }
                )
            },
            around=GEMMA,
        ),
        "gemma3-nested": gemma3_nested(gemma),
        "smollm3": smollm3(sizes),
        "phi4-mini": phi4_mini(sizes),
        "olmo3": olmo3(sizes),
        "ministral3": ministral3(sizes),
        "cohere2": cohere2(sizes),
        **gemma4(sizes),
        "phi3": Tiny(
            transformers.Phi3Config(
                **sizes | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
            ),
            {
                "window": Case({"sliding_window": 17}),
                "longrope": Case(longrope, gguf=True),
                "longrope-short": Case(longrope, tokens=64),
            },
        ),
        "granite": Tiny(
            transformers.GraniteConfig(
                **sizes,
                embedding_multiplier=12.0,
                residual_multiplier=0.22,
                attention_multiplier=0.2,
                logits_scaling=6.0,
                tie_word_embeddings=True,
            )
        ),
        "olmo2": Tiny(transformers.Olmo2Config(**sizes)),
        "mixtral": Tiny(
            transformers.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2),
            {
                "one": Case({"num_experts_per_tok": 1}, gguf=True),
                "all": Case({"num_experts_per_tok": 4, "sliding_window": 20}),
            },
        ),
        "qwen3moe": Tiny(
            transformers.Qwen3MoeConfig(**sparse, num_experts_per_tok=3, norm_topk_prob=True),
            {
                # Under the key that files of before transformers 5 have it in.
                "shares": Case({"norm_topk_prob": False, "num_experts": 6})
            },
        ),
        "qwen3moe-dense": Tiny(
            transformers.Qwen3MoeConfig(
                **sparse | {"num_hidden_layers": 4},
                num_experts_per_tok=2,
                decoder_sparse_step=2,
                mlp_only_layers=[3],
                attention_bias=True,
                tie_word_embeddings=True,
            ),
            gguf=False,
        ),
        "gpt_oss": gpt_oss(sizes),
        "granite_swa": granite_swa(sizes),
        "granitehybrid": granitehybrid(sizes),
        "lfm2": lfm2(sizes),
        "lfm2moe": lfm2moe(sizes),
        "lfm3": lfm3(sizes),
        "qwen3_5": qwen3_5(sizes),
        "qwen3_5_moe": qwen3_5_moe(sizes),
        "qwen3_next": qwen3_next(sizes),
    }


FULL, SLIDING = "full_attention", "sliding_attention"


def rope_sections(pairs: int) -> dict[str, dict[str, Any]]:
    """One of each type, for heads of so many pairs."""
    scaled = {"factor": 4.0, "original_max_position_embeddings": 32}
    factors = [1.0 + 0.3 * i for i in range(pairs)]
    sections: dict[str, dict[str, Any]] = {
        "linear": {"factor": 2.5},
        "dynamic": {"factor": 8.0},
        "llama3": scaled | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": scaled,
        "longrope": scaled | {"short_factor": factors, "long_factor": factors[::-1]},
    }
    return {
        kind: {"rope_type": kind, "rope_theta": 10000.0, **section}
        for kind, section in sections.items()
    }


def rope_cases(pairs: int, *gguf: str, by_layer: bool = False, **more: Any) -> dict[str, Case]:
    """A case of each type (with ``more`` in its section), of layers without a window if
    ``by_layer``. ``gguf``: the types that the converter has words for.
    """
    cases = {}
    for kind, section in rope_sections(pairs).items():
        rope: dict[str, Any] = section | more
        if by_layer:
            rope = {FULL: rope, SLIDING: {"rope_type": "default"}}
        positions = 40 if kind == "dynamic" else 128  # beyond which it scales
        changes = {"rope_parameters": rope, "max_position_embeddings": positions}
        cases[kind] = Case(changes, gguf=kind in gguf)
    return cases


# Five heads of 8 on one KV head, and widths that are no multiple of anything.
ODD = {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}
ODD |= {"intermediate_size": 44, "rms_norm_eps": 1e-3}


def smollm3(sizes: dict[str, Any]) -> Tiny:
    return Tiny(
        transformers.SmolLM3Config(**sizes | {"num_hidden_layers": 5}),
        {
            **rope_cases(4, "linear", "llama3", "yarn"),
            "interval": Case({"no_rope_layers": None, "no_rope_layer_interval": 2}),
            "list": Case({"no_rope_layers": [0, 1, 1, 0, 1, 1, 0]}),
            "no-list": Case(without=("no_rope_layers", "rope_parameters"), same=True),
            "unrotated": Case({"no_rope_layers": [0] * 5}),
            "rotated": Case({"no_rope_layers": [1] * 5}),
            "window": Case({"use_sliding_window": True, "sliding_window": 17, "layer_types": None}),
            "types": Case(
                {
                    "use_sliding_window": True,
                    "sliding_window": 24,
                    "layer_types": [SLIDING, FULL, FULL, SLIDING, FULL],
                }
            ),
            "biases": Case({"attention_bias": True, "mlp_bias": True}),
            "untied": Case({"tie_word_embeddings": False}, gguf=True),
            "no-kv-heads": Case(without=("num_key_value_heads",)),
            "head-dim": Case({"head_dim": 12}),
            "odd": Case(ODD, gguf=True),
        },
    )


def phi4_mini(sizes: dict[str, Any]) -> Tiny:
    """Tied, with fused matrices, three heads on a KV head, rotary positions on three quarters."""
    wide = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}

    def long(pairs: int, **values: Any) -> dict[str, Any]:
        return {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
            "long_factor": [1.0 + 0.7 * i for i in range(pairs)],
            **values,
        }

    def rope(section: dict[str, Any], **values: Any) -> Case:
        return Case({"rope_parameters": section}, **values)

    plain = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    return Tiny(
        transformers.Phi3Config(
            **sizes | wide | {"tie_word_embeddings": True},
            original_max_position_embeddings=64,
            rope_parameters=plain,
        ),
        {
            "longrope": rope(long(3), gguf=True),
            "short": rope(long(3), tokens=60),
            "published": Case(
                {
                    "rope_parameters": None,
                    "rope_scaling": {
                        "type": "longrope",
                        "short_factor": [1.0] * 3,
                        "long_factor": [1.0, 2.0, 3.0],
                    },
                    "partial_rotary_factor": 0.75,
                    "rope_theta": 10000.0,
                },
                gguf=True,
            ),
            "su": rope(long(3, rope_type="su")),
            "called-yarn": rope(long(3, rope_type="yarn")),
            "attention-factor": rope(long(3, attention_factor=1.3)),
            "factor": rope(long(3, factor=9.0)),
            "whole": rope(long(4, partial_rotary_factor=1.0)),
            "half": rope(long(2, partial_rotary_factor=0.5)),
            "unrotated": rope(plain | {"partial_rotary_factor": 0.0}),
            "window": Case({"sliding_window": 17}, gguf=True),
            "untied": Case({"tie_word_embeddings": False}, gguf=True),
            "one-kv-head": Case({"num_key_value_heads": 1}, gguf=True),
            "no-kv-heads": Case(without=("num_key_value_heads",)),
            "odd": Case(ODD),
        },
    )


def olmo3(sizes: dict[str, Any]) -> Tiny:
    types = [SLIDING, SLIDING, FULL, SLIDING, FULL]
    scaled = rope_sections(4)["yarn"]
    return Tiny(
        transformers.Olmo3Config(
            **sizes | {"num_hidden_layers": 5, "num_key_value_heads": 4}, sliding_window=17
        ),
        {
            **rope_cases(4, "linear", "yarn", by_layer=True),
            "both-scaled": Case({"rope_parameters": {FULL: scaled, SLIDING: scaled}}),
            # As published: a base of all layers, which transformers 5 hears for some of them only.
            "published": Case(
                {"rope_parameters": None, "rope_theta": 1000.0, "rope_scaling": scaled}
            ),
            "types": Case({"layer_types": types}, gguf=True),
            "no-types": Case(without=("layer_types",), same=True),
            "all-windows": Case({"layer_types": [SLIDING] * 5}),
            "no-windows": Case({"layer_types": [FULL] * 5}),
            "wide-window": Case({"sliding_window": 300}),
            "biases": Case({"attention_bias": True}),
            "tied": Case({"tie_word_embeddings": True}, gguf=True),
            "no-kv-heads": Case(without=("num_key_value_heads",), same=True),
            "one-kv-head": Case({"num_key_value_heads": 1}, gguf=True),
            "odd": Case(ODD),
        },
    )


def ministral3(sizes: dict[str, Any]) -> Tiny:
    beta: dict[str, Any] = {"llama_4_scaling_beta": 0.2}
    grows = beta | {"original_max_position_embeddings": 32}
    yarn = rope_sections(8)["yarn"] | beta | {"mscale": 1.0, "mscale_all_dim": 1.0}

    def rope(section: dict[str, Any], **values: Any) -> Case:
        return Case({"rope_parameters": section}, **values)

    return Tiny(
        transformers.Ministral3Config(**sizes | {"head_dim": 16}, rope_parameters=yarn),
        {
            **{k: v for k, v in rope_cases(8, **grows).items() if k != "yarn"},
            "default": rope({"rope_type": "default", "rope_theta": 10000.0, **grows}),
            "mscale": rope(yarn | {"mscale": 1.2, "mscale_all_dim": 0.7}),
            "no-mscale": rope(rope_sections(8)["yarn"] | beta),
            "fast-and-slow": rope(yarn | {"beta_fast": 4.0, "beta_slow": 0.5}),
            "constant": rope(yarn | {"llama_4_scaling_beta": 0.0}),
            "fast-growing": rope(yarn | {"original_max_position_embeddings": 7}, gguf=True),
            "no-rope": Case(without=("rope_parameters",)),
            "window": Case({"sliding_window": 17}),
            "tied": Case({"tie_word_embeddings": True}, gguf=True),
            "odd": Case(ODD | {"head_dim": 12}, gguf=True),
        },
    )


def cohere2(sizes: dict[str, Any]) -> Tiny:
    # The converter asks for rotary_pct, which published files have.
    own = {"num_hidden_layers": 5, "sliding_window": 17, "logit_scale": 0.25, "rotary_pct": 1.0}
    odd = {key: value for key, value in ODD.items() if key != "rms_norm_eps"}
    return Tiny(
        transformers.Cohere2Config(**sizes | own),
        {
            **rope_cases(4),
            "types": Case({"layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING]}),
            "pattern": Case({"layer_types": None, "sliding_window_pattern": 2}),
            "no-types": Case(without=("layer_types",), same=True),
            "all-windows": Case({"layer_types": [SLIDING] * 5}),
            "no-windows": Case({"layer_types": [FULL] * 5}),
            "wide-window": Case({"sliding_window": 300}),
            "logit-scale": Case({"logit_scale": 2.0}, gguf=True),
            "no-scale": Case(without=("logit_scale", "layer_norm_eps")),
            "eps": Case({"layer_norm_eps": 0.05}, gguf=True),
            "biases": Case({"attention_bias": True}),
            "untied": Case({"tie_word_embeddings": False}),
            "no-kv-heads": Case(without=("num_key_value_heads",)),
            "head-dim": Case({"head_dim": 12}),
            "odd": Case(odd, gguf=True),
        },
    )


def gemma4(sizes: dict[str, Any]) -> dict[str, Tiny]:
    """The dense model, one with experts, and one with shared caches and inputs of layers, as
    published: with a part that sees.
    """
    full, local = "full_attention", "sliding_attention"
    text = sizes | {
        "num_hidden_layers": 4,
        "layer_types": [local, full, local, full],
        "sliding_window": 24,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
    }
    # Written without what `save_pretrained` makes of the keys of layers that see everything.
    given = ("per_layer_config",)
    wide = {"global_head_dim": 16, "num_global_key_value_heads": 1}

    def rope(changes: dict[str, Any], **values: Any) -> dict[str, Any]:
        section = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
        return {
            "rope_parameters": {
                full: section | changes,
                local: {"rope_type": "default", "rope_theta": 1e4} | values,
            }
        }

    dense = {
        "published": Case(wide, given, same=True, gguf=True),
        "values": Case({"attention_k_eq_v": False}, gguf=True),
        # Without them, the number of KV heads is that of the other layers.
        "values-heads": Case(wide | {"attention_k_eq_v": False}, given),
        "no-cap": Case({"final_logit_softcapping": None}),
        "default-ropes": Case({"rope_parameters": None}, same=True),
        "rotary-half": Case(rope({"partial_rotary_factor": 0.5}, rope_theta=100.0), gguf=True),
        "rotary-all": Case(rope({"partial_rotary_factor": 1.0, "rope_theta": 1e3})),
        "rotary-none": Case(rope({"partial_rotary_factor": 0.1})),
        "rotary-factor": Case(rope({"partial_rotary_factor": 0.75, "factor": 4.0})),
        "rotary-default": Case(rope({"rope_type": "default", "rope_theta": 1e3})),
        "rotary-linear": Case(
            rope({"rope_type": "linear", "factor": 8.0, "partial_rotary_factor": 1.0})
        ),
        "six": Case(wide | {"num_hidden_layers": 6, "layer_types": None}, given, gguf=True),
        "last-is-full": Case(wide | {"layer_types": [local] * 4}, given),
        "no-windows": Case(wide | {"layer_types": [full] * 4}, given, gguf=True),
        "alike": Case({"global_head_dim": 8, "num_global_key_value_heads": 2}, given),
        "untied": Case({"tie_word_embeddings": False}, gguf=True),
        "biases": Case({"attention_bias": True, "rms_norm_eps": 1e-3}),
        "window": Case({"sliding_window": 17}),
        "wide": Case({"head_dim": 40, "global_head_dim": 192}, given, gguf=True),
        "odd": Case(
            {
                "hidden_size": 40,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "num_global_key_value_heads": 2,
                "head_dim": 12,
                "global_head_dim": 20,
                "intermediate_size": 36,
            },
            given,
            gguf=True,
        ),
    }
    sparse = {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
    }
    experts = {
        "one": Case({"top_k_experts": 1}, gguf=True),
        "all": Case({"top_k_experts": 4}, gguf=True),
        "few": Case({"num_experts": 3}),
        "many": Case({"num_experts": 16, "top_k_experts": 5}),
        "narrow": Case({"moe_intermediate_size": 8}, gguf=True),
        "off": Case({"enable_moe_block": False}),
        "values": Case({"attention_k_eq_v": False}),
        "no-cap": Case({"final_logit_softcapping": None}),
        "untied": Case({"tie_word_embeddings": False}),
        "inputs": Case({"hidden_size_per_layer_input": 8}, gguf=True),
        "sharing": Case(
            {
                "hidden_size_per_layer_input": 8,
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
            },
            gguf=True,
        ),
        "window": Case({"sliding_window": 17, "rms_norm_eps": 1e-3}),
        "odd": Case({"hidden_size": 40, "intermediate_size": 37, "moe_intermediate_size": 12}),
    }
    small = {
        "num_hidden_layers": 6,
        "layer_types": [local, full, local, local, full, full],
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "attention_k_eq_v": False,
        "num_key_value_heads": 1,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 16}

    def inner(changes: dict[str, Any], without: tuple[str, ...] = (), **values: Any) -> Case:
        return Case({TEXT: changes}, without, **values)

    shared = {
        "published": inner(wide, given, same=True, gguf=True),
        "none": inner({"num_kv_shared_layers": 0}, gguf=True),
        "one": inner({"num_kv_shared_layers": 1}),
        "most": inner({"num_kv_shared_layers": 4}),
        "not-wide": inner({"use_double_wide_mlp": False}, gguf=True),
        # With shared caches, `transformers` takes it for granted that there are some.
        "no-inputs": inner(
            {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}, gguf=True
        ),
        "wide-inputs": inner({"hidden_size_per_layer_input": 24}),
        "keys-as-values": inner(wide | {"attention_k_eq_v": True}, given),
        "no-cap": inner({"final_logit_softcapping": None}),
        "untied": Case({"tie_word_embeddings": False}),
        "no-type": Case(without=("model_type",), same=True),
        "pictures": inner({"use_bidirectional_attention": "vision"}, same=True),
        "window": inner({"sliding_window": 17, "rms_norm_eps": 1e-3}),
        "wide": inner({"head_dim": 32, "global_head_dim": 64}, given),
        "odd": inner(
            {
                "hidden_size": 40,
                "num_attention_heads": 5,
                "head_dim": 12,
                "global_head_dim": 20,
                "intermediate_size": 37,
                "hidden_size_per_layer_input": 7,
            },
            given,
        ),
    }
    # Scores are not scaled: large ones would turn on the last bit of a key.
    around = {"q_norm.weight": (0.3, 0.1), "post_attention_layernorm.weight": (0.5, 0.1)}
    return {
        "gemma4": Tiny(transformers.Gemma4TextConfig(**text), dense, around=around),
        "gemma4-moe": Tiny(
            transformers.Gemma4TextConfig(**text | sparse),
            experts,
            # In bf16 a token may go to another expert, which is to count less.
            around=around | {"post_feedforward_layernorm_2.weight": (0.25, 0.05)},
        ),
        "gemma4-e": Tiny(
            transformers.Gemma4Config(
                text_config=text | small | {"pad_token_id": 0}, vision_config=vision
            ),
            shared,
            around=around,
        ),
    }


def granite_swa(sizes: dict[str, Any]) -> Tiny:
    """Windows and sinks; a rotary base for each layer, or none."""
    own = {"num_hidden_layers": 5, "sliding_window": 17}
    own |= {"layer_rope_theta": [0, 1e4, 1e4, 500.0, 0]}
    own |= {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    own |= {"attention_multiplier": 0.2, "logits_scaling": 6.0}

    def rope(section: dict[str, Any]) -> Case:
        return Case({"rope_parameters": section})

    ropes = rope_sections(4)
    return Tiny(
        transformers.GraniteSWAConfig(**sizes | own),
        {
            "one-base": Case(without=("layer_rope_theta",)),
            "unrotated": Case({"layer_rope_theta": [0] * 5}),
            "linear": rope(ropes["linear"]),
            "llama3": rope(ropes["llama3"]),
            "yarn": rope(ropes["yarn"]),
            "types": Case({"layer_types": [SLIDING, FULL, FULL, SLIDING, SLIDING]}),
            "no-types": Case(without=("layer_types",), same=True),
            "all-windows": Case({"layer_types": [SLIDING] * 5}),
            "no-windows": Case({"layer_types": [FULL] * 5}),
            "wide-window": Case({"sliding_window": 300}),
            "biases": Case({"attention_bias": True, "mlp_bias": True}),
            "untied": Case({"tie_word_embeddings": False}),
            "no-scales": Case(without=("embedding_multiplier", "logits_scaling")),
            "no-kv-heads": Case({"num_key_value_heads": None}),
            "odd": Case(ODD),
        },
        gguf=False,
        around={"sinks": (0.0, 2.0)},
    )


def granitehybrid(sizes: dict[str, Any]) -> Tiny:
    """Mamba-2 layers and attention, in any order; experts beside a shared one, or dense."""
    mamba, full = "mamba", "attention"  # as published
    own = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 4}
    own["layer_types"][1] = FULL
    own |= {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16}
    own |= {"num_local_experts": 6, "num_experts_per_tok": 2}
    own |= {"intermediate_size": 20, "shared_intermediate_size": 40}
    own |= {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    own |= {"attention_multiplier": 0.2, "logits_scaling": 6.0}
    dense = {"num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 40}

    def case(*types: str, gguf: bool = True, **changes: Any) -> Case:
        types = types or (mamba, full, mamba, mamba)
        changes |= {"layer_types": list(types), "num_hidden_layers": len(types)}
        return Case(changes, gguf=gguf)

    return Tiny(
        transformers.GraniteMoeHybridConfig(**sizes | own),
        {
            "published": Case({"layer_types": [mamba, full, mamba, mamba]}, gguf=True, same=True),
            "block-types": Case(
                {"layers_block_type": [mamba, full, mamba, mamba]},
                without=("layer_types", "time_step_limit", "mamba_expand"),
                same=True,
            ),
            "dense": case(**dense),
            "one-expert": case(num_experts_per_tok=1),
            "all-experts": case(num_experts_per_tok=6, shared_intermediate_size=24),
            "one-group": case(mamba_n_groups=1, mamba_n_heads=8, mamba_d_head=8),
            "a-group-each": case(mamba, full, mamba_n_groups=4, mamba_d_state=10, **dense),
            "all-but-one": case(mamba, mamba, mamba, full, **dense),
            "attention-first": case(full, mamba, full, mamba_d_conv=2, rms_norm_eps=1e-3),
            "seven-taps": case(mamba, full, mamba_d_conv=7, mamba_d_head=4, mamba_n_heads=16),
            "rope": case(position_embedding_type="rope", gguf=False),
            "yarn": case(
                position_embedding_type="rope", rope_parameters=rope_sections(4)["yarn"], gguf=False
            ),
            "no-attention-rope": case(full, full, gguf=False, **dense),
            "no-conv-bias": case(mamba_conv_bias=False),
            "biases": case(mamba_proj_bias=True, attention_bias=True, gguf=False),
            "tied": case(tie_word_embeddings=True),
            "auto": case(mamba_d_head="auto", mamba_n_heads=2, mamba_expand=3, gguf=False),
            "head-dim": Case({"head_dim": 12, "residual_multiplier": 1.0}),
            "odd": case(
                mamba, full, mamba, hidden_size=40, num_attention_heads=5, num_key_value_heads=1,
                mamba_n_heads=5, mamba_n_groups=1, mamba_d_state=24, intermediate_size=12,
                num_local_experts=7, num_experts_per_tok=3, shared_intermediate_size=36,
            ),
        },
        around={
            "A_log": (0.5, 0.7),
            "dt_bias": (0.5, 0.5),
            "mamba.D": (1.0, 0.5),
            # In bf16 a token may go to another expert, which is to count less.
            "block_sparse_moe.output_linear.weight": (0.0, 0.1),
        },
    )  # fmt: skip


def lfm2(sizes: dict[str, Any]) -> Tiny:
    """Short convolutions and attention, in any order."""
    conv, full = "conv", "full_attention"
    scaled = {"factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}

    def layers(*types: str, gguf: bool = False, **values: Any) -> Case:
        changes = {"num_hidden_layers": len(types), "layer_types": list(types)}
        return Case(changes | values, gguf=gguf)

    return Tiny(
        transformers.Lfm2Config(
            **sizes | {"num_hidden_layers": 4, "layer_types": [conv, full, conv, conv]},
            block_multiple_of=16,
        ),
        {
            # As files of before transformers 5 have it.
            "old-keys": Case(
                {
                    "layer_types": None,
                    "full_attn_idxs": [1],
                    "rope_parameters": None,
                    "rope_theta": 500.0,
                    "tie_embedding": True,
                    "block_ff_dim": 48,
                    "intermediate_size": 100,
                }
            ),
            "no-types": Case({"full_attn_idxs": None}, without=("layer_types",)),
            "eps": Case({"norm_eps": 0.3}, gguf=True),
            "linear": Case(
                {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}},
                gguf=True,
            ),
            "llama3": Case(  # whose factors do not come into GGUF files
                {
                    "rope_parameters": scaled
                    | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
                }
            ),
            "yarn": Case({"rope_parameters": scaled | {"rope_type": "yarn"}}, gguf=True),
            "biases": Case({"conv_bias": True, "conv_L_cache": 4}),
            "one-kv-head": layers(
                *(conv, conv, full), hidden_size=36, num_attention_heads=3, num_key_value_heads=1,
                block_ffn_dim_multiplier=1.4, gguf=True,
            ),
            "seven-taps": layers(
                *(full, conv, full, conv), hidden_size=40, conv_L_cache=7, gguf=True,
                num_key_value_heads=4, block_auto_adjust_ff_dim=False, tie_word_embeddings=False,
            ),
            "two-taps": layers(*(conv, conv, conv, full), conv_L_cache=2, gguf=True),
            "attention-first": layers(full, conv, conv),
            "no-sizes": Case(
                {"vocab_size": VOCAB}, without=("conv_L_cache", "norm_eps"), same=True
            ),
            "untied": Case({"tie_word_embeddings": False}, gguf=True),
        },
    )  # fmt: skip


def lfm2moe(sizes: dict[str, Any]) -> Tiny:
    """Experts behind a dense layer, of every number and choice."""
    conv, full = "conv", "full_attention"
    own = {"num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2}
    own |= {"moe_intermediate_size": 20, "num_hidden_layers": 4}
    return Tiny(
        transformers.Lfm2MoeConfig(**sizes | own, layer_types=[conv, full, conv, conv]),
        {
            "no-sizes": Case(
                {"num_dense_layers": 2},
                without=("num_dense_layers", "conv_L_cache", "norm_eps", "routed_scaling_factor"),
            ),
            "tie-embedding": Case({"tie_embedding": False}, without=("tie_word_embeddings",)),
            "shares": Case({"norm_topk_prob": False}),
            "scale": Case({"routed_scaling_factor": 2.5}),
            "no-bias": Case({"use_expert_bias": False}),
            "all-sparse": Case({"num_dense_layers": 0}, gguf=True),
            "last-sparse": Case({"num_dense_layers": 3}, gguf=True),
            "all-dense": Case({"num_dense_layers": 4}),
            "one": Case({"num_experts_per_tok": 1}, gguf=True),
            "all": Case({"num_experts_per_tok": 6}, gguf=True),
            "many": Case({"num_experts": 17, "num_experts_per_tok": 5, "norm_eps": 1e-3}),
            "yarn": Case({"rope_parameters": rope_sections(4)["yarn"]}, gguf=True),
            "attention-first": Case({"layer_types": [full, conv, full, conv]}, gguf=True),
            "conv-biases": Case({"conv_bias": True, "conv_L_cache": 4}),
            "two-taps": Case({"conv_L_cache": 2, "layer_types": [conv, conv, conv, full]}),
            "odd": Case(
                {
                    "hidden_size": 40,
                    "num_attention_heads": 5,
                    "num_key_value_heads": 1,
                    "intermediate_size": 36,
                    "moe_intermediate_size": 12,
                    "conv_L_cache": 7,
                },
                gguf=True,
            ),
        },
        # A bias moves some choices, and no rounding of a number does.
        around={"expert_bias": (0.0, 0.2)},
    )


def lfm3(sizes: dict[str, Any]) -> Tiny:
    """Convolutions, windows and attention, in any order."""
    conv = "conv"
    local = {"rope_type": "default", "rope_theta": 1e4}

    def rope(values: dict[str, Any]) -> Case:
        return Case({"rope_parameters": {FULL: {"rope_theta": 1e4} | values, SLIDING: local}})

    def layers(*types: str, **values: Any) -> Case:
        return Case({"num_hidden_layers": len(types), "layer_types": list(types)} | values)

    return Tiny(
        transformers.Lfm3Config(
            **sizes | {"num_hidden_layers": 5}, head_dim=16, sliding_window=17,
            layer_types=[conv, SLIDING, conv, FULL, conv],
        ),
        {
            "defaults": Case(
                {"num_hidden_layers": 6},
                without=("layer_types", "rope_parameters", "conv_L_cache", "norm_eps"),
            ),
            "no-ropes": Case(without=("rope_parameters",), same=True),
            "no-norms": Case({"use_sandwich_norm": False}),
            "no-gates": Case({"use_attention_gate": False}),
            "neither": Case({"use_sandwich_norm": False, "use_attention_gate": False}),
            "default-rope": rope({"rope_type": "default"}),
            "rotary-all": rope({"rope_type": "proportional", "partial_rotary_factor": 1.0}),
            "rotary-some": rope({"rope_type": "proportional", "partial_rotary_factor": 0.3}),
            "linear": rope(rope_sections(8)["linear"]),
            "yarn": rope(rope_sections(8)["yarn"]),
            "biases": Case({"attention_bias": True, "conv_bias": True}),
            "wide-window": Case({"sliding_window": 300}),
            "no-attention-to-all": layers(conv, SLIDING, conv, SLIDING),
            "no-windows": layers(FULL, conv, conv, FULL, conv_L_cache=3),
            "untied": Case({"tie_word_embeddings": False}),
            "one-kv-head": Case({"num_key_value_heads": 1, "head_dim": 12}),
            "odd": layers(
                *(conv, FULL, SLIDING), hidden_size=40, num_attention_heads=6, head_dim=20,
                num_key_value_heads=3, intermediate_size=36, norm_eps=1e-3,
            ),
        },
        gguf=False,
    )  # fmt: skip


def qwen3_5(sizes: dict[str, Any]) -> Tiny:
    """Delta nets and attention, in any order, heads of several numbers and widths."""
    linear, full = "linear_attention", "full_attention"
    scaled = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    net = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }

    def layers(*types: str, gguf: bool = False, **values: Any) -> Case:
        changes = {"num_hidden_layers": len(types), "layer_types": list(types)}
        return Case(changes | values, gguf=gguf)

    def rope(kind: str, **values: Any) -> Case:
        return Case({"rope_parameters": scaled | {"rope_type": kind, **values}})

    return Tiny(
        transformers.Qwen3_5TextConfig(
            **sizes | {"num_hidden_layers": 3, "layer_types": [linear, full, linear]},
            **net,
            head_dim=16,
        ),
        {
            # As files have it that name no types, and beside keys that mean nothing here.
            "interval": Case(
                {
                    "layer_types": None,
                    "full_attention_interval": 3,
                    "attn_output_gate": True,
                    "mtp_num_hidden_layers": 1,
                }
            ),
            "rotary": Case({"rope_parameters": {**scaled, "rope_type": "default"}}, gguf=True),
            "sections": Case(
                {
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 500.0,
                        "partial_rotary_factor": 0.25,
                        "mrope_section": [1, 1, 0],
                        "mrope_interleaved": True,
                    }
                },
                gguf=True,
            ),
            "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=32),
            "two-a-key": Case({"linear_num_value_heads": 4}),
            "four-a-key": layers(
                *(linear, full), hidden_size=16, linear_num_key_heads=2, linear_num_value_heads=8,
                linear_key_head_dim=8, linear_value_head_dim=8, gguf=True,
            ),
            "one-key-head": Case({"linear_num_key_heads": 1, "linear_num_value_heads": 4}),
            "widths": Case({"linear_key_head_dim": 12, "linear_value_head_dim": 24}),
            "taps": Case({"linear_conv_kernel_dim": 2, "rms_norm_eps": 1e-3}),
            "seven-taps": Case({"linear_conv_kernel_dim": 7}, gguf=True),
            "biases": layers(linear, full, full, attention_bias=True),
            "tied": Case({"tie_word_embeddings": True}, gguf=True),
            "one-kv-head": Case({"num_key_value_heads": 1, "head_dim": 12}),
            "attention-last": layers(linear, linear, linear, full, hidden_size=40, gguf=True),
            "no-sizes": Case(
                {"linear_num_value_heads": 4},
                without=("linear_conv_kernel_dim", "rope_parameters", "partial_rotary_factor"),
            ),
        },
        around=DELTA_NETS,
    )  # fmt: skip


DELTA_NETS: Around = {
    "A_log": (0.5, 0.7),
    "dt_bias": (0.5, 0.5),
    "linear_attn.norm.weight": (1.0, 0.2),
    "norm.weight": (0.0, 0.2),
}
SPARSE_NETS = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
}


def sparse_cases() -> dict[str, Case]:
    linear, full = "linear_attention", "full_attention"
    return {
        "one": Case({"num_experts_per_tok": 1}, gguf=True),
        "all": Case({"num_experts_per_tok": 6}, gguf=True),
        "many": Case({"num_experts": 16, "num_experts_per_tok": 5}, gguf=True),
        "shared": Case({"shared_expert_intermediate_size": 33}, gguf=True),
        "one-a-key": Case({"linear_num_value_heads": 2}, gguf=True),
        "four-a-key": Case({"linear_num_value_heads": 8}, gguf=True),
        "one-key-head": Case({"linear_num_key_heads": 1}, gguf=True),
        "widths": Case({"linear_key_head_dim": 12, "linear_value_head_dim": 20}, gguf=True),
        "taps": Case({"linear_conv_kernel_dim": 2}, gguf=True),
        "tied": Case({"tie_word_embeddings": True}, gguf=True),
        "types": Case({"layer_types": [linear, linear, full]}, gguf=True),
        "one-kv-head": Case({"num_key_value_heads": 1}, gguf=True),
    }


def qwen3_5_moe(sizes: dict[str, Any]) -> Tiny:
    config = transformers.Qwen3_5MoeTextConfig(**sizes | SPARSE_NETS)
    return Tiny(config, sparse_cases(), around=DELTA_NETS)


def qwen3_next(sizes: dict[str, Any]) -> Tiny:
    config = transformers.Qwen3NextConfig(**sizes | SPARSE_NETS)
    cases = sparse_cases() | {
        "shares": Case({"norm_topk_prob": False}),
        "dense": Case({"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    }
    return Tiny(config, cases, around=DELTA_NETS)


def gpt_oss(sizes: dict[str, Any]) -> Tiny:
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    scaled |= {"truncate": False}
    yarn = scaled | {"rope_theta": 5000.0}
    full, local = "full_attention", "sliding_attention"
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    config = transformers.GptOssConfig(
        **sizes | own | {"head_dim": 16, "sliding_window": 17},
        rope_parameters=yarn,
        swiglu_limit=2.0,
    )

    def rope(values: dict[str, Any], *, gguf: bool = False) -> Case:
        return Case({"rope_parameters": {"rope_theta": 5000.0, **values}}, gguf=gguf)

    # The converter writes neither the limit nor that YaRN's range is not rounded.
    usual = {"swiglu_limit": 7.0, "rope_parameters": yarn | {"truncate": True}}
    return Tiny(
        config,
        {
            "truncated": Case(usual, gguf=True),
            "unscaled": Case(usual | {"rope_parameters": {"rope_type": "default"}}, gguf=True),
            "linear": rope({"rope_type": "linear", "factor": 2.5}),
            "rope-by-default": Case(without=("rope_parameters",)),
            "published": Case(
                {
                    "rope_scaling": scaled | {"beta_fast": 32.0, "beta_slow": 1.0},
                    "rope_theta": 10000.0,
                    "initial_context_length": 4096,
                },
                without=("rope_parameters",),
            ),
            "wide-window": Case(usual | {"sliding_window": 300}, gguf=True),
            "types-by-default": Case(without=("layer_types",), same=True),
            "all-windows": Case({"layer_types": [local] * 2}),
            "no-windows": Case({"layer_types": [full] * 2}),
            "three-layers": Case(usual | {"num_hidden_layers": 3, "layer_types": None}, gguf=True),
            "one-kv-head": Case(usual | {"num_key_value_heads": 1}, gguf=True),
            "one-expert": Case(usual | {"num_experts_per_tok": 1}, gguf=True),
            "all-experts": Case({"num_experts_per_tok": 4}),
            "swiglu": Case({"swiglu_alpha": 0.7, "swiglu_limit": 0.5}),
            "no-biases": Case({"attention_bias": False}),
            "tied": Case({"tie_word_embeddings": True}),
            "no-head-dim": Case(without=("head_dim",)),
            "odd": Case(
                usual
                | {
                    "hidden_size": 40,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 3,
                    "head_dim": 12,
                    "intermediate_size": 36,
                    "num_local_experts": 7,
                    "num_experts_per_tok": 3,
                    "rms_norm_eps": 1e-3,
                },
                gguf=True,
            ),
        },
        gguf=False,
        # Choices of experts that roundings do not change.
        around={"sinks": (0.0, 2.0), "router.weight": (0.0, 1.0)},
    )


def mistral3(sizes: dict[str, Any]) -> Tiny:
    """The text part of a Mistral Small that sees."""
    text = sizes | {"model_type": "mistral", "head_dim": 16, "sliding_window": None}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    scaled = {"factor": 4.0, "original_max_position_embeddings": 32}
    pairs = [1.0 + 0.3 * i for i in range(8)]

    def inner(changes: dict[str, Any], **values: Any) -> Case:
        return Case({TEXT: changes}, **values)

    def rope(kind: str, *, gguf: bool = False, **values: Any) -> Case:
        section = {"rope_type": kind, "rope_theta": 10000.0, **values}
        return inner({"rope_parameters": section}, gguf=gguf)

    config = transformers.Mistral3Config(
        text_config=text,
        vision_config=vision,
        image_token_index=VOCAB - 1,
        spatial_merge_size=1,
        tie_word_embeddings=False,
    )
    return Tiny(
        config,
        {
            "linear": rope("linear", factor=2.5, gguf=True),
            "dynamic": inner(
                {
                    "rope_scaling": {"type": "dynamic", "factor": 8.0},
                    "max_position_embeddings": 40,
                }
            ),
            "llama3": rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **scaled),
            "yarn": rope("yarn", **scaled, gguf=True),
            "longrope": rope(
                "longrope",
                short_factor=pairs,
                long_factor=pairs[::-1],
                factor=4.0,
                original_max_position_embeddings=64,
            ),
            # As published: a base of a billion, beside the other keys.
            "published": inner({"rope_theta": 1e9, "rope_parameters": None}, gguf=True),
            "tied": Case({"tie_word_embeddings": True}),
            "tied-by-default": Case(without=("tie_word_embeddings",)),
            "tied-inside": inner({"tie_word_embeddings": True}, same=True),
            "window": inner({"sliding_window": 17}),
            "no-type": Case(without=("model_type",), same=True),
            "layer-types": inner({"layer_types": ["sliding_attention"] * 2}, same=True),
            "ministral3": inner(
                {
                    "model_type": "ministral3",
                    "rope_parameters": rope_sections(8)["yarn"] | {"llama_4_scaling_beta": 0.3},
                }
            ),
            "one-kv-head": inner({"num_key_value_heads": 1}, gguf=True),
            "no-head-dim": Case(without=("head_dim",)),
            "odd": inner(
                {
                    "hidden_size": 40,
                    "num_attention_heads": 6,
                    "num_key_value_heads": 3,
                    "head_dim": 12,
                    "intermediate_size": 37,
                    "rms_norm_eps": 1e-3,
                }
            ),
        },
    )


def gemma3_nested(gemma: dict[str, Any]) -> Tiny:
    """The text part of a Gemma 3 that sees: every rope type on layers that see everything."""
    text = gemma | {"query_pre_attn_scalar": 16, "sliding_window": 17, "num_hidden_layers": 4}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    full, local = "full_attention", "sliding_attention"
    text["layer_types"] = [local, full, local, local]
    scaled = {"factor": 4.0, "original_max_position_embeddings": 32}
    pairs = [1.0 + 0.3 * i for i in range(8)]

    def rope(kind: str, positions: int = 256, **values: Any) -> Case:
        section = {full: {"rope_type": kind, **values}, local: {"rope_type": "default"}}
        return inner({"rope_parameters": section, "max_position_embeddings": positions})

    def inner(changes: dict[str, Any], **values: Any) -> Case:
        return Case({TEXT: changes}, **values)

    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=VOCAB - 1
    )
    return Tiny(
        config,
        {
            "linear": rope("linear", factor=8.0),
            "dynamic": rope("dynamic", 40, factor=8.0),
            "llama3": rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **scaled),
            "yarn": rope("yarn", rope_theta=5000.0, **scaled),
            "longrope": rope(
                "longrope",
                short_factor=pairs,
                long_factor=pairs[::-1],
                factor=4.0,
                original_max_position_embeddings=64,
            ),
            # As published: bases and scaling beside each other.
            "published": inner(
                {
                    "rope_parameters": None,
                    "rope_theta": 50000.0,
                    "rope_local_base_freq": 500.0,
                    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                    "layer_types": None,
                    "sliding_window_pattern": 2,
                    "final_logit_softcapping": 3.0,  # which this class does not heed
                }
            ),
            "untied": Case({"tie_word_embeddings": False}),
            "untied-inside": inner({"tie_word_embeddings": False}, same=True),
            "wide-window": inner({"sliding_window": 300}),
            "all-windows": inner({"layer_types": [local] * 4}),
            "no-windows": inner({"layer_types": [full] * 4}),
            "biases": inner({"attention_bias": True, "rms_norm_eps": 1e-3}),
            "no-kv-heads": Case(
                {TEXT: {"num_attention_heads": 8}}, without=("num_key_value_heads",)
            ),
            "no-head-dim": Case({TEXT: {"query_pre_attn_scalar": 256}}, without=("head_dim",)),
            "odd": inner(
                {
                    "hidden_size": 40,
                    "num_attention_heads": 5,
                    "head_dim": 12,
                    "intermediate_size": 37,
                    "query_pre_attn_scalar": 7,
                }
            ),
            "six": inner(
                {"num_hidden_layers": 6, "layer_types": None, "sliding_window": 24}, gguf=True
            ),
        },
        gguf=False,  # the converter writes no pattern but the usual one
        around=GEMMA,
    )


@contextmanager
def half_precision_cache(model: Any) -> Iterator[None]:
    """Keys (rotated) and values rounded to float16, as a cache of that type has them."""
    attention = "eager_attention_forward"
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    with ExitStack() as stack:
        for module in (each for each in modules if hasattr(each, attention)):
            plain = getattr(module, attention)

            def rounded(layer: Any, query: Any, key: Any, value: Any, *args: Any,
                        plain: Any = plain, **kwargs: Any) -> Any:  # fmt: skip
                return plain(
                    layer, query, key.half().float(), value.half().float(), *args, **kwargs
                )

            stack.callback(setattr, module, attention, plain)
            setattr(module, attention, rounded)
        yield


def auto_class(config: Any) -> Any:
    """That of models that only read, or that see, too."""
    reads = type(config) in transformers.AutoModelForCausalLM._model_mapping
    return transformers.AutoModelForCausalLM if reads else transformers.AutoModelForImageTextToText


def open_model(path: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(path)
    model, report = auto_class(config).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.eval()


def logits_of(model: Any, ids: list[int]) -> npt.NDArray[np.float32]:
    """[len(ids), vocab], all positions in one pass, computed in float32."""
    with half_precision_cache(model), torch.inference_mode():
        return np.asarray(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0])


def greedy(model: Any, ids: list[int], steps: int) -> list[int]:
    """``ids`` and the most probable tokens, no two of which follow each other twice: random models
    soon repeat themselves.
    """
    ids = list(ids)
    for _ in range(steps):
        last = logits_of(model, ids)[-1]
        last[[after for before, after in pairwise(ids) if before == ids[-1]]] = -np.inf
        ids.append(int(last.argmax()))
    return ids


def shapes_of(config: dict[str, Any]) -> dict[str, list[int]]:
    """The tensors that `save_pretrained` writes."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary)
        (path / "config.json").write_text(json.dumps(config))
        resolved = transformers.AutoConfig.from_pretrained(path)
        auto_class(resolved).from_config(resolved).save_pretrained(path)
        return {name: list(x.shape) for name, x in load_file(path / "model.safetensors").items()}


def record(name: str, tiny: Tiny, seed: int) -> None:
    home = FAMILIES / name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    with tempfile.TemporaryDirectory() as temporary:
        tiny.config.save_pretrained(temporary)
        config = json.loads((Path(temporary) / "config.json").read_text())
    model = auto_class(tiny.config).from_config(tiny.config)
    config["architectures"] = [type(model).__name__]
    (home / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    shapes = shapes_of(config)
    cases: dict[str, dict[str, Any]] = {}
    for label, case in {BASE: Case(), **tiny.cases}.items():
        own = shapes_of(changed(config, case.changes, case.without))
        cases[label] = {"tokens": case.tokens}
        cases[label] |= {"changes": case.changes} if case.changes else {}
        cases[label] |= {"without": case.without} if case.without else {}
        cases[label] |= {"shapes": own} if own != shapes else {}
    file = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "prompt": PROMPT,
        "seed": seed,
        "around": tiny.around,
        "shapes": shapes,
        "cases": cases,
    }
    text = json.dumps(file).replace('"cases": {', '"cases": {\n').replace('}, "', '},\n"')
    (home / "cases.json").write_text(text + "\n")
    arrays = logits(name, tiny, seed)
    np.savez_compressed(home / "logits.npz", **arrays)
    size = sum(each.stat().st_size for each in home.iterdir())
    new = len(set(arrays["ids"][PROMPT:].tolist()))
    spread = [round(float(arrays[label].std()), 1) for label in cases]
    print(f"{name}: {len(cases)} cases, {size:,} bytes, {new} tokens of {STEPS}, spread {spread}")


def logits(name: str, tiny: Tiny, seed: int) -> dict[str, npt.NDArray[Any]]:
    """What logits.npz has."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        base = open_model(folder(name, place / BASE))
        prompt = np.random.default_rng(seed).integers(2, VOCAB, PROMPT).tolist()
        ids = greedy(base, prompt, STEPS)
        columns = np.arange(len(ids))[:, None] * 7 + np.arange(KEPT) * (VOCAB // KEPT)
        columns = (columns % VOCAB).astype(np.int32)

        def kept(model: Any, tokens: int) -> npt.NDArray[np.float32]:
            return np.take_along_axis(logits_of(model, ids[:tokens]), columns[:tokens], axis=1)

        arrays: dict[str, npt.NDArray[Any]] = {"ids": np.array(ids, np.int32), "columns": columns}
        arrays[BASE] = kept(base, len(ids))
        arrays[f"{BASE}.bfloat16"] = kept(
            open_model(folder(name, place / "bf16", bf16=True)), len(ids)
        )
        for label, case in tiny.cases.items():
            made = kept(open_model(folder(name, place / label, label=label)), case.tokens)
            heard = np.abs(made - arrays[BASE][: len(made)]).max() / made.std() > LEAST
            assert heard != case.same, (
                f"{name}: {label} {'differs' if heard else 'changes nothing'}"
            )
            arrays[label] = made
    return arrays


# --- GGUF ----------------------------------------------------------------------------------------


def convert(folder: Path, target: Path, *, mtp: bool = False) -> None:
    """llama.cpp's own conversion, with a vocabulary of single characters. ``mtp``: with layers for
    multi-token prediction.
    """
    import gguf
    from conversion import get_model_class  # of llama.cpp
    from conversion.base import ModelBase

    def set_vocab() -> None:
        writer = converter.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*(chr(0x21 + index) for index in range(VOCAB - 1)), '!"'])
        writer.add_token_types([1] * VOCAB)
        writer.add_token_merges(['! "'])

    # One of the converters counts the tokens in it, to cut the embedding.
    vocab = {"model": {"vocab": list(range(VOCAB))}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(vocab))
    hparams = ModelBase.load_hparams(folder, False)
    if hparams["model_type"] == "granitemoehybrid":  # whose types it knows by their old names
        old = {"linear_attention": "mamba", FULL: "attention"}
        hparams["layer_types"] = [old[kind] for kind in hparams["layer_types"]]
    f32 = gguf.LlamaFileType.ALL_F32
    converter = get_model_class(hparams["architectures"][0])
    converter.no_mtp = not mtp
    made = converter(folder, f32, target, hparams=hparams, model_name=folder.name)
    converter = getattr(made, "impl", made)  # one class chooses among several
    converter.set_vocab = set_vocab
    converter.write()


def recipe(path: Path, weights: dict[str, npt.NDArray[np.float32]], heads: set[int]) -> Any:
    """(header, tensors): of each tensor its offset and (stored name, permuted heads, shift), the
    names of those that are stacked in it, or its numbers where no stored tensor has them. In place
    of permuted heads there may be what `forms` or `gathered` has."""
    import gguf

    tensors: list[Any] = []
    data = path.read_bytes()
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        content = data[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
        made = [
            (name, group, shift)
            for name, values in weights.items()
            for group in forms(name, heads)
            for shift in (0, 1)
            if values.nbytes % len(content) == 0
            and (isinstance(group, str) or len(values) % max(2 * group, 1) == 0)
            and transformed(values, group, shift).tobytes() == content
        ]
        made = made or gathered(np.frombuffer(content, np.float32), tensor.shape[::-1], weights)
        numbers = [] if made else np.frombuffer(content, np.float32).tolist()
        stacked = []
        if len(tensor.shape) == 3 and not made:
            size = len(content) // int(tensor.shape[2])
            parts = [content[at : at + size] for at in range(0, len(content), size)]
            stacked = [n for part in parts for n, w in weights.items() if w.tobytes() == part]
            assert len(stacked) == len(parts), tensor.name
        tensors.append([int(tensor.data_offset), *(made[0] if made else (stacked or numbers,))])
    return data[: reader.data_offset], tensors


def gathered(
    content: npt.NDArray[np.float32], shape: Any, weights: dict[str, npt.NDArray[np.float32]]
) -> list[Any]:
    """(stored name, [axis, indices], 0) of a tensor whose rows or columns these are, in any order:
    empty if there is none.
    """
    if len(shape) != 2:
        return []
    for name, values in weights.items():
        for axis in (0, 1):
            lines, stored = content.reshape(shape), values.reshape(len(values), -1)
            if axis:
                lines, stored = lines.T, stored.T
            places = {line.tobytes(): index for index, line in enumerate(stored)}
            found = [places.get(line.tobytes()) for line in lines]
            if None not in found:
                return [(name, [axis, found], 0)]
    return []


def forms(name: str, heads: set[int]) -> set[int | str]:
    """What `transformed` may make of a tensor."""
    if name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
        return {0, *heads}
    if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
        return {"gate", "up", "first", "second"}
    if name.endswith("input_linear.weight"):
        return {"first", "second"}
    return {"turned"} if name.endswith("experts.down_proj") else {0}


def record_gguf(name: str, tiny: Tiny) -> None:
    path = FAMILIES / name / "gguf.npz"
    path.unlink(missing_ok=True)
    headers, recipes = {}, {}
    for label in [BASE] * tiny.gguf + [n for n, case in tiny.cases.items() if case.gguf]:
        with tempfile.TemporaryDirectory() as temporary:
            source, target = (
                folder(name, Path(temporary) / name, label=label),
                Path(temporary) / "x",
            )
            convert(source, target)
            config = transformers.AutoConfig.from_pretrained(source).get_text_config().to_dict()
            heads = {config["num_attention_heads"], config["num_key_value_heads"]}
            header, recipes[label] = recipe(target, weights(name, label), heads)
            headers[label] = np.frombuffer(header, np.uint8)
    if not headers:
        return
    np.savez_compressed(path, meta=np.array(json.dumps(recipes)), **headers)
    own = [t[1] for tensors in recipes.values() for t in tensors if len(t) == 2]
    literal = [len(values) for values in own if not isinstance(values[0], str)]
    size = path.stat().st_size
    print(f"{name}/gguf.npz: {size:,} bytes for {gguf_labels(name)}, {literal} numbers of its own")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--llama-cpp", type=Path, help="its source, with the folder conversion/")
    parser.add_argument("--only-gguf", action="store_true", help="keep the folders as they are")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.llama_cpp:
        sys.path[:0] = [str(args.llama_cpp), str(args.llama_cpp / "gguf-py")]
    for name, tiny in models().items():
        if args.names and name not in args.names:
            continue
        if not args.only_gguf:
            record(name, tiny, zlib.crc32(name.encode()))
        if args.llama_cpp:
            record_gguf(name, tiny)


if __name__ == "__main__":
    main()
