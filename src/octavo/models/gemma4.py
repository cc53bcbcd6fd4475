"""Gemma 4 (Google DeepMind, 2026), the language model.

Against Gemma 3: layers that see everything have wider heads, and rotate some of their pairs, with
the frequencies of all (`proportional`). Scores are not scaled, and values are normalised head by
head, without a weight. By size:

- the larger ones take the keys' projection for values in layers that see everything;
- with experts, these stand beside the dense feed-forward layer, and their router reads the residual
  stream through a norm of its own;
- in the E models the last layers read the keys and values of the last one before them that sees as
  much, and every layer gets a part of a second embedding of the token.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from octavo.models.build import Builder
from octavo.models.config import Activation, Layer, ModelConfig
from octavo.models.family import Family, Key, Windows
from octavo.models.hf_type import FULL, ROPE_TYPES, SLIDING, HfType, Rule, layer_types
from octavo.models.program import Add, Embed, GatedActivation, Program, RmsNorm, Scale, Slice
from octavo.models.section import Section


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    if c.per_layer_input:
        _per_layer_inputs(b)
    for index, layer in enumerate(b.layers()):
        b.norm("x", "attn_norm", "h")
        b.project_qkv("h", layer)
        if layer.shares is None:  # values are of keys that have no norm yet
            values, head_dim = b.value("v"), c.heads_of(layer)[1]
            source = b.value("k") if layer.keys_as_values else values
            b.append(RmsNorm(source, None, values, b.eps, head_dim))
        b.norm_qk(layer, by_head=True)
        b.attend(layer)
        b.norm("h", "post_attention_norm", "h")
        b.add()
        b.norm("x", "ffn_norm", "h")
        b.feed_forward("h")
        if layer.experts is not None:
            _add_experts(b, layer)
        b.norm("h", "post_ffw_norm", "h")
        b.add()
        if c.per_layer_input:
            _add_layer_input(b, index)
        b.append(Scale("x", b.role("layer_output_scale"), "x"))
    return b.head()


def _per_layer_inputs(b: Builder) -> None:
    """Write down what all layers get beside the residual stream, side by side: the token's second
    embedding plus a normalised projection of its first, over sqrt(2).
    """
    c, width = b.config, b.config.per_layer_input
    b.widths |= dict.fromkeys(("inputs", "projected"), len(c.layers) * width)
    b.widths |= dict.fromkeys(("input", "input_gate"), width)
    b.append(Embed("per_layer_token_embd", "inputs", sqrt(width / 2.0)))
    b.linear("x", "per_layer_model_proj", "projected")
    # The projection counts over sqrt(hidden_size), which a norm undoes but for its epsilon.
    eps = b.eps * c.hidden_size
    b.append(RmsNorm("projected", "per_layer_proj_norm", "projected", eps, width, sqrt(0.5)))
    b.append(Add("inputs", "projected", "inputs"))


def _add_layer_input(b: Builder, index: int) -> None:
    """Write down how a layer adds its input to the residual stream: gated by the stream."""
    width = b.config.per_layer_input
    b.linear("x", "inp_gate", "input_gate")
    b.append(Slice("inputs", "input", index * width, width))
    b.append(GatedActivation("input_gate", "input", "input_gate", b.config.activation))
    b.linear("input_gate", "proj", "h")
    b.norm("h", "post_norm", "h")
    b.add()
