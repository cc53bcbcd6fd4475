"""A folder of a Llama of 1.07 B random weights in 4 bits, groups of 128, in a layout of others.

    python benchmarks/make_quantized.py gptq|gptq-order|awq|compressed-tensors FOLDER

What its numbers are is of no matter to how long it loads; that activation order is in no order is.
Embedding and head are bfloat16, as quantizers leave them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

from _script import as_script

HIDDEN, FFN, LAYERS, KV, VOCAB, GROUP = 2048, 8192, 16, 512, 32000, 128
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
BITS = {"bits": 4, "group_size": GROUP}
WEIGHTS = {"num_bits": 4, "group_size": GROUP, "strategy": "group", "type": "int"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "sym": True, "desc_act": False} | BITS,
    "gptq-order": {"quant_method": "gptq", "sym": True, "desc_act": True} | BITS,
    "awq": {"quant_method": "awq", "version": "gemm", "zero_point": True} | BITS,
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    },
}


def module(layout: str, n: int, k: int, rng: np.random.Generator) -> dict[str, Any]:
    def words(*shape: int) -> Any:
        return rng.integers(-(2**31), 2**31, shape, dtype=np.int32)

    if layout == "compressed-tensors":
        scales = np.full((n, k // GROUP), 0.002, ml_dtypes.bfloat16)
        return {"weight_packed": words(n, k // 8), "weight_scale": scales}
    zeros = np.full((k // GROUP, n // 8), 0x77777777, np.int32)
    tensors = {"qzeros": zeros, "scales": np.full((k // GROUP, n), 0.002, np.float16)}
    if layout == "awq":
        return tensors | {"qweight": words(k, n // 8)}
    order = rng.permutation(k) if layout == "gptq-order" else np.arange(k)
    g_idx = np.empty(k, np.int32)
    g_idx[order] = np.arange(k) // GROUP
    return tensors | {"qweight": words(k // 8, n), "g_idx": g_idx}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("layout", choices=list(CONFIGS))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    tensors = {"model.norm.weight": np.ones(HIDDEN, ml_dtypes.bfloat16)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        values = rng.standard_normal((VOCAB, HIDDEN), np.float32) * 0.02
        tensors[name] = values.astype(ml_dtypes.bfloat16)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, shape in LINEARS.items():
            for part, values in module(args.layout, *shape, rng).items():
                tensors[f"{prefix}{name}.{part}"] = values
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(HIDDEN, ml_dtypes.bfloat16)
    save_file(tensors, args.folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "quantization_config": CONFIGS[args.layout],
    }
    (args.folder / "config.json").write_text(json.dumps(config, indent=2))
    vocab = {chr(0x21 + index): index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(args.folder / "tokenizer.json"))


if __name__ == "__main__":
    as_script(main)
