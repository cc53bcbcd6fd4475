"""Mixes of K-quants beside llama.cpp's: the same source, calibration text and bytes.

    python benchmarks/k_quants.py --llama-cpp BUILD/bin [--model NAME=PATH] [--mix NAME]

BUILD/bin has llama.cpp's llama-quantize and llama-imatrix. The source is the model in fp32, made by
llama-quantize, so that both sides round the same numbers and no matrix is small already. Both
collect an importance matrix on the same pieces of a text (`octavo quantize`'s own) and quantize by
their own; Octavo by llama.cpp's, too, which shows what the search for scales does alone. What a
file's bytes stand for is computed in fp32 by numpy, without kernels, and compared with the source
on a text that nobody was calibrated on (`octavo fidelity`'s). What exists in build/k_quants
(``--cache``) is kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from _models import models
from _script import as_script

CACHE = Path(__file__).resolve().parent.parent / "build" / "k_quants"
MIXES = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")
LENGTH = 512  # tokens of a piece of the calibration text
WINDOW = 1024  # of the text that is measured on


def timed(done: Path, make: Callable[[Path], object]) -> None:
    """Makes a file, and notes beside it the seconds that took; not if it is there."""
    if not done.exists():
        began = time.monotonic()
        make(done)
        seconds = time.monotonic() - began
        done.with_suffix(".seconds").write_text(f"{seconds:.1f}", "utf-8")
        print(f"{done.name}: {seconds:.0f} s", flush=True)


def run(program: Path, *arguments: object) -> None:
    subprocess.run(
        [str(program), *map(str, arguments)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def make(path: Path, folder: Path, build: Path, mixes: list[str], pieces: int) -> None:
    """The source, importance matrices and files of both."""
    from octavo import loader
    from octavo.tools.quantize.calibrate import default_text, samples
    from octavo.tools.quantize.imatrix import collect, importance_of, read_imatrix, write_imatrix
    from octavo.tools.quantize.layouts import Format
    from octavo.tools.quantize.mixes import Mix
    from octavo.tools.quantize.quantize_checkpoint import quantize
    from octavo.tools.quantize.quantizer import Method
    from octavo.tools.quantize.scope import mixed

    source = folder / "source.gguf"
    bin_quantize, bin_imatrix = build / "llama-quantize", build / "llama-imatrix"
    timed(source, lambda out: run(bin_quantize, "--allow-requantize", path, out, "F32"))
    checkpoint = loader.load(source)
    text = folder / "calibration.txt"
    ids = checkpoint.tokenizer.encode(default_text(), add_special_tokens=False)
    text.write_text(checkpoint.tokenizer.decode(ids[: pieces * LENGTH]), "utf-8")
    matrices = {side: folder / f"{side}.imatrix.gguf" for side in ("octavo", "llama")}
    options = ("-m", source, "-f", text, "-c", LENGTH, "--no-ppl", "-o")
    timed(matrices["llama"], lambda out: run(bin_imatrix, *options, out))

    def collected(out: Path) -> None:
        looked = samples(checkpoint.tokenizer, text.read_text("utf-8"), pieces, LENGTH)
        write_imatrix(out, collect(checkpoint, looked, text.name))

    timed(matrices["octavo"], collected)
    for mix in mixes:

        def theirs(out: Path, mix: str = mix) -> None:
            run(bin_quantize, "--imatrix", matrices["llama"], source, out, mix)

        timed(folder / f"{mix}-llama.gguf", theirs)
        for side, matrix in matrices.items():
            recipe = mixed(checkpoint, Method.IMATRIX, Mix[mix])
            roles = [role for role, w in checkpoint.weights.items() if recipe.of(role, w.shape)]
            found, _ = importance_of(read_imatrix(matrix), checkpoint, roles, str(matrix))
            recipe = replace(recipe, importance=found)

            def quantized(out: Path, recipe: Any = recipe) -> None:
                quantize(checkpoint, recipe, Format.GGUF, out, None, lambda report: None)

            timed(folder / f"{mix}-octavo-by-{side}.gguf", quantized)


def measure(folder: Path, mixes: list[str], tokens: int | None) -> list[dict[str, Any]]:
    from octavo import loader
    from octavo.tools.quantize.distance import Fidelity
    from octavo.tools.quantize.fidelity import Exact, compare, default_text, windows

    source = loader.load(folder / "source.gguf")
    text = windows(source.tokenizer, default_text(), WINDOW, "the text", tokens)
    reference = Exact(source, WINDOW)
    found = []
    for mix in mixes:
        for side in ("llama", "octavo-by-octavo", "octavo-by-llama"):
            path = folder / f"{mix}-{side}.gguf"
            checkpoint = loader.load(path)
            loss = Fidelity.of(compare(Exact(checkpoint, WINDOW), reference, text, threads=2))
            weights = checkpoint.weights.values()
            found.append(
                {
                    "mix": mix,
                    "by": side,
                    "bytes": sum(weight.stored.nbytes for weight in weights),
                    "kl_mean_nats": loss.kl_mean,
                    "kl_standard_error": loss.kl_standard_error,
                    "kl_p99_nats": loss.kl_p99,
                    "top1_agreement": loss.top1_agreement,
                    "positions": loss.positions,
                    "seconds": float(path.with_suffix(".seconds").read_text("utf-8")),
                }
            )
            print(f"{mix} {side}: {loss.kl_mean:.5f}", flush=True)
    return found


def show(name: str, results: list[dict[str, Any]]) -> None:
    print(f"\n{name:8}{'file by':20}{'bytes':>12}{'mean KL':>10}{'± s.e.':>9}{'p99':>8}"
          f"{'top-1 %':>9}{'s':>6}{'of llama.cpp':>14}")  # fmt: skip
    for r in results:
        theirs = next(each for each in results if each["mix"] == r["mix"])
        if r["bytes"] != theirs["bytes"]:
            raise SystemExit(f"{r['mix']}: {r['by']} has {r['bytes']} bytes, not {theirs['bytes']}")
        print(
            f"{r['mix']:8}{r['by']:20}{r['bytes']:>12,}{r['kl_mean_nats']:10.5f}"
            f"{r['kl_standard_error']:9.5f}{r['kl_p99_nats']:8.3f}{100 * r['top1_agreement']:9.2f}"
            f"{r['seconds']:6.0f}{r['kl_mean_nats'] / theirs['kl_mean_nats']:14.3f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--llama-cpp", type=Path, required=True, help="folder of its programs")
    parser.add_argument("--model", action="append", help="NAME=PATH of a GGUF file")
    parser.add_argument("--mix", action="append", help=f"of {', '.join(MIXES)} (all)")
    parser.add_argument("--pieces", type=int, default=32, help="of the text, of 512 tokens")
    parser.add_argument("--tokens", type=int, help="of the text that is measured on (all)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for what is made")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    mixes = args.mix or list(MIXES)
    everything = {}
    for name, path in models(args.model).items():
        if args.model is None and name != "smollm2":
            continue  # the others' vocabularies take long to compare
        folder = args.cache / name
        folder.mkdir(parents=True, exist_ok=True)
        make(path, folder, args.llama_cpp, mixes, args.pieces)
        everything[name] = measure(folder, mixes, args.tokens)
        show(name, everything[name])
    if args.json:
        Path(args.json).write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    as_script(main)
