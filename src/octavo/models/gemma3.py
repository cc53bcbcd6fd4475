"""Gemma 3 (Gemma Team, 2025), the language model.

Against Llama: embeddings scaled by sqrt(hidden), q and k normalised a head, norms after attention
and feed-forward as well as before, GeGLU, and five sliding-window layers for every global one,
each kind with its own rotary base. The checkpoint's norm weights already include Gemma's "+ 1".
"""

from __future__ import annotations

from octavo.models import gemma2
from octavo.models.build import Builder
from octavo.models.config import Activation, ModelConfig
from octavo.models.family import TOWERS, Family, Key, Windows
from octavo.models.hf_type import FULL, SLIDING, HfType, HfWrapper, Rule, layer_types
from octavo.models.program import Program
from octavo.models.section import Section


def program(c: ModelConfig) -> Program:
    b = Builder(c)
    b.embed(c.embedding_scale)
    for layer in b.layers():
        b.norm("x", "attn_norm", "h")
        b.project_qkv("h", layer)
        b.norm_qk(layer, by_head=True)
        b.attend(layer)
        b.norm("h", "post_attention_norm", "h")
        b.add()
        b.norm("x", "ffn_norm", "h")
        b.feed_forward("h")
        b.norm("h", "post_ffw_norm", "h")
        b.add()
    return b.head()


def _types(values: Section) -> list[str]:
    period = values.count("sliding_window_pattern", 6)
    return layer_types(values, lambda index: (index + 1) % period != 0)


_CAP = "final_logit_softcapping"
FAMILY = Family(
    name="gemma3",
    title="Gemma 3",
    note="text only: a vision tower is passed over",
    program=program,
    keys=(gemma2.SCALE, Key("logits_softcap", _CAP, _CAP, default=0.0, null=0.0)),
    embedding_root=True,
    modules=gemma2.MODULES,
    hf=(
        HfType(
            model_type="gemma3_text",
            classes="Gemma3Text",
            causal_lm="Gemma3ForCausalLM",
            tokenizer="GemmaTokenizer",
            defaults={
                **gemma2.FAMILY.hf[0].defaults,
                "vocab_size": 262208,
                "max_position_embeddings": 131072,
                "final_logit_softcapping": None,
                "attn_logit_softcapping": None,
            },
            computed={"layer_types": Rule("sliding but every sliding_window_pattern-th", _types)},
            null_window=True,
            rope_theta={FULL: 1e6, SLIDING: 1e4},
        ),
    ),
    wrappers=(
        HfWrapper(
            model_type="gemma3",
            classes="Gemma3",
            texts=("gemma3_text",),
            passed_over=("final_logit_softcapping",),
            tokenizer="GemmaTokenizer",
        ),
    ),
    ignored=TOWERS,
    passed_over=("attn_logit_softcapping",),
    norm_offset=1.0,
    activation=Activation.GELU_TANH,
    windows=Windows(period=6, theta=1e4, scaled=False),
    hidden_scale_layers=62,
    merged_spaces=True,
)
