"""Records what llama.cpp computes for the GGUF files of the tiny random models.

Run by hand, with llama.cpp's headers and what logits.cpp was built to:

    g++ -std=c++17 -I SOURCE/include -I SOURCE/ggml/include logits.cpp \\
        -L LIBRARIES -lllama -lggml -lggml-base -o DRIVER
    python tests/oracle/record_llama_cpp.py --driver DRIVER [NAME ...]

llama_cpp.npz of families/NAME gets, of each case that it loads, the logits of the first tokens of
the recorded text, in the first of the recorded columns. Cases that it refuses are printed.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from oracle.tiny_folders import FAMILIES, LLAMA_CPP, gguf_file, gguf_labels, recorded

TOKENS = 64
COLUMNS = 3
# The converter writes Qwen3.5's sections where a config names none: 32 pairs, of which llama.cpp's
# graph makes an assertion. Positions of text are the same in every section.
SECTIONS = (
    np.array([11, 11, 10, 0], np.int32).tobytes(),
    np.array([1, 1, 0, 0], np.int32).tobytes(),
)
NAMES = sorted(path.parent.name for path in FAMILIES.glob("*/gguf.npz"))


def record(name: str, driver: Path) -> None:
    expected = recorded(name)
    kept = {}
    for label in gguf_labels(name):
        ids = expected.tokens(label)[:TOKENS]
        with tempfile.TemporaryDirectory() as temporary:
            file, out = Path(temporary) / "model.gguf", Path(temporary) / "logits"
            gguf_file(name, label, file)
            file.write_bytes(file.read_bytes().replace(*SECTIONS))
            command = [driver, file, out, *map(str, ids)]
            run = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if run.returncode:
                reasons = [
                    line for line in run.stderr.splitlines() if "rror" in line or "ASSERT" in line
                ]
                print(f"{name}: {label} refused: {(reasons or [run.stderr[-200:]])[0]}")
                continue
            logits = np.fromfile(out, np.float32).reshape(len(ids), -1)
        columns = expected.columns[: len(ids), :COLUMNS]
        kept[label] = np.take_along_axis(logits, columns, axis=1)
    if not kept:
        return
    path = FAMILIES / name / LLAMA_CPP
    np.savez_compressed(path, **kept)
    print(f"{name}: {len(kept)} cases, {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Record llama.cpp's logits.")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--driver", required=True, type=Path)
    args = parser.parse_args()
    for name in args.names:
        record(name, args.driver)


if __name__ == "__main__":
    main()
