"""Records what llama.cpp's layers for multi-token prediction say, of tiny random models.

Run by hand, in the environment of record_families.py, with llama.cpp's source and what
draft_mtp.cpp was built to:

    g++ -std=c++17 -I SOURCE/include -I SOURCE/src -I SOURCE/ggml/include draft_mtp.cpp \\
        -L LIBRARIES -lllama -lggml -lggml-base -o DRIVER
    python tests/oracle/record_mtp.py --llama-cpp SOURCE --driver DRIVER [NAME ...]

A model is the base of families/NAME with one such layer (mtp_folders.py). llama.cpp's converter
makes a GGUF file of it, of which the header is kept as in families/, and its graph computes the
layer on rows and keys in float32.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import transformers

from oracle.mtp_folders import MTP, NAMES, mtp_folder, mtp_weights
from oracle.record_families import VOCAB, convert, recipe
from oracle.tiny_folders import weights

TOKENS = 40
DRAFTS = 4


def record(name: str, driver: Path) -> None:
    ids = np.random.default_rng(NAMES.index(name)).integers(2, VOCAB, TOKENS).astype(np.int32)
    with tempfile.TemporaryDirectory() as temporary:
        source, target, out = (Path(temporary) / part for part in (name, "model.gguf", "logits"))
        convert(mtp_folder(name, source), target, mtp=True)
        config = transformers.AutoConfig.from_pretrained(source)
        heads = {config.num_attention_heads, config.num_key_value_heads}
        header, tensors = recipe(target, weights(name) | mtp_weights(name), heads)
        subprocess.run(
            [driver, target, str(DRAFTS), out, *map(str, ids.tolist())],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        logits = np.fromfile(out, np.float32).reshape(TOKENS + DRAFTS - 1, VOCAB)
    path = MTP / f"{name}.npz"
    np.savez_compressed(
        path,
        ids=ids,
        logits=logits,
        header=np.frombuffer(header, np.uint8),
        meta=np.array(json.dumps(tensors)),
    )
    print(f"{name}: {path.stat().st_size:,} bytes, deviation {logits.std():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Record llama.cpp's multi-token prediction.")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--llama-cpp", required=True, type=Path, metavar="SOURCE")
    parser.add_argument("--driver", required=True, type=Path)
    args = parser.parse_args()
    sys.path[:0] = [str(args.llama_cpp), str(args.llama_cpp / "gguf-py")]
    MTP.mkdir(exist_ok=True)
    for name in args.names:
        record(name, args.driver)


if __name__ == "__main__":
    main()
