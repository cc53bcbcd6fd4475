"""Writes small GGUF files, right or wrong on purpose, from the format's specification alone."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = (
    range(13)
)
SCALARS = dict(enumerate("BbHhIif?")) | {UINT64: "Q", INT64: "q", FLOAT64: "d"}
F32, F16, Q4_0, Q4_1, Q8_0, Q4_K = 0, 1, 2, 3, 8, 12
Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4 = 10, 11, 20, 23, 39
IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ3_S, IQ2_S, IQ1_M = 16, 17, 18, 19, 21, 22, 29
TQ1_0, TQ2_0 = 34, 35
BLOCKS = {
    F32: (1, 4),
    F16: (1, 2),
    Q4_0: (32, 18),
    Q4_1: (32, 20),
    Q8_0: (32, 34),
    Q4_K: (256, 144),
    Q2_K: (256, 84),
    Q3_K: (256, 110),
    IQ4_NL: (32, 18),
    IQ4_XS: (256, 136),
    MXFP4: (32, 17),
    IQ1_S: (256, 50),
    IQ1_M: (256, 56),
    IQ2_XXS: (256, 66),
    IQ2_XS: (256, 74),
    IQ2_S: (256, 82),
    IQ3_XXS: (256, 98),
    IQ3_S: (256, 110),
    TQ1_0: (256, 54),
    TQ2_0: (256, 66),
    30: (1, 2),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass
class Tensor:
    name: str | bytes
    shape: tuple[int, ...]  # outermost first
    type: int = F32
    data: bytes | None = None  # zeros
    offset: int | None = None  # into the data section; None: after the one before


@dataclass
class Gguf:
    """``metadata`` maps keys to (type, value), arrays to (ARRAY, element type, values)."""

    metadata: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    version: int = 3
    alignment: int = 32

    def set(self, key: str, *value: Any) -> Gguf:
        self.metadata[key] = value
        return self

    def drop(self, key: str) -> Gguf:
        del self.metadata[key]
        return self

    def tensor(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def header(self) -> bytes:
        """Everything before the tensor data, unpadded."""
        out = [struct.pack("<4sIQQ", b"GGUF", self.version, len(self.tensors), len(self.metadata))]
        for key, value in self.metadata.items():
            out.append(string(key) + struct.pack("<I", value[0]) + encode(*value))
        position = 0
        for tensor in self.tensors:
            offset = position if tensor.offset is None else tensor.offset
            out.append(string(tensor.name) + struct.pack("<I", len(tensor.shape)))
            out.append(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))
            out.append(struct.pack("<IQ", tensor.type, offset))
            position = self._padded(position + self._size(tensor))
        return b"".join(out)

    def build(self) -> bytes:
        header = self.header()
        out = header.ljust(self._padded(len(header)), b"\0")
        for tensor in self.tensors:
            data = bytes(self._size(tensor)) if tensor.data is None else tensor.data
            out += data.ljust(self._padded(len(data)), b"\0")
        return out

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path

    def _padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def _size(self, tensor: Tensor) -> int:
        elements, block = BLOCKS.get(tensor.type, (1, 1))
        return prod(tensor.shape) // elements * block


def split(file: Gguf, counts: list[int]) -> list[Gguf]:
    """The model in as many files as there are counts, each with so many tensors (the last with the
    rest), as gguf-split has them: the metadata in the first.
    """
    files, begin = [], 0
    for number, count in enumerate(counts):
        part = Gguf(dict(file.metadata) if number == 0 else {}, alignment=file.alignment)
        end = len(file.tensors) if number == len(counts) - 1 else begin + count
        part.tensors = file.tensors[begin:end]
        part.set("split.no", UINT16, number).set("split.count", UINT16, len(counts))
        files.append(part.set("split.tensors.count", INT32, len(file.tensors)))
        begin = end
    return files


def write_split(files: list[Gguf], folder: Path, stem: str = "model") -> list[Path]:
    return [
        file.write(folder / f"{stem}-{number:05}-of-{len(files):05}.gguf")
        for number, file in enumerate(files, 1)
    ]


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def encode(kind: int, *value: Any) -> bytes:
    if kind == STRING:
        return string(value[0])
    if kind != ARRAY:
        return struct.pack("<" + SCALARS[kind], value[0])
    element, values = value
    head = struct.pack("<IQ", element, len(values))
    if element == STRING:
        return head + b"".join(map(string, values))
    if element == ARRAY:
        return head + b"".join(encode(ARRAY, *inner) for inner in values)
    return head + b"".join(struct.pack("<" + SCALARS[element], v) for v in values)


def byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the bytes 0 to 255."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(spare)) for byte in range(256)]


def tiny_llama(
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 64,
    type: int = Q8_0,
    seed: int = 0,
) -> Gguf:
    """A Llama with a byte-level vocabulary: bytes, two merges, <s>, <|im_end|>, <tool>."""
    tokens = [*byte_characters(), "he", "llo", "hello", "<s>", "<|im_end|>", "<tool>"]
    types = [NORMAL] * 259 + [CONTROL, CONTROL, USER_DEFINED]
    merges = ["h e", "l l", "ll o", "he llo"]
    tokens.insert(256, "ll")
    types.insert(256, NORMAL)
    head_dim = hidden // heads
    file = Gguf()
    for key, value in (
        ("block_count", layers),
        ("context_length", 128),
        ("embedding_length", hidden),
        ("feed_forward_length", ffn),
        ("attention.head_count", heads),
        ("attention.head_count_kv", kv_heads),
        ("rope.dimension_count", head_dim),
        ("vocab_size", len(tokens)),
    ):
        file.set(f"llama.{key}", UINT32, value)
    file.set("general.architecture", STRING, "llama").set("general.name", STRING, "tiny")
    file.set("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5)
    file.set("llama.rope.freq_base", FLOAT32, 10000.0)
    file.set("tokenizer.ggml.model", STRING, "gpt2").set("tokenizer.ggml.pre", STRING, "gpt-2")
    file.set("tokenizer.ggml.tokens", ARRAY, STRING, tokens)
    file.set("tokenizer.ggml.token_type", ARRAY, INT32, types)
    file.set("tokenizer.ggml.merges", ARRAY, STRING, merges)
    file.set("tokenizer.ggml.bos_token_id", UINT32, tokens.index("<s>"))
    file.set("tokenizer.ggml.eos_token_id", UINT32, tokens.index("<|im_end|>"))
    file.set(
        "tokenizer.chat_template", STRING, "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    matrices = {
        "attn_q": (hidden, hidden),
        "attn_k": (kv_heads * head_dim, hidden),
        "attn_v": (kv_heads * head_dim, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    add_tensors(file, layers, len(tokens), hidden, matrices, ("attn_norm", "ffn_norm"), type, seed)
    return file


def dynamic_llama(seed: int = 0) -> Gguf:
    """A `tiny_llama` whose matrices are of different types, as "dynamic" files have them; their
    blocks are any bytes.
    """
    file = tiny_llama(2, hidden=256, heads=8, ffn=512, type=Q8_0)
    types = {
        "attn_q": (IQ2_XXS, TQ1_0), "attn_k": (IQ2_XS, TQ2_0), "attn_v": (Q8_0, IQ4_XS),
        "attn_output": (IQ3_S, IQ3_XXS), "ffn_gate": (IQ1_S, IQ1_M), "ffn_up": (IQ2_S, IQ1_S),
        "ffn_down": (IQ3_XXS, IQ2_S),
    }  # fmt: skip
    rng = np.random.default_rng(seed)
    for layer in range(2):
        for name, of_layer in types.items():
            tensor = file.tensor(f"blk.{layer}.{name}.weight")
            if of_layer[layer] != Q8_0:
                tensor.type = of_layer[layer]
                elements, size = BLOCKS[tensor.type]
                tensor.data = rng.bytes(prod(tensor.shape) // elements * size)
    return file


MIXTRAL_EXPERTS = 3


def tiny_mixtral(layers: int = 2, type: int = F32) -> Gguf:
    """Experts that are the rows of `tiny_llama`'s feed-forward matrices."""
    file = tiny_llama(layers, ffn=32 * MIXTRAL_EXPERTS, type=type)
    file.set("llama.expert_count", UINT32, MIXTRAL_EXPERTS)
    file.set("llama.expert_used_count", UINT32, 2).set("llama.feed_forward_length", UINT32, 32)
    for tensor in file.tensors:
        name = str(tensor.name)
        if name.endswith(("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")):
            tensor.name = name.replace(".weight", "_exps.weight")
            tensor.shape = (MIXTRAL_EXPERTS, 32, 32)
    rng = np.random.default_rng(3)
    for layer in range(layers):
        shape = (MIXTRAL_EXPERTS, 32)
        router = rng.normal(0, 0.2, shape).astype("<f4").tobytes()
        file.tensors.append(Tensor(f"blk.{layer}.ffn_gate_inp.weight", shape, F32, router))
    return file


def tiny_gemma3(layers: int = 6, hidden: int = 32, ffn: int = 64, seed: int = 0) -> Gguf:
    """A Gemma 3 with a SentencePiece vocabulary; heads of 16, two of them on one KV head."""
    pieces = ["▁", "a", "b", "c", "t", "h", "e", "th", "▁th", "▁the", "ab", "bc", "abc"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "\n", "  ", "   "]
    types = [CONTROL] * 5 + [USER_DEFINED] * 3
    tokens += [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    types += [BYTE] * 256 + [NORMAL] * len(pieces)
    file = Gguf()
    for key, value in (
        ("block_count", layers),
        ("context_length", 128),
        ("embedding_length", hidden),
        ("feed_forward_length", ffn),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("attention.sliding_window", 8),
    ):
        file.set(f"gemma3.{key}", UINT32, value)
    file.set("general.architecture", STRING, "gemma3")
    file.set("gemma3.attention.layer_norm_rms_epsilon", FLOAT32, 1e-6)
    file.set("gemma3.rope.freq_base", FLOAT32, 1e6)
    file.set("tokenizer.ggml.model", STRING, "llama").set("tokenizer.ggml.pre", STRING, "default")
    file.set("tokenizer.ggml.tokens", ARRAY, STRING, tokens)
    file.set("tokenizer.ggml.scores", ARRAY, FLOAT32, [-float(i) for i in range(len(tokens))])
    file.set("tokenizer.ggml.token_type", ARRAY, INT32, types)
    file.set("tokenizer.ggml.bos_token_id", UINT32, 2).set("tokenizer.ggml.eos_token_id", UINT32, 1)
    file.set("tokenizer.ggml.unknown_token_id", UINT32, 3)
    file.set("tokenizer.ggml.add_space_prefix", BOOL, False)
    matrices = {
        "attn_q": (32, hidden),
        "attn_k": (16, hidden),
        "attn_v": (16, hidden),
        "attn_output": (hidden, 32),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    add_tensors(file, layers, len(tokens), hidden, matrices, norms, F32, seed)
    for layer in range(layers):
        for name in ("attn_q_norm", "attn_k_norm"):
            file.tensors.append(Tensor(f"blk.{layer}.{name}.weight", (16,), F32, ones(16)))
    return file


def add_tensors(
    file: Gguf,
    layers: int,
    vocab: int,
    hidden: int,
    matrices: dict[str, tuple[int, int]],
    norms: tuple[str, ...],
    type: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)

    def random(shape: tuple[int, int]) -> bytes:
        values = rng.normal(0, shape[1] ** -0.5, shape).astype("<f4")
        if type == F32:
            return values.tobytes()
        if type == F16:
            return values.astype("<f2").tobytes()
        assert type == Q8_0
        blocks = values.reshape(-1, 32)
        scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype("<f2")
        quants = np.rint(blocks / scales.astype(np.float32)).astype(np.int8)
        return np.concatenate([scales.view(np.uint8), quants.view(np.uint8)], axis=1).tobytes()

    file.tensors.append(Tensor("token_embd.weight", (vocab, hidden), type, random((vocab, hidden))))
    file.tensors.append(Tensor("output_norm.weight", (hidden,), F32, ones(hidden)))
    for layer in range(layers):
        for name, shape in matrices.items():
            data = random(shape)
            file.tensors.append(Tensor(f"blk.{layer}.{name}.weight", shape, type, data))
        for name in norms:
            file.tensors.append(Tensor(f"blk.{layer}.{name}.weight", (hidden,), F32, ones(hidden)))


def ones(count: int) -> bytes:
    return np.ones(count, "<f4").tobytes()


def all_that_merges(whole: str) -> tuple[list[str], list[str]]:
    """Tokens of two characters and more, and merges, with which every part of ``whole`` is one."""
    tokens: list[str] = []
    merges: list[str] = []
    for length in range(2, len(whole) + 1):
        for start in range(len(whole) - length + 1):
            token = whole[start : start + length]
            if token not in tokens:
                tokens.append(token)
                merges += [f"{token[:cut]} {token[cut:]}" for cut in range(1, length)]
    return tokens, merges
