"""Records what `transformers` computes for tiny random models of every family.

Run by hand, in an environment with torch, transformers and ml_dtypes:

    python tests/oracle/record_families.py [--llama-cpp SOURCE] [NAME ...]

Each model goes to families/NAME: the folder that `save_pretrained` writes, in float32, and
logits.npz. Its bfloat16 twin is the same numbers rounded, which the tests do for themselves (and
this script checks that `save_pretrained` writes the very bytes). Numbers come from `transformers`
in float32; keys and values are rounded to float16 on their way into attention, because Octavo
keeps them so.

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.numpy import save

HERE = Path(__file__).resolve().parent / "families"

VOCAB = 96
PROMPT = 40  # tokens before the greedy ones
STEPS = 64
ROWS = 16  # of the prompt, whose logits are kept: the last ones
STRIDE = 3  # of a variant's rows one in three is kept


@dataclass
class Variant:
    """The same weights under another config.json."""

    changes: dict[str, Any] = field(default_factory=dict)
    gguf: bool = False  # the converter has words for it
    tokens: int = PROMPT + STEPS  # of the sequence, and the longest one that the engine accepts


@dataclass
class Tiny:
    config: Any
    variants: dict[str, Variant] = field(default_factory=dict)
    gguf: bool = True  # the converter has words for the base


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
                "llama3": Variant({"rope_parameters": llama3}, gguf=True),
                "linear": Variant({"rope_parameters": linear}, gguf=True),
                "yarn": Variant({"rope_parameters": yarn}, gguf=True),
                "yarn-mscale": Variant(
                    {
                        "rope_parameters": scaled
                        | {"rope_type": "yarn", "mscale": 1.2, "mscale_all_dim": 0.7}
                        | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}
                    }
                ),
                # For a sequence of exactly the longest length, where the rules agree; and written
                # as files of before transformers 5 have it.
                "dynamic": Variant(
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
            {"no-window": Variant({"sliding_window": None}, gguf=True)},
        ),
        "qwen2": Tiny(
            transformers.Qwen2Config(**sizes),
            {
                "window": Variant(
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
            {"scale": Variant({"query_pre_attn_scalar": 24})},
        ),
        "gemma3": Tiny(
            transformers.Gemma3TextConfig(
                **gemma | {"num_hidden_layers": 6}, query_pre_attn_scalar=16
            ),
            {
                # As files of before transformers 5 have it: two bases, and scaling of one.
                "linear": Variant(
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
        ),
        "phi3": Tiny(
            transformers.Phi3Config(
                **sizes | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
            ),
            {
                "window": Variant({"sliding_window": 17}),
                "longrope": Variant(longrope, gguf=True),
                "longrope-short": Variant(longrope, tokens=64),
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
                "one": Variant({"num_experts_per_tok": 1}, gguf=True),
                "all": Variant({"num_experts_per_tok": 4, "sliding_window": 20}),
            },
        ),
        "qwen3moe": Tiny(
            transformers.Qwen3MoeConfig(**sparse, num_experts_per_tok=3, norm_topk_prob=True),
            {
                # Under the key that files of before transformers 5 have it in.
                "shares": Variant({"norm_topk_prob": False, "num_experts": 6})
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
    }


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep activations near one, and norms and biases that do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if weight.dim() >= 2:  # three, where all experts' matrices are in one
                weight.copy_(values * 1.5 / weight.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                weight.copy_(values * 0.3)
            else:
                weight.copy_(weight + values * 0.2)  # around one, or zero in Gemma


@contextmanager
def half_precision_cache(model: Any) -> Iterator[None]:
    """Keys (rotated) and values rounded to float16, as a cache of that type has them."""
    module = sys.modules[type(model).__module__]
    attention = module.eager_attention_forward  # type: ignore[attr-defined]

    def rounded(layer: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return attention(layer, query, key.half().float(), value.half().float(), *args, **kwargs)

    module.eager_attention_forward = rounded  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.eager_attention_forward = attention  # type: ignore[attr-defined]


def logits_of(folder: Path, ids: list[int]) -> npt.NDArray[np.float32]:
    """[len(ids), vocab], all positions in one pass, computed in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with half_precision_cache(model), torch.inference_mode():
        return np.asarray(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0])


def greedy(folder: Path, ids: list[int], steps: int) -> list[int]:
    """``ids`` and what the model itself makes follow, with its own cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = model.generate(
        torch.tensor([ids]),
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        no_repeat_ngram_size=2,  # random models soon repeat one token
    )
    return [int(token) for token in out[0]]


def record(name: str, tiny: Tiny, seed: int) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model = transformers.AutoModelForCausalLM.from_config(tiny.config)
    randomize(model, seed)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    prompt = np.random.default_rng(seed).integers(2, VOCAB, PROMPT).tolist()
    ids = greedy(folder, prompt, STEPS)
    first = PROMPT - ROWS
    arrays = {"ids": np.array(ids, np.int32), "float32": logits_of(folder, ids)[first:]}
    with tempfile.TemporaryDirectory() as temporary:
        twin = Path(temporary) / "bf16"
        model.to(torch.bfloat16).save_pretrained(twin)
        assert (twin / "model.safetensors").read_bytes() == rounded(folder / "model.safetensors")
        arrays["bfloat16"] = logits_of(twin, ids)[first:]
        config = json.loads((folder / "config.json").read_text())
        for label, variant in tiny.variants.items():
            other = Path(temporary) / label
            shutil.copytree(folder, other)
            (other / "config.json").write_text(json.dumps(config | variant.changes))
            arrays[f"{label}.float32"] = logits_of(other, ids[: variant.tokens])[first::STRIDE]
    variants = {
        label: {"changes": variant.changes, "tokens": variant.tokens}
        for label, variant in tiny.variants.items()
    }
    meta = {
        "prompt": PROMPT,
        "first_row": first,
        "variant_stride": STRIDE,
        "variants": variants,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    np.savez_compressed(folder / "logits.npz", meta=np.array(json.dumps(meta)), **arrays)
    size = sum(file.stat().st_size for file in folder.iterdir())
    spread = {key: round(float(value.std()), 2) for key, value in arrays.items() if key != "ids"}
    print(f"{name}: {size:,} bytes, {len(set(ids[PROMPT:]))} tokens of {STEPS}, spread {spread}")


def rounded(path: Path) -> bytes:
    """A safetensors file with every float32 rounded to bfloat16."""
    from safetensors.numpy import load_file

    values = {name: x.astype(ml_dtypes.bfloat16) for name, x in load_file(path).items()}
    return save(values, {"format": "pt"})


# --- GGUF ----------------------------------------------------------------------------------------


def convert(folder: Path, target: Path) -> None:
    """llama.cpp's own conversion, with a vocabulary of single characters."""
    import gguf
    from conversion import get_model_class  # of llama.cpp
    from conversion.base import ModelBase

    def set_vocab(self: Any) -> None:
        writer = self.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*(chr(0x21 + index) for index in range(VOCAB - 1)), '!"'])
        writer.add_token_types([1] * VOCAB)
        writer.add_token_merges(['! "'])

    # One of the converters counts the tokens in it, to cut the embedding.
    vocab = {"model": {"vocab": list(range(VOCAB))}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(vocab))
    hparams = ModelBase.load_hparams(folder, False)
    converter = get_model_class(hparams["architectures"][0])
    converter.set_vocab = set_vocab
    f32 = gguf.LlamaFileType.ALL_F32
    converter(folder, f32, target, hparams=hparams, model_name=folder.name).write()


def recipe(path: Path, weights: dict[str, npt.NDArray[np.float32]], heads: set[int]) -> Any:
    """(header, tensors): of each tensor its offset and (stored name, permuted heads, shift), the
    names of those that are stacked in it, or its numbers where no stored tensor has them."""
    import gguf

    tensors: list[Any] = []
    data = path.read_bytes()
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        content = data[tensor.data_offset : tensor.data_offset + tensor.n_bytes]
        made = [
            (name, group, shift)
            for name, values in weights.items()
            for group in ({0} | heads if name.endswith(("q_proj.weight", "k_proj.weight",
                                                        "q_proj.bias", "k_proj.bias")) else {0})
            for shift in (0, 1)
            if values.nbytes == len(content)
            and transformed(values, group, shift).tobytes() == content
        ]  # fmt: skip
        numbers = [] if made else np.frombuffer(content, np.float32).tolist()
        stacked = []
        if len(tensor.shape) == 3:
            size = len(content) // int(tensor.shape[2])
            parts = [content[at : at + size] for at in range(0, len(content), size)]
            stacked = [n for part in parts for n, w in weights.items() if w.tobytes() == part]
            assert len(stacked) == len(parts), tensor.name
        tensors.append([int(tensor.data_offset), *(made[0] if made else (stacked or numbers,))])
    return data[: reader.data_offset], tensors


def transformed(values: npt.NDArray[np.float32], heads: int, shift: int) -> npt.NDArray[np.float32]:
    if heads:
        halves = values.reshape(heads, 2, -1, *values.shape[1:])
        values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
    return values + np.float32(shift) if shift else values


def record_gguf(name: str, tiny: Tiny) -> None:
    from safetensors.numpy import load_file

    folder = HERE / name
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    heads = {config["num_attention_heads"], config["num_key_value_heads"]}
    headers, recipes = {}, {}
    changes = {"base": {}} | {n: v.changes for n, v in tiny.variants.items() if v.gguf}
    if not tiny.gguf:
        del changes["base"]
    if config.get("sliding_window") and config["model_type"] == "mistral":
        del changes["base"]  # the converter drops the window
    for label, change in changes.items():
        with tempfile.TemporaryDirectory() as temporary:
            other = Path(temporary) / name
            shutil.copytree(folder, other)
            (other / "config.json").write_text(json.dumps(config | change))
            convert(other, Path(temporary) / "model.gguf")
            header, recipes[label] = recipe(Path(temporary) / "model.gguf", weights, heads)
            headers[label] = np.frombuffer(header, np.uint8)
    if not headers:
        return
    np.savez_compressed(folder / "gguf.npz", meta=np.array(json.dumps(recipes)), **headers)
    own = [t[1] for tensors in recipes.values() for t in tensors if len(t) == 2]
    literal = [len(values) for values in own if not isinstance(values[0], str)]
    size = (folder / "gguf.npz").stat().st_size
    print(f"{name}/gguf.npz: {size:,} bytes for {list(headers)}, {literal} numbers of its own")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--llama-cpp", type=Path, help="its source, with the folder conversion/")
    parser.add_argument("--only-gguf", action="store_true", help="keep the folders as they are")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    if args.llama_cpp:
        sys.path[:0] = [str(args.llama_cpp), str(args.llama_cpp / "gguf-py")]
    for seed, (name, tiny) in enumerate(models().items()):
        if args.names and name not in args.names:
            continue
        if not args.only_gguf:
            record(name, tiny, seed)
        if args.llama_cpp:
            record_gguf(name, tiny)


if __name__ == "__main__":
    main()
