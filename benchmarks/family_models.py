"""Makes models of the hybrid and sparse families' shapes with random weights, for `families.py`.

    python benchmarks/family_models.py [--only NAME] [--depth N] [--source SMOLLM2.gguf]

Widths, heads, windows and experts' sizes are those of published models; what is cut to fit a small
machine is said in `MODELS`. Each is made in two depths, so that the time of a layer can be told
from that of the ends. Matrices are Q4_0 (gpt-oss's experts MXFP4) with random codes under one
scale, which keeps activations of the order of one; the tokenizer is SmolLM2's, padded with unused
tokens to the family's vocabulary where all its layers are there. Any engine can load, serve and
time such a file; what it says is nonsense.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import log2, prod
from pathlib import Path

import numpy as np

from _models import CACHE
from _script import as_script
from make_models import F32, Bytes, Tensor, metadata, string, write
from octavo.tools.quantize.gguf_writer import Value, key

Q4_0, MXFP4 = 2, 39  # ggml's type numbers
BLOCK = 32
UNUSED = 5  # type of a token in a GGUF file
Sizes = dict[str, tuple[int, ...]]  # of tensors, outermost first


@dataclass(frozen=True)
class FamilyModel:
    """A model's sizes. Keys are without the architecture's name; a layer's tensors without blk.N.

    ``depths``: layers of the model that is compared, and of another that ends like it.
    """

    title: str
    architecture: str
    hidden: int
    depths: tuple[int, int]
    keys: Callable[[int], dict[str, Value]]  # of so many layers
    layer: Callable[[int, int], Sizes]  # of layer i of so many
    ends: Callable[[int], Sizes] = field(default=lambda layers: {})  # beside embedding and norm
    vocab: int = 49152
    output_norm: str = "output_norm"
    experts: int = Q4_0


def attention(
    hidden: int, heads: int, kv_heads: int, head_dim: int, *, gate: bool = False
) -> Sizes:
    """Return the matrices of an attention layer; ``gate``: queries have gates between them."""
    return {
        "attn_q": (heads * head_dim * (2 if gate else 1), hidden),
        "attn_k": (kv_heads * head_dim, hidden),
        "attn_v": (kv_heads * head_dim, hidden),
        "attn_output": (hidden, heads * head_dim),
    }


def feed_forward(hidden: int, width: int, ending: str = "", experts: tuple[int, ...] = ()) -> Sizes:
    return {
        f"ffn_gate{ending}": (*experts, width, hidden),
        f"ffn_up{ending}": (*experts, width, hidden),
        f"ffn_down{ending}": (*experts, hidden, width),
    }


def norms(size: int, *names: str) -> Sizes:
    return dict.fromkeys(names, (size,))


# ── Qwen 3.5 ────────────────────────────────────────────────────────────────────────────────────


def qwen35_keys(heads: int, value_heads: int) -> dict[str, Value]:
    return {
        "attention.head_count": heads,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 64,
        "rope.dimension_sections": np.array([11, 11, 10, 0], "<i4"),
        "rope.freq_base": 1e7,
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.group_count": 16,
        "ssm.time_step_rank": value_heads,
        "ssm.state_size": 128,
        "ssm.inner_size": value_heads * 128,
    }


def qwen35_mixer(hidden: int, heads: int, value_heads: int, index: int) -> Sizes:
    found = norms(hidden, "attn_norm", "post_attention_norm")
    if (index + 1) % 4 == 0:
        found |= attention(hidden, heads, 2, 256, gate=True)
        return found | norms(256, "attn_q_norm", "attn_k_norm")
    wide, channels = value_heads * 128, (2 * 16 + value_heads) * 128
    return found | {
        "attn_qkv": (channels, hidden),
        "attn_gate": (wide, hidden),
        "ssm_beta": (value_heads, hidden),
        "ssm_alpha": (value_heads, hidden),
        "ssm_conv1d": (channels, 4),
        "ssm_dt.bias": (value_heads,),
        "ssm_a": (value_heads,),
        "ssm_norm": (128,),
        "ssm_out": (hidden, wide),
    }


def qwen35_experts(index: int, layers: int) -> Sizes:
    found = qwen35_mixer(2048, 16, 32, index) | {"ffn_gate_inp": (64, 2048)}
    found |= feed_forward(2048, 512, "_exps", (64,)) | feed_forward(2048, 512, "_shexp")
    return found | {"ffn_gate_inp_shexp": (1, 2048)}


# ── gpt-oss ─────────────────────────────────────────────────────────────────────────────────────


def gpt_oss_layer(index: int, layers: int) -> Sizes:
    matrices = attention(2880, 64, 8, 64) | {"ffn_gate_inp": (32, 2880)}
    matrices |= feed_forward(2880, 2880, "_exps", (32,))
    biases = {f"{name}.bias": size[:-1] for name, size in matrices.items()}
    found = norms(2880, "attn_norm", "post_attention_norm") | matrices | biases
    return found | {"attn_sinks": (64,)}


# ── Gemma 4 ─────────────────────────────────────────────────────────────────────────────────────


def gemma4_keys(layers: int) -> dict[str, Value]:
    own = layers // 2
    return {
        "feed_forward_length": np.repeat([6144, 12288], [own, layers - own]).astype("<i4"),
        "attention.head_count": 8,
        "attention.head_count_kv": 1,
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": np.array([(i + 1) % 5 != 0 for i in range(layers)]),
        "attention.shared_kv_layers": layers - own,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "embedding_length_per_layer_input": 256,
        "final_logit_softcapping": 30.0,
        "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }


def gemma4_layer(index: int, layers: int) -> Sizes:
    head_dim = 256 if (index + 1) % 5 else 512
    own = index < layers // 2  # the others read its keys and values
    found = attention(1536, 8, 1, head_dim) | norms(head_dim, "attn_q_norm", "attn_k_norm")
    if not own:
        found = {name: found[name] for name in ("attn_q", "attn_output", "attn_q_norm")}
    found |= feed_forward(1536, 6144 if own else 12288)
    found |= {"inp_gate": (256, 1536), "proj": (1536, 256), "layer_output_scale": (1,)}
    names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
    return found | norms(1536, *names)


def gemma4_ends(layers: int) -> Sizes:
    return {
        "per_layer_token_embd": (49152, layers * 256),
        "per_layer_model_proj": (layers * 256, 1536),
        "per_layer_proj_norm": (256,),
        "rope_freqs": (256,),
    }


# ── LFM2 ────────────────────────────────────────────────────────────────────────────────────────

LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)


def lfm2_keys(layers: int) -> dict[str, Value]:
    kv_heads = [8 if index in LFM2_ATTENTION else 0 for index in range(layers)]
    return {
        "feed_forward_length": 8192,
        "attention.head_count": 32,
        "attention.head_count_kv": np.array(kv_heads, "<i4"),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 64,
        "rope.freq_base": 1e6,
        "shortconv.l_cache": 3,
    }


def lfm2_layer(index: int, layers: int) -> Sizes:
    found = norms(2048, "attn_norm", "ffn_norm") | feed_forward(2048, 8192)
    if index in LFM2_ATTENTION:
        found |= attention(2048, 32, 8, 64)
        return found | norms(64, "attn_q_norm", "attn_k_norm")
    return found | {
        "shortconv.in_proj": (3 * 2048, 2048),
        "shortconv.conv": (2048, 3),
        "shortconv.out_proj": (2048, 2048),
    }


MODELS = {
    "qwen35-0.8b": FamilyModel(
        "Qwen 3.5 0.8B",
        "qwen35",
        1024,
        (24, 12),
        lambda layers: qwen35_keys(8, 16) | {"feed_forward_length": 3584},
        lambda index, layers: qwen35_mixer(1024, 8, 16, index) | feed_forward(1024, 3584),
        vocab=248320,
    ),
    "qwen35moe-1b": FamilyModel(
        "Qwen 3.5 35B-A3B, 4 of 40 layers, 64 of 256 experts",
        "qwen35moe",
        2048,
        (4, 8),
        lambda layers: (
            qwen35_keys(16, 32)
            | {
                "expert_count": 64,
                "expert_used_count": 8,
                "expert_feed_forward_length": 512,
                "expert_shared_feed_forward_length": 512,
            }
        ),
        qwen35_experts,
    ),
    "gpt-oss": FamilyModel(
        "gpt-oss 20B, 4 of 24 layers",
        "gpt-oss",
        2880,
        (4, 2),
        lambda layers: {
            "attention.head_count": 64,
            "attention.head_count_kv": 8,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.sliding_window": 128,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 32,
            "expert_used_count": 4,
            "expert_feed_forward_length": 2880,
            "feed_forward_length": 2880,
            "rope.dimension_count": 64,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
        gpt_oss_layer,
        lambda layers: {"output": (49152, 2880)},
        experts=MXFP4,
    ),
    "gemma4-1b": FamilyModel(
        "Gemma 4 E2B, 20 of 35 layers (10 with keys and values of their own)",
        "gemma4",
        1536,
        (20, 10),
        gemma4_keys,
        gemma4_layer,
        gemma4_ends,
    ),
    "lfm2-1.2b": FamilyModel(
        "LFM2 1.2B",
        "lfm2",
        2048,
        (16, 8),
        lfm2_keys,
        lfm2_layer,
        vocab=65536,
        output_norm="token_embd_norm",
    ),
}


# ── Files ───────────────────────────────────────────────────────────────────────────────────────


def made(name: str, layers: int) -> Path:
    """Where a model of `MODELS` is put."""
    return CACHE / f"{name}-{layers}.gguf"


def make(name: str, layers: int, source: Path) -> Path:
    model, path = MODELS[name], made(name, layers)
    numbers: dict[str, Value] = {
        "block_count": layers,
        "context_length": 16384,
        "embedding_length": model.hidden,
        "vocab_size": model.vocab,
        **model.keys(layers),
    }
    stated: dict[str, Value] = {
        "general.architecture": model.architecture,
        "general.name": f"{model.title}, random weights",
        **{f"{model.architecture}.{end}": value for end, value in numbers.items()},
    }
    # A key's bytes are its name, which `write` adds, and its value.
    keys = {full: key(full, value)[len(string(full)) :] for full, value in stated.items()}
    write(path, keys | tokenizer(source, model.vocab), tensors(model, layers))
    return path


def tokenizer(source: Path, vocab: int) -> dict[str, bytes]:
    """Return the keys of a file's tokenizer, padded to a vocabulary."""
    found = {k: v for k, v in metadata(source).items() if k.startswith("tokenizer.")}
    tokens, types = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
    missing = range(int.from_bytes(found[tokens][8:16], "little"), vocab)
    unused = np.full(len(missing), UNUSED, "<i4").tobytes()
    padding = {tokens: b"".join(string(f"<unused {id}>") for id in missing), types: unused}
    for name, more in padding.items():
        found[name] = found[name][:8] + vocab.to_bytes(8, "little") + found[name][16:] + more
    return found


def tensors(model: FamilyModel, layers: int) -> Iterator[Tensor]:
    sizes: Sizes = {"token_embd": (model.vocab, model.hidden), model.output_norm: (model.hidden,)}
    sizes |= model.ends(layers)
    for index in range(layers):
        of_layer = model.layer(index, layers)
        sizes |= {f"blk.{index}.{name}": size for name, size in of_layer.items()}
    random = np.random.default_rng(0)
    for name, size in sizes.items():
        part = name.split(".", 2)[2] if name.startswith("blk.") else name
        kind, data = content(part, size, model, layers, random)
        whole = name if name.endswith((".bias", "ssm_a")) else f"{name}.weight"
        yield whole, size, kind, data


def content(
    name: str, size: tuple[int, ...], model: FamilyModel, layers: int, random: np.random.Generator
) -> tuple[int, Bytes]:
    """Return type and bytes of a tensor, by its name without the layer's."""
    if name == "rope_freqs":  # the first quarter of the pairs is rotated
        values = np.where(np.arange(size[0]) < size[0] // 4, 1.0, 1e30)
    elif name.endswith("norm") or name == "layer_output_scale":
        values = np.ones(size)
    elif name == "ssm_a":
        values = np.full(size, -4.0)
    elif name == "ssm_dt.bias":
        values = np.full(size, -4.0)  # a token's decay is exp(-4 log(1 + exp(-4))): 0.93
    elif name.endswith(("bias", "sinks")) or name == "ffn_gate_inp_shexp":
        values = np.zeros(size)
    elif name in ("ssm_conv1d", "shortconv.conv", "ffn_gate_inp"):
        values = random.standard_normal(size) * size[-1] ** -0.5
    else:
        to_residual = name.endswith(("attn_output", "ssm_out", "out_proj")) or "ffn_down" in name
        deviation = (size[-1] * (2 * layers if to_residual else 1)) ** -0.5
        kind = model.experts if name.endswith("_exps") else Q4_0
        return kind, coded(kind, prod(size), deviation, random)
    return F32, values.astype("<f4").view(np.uint8).reshape(-1)


def coded(kind: int, count: int, deviation: float, random: np.random.Generator) -> Bytes:
    """Return blocks of random codes: in Q4_0 an fp16 scale and numbers from -8 to 7, in MXFP4 a
    power of two and e2m1 numbers.
    """
    if kind == Q4_0:
        scale = np.array([deviation / 4.6], "<f2").view(np.uint8)
    else:
        scale = np.array([127 + round(log2(deviation / 2.9))], np.uint8)
    blocks = random.integers(0, 256, (count // BLOCK, len(scale) + BLOCK // 2), np.uint8)
    blocks[:, : len(scale)] = scale
    return blocks.reshape(-1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=list(MODELS), action="append")
    parser.add_argument("--depth", type=int, help="layers (default: both depths)")
    parser.add_argument("--source", type=Path, help="SmolLM2's GGUF (default: the pulled one)")
    args = parser.parse_args()
    source = args.source
    if source is None:
        from octavo.loader import pull

        source = pull.resolve("smollm2")
    for name in args.only or MODELS:
        for layers in [args.depth] if args.depth else MODELS[name].depths:
            path = make(name, layers, source)
            size = f"{path.stat().st_size / 1e6:.1f} MB"
            print(f"{name}, {layers} layers: {path}, {size}", flush=True)
    return 0


if __name__ == "__main__":
    as_script(main)
