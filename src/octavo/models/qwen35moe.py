"""Qwen 3.5 with experts (Qwen Team, 2026): besides those that a token is routed to, one that every
token goes to, with a gate.
"""

from __future__ import annotations

from octavo.models import qwen35
from octavo.models.family import Family
from octavo.models.hf_type import HfType, HfWrapper

SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DEFAULTS = {key: each for key, each in qwen35.DEFAULTS.items() if key != "intermediate_size"}
FAMILY = Family(
    name="qwen35moe",
    title="Qwen 3.5 with experts",
    note="as Qwen 3.5",
    program=qwen35.program,
    mtp=qwen35.mtp_program,
    recurrent=qwen35.DELTA_NET,
    modules=qwen35.MODULES | SHARED,
    bare=qwen35.BARE,
    forms=qwen35.FAMILY.forms,
    gathers=qwen35.FAMILY.gathers,
    hf=(
        HfType(
            model_type="qwen3_5_moe_text",
            classes="Qwen3_5MoeText",
            causal_lm="Qwen3_5MoeForCausalLM",
            tokenizer="Qwen3_5Tokenizer",
            defaults=_DEFAULTS
            | {
                "hidden_size": 2048,
                "num_hidden_layers": 40,
                "num_key_value_heads": 2,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "num_experts_per_tok": 8,
                "num_experts": 256,
            },
            computed=qwen35.COMPUTED,
            feed_forward=lambda values: values.count("moe_intermediate_size"),
            partial_rotary=0.25,
        ),
    ),
    wrappers=(
        HfWrapper(
            model_type="qwen3_5_moe",
            classes="Qwen3_5Moe",
            texts=("qwen3_5_moe_text",),
            tied=False,
            tokenizer="Qwen3_5Tokenizer",
        ),
    ),
    ignored=qwen35.FAMILY.ignored,
    bias_keys=qwen35.BIAS_KEYS,
    norm_offset=1.0,
    whole_norms=qwen35.FAMILY.whole_norms,
    rotary_sections=qwen35.FAMILY.rotary_sections,
    expert_size="expert_feed_forward_length",
    shared_expert_size="expert_shared_feed_forward_length",
)
