"""Octavo's quantizers beside the published ones: the same model, text, bits and groups.

    python benchmarks/quantizers.py make      --model smollm2=PATH     # this repository
    python benchmarks/quantizers.py reference --model smollm2=PATH [--python PEER] [--only NAME]
    python benchmarks/quantizers.py report    --model smollm2=PATH [--json FILE]

PATH is a GGUF file or a bfloat16 folder. ``make`` writes the calibration text's token ids and
quantizes with rtn, GPTQ and AWQ. ``reference`` does the same with the published packages, on the
same ids and the same weights in fp32; PEER is the Python of an environment that has one of them and
torch:

- llm-compressor (https://github.com/vllm-project/llm-compressor): GPTQ and AWQ at their defaults;
- autoawq 0.2.9 (https://github.com/casper-hansen/AutoAWQ) with transformers 4.51.3: AWQ as its
  authors have it, from a folder only. Two things are patched. Between the scales it tries it puts
  the weights back that it has copied to the CPU; where they are there already that is no copy, and
  every trial would work on what the last one left. Its clipping search multiplies element by
  element what is a product of matrices: the same numbers but for the order of sums, much faster.

``--layers N`` quantizes the first N layers only, and leaves the others as they are: hours become
minutes. ``report`` takes each result's weights as they are stored, computes in fp32 on a text that
nobody was calibrated on (`octavo fidelity`'s), and compares with the source. What exists is kept:
remove it from the folder (``--cache``, build/quantizers) to make it again. ``--only NAME`` for one
result.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from _models import models
from _script import as_script

Float32 = npt.NDArray[np.float32]
CACHE = Path(__file__).resolve().parent.parent / "build" / "quantizers"
BITS, GROUP = 4, 64
KINDS = {"asym": False, "sym": True}  # of scales: with zeros, or alone
OURS = ("rtn", "gptq", "awq")
THEIRS = ("gptq", "awq")
AUTOAWQ = "autoawq-awq-asym"
WINDOW = 512  # tokens compared at a time
ROWS = 64  # positions whose distributions are held
MADE = "made.json"  # in a result's folder once it is done: seconds, and layers (null: all)


def finished(out: Path, layers: int | None) -> int | None:
    """The seconds that a result took, if it is there. One of fewer layers than are asked for is in
    the way."""
    try:
        made = json.loads((out / MADE).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    if made["layers"] is not None and (layers is None or layers > made["layers"]):
        raise SystemExit(
            f"{out} is of {made['layers']} layers: remove it, or give --layers {made['layers']}"
        )
    seconds: int = made["seconds"]
    return seconds


def note(out: Path, seconds: float, layers: int | None) -> None:
    """``out`` is done."""
    (out / MADE).write_text(json.dumps({"seconds": round(seconds), "layers": layers}), "utf-8")
    print(f"{out.name}: {seconds:.0f} s", flush=True)


class Enough(Exception):
    """As many layers as were asked for are quantized."""


def make(
    path: Path, cache: Path, count: int, length: int, only: list[str], layers: int | None
) -> None:
    from octavo import loader
    from octavo.tools.quantize.calibrate import default_text, samples
    from octavo.tools.quantize.layouts import Format, scheme_of
    from octavo.tools.quantize.quantize_checkpoint import quantize
    from octavo.tools.quantize.quantizer import Method, Recipe, Report

    def progress(report: Report) -> None:
        if report.last and report.layer + 1 == layers:
            raise Enough

    checkpoint = loader.load(path)
    ids = samples(checkpoint.tokenizer, default_text(), count, length)
    np.save(cache / "ids.npy", ids)
    for method in OURS:
        for kind, symmetric in KINDS.items():
            # AWQ's own layout is asymmetric; the symmetric one goes where llm-compressor's does.
            format = Format.COMPRESSED_TENSORS if symmetric else Format.GPTQ
            name = f"octavo-{method}-{kind}"
            out = cache / name
            if (only and name not in only) or finished(out, layers) is not None:
                continue
            began = time.monotonic()
            recipe = Recipe(Method(method), scheme_of(format, BITS, GROUP, symmetric))
            with suppress(Enough):  # the layers stay in the folder, as if interrupted
                quantize(checkpoint, recipe, format, out, ids, progress)
            note(out, time.monotonic() - began, layers)


def autoawq(path: Path, cache: Path, layers: int | None) -> None:
    import inspect
    import shutil
    import textwrap

    import torch
    from awq import AutoAWQForCausalLM
    from awq.quantize import quantizer

    def patch(name: str, changes: dict[str, str]) -> None:
        source = textwrap.dedent(inspect.getsource(getattr(quantizer.AwqQuantizer, name)))
        for old, new in changes.items():
            if old not in source:
                raise SystemExit(f"this version of AutoAWQ has another {name}")
            source = source.replace(old, new)
        exec(source, quantizer.__dict__)
        setattr(quantizer.AwqQuantizer, name, quantizer.__dict__[name])

    product = "torch.einsum('tgi,cgi->ctg', input_feat[0], {}[:, 0])"
    patch(
        "_compute_best_clip",
        {f"(input_feat * {w}).sum(dim=-1)": product.format(w) for w in ("w", "q_w")},
    )
    patch("_compute_best_scale", {"v.cpu()": "v.cpu().clone()"})
    prepare = quantizer.AwqQuantizer.init_quant

    def first(self: Any, **how: Any) -> Any:
        modules, *rest = prepare(self, **how)
        return modules[:layers], *rest

    quantizer.AwqQuantizer.init_quant = first
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    ids = np.load(cache / "ids.npy")
    began = time.monotonic()
    model = AutoAWQForCausalLM.from_pretrained(
        str(path), torch_dtype=torch.float32, device_map="cpu", use_cache=False
    )
    model.quantize(
        None,
        quant_config={"zero_point": True, "q_group_size": GROUP, "w_bit": BITS, "version": "GEMM"},
        calib_data=ids.tolist(),
        max_calib_samples=len(ids),
        max_calib_seq_len=ids.shape[1],
    )
    seconds = time.monotonic() - began
    out = cache / AUTOAWQ
    model.save_quantized(str(out))
    shutil.copyfile(path / "tokenizer.json", out / "tokenizer.json")
    note(out, seconds, layers)


def reference(path: Path, cache: Path, only: list[str], layers: int | None) -> None:
    """With the package that this Python has."""
    if importlib.util.find_spec("llmcompressor") is not None and only != [AUTOAWQ]:
        llm_compressor(path, cache, only)
    elif importlib.util.find_spec("awq") is None:
        raise SystemExit("there is neither llmcompressor nor awq in this Python: see --python")
    elif path.is_file():
        raise SystemExit("autoawq reads folders: give one with --model")
    elif finished(cache / AUTOAWQ, layers) is None:
        autoawq(path, cache, layers)


def llm_compressor(path: Path, cache: Path, only: list[str]) -> None:
    import torch
    import transformers
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from safetensors.torch import save_file

    # Its AWQ pins memory for an accelerator, and fails where there is none.
    torch.Tensor.pin_memory = lambda self, *_: self
    modifiers = {"gptq": GPTQModifier, "awq": AWQModifier}
    ids = np.load(cache / "ids.npy")
    data = Dataset.from_dict(
        {"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(cache / "octavo-rtn-asym"))
    source = path if path.is_dir() else cache.with_name(cache.name + "-source")
    if not source.exists():  # it wants a folder's config
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        model.config.quantization_config = None
        model.config.save_pretrained(source)
        save_file(
            {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"},
            source / "model.safetensors",
            {"format": "pt"},
        )
        tokenizer.save_pretrained(source)
    for method in THEIRS:
        for kind, symmetric in KINDS.items():
            name = f"llm-compressor-{method}-{kind}"
            out = cache / name
            if (only and name not in only) or finished(out, None) is not None:
                continue
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(source), dtype=torch.float32
            )
            weights = {"num_bits": BITS, "type": "int", "symmetric": symmetric}
            weights |= {"strategy": "group", "group_size": GROUP}
            groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
            began = time.monotonic()
            oneshot(
                model=model,
                processor=tokenizer,
                dataset=data,
                recipe=modifiers[method](config_groups=groups, ignore=["lm_head"]),
                num_calibration_samples=len(ids),
                max_seq_length=ids.shape[1],
                shuffle_calibration_samples=False,
            )
            seconds = time.monotonic() - began
            model.save_pretrained(out, save_compressed=True)
            tokenizer.save_pretrained(out)
            note(out, seconds, None)


def log_softmax(logits: Float32) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def weights_of(path: Path) -> dict[str, Float32]:
    """A model's weights, or those of the layers that an interrupted run has in its folder."""
    from octavo import loader
    from octavo.loader.dequantize import dequantize
    from octavo.tools.quantize.layouts import Format, scheme_of
    from octavo.tools.quantize.quantize_checkpoint import WORK
    from octavo.tools.quantize.state import State

    if path.is_file() or (path / "config.json").exists():
        stored = loader.load(path).weights
        return {role: dequantize(weight) for role, weight in stored.items()}
    settings = json.loads((path / WORK / "state.json").read_text("utf-8"))
    symmetric = path.name.endswith("-sym")
    format = Format.COMPRESSED_TENSORS if symmetric else Format.GPTQ
    state = State(path / WORK, settings, scheme_of(format, BITS, GROUP, symmetric))
    found: dict[str, Float32] = {}
    for layer in range(state.finished()):
        result = state.load(layer)
        found |= {role: matrix.values() for role, matrix in result.matrices.items()}
        found |= result.vectors
    state.close()
    return found


def hidden_of(
    path: Path, source: Path, windows: list[npt.NDArray[np.int32]], layers: int | None
) -> tuple[list[Float32], Float32]:
    """What the head is multiplied with at every position, and the head. What is not of the first
    ``layers`` layers is the ``source``'s."""
    from octavo import loader
    from octavo.executor.reference import evaluate as executor
    from octavo.models import families
    from octavo.models.program import Logits

    checkpoint = loader.load(source)
    program = families.program(checkpoint.config)
    head = program.ops[-1]
    assert isinstance(head, Logits)
    assert not head.softcap
    weights = weights_of(source)
    for role, values in weights_of(path).items():
        if layers is None or (role.startswith("layers.") and int(role.split(".")[1]) < layers):
            weights[role] = values
    rows = []
    for window in windows:
        values: executor.Values = {}
        executor.run(program.ops[:-1], program.config, weights, values, window[None])
        rows.append(values[head.x][0])
    return rows, weights[head.weight]


def logits_in_pieces(hidden: list[Float32], head: Float32) -> Iterator[Float32]:
    for rows in hidden:
        for start in range(0, len(rows), ROWS):
            yield rows[start : start + ROWS] @ head.T


def report(path: Path, cache: Path, most: int, file: str | None, layers: int | None) -> None:
    from octavo import loader
    from octavo.tools.quantize.fidelity import default_text

    tokenizer = loader.load(path).tokenizer
    ids = np.array(tokenizer.encode(default_text()), np.int32)
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)]
    windows = windows[:: -(-len(windows) // most)]
    source = hidden_of(path, path, windows, layers)
    results: list[dict[str, Any]] = []
    for out in sorted(cache.iterdir()):
        seconds = finished(out, layers)
        if seconds is None:
            continue
        found = hidden_of(out, path, windows, layers)
        kl, agree = [], []
        for a, b in zip(logits_in_pieces(*source), logits_in_pieces(*found), strict=True):
            p, q = log_softmax(a), log_softmax(b)
            kl += (np.exp(p) * (p - q)).sum(axis=1).tolist()
            agree += (p.argmax(axis=1) == q.argmax(axis=1)).tolist()
        results.append(
            {
                "name": out.name,
                "mean_kl_nats": float(np.mean(kl)),
                "standard_error": float(np.std(kl, ddof=1) / np.sqrt(len(kl))),
                "p99_kl_nats": float(np.quantile(kl, 0.99)),
                "top1_agreement_percent": 100 * float(np.mean(agree)),
                "seconds": seconds,
                "positions": len(kl),
            }
        )
        base = {r["name"].rpartition("-")[2]: r["mean_kl_nats"] for r in results
                if r["name"].startswith("octavo-rtn")}  # fmt: skip
        print(results[-1]["name"], f"{results[-1]['mean_kl_nats']:.4f}", flush=True)
    print(f"\n{'':26}{'mean KL':>9}{'± s.e.':>8}{'p99':>7}{'top-1 %':>9}{'of rtn':>8}{'s':>7}")
    for r in results:
        rounded = base.get(r["name"].rpartition("-")[2])
        ratio = "" if rounded is None else f"{r['mean_kl_nats'] / rounded:.2f}"
        print(
            f"{r['name']:26}{r['mean_kl_nats']:9.4f}{r['standard_error']:8.4f}"
            f"{r['p99_kl_nats']:7.2f}{r['top1_agreement_percent']:9.2f}{ratio:>8}"
            f"{r['seconds']:>7}"
        )
    if file:
        Path(file).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="*", help="make, reference or report")
    parser.add_argument("--model", action="append", help="NAME=PATH of a file or folder")
    parser.add_argument("--python", help="the Python of an environment with the published package")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for results")
    parser.add_argument("--only", action="append", default=[], help="one result, by its name")
    parser.add_argument("--samples", type=int, default=16, help="pieces of the text")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of each")
    parser.add_argument("--windows", type=int, default=99, help="of 512 tokens that are compared")
    parser.add_argument("--layers", type=int, help="of the model that are quantized (all)")
    parser.add_argument("--json", help="file for the report")
    args = parser.parse_args()
    if unknown := set(args.what) - {"make", "reference", "report"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = models(args.model)
    for name, path in chosen.items():
        if args.model is None and name != "smollm2":
            continue  # the other has a head too large to hold twice
        cache = args.cache / name
        cache.mkdir(parents=True, exist_ok=True)
        for what in args.what or ["make", "report"]:
            if what == "make":
                make(path, cache, args.samples, args.seq_len, args.only, args.layers)
            elif what == "reference" and args.python:
                only = [f"--only={each}" for each in args.only]
                where = [f"--model={name}={path}", f"--cache={args.cache}"]
                where += [f"--layers={args.layers}"] if args.layers else []
                subprocess.run([args.python, __file__, what, *where, *only], check=True)
            elif what == "reference":
                reference(path, cache, args.only, args.layers)
            else:
                report(path, cache, args.windows, args.json, args.layers)
    return 0


if __name__ == "__main__":
    as_script(main)
