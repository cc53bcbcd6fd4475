"""Whether other packages read what `octavo quantize` writes: every layout, with their numbers.

    python benchmarks/quantized_readers.py write FOLDER                    # with octavo's tests
    REFERENCE/bin/python benchmarks/quantized_readers.py read FOLDER      # with transformers 5

The first writes a tiny random model in every combination that the command accepts, and the logits
that Octavo's definition of the formats (numpy, fp32) gives for it. The second loads each with
transformers, on the CPU, and prints the largest difference of a logit in standard deviations, or
what it raised. It needs compressed-tensors, and for gptq and awq GPTQModel and optimum; GGUF files
need gguf. docs/quantize.md has the table.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import product
from pathlib import Path

import numpy as np

TOKENS = np.random.default_rng(11).integers(0, 90, (2, 32))
LOGITS = ".logits.npy"


def write(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from octavo.loader import load
    from tools.quantize.quantizing import logits_of, make, qwen3_folder, random_folder
    from tools.quantize.test_gguf_model import speaking

    folder.mkdir(parents=True)
    source = qwen3_folder(folder / "source")
    talking = speaking(random_folder("llama", folder / "talking"))
    for format, bits, group, symmetric, order, embedding in product(
        ("gptq", "awq", "compressed-tensors", "gguf"),
        (4, 8),
        (32, None),
        (True, False),
        ("static", "group"),
        (16, 8, 4, None),
    ):
        name = "-".join(
            [
                format,
                f"{bits}bit",
                f"g{group or 'all'}",
                "sym" if symmetric else "asym",
                order,
                f"ends{embedding or 'default'}",
            ]
        )
        out = folder / (name + ".gguf" * (format == "gguf"))
        try:
            make(
                talking if format == "gguf" else source,
                out,
                method="gptq",
                format=format,
                bits=bits,
                group=group,
                symmetric=symmetric,
                order=order,
                embedding=embedding,
            )
        except ValueError:
            continue  # refused
        np.save(folder / (out.name + LOGITS), logits_of(load(out), TOKENS))


def read(folder: Path) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for path in sorted(folder.glob(f"*{LOGITS}")):
        name, expected = path.name.removesuffix(LOGITS), np.load(path)
        place, how = folder / name, {}
        if name.endswith(".gguf"):
            place, how = folder, {"gguf_file": name}
        elif name.startswith("gptq"):
            how = {"quantization_config": transformers.GPTQConfig(bits=4, backend="torch")}
        elif name.startswith("awq"):
            how = {"quantization_config": transformers.AwqConfig(bits=4, backend="torch_awq")}
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.float32, **how
            )
            with torch.no_grad():
                got = model(torch.from_numpy(TOKENS)).logits.numpy()
            error = np.abs(got - expected).max() / expected.std()
            in_int8 = name.startswith("compressed-tensors-8bit-gall")  # activations, too
            said = f"{error:.1e}{'' if error < (0.5 if in_int8 else 2e-2) else '  ✗'}"
        except Exception as error:
            lines = str(error).splitlines() or [""]
            said = f"{type(error).__name__}: {lines[0][:120]}  ✗"
        print(f"{name:58} {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("write", "read"))
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    (write if asked.what == "write" else read)(asked.folder)


if __name__ == "__main__":
    main()
