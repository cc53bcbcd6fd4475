"""Records tiny quantized models made by the packages that write such checkpoints.

Run by hand, a process for each model, in an environment with torch, transformers and the package:

    python tests/oracle/record_quantized.py NAME

Each goes to quantized/NAME: config.json and model.safetensors as the package wrote them (without
what its configuration says about the machine), and reference.npz: ``ids``, ``logits`` that
`transformers` computes in float32 of the dequantized model, keys and values rounded to float16 as
in record_families.py, and in ``meta`` a CRC-32 of every matrix, dequantized in float32 by the
package's own code; of `ROUNDED_TWICE` the matrices themselves. See README.md here.
"""

import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["GPTQMODEL_CPU_WORKERS"] = "2"

import numpy as np
import torch
import transformers
from record_families import half_precision_cache
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from oracle.drawn_configs import make_weights

HERE = Path(__file__).resolve().parent / "quantized"
VOCAB, TOKENS, ROWS = 64, 72, 20

Matrices = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def base(path: Path, seed: int, dtype: torch.dtype, config: Any, positive: bool) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(config)
    parameters = dict(model.named_parameters())
    made = make_weights({name: list(each.shape) for name, each in parameters.items()}, seed, {})
    for name, each in parameters.items():
        each.data = torch.from_numpy(made[name])
    for module in linears(model).values() if positive else ():
        module.weight.data[2::8].abs_()
    model = model.to(dtype).eval()
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({chr(0x21 + i): i for i in range(VOCAB)}, unk_token="!"))
    tokenizer.save(str(path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": '"', "pad_token": '"'}
    (path / "tokenizer_config.json").write_text(json.dumps(kind))
    return model


def calibration(count: int = 16, length: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, VOCAB, (1, length), generator=generator) for _ in range(count)]


def linears(model: Any, head: bool = False) -> dict[str, Any]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (head or name != "lm_head")
    }


# ── GPTQModel ───────────────────────────────────────────────────────────────────────────────────


def gptqmodel(source: Path, target: Path, **settings: Any) -> Matrices:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(device="cpu", **settings)
    model = GPTQModel.load(str(source), config)
    rows = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in calibration()]
    model.quantize(rows, batch_size=1)
    model.save(str(target))
    torch_backend = BACKEND.TORCH_AWQ if "method" in settings else BACKEND.TORCH
    loaded = GPTQModel.load(str(target), device="cpu", backend=torch_backend)
    found, written = {}, load_file(target / "model.safetensors")
    for name, module in loaded.model.named_modules():
        if not hasattr(module, "qweight"):
            continue
        # As in the file: it rounds them to the model's dtype.
        module.scales = written[f"{name}.scales"].float()
        if "method" in settings:
            found[name] = awq_values(module, config.group_size)
            continue
        module.dequant_dtype = torch.int32
        found[name] = module.dequantize_weight().T
    return found


def awq_values(module: Any, group: int) -> torch.Tensor:
    from awq.utils.packing_utils import dequantize_gemm

    scales = module.scales.float()
    return dequantize_gemm(module.qweight, module.qzeros, scales, 4, group).T


# ── AutoGPTQ and AutoAWQ: their own packing of numbers rounded here ─────────────────────────────


def rounded(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros [n, groups] for rounding to the nearest."""
    n, k = weight.shape
    parts = weight.float().reshape(n, k // group, group)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float()
    return scales, (-low / scales).round().clamp(1, 2**bits - 1)


def autogptq(source: Path, target: Path, bits: int, group: int) -> Matrices:
    """A folder as AutoGPTQ 0.7 saves it: the layout is said in quantize_config.json alone."""
    package = find_spec("auto_gptq")  # which imports nothing of it: it needs transformers 4
    file = Path(package.origin).parent / "nn_modules/qlinear/qlinear_cuda_old.py"
    spec = spec_from_file_location("qlinear_cuda_old", file)
    module_from = module_from_spec(spec)
    spec.loader.exec_module(module_from)

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    found, tensors = {}, dict(load_file(source / "model.safetensors"))
    for name, module in linears(model).items():
        n, k = module.weight.shape
        scales, zeros = rounded(module.weight.data, bits, group)
        packed = module_from.QuantLinear(bits, group, k, n, bias=True)
        bias = torch.nn.Parameter(
            torch.zeros(n), requires_grad=False
        )  # as it used to be given to every module
        linear = torch.nn.Linear(k, n)
        linear.weight = torch.nn.Parameter(module.weight.detach().float(), requires_grad=False)
        linear.bias = bias
        packed.pack(linear, scales.clone(), zeros.clone(), torch.arange(k) // group)
        identity = torch.eye(k)
        packed.scales = packed.scales.float()
        packed.bias = packed.bias.float()
        found[name] = packed(identity).T
        packed.scales = packed.scales.half()
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{key}": x for key, x in packed.state_dict().items()}
        tensors[f"{name}.bias"] = torch.zeros(n, dtype=torch.float16)
    save(source, target, tensors, None)
    said = {"bits": bits, "group_size": group, "damp_percent": 0.01, "desc_act": False}
    said |= {
        "static_groups": False,
        "sym": False,
        "true_sequential": True,
        "model_file_base_name": "model",
    }
    (target / "quantize_config.json").write_text(json.dumps(said, indent=2))
    return found


def autoawq(source: Path, target: Path, group: int) -> Matrices:
    from awq.modules.linear.gemm import WQLinear_GEMM

    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    found, tensors = {}, dict(load_file(source / "model.safetensors"))
    for name, module in linears(model).items():
        scales, zeros = rounded(module.weight.data, 4, group)
        module.weight.data = module.weight.data.float()
        if module.bias is not None:
            module.bias.data = module.bias.data.float()
        packed = WQLinear_GEMM.from_linear(
            module, 4, group, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
        )
        found[name] = awq_values(packed, group)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{key}": x for key, x in packed.state_dict().items()}
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    said |= {"version": "gemm", "modules_to_not_convert": None}
    save(source, target, tensors, said)
    return found


def save(source: Path, target: Path, tensors: Matrices, said: dict[str, Any] | None) -> None:
    target.mkdir()
    save_file(
        {name: x.contiguous() for name, x in tensors.items()},
        target / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((source / "config.json").read_text())
    if said is not None:
        config["quantization_config"] = said
    (target / "config.json").write_text(json.dumps(config, indent=2))


# ── llm-compressor and compressed-tensors ───────────────────────────────────────────────────────


def llmcompressor(source: Path, target: Path, groups: dict[str, Any], method: str) -> Matrices:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    modifier = {"gptq": GPTQModifier, "rtn": QuantizationModifier}[method]
    rows = [{"input_ids": x[0].tolist(), "attention_mask": [1] * x.shape[1]} for x in calibration()]
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    oneshot(
        model=model,
        tokenizer=transformers.AutoTokenizer.from_pretrained(source),
        dataset=Dataset.from_list(rows),
        recipe=modifier(config_groups=groups, ignore=["lm_head"]),
        output_dir=str(target),
        num_calibration_samples=len(rows),
        max_seq_length=64,
    )
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    tensors, found = load_file(target / "model.safetensors"), {}
    for name in linears(model):
        state = {k[len(name) + 1 :]: x for k, x in tensors.items() if k.startswith(f"{name}.")}
        fitting = [s for s in parsed.config_groups.values() if matches(name, s.targets)]
        scheme = fitting[0]
        state["weight_scale"] = state["weight_scale"].float()
        kind = BaseCompressor.get_value_from_registry(scheme.format or parsed.format)
        found[name] = kind.decompress(state, scheme)["weight"]
    return found


def matches(name: str, targets: list[str]) -> bool:
    return any(t == "Linear" or t.removeprefix("re:.*") in name for t in targets)


def ordered(source: Path, target: Path) -> Matrices:
    """Activation order as compressed-tensors 0.11 and before packed it; later ones refuse it."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs

    weights = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True}
    args = QuantizationArgs(**weights, actorder="group")
    compressor = PackedQuantizationCompressor()
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    found, tensors = {}, dict(load_file(source / "model.safetensors"))
    generator = torch.Generator().manual_seed(0)
    for name, module in linears(model).items():
        weight = module.weight.data.float()
        k = weight.shape[1]
        g_idx = torch.empty(k, dtype=torch.int32)
        g_idx[torch.randperm(k, generator=generator)] = (torch.arange(k) // 32).int()
        scale = torch.stack([weight[:, g_idx == g].abs().amax(1) / 7.5 for g in range(k // 32)], 1)
        scale = scale.bfloat16()
        zero = torch.zeros_like(scale, dtype=torch.int8)
        made = compressor.compress_weight(weight, scale.float(), args, zero, g_idx)
        made |= {"weight_scale": scale, "weight_g_idx": g_idx}
        wide = made | {"weight_scale": scale.float()}
        found[name] = compressor.decompress_weight(wide, args)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{key}": x for key, x in made.items()}
    said = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config |= {"config_groups": {"group_0": said}, "ignore": ["lm_head"], "kv_cache_scheme": None}
    save(source, target, tensors, config)
    return found


# ── AutoRound ───────────────────────────────────────────────────────────────────────────────────


def autoround(source: Path, target: Path, layout: str, **settings: Any) -> Matrices:
    from auto_round import AutoRound
    from auto_round_extension.torch.qlinear_torch import QuantLinear as Plain
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    rounds = AutoRound(
        model, tokenizer, iters=0, disable_opt_rtn=True, device_map="cpu", **settings
    )
    rounds.quantize_and_save(str(target), format=layout)
    written = next(target.rglob("model.safetensors"))
    if written.parent != target:
        for file in written.parent.iterdir():
            shutil.move(file, target / file.name)
    tensors, found = load_file(target / "model.safetensors"), {}
    bits, group = settings["bits"], settings["group_size"]
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    awq = "awq" in config.get("packing_format", "")
    less_one = LessOne if layout in ("auto_gptq", "auto_round:auto_gptq") else Plain
    for name in [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]:
        state = {part: tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")}
        if awq:
            found[name] = awq_values(SimpleNamespace(**state), group)
            continue
        words, n = state["qweight"].shape
        module = less_one(bits, group, words * 32 // bits, n, bias=False)
        for part, x in state.items():
            setattr(module, part, x.float() if part == "scales" else x)
        identity = torch.eye(words * 32 // bits)
        found[name] = module(identity).T
    return found


# ── Floats of 8 and 4 bits: numbers rounded here, read by the packages' own code ────────────────


def rounded_fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 numbers [n, k], and the scales of blocks of so many outputs and inputs."""
    (n, k), (rows, columns) = weight.shape, block
    largest = torch.nn.functional.max_pool2d(weight.abs()[None], block, ceil_mode=True)[0]
    scales = largest / torch.finfo(torch.float8_e4m3fn).max
    wide = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return (weight / wide).to(torch.float8_e4m3fn), scales


def rewritten(
    source: Path, target: Path, said: dict[str, Any], each: Callable[[torch.Tensor], Any]
) -> Matrices:
    """A folder in which ``each`` gives, for a linear layer's weight, its values and its tensors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    found, tensors = {}, dict(load_file(source / "model.safetensors"))
    for name, module in linears(model).items():
        found[name], parts = each(module.weight.data.float())
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{key}": x for key, x in parts.items()}
    save(source, target, tensors, said)
    return found


def transformers_fp8(source: Path, target: Path, block: tuple[int, int] | None) -> Matrices:
    """Blocks as DeepSeek has them, or a scale for a tensor, and activations' beside it."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    def each(weight: torch.Tensor) -> Any:
        codes, scales = rounded_fp8(weight, block or tuple(weight.shape))
        parts = {"weight": codes, "weight_scale_inv": scales}
        if block is None:
            parts |= {"weight_scale_inv": scales[0, 0], "activation_scale": torch.tensor(0.02)}
        values = _dequantize_fp8_weight(codes, parts["weight_scale_inv"], block, torch.float32)
        return values, parts

    said = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "static" if block is None else "dynamic",
        "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"],
    }
    return rewritten(source, target, said, each)


def compressed_floats(source: Path, target: Path, layout: str) -> Matrices:
    """With the compressors of compressed-tensors 0.12: scales of outputs, and NVFP4."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.quantized_compressors import nvfp4_quantized
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    fp4 = layout == "nvfp4-pack-quantized"
    weights: dict[str, Any] = {"type": "float", "symmetric": True}
    weights |= (
        {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
        if fp4
        else {"num_bits": 8, "strategy": "channel"}
    )
    args = QuantizationArgs(**weights)
    compressor = BaseCompressor.load_from_registry(layout)

    def each(weight: torch.Tensor) -> Any:
        if not fp4:
            _, scales = rounded_fp8(weight, (1, weight.shape[1]))
            scales = scales.bfloat16()
            parts = compressor.compress_weight(weight, scales.float(), args)
            parts["weight_scale"] = scales
            return compressor.decompress_weight(parts | {"weight_scale": scales.float()}), parts
        whole = (448 * 6 / weight.abs().max()).reshape(1)
        local = weight.abs().reshape(len(weight), -1, 16).amax(2)
        scales = (local / 6 * whole).to(torch.float8_e4m3fn)
        parts = compressor.compress_weight(weight, scales.float(), whole, args)
        parts |= {"weight_scale": scales, "weight_global_scale": whole}
        # What its decompress_weight does, in float32.
        packed = parts["weight_packed"]
        numbers = nvfp4_quantized.unpack_fp4_from_uint8(packed, *weight.shape, torch.float32)
        values = dequantize(numbers, scales.float(), global_scale=whole, dtype=torch.float32)
        return values, parts | {"input_global_scale": torch.tensor([3.0])}

    inputs = {"num_bits": weights["num_bits"], "type": "float", "dynamic": not fp4 or "local"}
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    said = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group | {"input_activations": inputs}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return rewritten(source, target, said, each)


def modelopt(source: Path, target: Path, algorithm: str) -> Matrices:
    """As ModelOpt 0.47 packs and reads them; FP8 with its configuration in a file of its own."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    def each(weight: torch.Tensor) -> Any:
        one = {"input_scale": torch.tensor(0.03)}
        if algorithm == "NVFP4":
            packed, scales, whole = NVFP4QTensor.quantize(weight, 16)
            settings = {"scale": scales, "double_scale": whole, "block_sizes": {-1: 16}}
            parts = {"weight": packed._quantized_data, "weight_scale": scales}
            parts |= {"weight_scale_2": whole}
            return packed.dequantize(dtype=torch.float32, **settings), one | parts
        packed, scale = FP8QTensor.quantize(weight)
        values = packed.dequantize(dtype=torch.float32, scale=scale, block_sizes={})
        return values, one | {"weight": packed._quantized_data, "weight_scale": scale.reshape(())}

    said = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    said |= {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}
    if algorithm == "NVFP4":
        return rewritten(source, target, said, each)
    found = rewritten(source, target, None, each)
    said = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    own = {"producer": {"name": "modelopt"}, "quantization": said}
    (target / "hf_quant_config.json").write_text(json.dumps(own, indent=2))
    return found


W4 = {"num_bits": 4, "group_size": 32, "strategy": "group", "type": "int", "symmetric": True}
W8 = {"num_bits": 8, "strategy": "channel", "type": "int", "symmetric": True}
A8 = {"num_bits": 8, "strategy": "token", "type": "int", "symmetric": True, "dynamic": True}
LINEAR = {"targets": ["Linear"]}
LLAMA, QWEN2 = transformers.LlamaConfig, transformers.Qwen2Config

BF16, F16 = torch.bfloat16, torch.float16
BY_32 = {"bits": 4, "group_size": 32}
DYNAMIC = {r"+:.*\.gate_proj": BY_32, r"-:.*\.o_proj": {}}
MIXED = {
    "attention": {
        "targets": ["re:.*self_attn"],
        "weights": W8 | {"symmetric": False, "group_size": -1},
    },
    "mlp": {"targets": ["re:.*mlp"], "weights": W4 | {"num_bits": 3}},
}


def one(**group: Any) -> dict[str, Any]:
    """A single group of all linear modules."""
    return {"group_0": LINEAR | group}


MODELS: dict[str, tuple[Any, torch.dtype, Callable[[Path, Path], Matrices]]] = {
    # GPTQModel: activation order; one less in whole words; three bits; a column of all inputs.
    "gptqmodel-order": (LLAMA(**SIZES), BF16, partial(gptqmodel, **BY_32, desc_act=True, sym=True)),
    "gptqmodel-asymmetric": (
        LLAMA(**SIZES),
        F16,
        partial(gptqmodel, **BY_32, desc_act=False, sym=False),
    ),
    "gptqmodel-v2-3bit-order": (
        LLAMA(**SIZES),
        F16,
        partial(gptqmodel, **BY_32 | {"bits": 3}, desc_act=True, sym=False, format="gptq_v2"),
    ),
    "gptqmodel-dynamic": (
        QWEN2(**SIZES),
        F16,
        partial(
            gptqmodel,
            bits=8,
            group_size=-1,
            desc_act=False,
            sym=True,
            lm_head=True,
            act_group_aware=False,
            dynamic=DYNAMIC,
        ),
    ),
    "gptqmodel-awq": (
        LLAMA(**SIZES | {"intermediate_size": 128, "num_key_value_heads": 2}),
        F16,
        partial(gptqmodel, **BY_32, method="awq", format="gemm", sym=False),
    ),
    "autogptq-3bit": (LLAMA(**SIZES), F16, partial(autogptq, bits=3, group=32)),
    "autoawq": (QWEN2(**SIZES), F16, partial(autoawq, group=32)),
    "llmcompressor-w4a16": (
        LLAMA(**SIZES),
        BF16,
        partial(llmcompressor, groups=one(weights=W4 | {"actorder": "weight"}), method="gptq"),
    ),
    "llmcompressor-w4a16-asymmetric": (
        QWEN2(**SIZES),
        BF16,
        partial(llmcompressor, groups=one(weights=W4 | {"symmetric": False}), method="rtn"),
    ),
    "llmcompressor-w8a8": (
        LLAMA(**SIZES),
        BF16,
        partial(llmcompressor, groups=one(weights=W8, input_activations=A8), method="rtn"),
    ),
    "llmcompressor-mixed": (
        LLAMA(**SIZES),
        BF16,
        partial(llmcompressor, groups=MIXED, method="rtn"),
    ),
    "compressed-tensors-order": (LLAMA(**SIZES), BF16, ordered),
    "autoround": (LLAMA(**SIZES), F16, partial(autoround, layout="auto_round", **BY_32, sym=False)),
    "autoround-gptq": (
        LLAMA(**SIZES),
        F16,
        partial(autoround, layout="auto_gptq", **BY_32, sym=False),
    ),
    "fp8-blocks": (LLAMA(**SIZES), BF16, partial(transformers_fp8, block=(40, 48))),
    "fp8-tensors": (QWEN2(**SIZES), BF16, partial(transformers_fp8, block=None)),
    "compressed-tensors-fp8": (
        LLAMA(**SIZES),
        BF16,
        partial(compressed_floats, layout="float-quantized"),
    ),
    "compressed-tensors-nvfp4": (
        LLAMA(**SIZES),
        BF16,
        partial(compressed_floats, layout="nvfp4-pack-quantized"),
    ),
    "modelopt-fp8": (LLAMA(**SIZES), BF16, partial(modelopt, algorithm="FP8")),
    "modelopt-nvfp4": (QWEN2(**SIZES), BF16, partial(modelopt, algorithm="NVFP4")),
}
# Whose values the packages round more often than once, so that they are kept, not their sums.
ROUNDED_TWICE = ("compressed-tensors-nvfp4", "modelopt-nvfp4")
# With outputs of positive weights, whose zero is 0: one less of it borrows.
BORROWING = ("gptqmodel-asymmetric", "autoround-gptq")
PACKAGES = (
    "gptqmodel",
    "auto-gptq",
    "autoawq",
    "llmcompressor",
    "compressed-tensors",
    "auto-round",
    "nvidia-modelopt",
)


def clean(values: Any) -> Any:
    """A configuration without paths of the machine that made it."""
    if isinstance(values, dict):
        return {k: clean(v) for k, v in values.items() if not k.endswith("path")}
    return values


def record(name: str) -> None:
    config, dtype, quantize = MODELS[name]
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        source, made = Path(temporary) / "base", Path(temporary) / "made"
        os.chdir(temporary)  # some packages write logs where they run
        base(source, list(MODELS).index(name), dtype, config, name in BORROWING)
        matrices = quantize(source, made)
        target.mkdir()
        for file in ("config.json", "quantize_config.json", "hf_quant_config.json"):
            if (made / file).exists():
                values = clean(json.loads((made / file).read_text()))
                (target / file).write_text(json.dumps(values, indent=2) + "\n")
        shutil.copy(made / "model.safetensors", target)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        os.chdir(HERE)
    # What is not quantized, as the package wrote it.
    written = load_file(target / "model.safetensors")
    for key, parameter in model.named_parameters():
        if key in written and parameter.shape == written[key].shape:
            parameter.data = written[key].float()
    for key, values in matrices.items():
        model.get_submodule(key).weight.data = values.float().contiguous()
    values = {k: v.float().contiguous().numpy() for k, v in matrices.items()}
    sums = {k: zlib.crc32(v.tobytes()) for k, v in values.items()}
    if name in ROUNDED_TWICE:
        sums = {}
    ids = np.random.default_rng(0).integers(2, VOCAB, TOKENS).astype(np.int32)
    with half_precision_cache(model), torch.inference_mode():
        logits = model(input_ids=torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits
    versions = {}
    for package in ("torch", "transformers", *PACKAGES):
        try:
            versions[package] = version(package)
        except ModuleNotFoundError:
            continue
    meta = json.dumps({"crc32": sums, "versions": versions})
    kept = np.asarray(logits[0, -ROWS:])
    arrays = {} if sums else values
    np.savez_compressed(
        target / "reference.npz", ids=ids, logits=kept, meta=np.array(meta), **arrays
    )
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{name}: {size:,} bytes, {len(values)} matrices, logits' deviation {kept.std():.2f}")


if __name__ == "__main__":
    for each in sys.argv[1:] or MODELS:
        record(each)
