"""Makes the model files that the comparison with peers needs and that nobody publishes.

    python benchmarks/make_models.py [--only NAME] [--source SMOLLM2.gguf] [--folder DIR] [--seed N]

- ``smollm2-q4_0``: SmolLM2 with its Q4_1 matrices dequantized and stored as Q4_0 by ggml's rounding
  rule, everything else (the Q8_0 embedding) as it was: what ``llama-quantize --allow-requantize
  --token-embedding-type q8_0`` makes of it, byte for byte in every tensor.
- ``llama-1b-q4_0``: the shape of a Llama 3.2 1B (2048 wide, 16 layers, 32 query and 8 KV heads of
  64, 8192 in the feed-forward) with random weights, every matrix Q4_0, and SmolLM2's tokenizer with
  its 49,152 tokens, tied: 1,073,809,408 parameters. It talks nonsense at full cost, so any engine
  can load, serve and time it. Weights are normal with a deviation of 1 / √inputs, those that write
  to the residual stream divided by √(2 · layers) besides, so that activations and logits stay of
  the order of one; each tensor has its own stream of random numbers, drawn from the seed.
- ``qwen3moe-1b-q4_0``: the same of the shape of a small Qwen3-MoE (1024 wide, 10 layers, 16 query
  and 4 KV heads of 128, 64 experts of 512 of which each token takes 8): 1,110,093,824 parameters,
  of which a token's step reads 229 million.

The tokenizer comes from the pulled SmolLM2 (or ``--source``); files go to the benchmarks' cache,
where ``peers.py`` finds them. Layout of blocks and file: ggml repository, ggml-common.h and
docs/gguf.md.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from _models import made
from _script import as_script

F32, Q4_0 = 0, 2  # ggml's type numbers, and its file type for "mostly Q4_0", which is 2 as well
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9  # GGUF's value types
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
ALIGNMENT = 32
BLOCK = 32

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Tensor = tuple[str, tuple[int, ...], int, Bytes]  # name, shape (outermost first), type, data


# --- blocks of numbers ----------------------------------------------------------------------------


def to_q4_0(values: Floats) -> Bytes:
    """Blocks of 32 as an fp16 scale and 16 bytes: w = d · (q − 8), d = (value of most size) / −8.

    The rounding rule of ggml's quantize_row_q4_0_ref: q = min(15, ⌊w / d + 8.5⌋), in float32 with
    the scale before it is rounded to fp16.
    """
    blocks = values.reshape(-1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = largest / np.float32(-8)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    quants = np.minimum(15, (blocks * inverse + np.float32(8.5)).astype(np.int8)).view(np.uint8)
    out = np.empty((len(blocks), 18), np.uint8)
    out[:, :2] = scale.astype("<f2").view(np.uint8)
    out[:, 2:] = quants[:, :16] | quants[:, 16:] << 4
    return out.reshape(-1)


def from_q4_1(data: Bytes) -> Floats:
    """Blocks of an fp16 scale d, an fp16 minimum m and 16 bytes: w = d · q + m."""
    blocks = data.reshape(-1, 20)
    d, m = (blocks[:, i : i + 2].copy().view("<f2").astype(np.float32) for i in (0, 2))
    quants = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (quants * d + m).reshape(-1)


# --- GGUF files -----------------------------------------------------------------------------------


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def metadata(path: Path) -> dict[str, bytes]:
    """Key → (type, value) as the bytes they are in the file, so that they can be copied unread."""
    data = path.read_bytes()
    position = 24

    def u64() -> int:
        nonlocal position
        position += 8
        return int.from_bytes(data[position - 8 : position], "little")

    def u32() -> int:
        nonlocal position
        position += 4
        return int.from_bytes(data[position - 4 : position], "little")

    def skip(kind: int) -> None:
        nonlocal position
        if kind == STRING:
            length = u64()
            position += length
        elif kind == ARRAY:
            inner = u32()
            for _ in range(u64()):
                skip(inner)
        else:
            position += SCALAR_BYTES[kind]

    found: dict[str, bytes] = {}
    for _ in range(int.from_bytes(data[16:24], "little")):
        length = u64()
        key = data[position : position + length].decode()
        position += length
        begin = position
        skip(u32())
        found[key] = data[begin:position]
    return found


def write(path: Path, metadata: dict[str, bytes], tensors: Iterable[Tensor]) -> None:
    """A GGUF file of version 3. Tensors are drawn once for their data, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = path.with_suffix(".body")
    infos = []
    offset = 0
    with body.open("wb") as out:
        for name, shape, kind, data in tensors:
            infos.append(string(name) + struct.pack("<I", len(shape)))
            infos.append(struct.pack(f"<{len(shape)}QIQ", *reversed(shape), kind, offset))
            raw = data.tobytes()
            raw += bytes(-len(raw) % ALIGNMENT)
            out.write(raw)
            offset += len(raw)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(infos) // 2, len(metadata))
    head += b"".join(string(key) + value for key, value in metadata.items()) + b"".join(infos)
    whole = path.with_suffix(".part")
    with whole.open("wb") as out, body.open("rb") as rest:
        out.write(head + bytes(-len(head) % ALIGNMENT))
        while chunk := rest.read(1 << 24):
            out.write(chunk)
    body.unlink()
    whole.rename(path)  # so that an interrupted run leaves no file that looks finished


# --- the models -------------------------------------------------------------------------------


def smollm2_q4_0(source: Path, seed: int) -> tuple[dict[str, bytes], Iterator[Tensor]]:
    from octavo.loader.base import WeightFormat
    from octavo.loader.gguf import GgufFile

    file = GgufFile(source)

    def tensors() -> Iterator[Tensor]:
        for name in file.tensors:
            weight = file.weight(name)
            if weight.format is WeightFormat.Q4_1:
                yield name, weight.shape, Q4_0, to_q4_0(from_q4_1(weight.data))
            else:
                yield name, weight.shape, int(weight.format), weight.data

    keys = metadata(source)
    keys["general.file_type"] = struct.pack("<II", UINT32, Q4_0)
    return keys, tensors()


@dataclass(frozen=True)
class Shape:
    """The sizes of a random model; ``ffn`` is an expert's width where there are any."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    experts: int = 0
    chosen: int = 0


LLAMA_1B = Shape("Llama 1B shape, random weights", "llama", 16, 2048, 32, 8, 64, 8192)
QWEN3_MOE_1B = Shape(
    "Qwen3-MoE 1B shape, random weights", "qwen3moe", 10, 1024, 16, 4, 128, 512, 64, 8
)


def random_q4_0(shape: Shape, source: Path, seed: int) -> tuple[dict[str, bytes], Iterator[Tensor]]:
    tokenizer = {k: v for k, v in metadata(source).items() if k.startswith("tokenizer.")}
    vocab = int.from_bytes(tokenizer["tokenizer.ggml.tokens"][8:16], "little")
    arch, hidden, ffn = shape.architecture, shape.hidden, shape.ffn
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def keys() -> Iterator[tuple[str, bytes]]:
        yield "general.architecture", struct.pack("<I", STRING) + string(arch)
        yield "general.name", struct.pack("<I", STRING) + string(shape.name)
        numbers = {
            "general.file_type": Q4_0,
            "general.quantization_version": 2,
            f"{arch}.block_count": shape.layers,
            f"{arch}.context_length": 8192,
            f"{arch}.embedding_length": hidden,
            f"{arch}.feed_forward_length": ffn,
            f"{arch}.attention.head_count": shape.heads,
            f"{arch}.attention.head_count_kv": shape.kv_heads,
            f"{arch}.rope.dimension_count": shape.head_dim,
            f"{arch}.vocab_size": vocab,
        }
        if shape.experts:
            numbers |= {
                f"{arch}.attention.key_length": shape.head_dim,
                f"{arch}.attention.value_length": shape.head_dim,
                f"{arch}.expert_count": shape.experts,
                f"{arch}.expert_used_count": shape.chosen,
                f"{arch}.expert_feed_forward_length": ffn,
            }
        for key, value in numbers.items():
            yield key, struct.pack("<II", UINT32, value)
        yield f"{arch}.rope.freq_base", struct.pack("<If", FLOAT32, 500000.0)
        yield f"{arch}.attention.layer_norm_rms_epsilon", struct.pack("<If", FLOAT32, 1e-5)
        yield from tokenizer.items()

    def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "token_embd", (vocab, hidden)
        yield "output_norm", (hidden,)
        for layer in range(shape.layers):
            yield f"blk.{layer}.attn_norm", (hidden,)
            yield f"blk.{layer}.attn_q", (q, hidden)
            yield f"blk.{layer}.attn_k", (kv, hidden)
            yield f"blk.{layer}.attn_v", (kv, hidden)
            yield f"blk.{layer}.attn_output", (hidden, q)
            yield f"blk.{layer}.ffn_norm", (hidden,)
            if not shape.experts:
                yield f"blk.{layer}.ffn_gate", (ffn, hidden)
                yield f"blk.{layer}.ffn_up", (ffn, hidden)
                yield f"blk.{layer}.ffn_down", (hidden, ffn)
                continue
            yield f"blk.{layer}.attn_q_norm", (shape.head_dim,)
            yield f"blk.{layer}.attn_k_norm", (shape.head_dim,)
            yield f"blk.{layer}.ffn_gate_inp", (shape.experts, hidden)
            yield f"blk.{layer}.ffn_gate_exps", (shape.experts, ffn, hidden)
            yield f"blk.{layer}.ffn_up_exps", (shape.experts, ffn, hidden)
            yield f"blk.{layer}.ffn_down_exps", (shape.experts, hidden, ffn)

    def tensors() -> Iterator[Tensor]:
        for index, (name, size) in enumerate(shapes()):
            if len(size) == 1:
                yield f"{name}.weight", size, F32, np.ones(size, np.float32).view(np.uint8)
                continue
            to_residual = name.endswith(("attn_output", "ffn_down", "ffn_down_exps"))
            deviation = (size[-1] * (2 * shape.layers if to_residual else 1)) ** -0.5
            random = np.random.Generator(np.random.Philox(key=[seed, index]))
            values = random.standard_normal(prod(size), np.float32) * np.float32(deviation)
            if name.endswith("ffn_gate_inp"):
                yield f"{name}.weight", size, F32, values.view(np.uint8)
            else:
                yield f"{name}.weight", size, Q4_0, to_q4_0(values)

    return dict(keys()), tensors()


MAKERS = {
    "smollm2-q4_0": smollm2_q4_0,
    "llama-1b-q4_0": partial(random_q4_0, LLAMA_1B),
    "qwen3moe-1b-q4_0": partial(random_q4_0, QWEN3_MOE_1B),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=list(MAKERS), action="append")
    parser.add_argument("--source", type=Path, help="SmolLM2's GGUF (default: the pulled one)")
    parser.add_argument("--folder", type=Path, help="where files go (default: the cache)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    source = args.source
    if source is None:
        from octavo.loader import pull

        source = pull.cached("smollm2")
        if source is None:
            print("SmolLM2 is needed: run `octavo pull smollm2`, or give its file as --source")
            return 1
    for name in args.only or MAKERS:
        path = args.folder / f"{name}.gguf" if args.folder else made(name)
        write(path, *MAKERS[name](source, args.seed))
        print(f"{name}: {path}, {path.stat().st_size / 1e6:.1f} MB", flush=True)
    return 0


if __name__ == "__main__":
    as_script(main)
