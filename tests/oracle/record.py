"""Records what independent implementations compute, so that ``make test`` needs none of them.

Run by hand, in an environment with torch, transformers and gguf, when an oracle must change:

    python tests/oracle/record.py --models DIR          # DIR holds smollm2.gguf, gemma3-270m.gguf

Everything comes from `transformers` in float32 on the CPU: the two real models from the same GGUF
files that Octavo serves (dequantized on load), the tiny ones from random weights, which are
written to GGUF by this file with llama.cpp's conversion conventions. See README.md here for what
each output holds.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gguf
import numpy as np
import numpy.typing as npt
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from tokenizers import pre_tokenizers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from strings import fixed, generate  # noqa: E402

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

TOP = 20  # recorded candidates a position
TEXT_TOKENS = 160  # recorded positions of a short text
LONG_TOKENS = 704  # long enough to leave Gemma 3 270M's window of 512
LONG_ROWS = 48  # recorded positions at the end of the long text
GREEDY_TOKENS = 16
TOKENIZER_CASES = 520  # the fixed ones and some random ones
TOKENIZER_SEED = 20260101

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5, 6,",
    "Water boils at",
]

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello!"}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    [
        {"role": "user", "content": "2 + 2 = "},
        {"role": "assistant", "content": "4\n"},
        {"role": "user", "content": "  and <|im_end|> 3?\n\n"},
    ],
]


# --- real models ---------------------------------------------------------------------------------


def load_tokenizer(path: Path) -> tuple[Any, str]:
    """The tokenizer transformers builds from a GGUF file, and what was corrected in it.

    For ``tokenizer.ggml.pre = smollm`` transformers (5.24) falls back to plain byte-level BPE. The
    model's own tokenizer, which the file names, first sets every digit apart; without that
    "a  1" and "\\n\\n1" come out otherwise. llama.cpp agrees with the corrected form.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    reader = gguf.GGUFReader(path)
    pre = reader.fields.get("tokenizer.ggml.pre")
    correction = ""
    if pre is not None and pre.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        correction = "pre_tokenizer = Digits(individual) + ByteLevel, as tokenizer.ggml.pre says"
    return tokenizer, correction


def load_model(path: Path) -> Any:
    """The model in float32, weights dequantized from the GGUF file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    return model.eval()


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of the text alone, without BOS; special tokens in the text are recognised."""
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def logits_of(model: Any, ids: list[int]) -> Float32:
    """[len(ids), vocab] next-token logits, all positions in one pass."""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    result: Float32 = out.float().numpy()
    return result


def log_softmax(logits: Float32) -> Float32:
    """Row-wise natural-log probabilities, computed in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x.astype(np.float32)


def greedy(model: Any, ids: list[int], count: int) -> tuple[Int32, Float32]:
    """``count`` greedy tokens, and at each step the logprob gap between the first and second.

    A gap near zero is a tie that a quantized engine may rightly break the other way.
    """
    ids = list(ids)
    tokens, margins = [], []
    for _ in range(count):
        logprobs = log_softmax(logits_of(model, ids)[-1:])[0]
        first, second = np.argsort(-logprobs, kind="stable")[:2]
        tokens.append(int(first))
        margins.append(float(logprobs[first] - logprobs[second]))
        ids.append(int(first))
    return np.array(tokens, np.int32), np.array(margins, np.float32)


def record_model(name: str, path: Path, out: Path) -> None:
    """Writes ``{name}.npz``: top logprobs over texts, greedy continuations."""
    tokenizer, correction = load_tokenizer(path)
    model = load_model(path)
    bos = [tokenizer.bos_token_id] if name.startswith("gemma") else []
    arrays: dict[str, npt.NDArray[Any]] = {}
    texts = []
    for text, tokens, rows in (
        ("alice", TEXT_TOKENS, TEXT_TOKENS),
        ("code", TEXT_TOKENS, TEXT_TOKENS),
        ("tongues", TEXT_TOKENS, TEXT_TOKENS),
        ("jargon", LONG_TOKENS, LONG_ROWS),
    ):
        content = (HERE / "texts" / f"{text}.txt").read_text(encoding="utf-8")
        ids = (bos + encode(tokenizer, content))[:tokens]
        logprobs = log_softmax(logits_of(model, ids)[-rows:])
        top = np.argsort(-logprobs, axis=1, kind="stable")[:, :TOP].astype(np.int32)
        arrays[f"{text}_ids"] = np.array(ids, np.int32)
        arrays[f"{text}_rows"] = np.arange(len(ids) - rows, len(ids), dtype=np.int32)
        arrays[f"{text}_top_ids"] = top
        arrays[f"{text}_top_logprobs"] = np.take_along_axis(logprobs, top, axis=1)
        texts.append(text)
    for index, prompt in enumerate(PROMPTS):
        ids = bos + encode(tokenizer, prompt)
        arrays[f"prompt{index}_ids"] = np.array(ids, np.int32)
        arrays[f"prompt{index}_greedy"], arrays[f"prompt{index}_margins"] = greedy(
            model, ids, GREEDY_TOKENS
        )
        print(name, repr(prompt), repr(tokenizer.decode(arrays[f"prompt{index}_greedy"])))
    meta = {
        "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "texts": texts,
        "prompts": PROMPTS,
        "tokenizer_correction": correction,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    save(out / f"{name}.npz", meta, arrays)


def record_tokenizer(name: str, path: Path, out: Path) -> None:
    """Writes ``{name}.tokenizer.json``: strings with their ids and what the ids decode to."""
    tokenizer, correction = load_tokenizer(path)
    plain = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    lines = []
    for text in generate(TOKENIZER_CASES, TOKENIZER_SEED):
        ids = encode(tokenizer, text)
        case: dict[str, Any] = {"text": text, "ids": ids}
        decoded = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        if decoded != text:
            case["decoded"] = decoded
        without = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
        if without != decoded:
            case["decoded_without_special"] = without
        if encode(plain, text) != ids:
            case["uncorrected_ids"] = encode(plain, text)
        lines.append(json.dumps(case, ensure_ascii=True, separators=(",", ":")))
    chats = []
    if getattr(tokenizer, "chat_template", None):
        for messages in CHATS:
            for prompt in (False, True):
                text = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt
                )
                chats.append({"messages": messages, "add_generation_prompt": prompt, "text": text})
    head = {
        "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "tokenizer_correction": correction,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    body = ",\n".join(lines)
    chat = ",\n".join(json.dumps(c) for c in chats)
    (out / f"{name}.tokenizer.json").write_text(
        f'{{"meta":{json.dumps(head)},\n"cases":[\n{body}\n],\n"chats":[\n{chat}\n]}}\n',
        encoding="utf-8",
    )
    print(name, len(lines), "tokenizer cases,", len(chats), "chats;", len(fixed()), "fixed")


def save(path: Path, meta: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> None:
    np.savez_compressed(path, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]
    print(path.name, path.stat().st_size, "bytes")


# --- tiny models with random weights -------------------------------------------------------------


@dataclass
class Tiny:
    """A random model: its transformers config, GGUF metadata and the format of each weight."""

    arch: str
    config: Any
    seed: int
    tokens: int  # length of the recorded prompt
    formats: dict[str, Q] = field(default_factory=dict)  # GGUF name without "blk.N." -> format
    metadata: Callable[[gguf.GGUFWriter], None] = lambda _writer: None
    note: str = ""


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, by byte value."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in kept]
    table = {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(other)}
    return [table[b] for b in range(256)]


MERGES = ["t h", "th e", "Ġ the", "i n", "Ġ a", "e r", "in g", "o n"]
BYTE_VOCAB = 3 + 256 + len(MERGES)  # 267
SPM_VOCAB = 6 + 256 + 15  # 277


def write_byte_level(writer: gguf.GGUFWriter, pre: str) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet()]
    tokens += [m.replace(" ", "") for m in MERGES]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)


def write_sentencepiece(writer: gguf.GGUFWriter) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    types = [3] * 6
    tokens += [f"<0x{b:02X}>" for b in range(256)]
    types += [6] * 256
    tokens += ["▁t", "he", "▁the", "in", "er", "▁", "t", "h", "e", "i", "n", "r", "a", "o", "s"]
    types += [1] * 15
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * 262 + [-float(i) for i in range(15)])
    writer.add_token_types(types)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3_factors(dim: int) -> Float32:
    """[dim/2] divisors of the rotary frequencies (Llama 3.1's rope scaling), as converters write
    them into ``rope_freqs.weight``."""
    rope = LLAMA3_ROPE
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * float(rope["rope_theta"]) ** (i / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


ROLES = (
    *("token_embd", "attn_q", "attn_k", "attn_v", "attn_output"),
    *("ffn_gate", "ffn_up", "ffn_down", "output"),
)


def tiny_models() -> dict[str, Tiny]:
    def llama(**kw: Any) -> Any:
        kw = {"num_hidden_layers": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": False} | kw
        kw.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
        return transformers.LlamaConfig(
            vocab_size=BYTE_VOCAB, bos_token_id=1, eos_token_id=2, max_position_embeddings=256, **kw
        )

    def gemma(**kw: Any) -> Any:
        kw = {"head_dim": 16, "hidden_size": 32} | kw
        return transformers.Gemma3TextConfig(
            vocab_size=SPM_VOCAB,
            intermediate_size=40,
            num_hidden_layers=6,
            num_key_value_heads=1,
            query_pre_attn_scalar=kw["head_dim"],
            sliding_window=8,
            max_position_embeddings=256,
            rms_norm_eps=1e-6,
            attn_implementation="eager",
            **kw,
        )

    # transformers' Gemma3 reads attn_logit_softcapping but never applies it, nor does llama.cpp.
    def caps(writer: gguf.GGUFWriter) -> None:
        writer.add_final_logit_softcapping(5.0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    def formats(*kinds: Q) -> dict[str, Q]:
        """Formats of the weights, in the order of `ROLES`; without one the head is tied."""
        return dict(zip(ROLES, kinds, strict=False))

    k_quants = formats(Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.BF16, Q.Q4_K, Q.Q5_K, Q.Q6_K)
    small = formats(Q.IQ4_NL, Q.Q3_K, Q.IQ4_XS, Q.Q2_K, Q.MXFP4, Q.IQ4_NL, Q.Q3_K, Q.Q2_K, Q.MXFP4)
    legacy = formats(Q.F16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q5_1, Q.Q4_0, Q.Q4_1, Q.Q5_0)
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 16}
    wide |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "tiny-llama": Tiny(
            "llama",
            llama(
                hidden_size=48,
                intermediate_size=80,
                num_attention_heads=6,
                num_key_value_heads=2,
                head_dim=16,
                rope_parameters=LLAMA3_ROPE,
            ),
            seed=1,
            tokens=48,
            note="Llama-3 rope factors, grouped queries, untied head, heads x head_dim != hidden",
        ),
        "tiny-llama-odd": Tiny(
            "llama",
            llama(
                hidden_size=36,
                intermediate_size=44,
                num_attention_heads=9,
                num_key_value_heads=1,
                head_dim=4,
                rms_norm_eps=1e-6,
                tie_word_embeddings=True,
            ),
            seed=2,
            tokens=40,
            note="widths that no vector length divides, nine heads on one KV head, tied head",
        ),
        "tiny-llama-legacy": Tiny(
            "llama",
            llama(
                hidden_size=96,
                intermediate_size=160,
                num_attention_heads=3,
                num_key_value_heads=3,
                head_dim=32,
            ),
            seed=3,
            tokens=40,
            formats=legacy,
            note="Q4_0, Q4_1, Q5_0, Q5_1 and F16 weights, as many KV heads as heads",
        ),
        "tiny-llama-k": Tiny(
            "llama",
            llama(**wide, tie_word_embeddings=True),
            seed=4,
            tokens=40,
            formats=k_quants,
            note="Q4_K, Q5_K, Q6_K, Q8_0 and BF16 weights",
        ),
        "tiny-llama-small": Tiny(
            "llama",
            llama(**wide),
            seed=7,
            tokens=40,
            formats=small,
            note="Q2_K, Q3_K, IQ4_NL, IQ4_XS and MXFP4 weights",
        ),
        "tiny-gemma3": Tiny(
            "gemma3",
            gemma(num_attention_heads=3, hidden_size=36),
            seed=5,
            tokens=48,
            note="window of 8 on five layers of six, q/k norms, one KV head, head_dim apart",
        ),
        "tiny-gemma3-caps": Tiny(
            "gemma3",
            gemma(
                num_attention_heads=2,
                head_dim=24,
                final_logit_softcapping=5.0,
                rope_parameters={
                    "full_attention": {
                        "rope_type": "linear",
                        "rope_theta": 1_000_000.0,
                        "factor": 8.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                },
            ),
            seed=6,
            tokens=48,
            metadata=caps,
            note="soft-cap on the logits, linear rope scaling of the global layer",
        ),
    }


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(arch: str, name: str) -> tuple[str, str]:
    """(prefix, name) of a transformers weight in GGUF: ("blk.3.", "attn_q")."""
    stem = name.removesuffix(".weight")
    prefix = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        prefix = f"blk.{layer}."
    if stem == "post_attention_layernorm":
        return prefix, "post_attention_norm" if arch == "gemma3" else "ffn_norm"
    return prefix, NAMES[stem]


def permute(w: Float32, heads: int) -> Float32:
    """Rows of q and k as the llama converter orders them for interleaved rotation."""
    rows, columns = w.shape
    half = rows // heads // 2
    return w.reshape(heads, 2, half, columns).swapaxes(1, 2).reshape(rows, columns)


def unpermute(w: Float32, heads: int) -> Float32:
    rows, columns = w.shape
    half = rows // heads // 2
    return w.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def random_blocks(rng: np.random.Generator, shape: tuple[int, int], kind: Q) -> npt.NDArray[Any]:
    """Random blocks of a format with scales that give weights of about 1/sqrt(columns).

    The gguf package reads these formats but does not write them, so the bytes come first.
    """
    rows, columns = shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    spread = 1.0 / np.sqrt(columns)

    def scales(factor: float) -> npt.NDArray[np.uint8]:
        values = (spread * factor * rng.uniform(0.5, 1.5, data.shape[:2])).astype(np.float16)
        return values[..., None].view(np.uint8)

    if kind == Q.Q4_K:
        data[..., 0:2], data[..., 2:4] = scales(1 / 200), scales(7.5 / 200)
    elif kind == Q.Q5_K:
        data[..., 0:2], data[..., 2:4] = scales(1 / 400), scales(15.5 / 400)
    elif kind == Q.Q6_K:
        data[..., 192:208] = (
            rng.integers(-40, 41, data[..., 192:208].shape).astype(np.int8).view("u1")
        )
        data[..., 208:210] = scales(1 / 400)
    elif kind == Q.Q2_K:
        data[..., 80:82], data[..., 82:84] = scales(1 / 14), scales(1.5 / 14)
    elif kind == Q.Q3_K:
        data[..., 108:110] = scales(1 / 42)
    elif kind == Q.IQ4_XS:
        data[..., 0:2] = scales(1 / 1300)
    elif kind == Q.IQ4_NL:
        data[..., 0:2] = scales(1 / 70)
    else:
        raise ValueError(kind)
    return data.reshape(rows, -1)


def stored(rng: np.random.Generator, w: Float32, kind: Q) -> tuple[npt.NDArray[Any], Float32]:
    """(what the file holds, the float32 values it stands for)."""
    if kind == Q.F32:
        return w, w
    if kind == Q.F16:
        half = w.astype(np.float16)
        return half, half.astype(np.float32)
    if kind in (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS):
        data = random_blocks(rng, (w.shape[0], w.shape[1]), kind)
    else:
        data = gguf.quants.quantize(w, kind)
    return data, gguf.quants.dequantize(data, kind).astype(np.float32)


def build_tiny(name: str, tiny: Tiny, out: Path) -> Any:
    """Writes ``{name}.gguf`` and returns the transformers model with exactly its weights."""
    rng = np.random.default_rng(tiny.seed)
    config, arch = tiny.config, tiny.arch
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    writer = gguf.GGUFWriter(out / f"{name}.gguf", arch)
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    rope: dict[str, Any] = config.rope_parameters
    if arch == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(rope["rope_theta"])
        if rope["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(config.head_dim))
        write_byte_level(writer, "llama-bpe" if rope["rope_type"] == "llama3" else "smollm")
    else:
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
        write_sentencepiece(writer)
    tiny.metadata(writer)

    weights = model.state_dict()
    for key in sorted(weights):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        prefix, short = gguf_name(arch, key)
        shape = tuple(weights[key].shape)
        if len(shape) == 1:
            value = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            if short == "output_norm" and config.tie_word_embeddings:
                value *= 4  # to make up for the small embeddings below
            writer.add_tensor(f"{prefix}{short}.weight", value)
            value = value - 1 if arch == "gemma3" else value  # Gemma's norms multiply by 1 + w
        else:
            spread = 1.4 / np.sqrt(shape[1])
            if short == "token_embd":  # tied: small, or every token would predict itself
                spread = 0.5 / np.sqrt(shape[1]) if config.tie_word_embeddings else 1.0
            drawn = rng.normal(0, spread, shape).astype(np.float32)
            kind = tiny.formats.get(short, Q.F32)
            data, value = stored(rng, drawn, kind)
            raw = None if kind in (Q.F32, Q.F16) else kind
            writer.add_tensor(f"{prefix}{short}.weight", data, raw_dtype=raw)
            if arch == "llama" and short in ("attn_q", "attn_k"):
                heads = (
                    config.num_attention_heads if short == "attn_q" else config.num_key_value_heads
                )
                value = unpermute(value, heads)
                assert np.array_equal(unpermute(permute(value, heads), heads), value)
        weights[key].copy_(torch.from_numpy(np.ascontiguousarray(value)))
    model.load_state_dict(weights)
    model.tie_weights()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def record_tiny(name: str, tiny: Tiny, out: Path) -> None:
    """Writes ``{name}.gguf`` and ``{name}.npz`` (ids, logits of every position, a greedy run)."""
    model = build_tiny(name, tiny, out)
    rng = np.random.default_rng(100 + tiny.seed)
    ids = rng.integers(3, tiny.config.vocab_size, tiny.tokens).astype(np.int32)
    logits = logits_of(model, ids.tolist())
    tokens, margins = greedy(model, ids[:12].tolist(), GREEDY_TOKENS)
    meta = {
        "note": tiny.note,
        "gguf_sha256": hashlib.sha256((out / f"{name}.gguf").read_bytes()).hexdigest(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    arrays = {"ids": ids, "logits": logits, "greedy": tokens, "greedy_margins": margins}
    save(out / f"{name}.npz", meta, arrays)
    size = (out / f"{name}.gguf").stat().st_size
    print(f"{name}.gguf {size} bytes; logits sd {logits.std():.2f}, greedy {tokens[:6].tolist()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--models", type=Path, help="folder with smollm2.gguf and gemma3-270m.gguf")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--only", default="tiny,tokenizer,model", help="comma-separated parts")
    args = parser.parse_args()
    parts = args.only.split(",")
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    if "tiny" in parts:
        for name, tiny in tiny_models().items():
            record_tiny(name, tiny, args.out)
    for name in ("smollm2", "gemma3-270m"):
        if args.models is None:
            break
        if "tokenizer" in parts:
            record_tokenizer(name, args.models / f"{name}.gguf", args.out)
        if "model" in parts:
            record_model(name, args.models / f"{name}.gguf", args.out)


if __name__ == "__main__":
    main()
