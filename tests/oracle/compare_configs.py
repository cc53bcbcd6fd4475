"""Compares Octavo with transformers on drawn config.json files: the logits at every position.

Run by hand, in an environment with torch, transformers and what Octavo needs:

    python tests/oracle/compare_configs.py [--seed 0] [--count 400] [--left-out] [--record]

Each drawn file gets random weights of the shapes that transformers gives it, and a prompt longer
than every window. transformers computes in float32. Octavo's Program runs in float32 on its plain
executor, for as many tokens as the engine admits by default, or for the prompt if that is longer.
Each must agree within `LIMIT` of the logits' standard deviation, or be refused; the reasons are
printed. Files that transformers refuses are counted apart: Octavo must not crash on them.

With ``--left-out`` each key of a full config of each family is left out in turn instead. With
``--record`` what transformers makes of 60 drawn files and of some with a key left out goes to
`configs.json.gz` and `configs.npz`, for tests/oracle/test_configs.py.
"""

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import numpy as np
import numpy.typing as npt
import torch
import transformers

from octavo.executor.reference import evaluate
from octavo.loader import load
from octavo.loader.base import CheckpointError
from octavo.loader.dequantize import dequantize
from octavo.loader.hf_config import model_config
from octavo.loader.hf_folder import HfFolder
from octavo.models.families import program
from oracle.drawn_configs import (
    MODEL_TYPES,
    Config,
    around,
    complete,
    draw,
    ids_of,
    make_weights,
    rope,
    write_folder,
)

HERE = Path(__file__).parent
LIMIT = 4e-3  # of the logits' standard deviation
MOST_WEIGHTS = 120_000_000
MOST_LOGITS = 40_000_000
MOST_SCORES = 200_000_000  # of a layer's attention
RECORDED = HERE / "configs.json.gz"
LOGITS = HERE / "configs.npz"
KEPT_ROWS = 6
RECORDED_DRAWS, RECORDED_STRIDE = 60, 9


class Refused(Exception):
    """By transformers."""


class TooLarge(Exception):
    """For this machine."""


def theirs(folder: Path) -> Any:
    """The model. Raises `Refused`."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from None


def make_folder(config: Config, path: Path, seed: int) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """The folder, the resolved config, and the weights' shapes. Raises `Refused`, `TooLarge`."""
    try:
        write_folder(path, config, {"x": np.zeros(1, np.float32)}, 4)
        resolved = transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(resolved)
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from None
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if sum(map(prod, shapes.values())) > MOST_WEIGHTS:
        raise TooLarge
    if resolved.tie_word_embeddings:
        del shapes["lm_head.weight"]
    weights = make_weights(shapes, seed, around(config["model_type"]))
    write_folder(path, config, weights, resolved.vocab_size)
    return resolved, shapes


def prompt_length(rng: random.Random, resolved: Any) -> int:
    """Longer than every window, and at times than the context of training."""
    window = getattr(resolved, "sliding_window", None) or 0
    types = getattr(resolved, "layer_types", None)
    if types is not None and "sliding_attention" not in types:
        window = 0
    return window + rng.choice([20, 40, 60]) + (0 if window else 10)


def logits_of(model: Any, ids: list[int]) -> npt.NDArray[np.float32]:
    try:
        with torch.inference_mode(), contextlib.redirect_stderr(io.StringIO()):
            made = model(input_ids=torch.tensor([ids]), use_cache=False)
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from None
    return np.asarray(made.logits[0])


def ours(folder: Path, ids: list[int]) -> tuple[npt.NDArray[np.float32], tuple[str, ...]]:
    """Logits and notes. Raises `CheckpointError`."""
    checkpoint = load(folder)
    config = checkpoint.config
    if len(ids) > config.context_length:
        raise CheckpointError(f"a context of {config.context_length} tokens")
    made = program(config, max(config.default_length, len(ids)))
    weights = {role: dequantize(weight) for role, weight in checkpoint.weights.items()}
    return evaluate.logits(made, weights, np.array([ids]))[0], checkpoint.notes


def compare(config: Config, seed: int, rng: random.Random, keep: list[Any] | None = None) -> str:
    """What came: "same: ...", "different: ...", "refused: ..." and others."""
    temporary = Path(tempfile.mkdtemp())
    try:
        folder = temporary / "model"
        try:
            resolved, shapes = make_folder(config, folder, seed)
            length = prompt_length(rng, resolved)
            length = min(length, max(2, resolved.max_position_embeddings))
            scores = length**2 * resolved.num_attention_heads
            if length * resolved.vocab_size > MOST_LOGITS or scores > MOST_SCORES:
                raise TooLarge
            ids = ids_of(seed, length)
            wanted = logits_of(theirs(folder), ids)
        except TooLarge:
            return "too large"
        except Refused as error:
            try:
                model_config(HfFolder(folder))
            except CheckpointError as reason:
                return f"refused by both: {error}, {reason}"
            return f"refused by transformers only: {error}"
        try:
            got, notes = ours(folder, ids)
        except CheckpointError as error:
            return f"refused: {str(error).partition(': ')[2]}"
        difference = float(np.abs(got - wanted).max() / wanted.std())
        said = f" (notes: {'; '.join(notes)})" if notes else ""
        if not difference < LIMIT:
            return f"different: {difference:.1e}{said}"
        if keep is not None and length < 200 and sum(map(prod, shapes.values())) < 300_000:
            keep.append((config, seed, length, shapes, wanted[-KEPT_ROWS:]))
        return f"same: {difference:.1e}{said}"
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def drawn(seed: int) -> Iterator[tuple[Config, int, random.Random]]:
    """Endless: which of them transformers accepts is seen later."""
    rng = random.Random(seed)
    number = 0
    while True:
        yield draw(rng), number, rng
        number += 1


def left_out(seeds: Iterable[int]) -> Iterator[tuple[str, Config]]:
    """Each family with each key left out in turn, of the rotary settings too."""
    for model_type in MODEL_TYPES:
        for seed in seeds:
            rng = random.Random(seed)
            config = complete(rng, model_type)
            config |= rope(rng, config)
            for key, value in config.items():
                if key == "model_type":
                    continue
                yield f"{model_type} {seed} without {key}", without(config, key)
                for inner in value if isinstance(value, dict) else ():
                    part = config | {key: without(value, inner)}
                    yield f"{model_type} {seed} without {key}.{inner}", part


def without(values: Config, key: str) -> Config:
    return {name: value for name, value in values.items() if name != key}


def run(args: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()
    worst = 0.0
    kept: list[Any] | None = [] if args.record else None

    def one(name: str, config: Config, seed: int, rng: random.Random) -> None:
        nonlocal worst
        try:
            came = compare(config, seed, rng, kept)
        except Exception:
            came = f"crash: {traceback.format_exc()}"
        kind = came.partition(":")[0]
        counts[kind] += 1
        if kind == "same":
            worst = max(worst, float(came.split()[1]))
        if kind in ("different", "refused", "crash") or args.verbose:
            print(f"{name}: {came}")
            if kind != "same":
                print(f"    {json.dumps(config)}", flush=True)

    count = 0 if args.left_out else RECORDED_DRAWS if args.record else args.count
    source = drawn(args.seed)
    while counts["same"] + counts["different"] + counts["refused"] < count:
        config, number, rng = next(source)
        one(f"{number}", config, number, rng)
    if args.left_out or args.record:
        every = list(left_out(range(3) if args.record else [args.seed]))
        for name, config in every[:: RECORDED_STRIDE if args.record else 1]:
            one(name, config, 1, random.Random(1))
    print(f"{dict(counts)}, largest difference of what is the same {worst:.1e}")
    if kept is not None:
        record(kept)
    return counts["different"] + counts["crash"]


def record(kept: list[Any]) -> None:
    cases = [
        {"config": config, "seed": seed, "length": length, "shapes": shapes}
        for config, seed, length, shapes, _ in kept
    ]
    text = json.dumps({"transformers": transformers.__version__, "cases": cases})
    RECORDED.write_bytes(gzip.compress(text.encode(), mtime=0))
    np.savez_compressed(LOGITS, **{f"{i}": case[-1] for i, case in enumerate(kept)})
    print(f"{len(kept)} recorded, {RECORDED.stat().st_size + LOGITS.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=400, help="files that transformers accepts")
    parser.add_argument("--left-out", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print every file's outcome")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sys.exit(bool(run(args)))


if __name__ == "__main__":
    main()
