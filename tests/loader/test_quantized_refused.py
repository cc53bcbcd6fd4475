"""Quantized folders that are refused by name: what is not supported, and what is hostile."""

import json
import random
import resource
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from loader import quantized_writer as writer
from loader.quantized_writer import gptq_config, quantize_all, quantized, refused, words
from octavo.loader import load
from octavo.loader.base import CheckpointError
from oracle.tiny_folders import QUANTIZED, folder, quantized_folder

# ── What is refused ─────────────────────────────────────────────────────────────────────────────


GPTQ, CT = gptq_config(4, 32), writer.ct_config(4, 32, symmetric=False, layout="pack-quantized")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}


def ct(weights: Any = None, **group: Any) -> dict[str, Any]:
    """CT with changes to its group."""
    first = CT["config_groups"]["group_0"]
    made = first | {"weights": first["weights"] | (weights or {})} | group
    return CT | {"config_groups": {"group_0": made}}


STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
REFUSED: dict[str, tuple[Any, str]] = {
    "a number": (3, "quantization_config: is not an object"),
    "no method": ({"bits": 4}, "quant_method '' is not supported; supported are gptq, awq, comp"),
    "method": ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported, only e4m3"),
    "ue8m0": ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0' is not supported"),
    "experts of fp4": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4' is not"),
    "half a block": (
        {"quant_method": "fp8", "weight_block_size": [128]},
        "weight_block_size is [128], not two numbers of outputs and inputs",
    ),
    "no block": (
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        "weight_block_size is [0, 128], not two numbers",
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        "quant_algo 'W4A8_AWQ' is not supported; supported are FP8, NVFP4",
    ),
    "modelopt's group": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
        "group_size is 32; NVFP4 has 16",
    ),
    "method a list": ({"quant_method": ["gptq"]}, "quant_method is ['gptq'], not a string"),
    "no bits": ({"quant_method": "gptq", "group_size": 32}, "bits is missing"),
    "2 bits": (GPTQ | {"bits": 2}, "bits is 2, which is not supported; supported are 3, 4, 8"),
    "bits of text": (GPTQ | {"bits": "4"}, "bits is '4', not an integer"),
    "a group beyond": (GPTQ | {"group_size": 10**30}, "group_size is above 2147483647"),
    "no group": (GPTQ | {"group_size": None}, "group_size is null"),
    "group of none": (GPTQ | {"group_size": 0}, "group_size is 0"),
    "negative group": (GPTQ | {"group_size": -2}, "group_size is -2, not an integer from -1"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supp"),
    "marlin's flag": (GPTQ | {"is_marlin_format": True}, "laid out for Marlin are not supported"),
    "planar": (GPTQ | {"checkpoint_format": "gptq_p"}, "'gptq_p' is not supported; gptq and"),
    "words": (GPTQ | {"pack_dtype": "int64"}, "pack_dtype 'int64' is not supported"),
    "rotation": (GPTQ | {"rotation": "hadamard"}, "rotation 'hadamard' is not supported"),
    "rule": (GPTQ | {"dynamic": {"a": 3}}, "quantization_config: dynamic: a is not an object"),
    "rules": (GPTQ | {"dynamic": [1]}, "dynamic is not an object"),
    "rule's bits": (GPTQ | {"dynamic": {"a": {"bits": 5}}}, "dynamic: a: bits is 5, which is not"),
    "many rules": (
        GPTQ | {"dynamic": {str(i): {"group_size": 32 * i + 32} for i in range(65)}},
        "has more than 64 combinations of bits and group sizes",
    ),
    "gemv": (AWQ | {"version": "gemv"}, "version 'gemv' is not supported, only gemm"),
    "awq bits": (AWQ | {"bits": 8}, "bits is 8, which is not supported; supported are 4"),
    "no groups": (CT | {"config_groups": {}}, "config_groups is empty"),
    "groups a list": (CT | {"config_groups": [1]}, "config_groups is not an object"),
    "dense": (CT | {"format": "dense"}, "group_0: format 'dense' is not supported"),
    "2:4": (CT | {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
    "sparse": (
        CT | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config is not supported: weights that are stored sparse",
    ),
    "fp8": (ct(format="float-quantized"), "float-quantized is of floats of 8 bits"),
    "nvfp4": (ct(format="nvfp4-pack-quantized"), "pack-quantized is of floats of 4 bits"),
    "mxfp4": (ct(format="mxfp4-pack-quantized"), "format 'mxfp4-pack-quantized' is not supported"),
    "fp8 by groups": (
        ct({"type": "float", "num_bits": 8, "strategy": "group"}, format="float-quantized"),
        "strategy 'group' is not supported; tensor, channel and block are",
    ),
    "nvfp4 by groups": (
        ct({"type": "float", "strategy": "group"}, format="nvfp4-pack-quantized"),
        "has strategy tensor_group and groups of 16",
    ),
    "float": (ct({"type": "float"}), "weights: type 'float' is not supported, only int"),
    "block": (ct({"strategy": "block"}), "strategy 'block' is not supported; tensor, channel and"),
    "no size": (ct({"group_size": None}), "strategy 'group' contradicts group_size -1"),
    "scheme": (CT | {"config_groups": {"group_0": ["Linear"]}}, "group_0 is not an object"),
    "static": (ct(input_activations=STATIC), "scales fixed beforehand are not supported"),
    "fp8 activations": (ct(input_activations=FP8), "type float and 8 bits are not supported"),
    "outputs": (ct(output_activations=STATIC), "output_activations are not supported"),
    "kv": (CT | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is not supported"),
    "spin": (CT | {"transform_config": {"a": 1}}, "transform_config is not supported"),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:fp8"},
        "packing_format 'auto_round:fp8' is not supported",
    ),
    "auto-round's activations": (
        {"quant_method": "auto-round", "act_bits": 8},
        "act_bits 8 is not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_configuration_refused_by_name(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    message = refused(folder("llama", tmp_path / "m", {"quantization_config": config}))
    assert message.startswith(f"{tmp_path}/m/config.json: quantization_config: ")
    assert reason in message


def changed(name: str, change: Any) -> Any:
    """Changes a tensor, or leaves it out if nothing is given back."""

    def apply(tensors: dict[str, Any]) -> None:
        value = change(tensors.pop(name))
        if value is not None:
            tensors[name] = value

    return apply


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
TENSORS: dict[str, tuple[str, Any, str]] = {
    "no numbers": (
        "gptq", changed(f"{Q}.qweight", lambda x: None), f"has no {Q}.qweight beside it",
    ),
    "no numbers of awq": (
        "awq", changed(f"{Q}.qweight", lambda x: None), f"has no {Q}.qweight beside it",
    ),
    "no zero points": (
        "ct", changed(f"{Q}.weight_zero_point", lambda x: None),
        f"'{Q}.weight_scale' has no {Q}.weight_zero_point beside it, and symmetric is false",
    ),
    "no zero points of bytes": (
        "int", changed(f"{Q}.weight_zero_point", lambda x: None),
        f"'{Q}.weight_scale' has no {Q}.weight_zero_point beside it, and symmetric is false",
    ),
    "no scales": (
        "gptq", changed(f"{Q}.scales", lambda x: None), f"has no {Q}.scales beside it",
    ),
    "other bits": (
        "gptq", changed(f"{Q}.qweight", lambda x: np.repeat(x, 2, axis=0)),
        f"'{Q}.qweight' has shape [8, 32], not [4, 32] of 4-bit numbers",
    ),
    "other groups": (
        "gptq", changed(f"{DOWN}.scales", lambda x: x[:1]),
        f"'{DOWN}.scales' has shape [1, 32], not [2, 32]",
    ),
    "zeros": (
        "gptq", changed(f"{DOWN}.qzeros", lambda x: x[:, :3]),
        f"'{DOWN}.qzeros' has shape [2, 3], not [2, 4]",
    ),
    "scales of integers": (
        "gptq", changed(f"{Q}.scales", lambda x: x.view(np.int16).astype(np.int32)),
        f"'{Q}.scales' is of type I32, not F16 or BF16 or F32",
    ),
    "g_idx": (
        "gptq", changed(f"{DOWN}.g_idx", lambda x: x * 0),
        f"'{DOWN}.g_idx' does not give every group 32 inputs",
    ),
    "g_idx beyond": (
        "gptq", changed(f"{DOWN}.g_idx", lambda x: x + (1 << 30)),
        f"'{DOWN}.g_idx' puts input 0 in group 1073741824, but has 2 groups",
    ),
    "short g_idx": (
        "gptq", changed(f"{DOWN}.g_idx", lambda x: x[:-1]), "has shape [47], not [48]",
    ),
    "unknown module": (
        "gptq", lambda t: t.update({"vision.x.qweight": t[f"{Q}.qweight"]}),
        "'vision.x.qweight' is not used by this model family",
    ),
    "awq's words": (
        "awq", changed(f"{Q}.qweight", lambda x: x.T),
        f"'{Q}.qweight' has shape [4, 32], not [inputs, outputs/8] of [32, 32]",
    ),
    "two forms": (
        "ct", lambda t: t.update({f"{Q}.weight": np.zeros((32, 32), np.float32)}),
        f"'{Q}.weight' is there beside its packed form",
    ),
    "another shape": (
        "ct", changed(f"{Q}.weight_shape", lambda x: x * (1 << 35)),
        f"'{Q}.weight_shape' is [1099511627776, 1099511627776], not [32, 32]",
    ),
    "zero points": (
        "ct", changed(f"{Q}.weight_zero_point", lambda x: np.full((32, 1), -9, np.int8)),
        "weight_zero_point' is not of 4-bit numbers",
    ),
    "static scale": (
        "ct", lambda t: t.update({f"{Q}.input_scale": np.ones(1, np.float32)}),
        f"'{Q}.input_scale' is a scale fixed beforehand, of activations to int8",
    ),
    "floats": (
        "int", changed(f"{Q}.weight", lambda x: x.astype(np.float32)),
        f"'{Q}.weight' is of type F32, not I8",
    ),
    "packed for int": (
        "int", changed(f"{Q}.weight_scale", lambda x: x[:, :0]), "has shape [32, 0], not [32, 1]",
    ),
}  # fmt: skip


def small(kind: str, path: Path) -> Path:
    """A quantized folder of each layout."""
    folder("llama", path)
    if kind == "gptq":
        quantize_all(path, GPTQ, lambda x: (m := quantized(x, 4, 32), writer.gptq(m)))
    elif kind == "awq":
        quantize_all(path, AWQ, lambda x: (m := quantized(x, 4, 32), writer.awq(m)))
    elif kind == "ct":
        quantize_all(path, CT, lambda x: (m := quantized(x, 4, 32), writer.pack_quantized(m)))
    else:
        config = writer.ct_config(8, -1, symmetric=False, layout="int-quantized")
        quantize_all(path, config, lambda x: (m := quantized(x, 8, -1), writer.int_quantized(m)))
    return path


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_refused_by_name(name: str, tmp_path: Path) -> None:
    kind, change, reason = TENSORS[name]
    path = small(kind, tmp_path / "m")
    assert load(path).quantization is not None
    stored = load_file(path / "model.safetensors")
    change(stored)
    save_file(
        {key: np.ascontiguousarray(x) for key, x in stored.items()}, path / "model.safetensors"
    )
    message = refused(path)
    assert "model.safetensors: tensor '" in message
    assert reason in message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["gptq", "awq", "ct", "int"])
def test_scales_that_are_not_finite(kind: str, value: float, tmp_path: Path) -> None:
    """Refused when the rows are made; rows before the one that has it can be read."""
    path = small(kind, tmp_path / "m")
    name = f"{Q}.weight_scale" if kind in ("ct", "int") else f"{Q}.scales"
    stored = load_file(path / "model.safetensors")
    stored[name].flat[3] = value
    save_file(stored, path / "model.safetensors")
    weight = load(path).weights["layers.0.attn_q"]
    assert weight.rows(0, 3).any()
    with pytest.raises(CheckpointError) as caught:
        weight.rows(3, 32)
    reason = f"tensor '{name}' has a scale that is not finite"
    assert str(caught.value) == f"{path}/model.safetensors: {reason}"


def test_an_activation_order_that_is_missing(tmp_path: Path) -> None:
    path = small("gptq", tmp_path / "m")
    stored = load_file(path / "model.safetensors")
    for name in [f"{DOWN}.g_idx", f"{Q}.g_idx"]:  # of 48 inputs, and of 32: one group
        del stored[name]
    save_file(stored, path / "model.safetensors")
    assert load(path).quantization is not None
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (path / "config.json").write_text(json.dumps(config))
    assert f"has no {DOWN}.g_idx beside it" in refused(path)


def test_zero_points_that_some_groups_have(tmp_path: Path) -> None:
    """Without one a matrix is of the symmetric group, if it may be."""

    def make(x: Any) -> Any:
        symmetric = x.shape[1] == 48
        made = quantized(x, 8 if symmetric else 4, 32, symmetric=symmetric)
        return made, writer.pack_quantized(made, symmetric=symmetric)

    path = folder("llama", tmp_path / "m")
    group = CT["config_groups"]["group_0"]
    other = writer.ct_config(8, 32, symmetric=True, layout="pack-quantized")
    groups = {"group_0": group, "group_1": other["config_groups"]["group_0"]}
    quantize_all(path, CT | {"config_groups": groups}, make)
    assert load(path).quantization is not None
    stored = load_file(path / "model.safetensors")
    del stored[f"{Q}.weight_zero_point"]
    save_file(stored, path / "model.safetensors")
    assert f"has no {Q}.weight_zero_point beside it" in refused(path)


def test_an_order_that_is_missing(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m")
    config = writer.ct_config(4, 32, symmetric=True, layout="pack-quantized")
    group = config["config_groups"]["group_0"]
    group["weights"] = group["weights"] | {"actorder": "group"}
    quantize_all(
        path,
        config,
        lambda x: (
            m := quantized(x, 4, 32, symmetric=True),
            writer.pack_quantized(m, symmetric=True),
        ),
    )
    assert "weight_g_idx beside it, and actorder asks for one" in refused(path)


def test_groups_that_no_kernel_takes(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m")
    quantize_all(path, gptq_config(4, 16), lambda x: (m := quantized(x, 4, 16), writer.gptq(m)))
    assert "scales' has groups of 16 inputs, not a multiple of 32" in refused(path)


def test_packed_numbers_of_bits_that_only_plain_groups_may_have(tmp_path: Path) -> None:
    """int-quantized numbers may have 5 bits, each in a byte; there is no packing of 5."""

    def five(x: Any) -> Any:
        made = quantized(x, 5, -1, symmetric=True)
        return made, {"weight_packed": words(made.q, 5), "weight_scale": made.scales}

    path = folder("llama", tmp_path / "m")
    config = writer.ct_config(5, -1, symmetric=True, layout="int-quantized")
    quantize_all(path, config, five)
    message = refused(path)
    assert "model.safetensors: tensor '" in message
    assert "weight_packed' is there, but no group's format is pack-quantized" in message


def test_packed_numbers_are_of_packed_groups_bits(tmp_path: Path) -> None:
    """A plain group beside a packed one: its bits are none that packed numbers may have."""

    def eight(x: Any) -> Any:
        return (m := quantized(x, 8, 32)), writer.pack_quantized(m)

    path = folder("llama", tmp_path / "m")
    group = CT["config_groups"]["group_0"]
    plain = writer.ct_config(8, -1, symmetric=False, layout="int-quantized")
    config = CT | {
        "format": "mixed-precision",
        "config_groups": {
            "group_0": group | {"format": "pack-quantized"},
            "group_1": plain["config_groups"]["group_0"] | {"format": "int-quantized"},
        },
    }
    quantize_all(path, config, eight)
    assert "weight_packed' has shape" in (message := refused(path))
    assert message.endswith("of 4-bit numbers")


# ── Hostile files ───────────────────────────────────────────────────────────────────────────────


WEIRD = [None, True, False, 0, 1, -1, 2, 3, 4, 8, 16, 32, 48, 64, 1 << 40, 1.5, 1e308, "", "int"]
WEIRD += ["fp8", "modelopt", "NVFP4", "float", "float-quantized", "nvfp4-pack-quantized"]
WEIRD += ["gptq", "gptq_v2", "pack-quantized", "int-quantized", "group", "channel", [], [1], {}]
HEADER = 8


def changed_values(values: Any, rng: random.Random) -> None:
    """Some place of a JSON value gets another one, or goes."""
    while True:
        keys = list(values) if isinstance(values, dict) else list(range(len(values)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = values[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.8:
            values = inner
            continue
        if isinstance(values, dict) and rng.random() < 0.2:
            del values[key]
        elif isinstance(values, dict) and rng.random() < 0.1:
            values[rng.choice(["bits", "dynamic", "format", "strategy", "x"])] = values.pop(key)
        else:
            values[key] = deepcopy(rng.choice(WEIRD))
        return


def changed_header(header: dict[str, Any], rng: random.Random) -> None:
    """A tensor gets another name, type or shape, its bytes staying what they are."""
    name = rng.choice(sorted(header.keys() - {"__metadata__"}))
    entry = header[name]
    match rng.randrange(4):
        case 0:
            module, _, part = name.rpartition(".")
            parts = ["qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "bias"]
            parts += ["weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", part]
            parts += ["weight_scale_inv", "weight_scale_2", "weight_global_scale", "input_scale"]
            header[f"{module}.{rng.choice(parts)}"] = header.pop(name)
        case 1:
            sizes = {"I32": "F32", "F32": "I32", "F16": "BF16", "BF16": "F16", "I8": "U8"}
            sizes |= {"U8": "F8_E4M3", "F8_E4M3": "F8_E5M2"}
            entry["dtype"] = sizes.get(entry["dtype"], "I32")
        case 2:
            rng.shuffle(entry["shape"])
        case 3 if len(entry["shape"]) > 1 and entry["shape"][0] % 2 == 0:
            entry["shape"][0] //= 2
            entry["shape"][-1] *= 2


def mutate(count: int, path: Path, seed: int = 0) -> tuple[int, int]:
    """Configurations, headers and bytes of quantized folders: loaded and read, or refused by name.
    How many were loaded, and how many refused.
    """
    sources = [small(kind, path / kind) for kind in ("gptq", "awq", "ct", "int")]
    sources += [quantized_folder(name, path / name) for name in QUANTIZED]
    rng = random.Random(seed)
    loaded = 0
    for _ in range(count):
        source = rng.choice(sources)
        if rng.random() < 0.5:
            own = list(source.glob("*quant*_config.json"))
            victim = own[0] if own and rng.random() < 0.5 else source / "config.json"
        else:
            victim = source / "model.safetensors"
        good = victim.read_bytes()
        if victim.suffix == ".json":
            values = json.loads(good)
            for _ in range(rng.choice((1, 1, 2, 3))):
                changed_values(values.get("quantization_config", values), rng)
            victim.write_text(json.dumps(values))
        else:
            length = int.from_bytes(good[:HEADER], "little")
            header, data = (
                json.loads(good[HEADER : HEADER + length]),
                bytearray(good[HEADER + length :]),
            )
            for _ in range(rng.choice((0, 1, 1, 2))):
                changed_header(header, rng)
            for _ in range(rng.choice((0, 0, 4))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            text = json.dumps(header).encode()
            victim.write_bytes(len(text).to_bytes(HEADER, "little") + text + data)
        try:
            checkpoint = load(source)
            for weight in checkpoint.weights.values():
                assert weight.data.nbytes == weight.nbytes
            loaded += 1
        except CheckpointError as error:
            if not str(error).startswith(str(source)):
                raise
        finally:
            victim.write_bytes(good)
    return loaded, count - loaded


@pytest.mark.parametrize("count", [250, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_quantized_folders(count: int, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded, other = mutate(count, tmp_path)
    assert loaded
    assert other
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (200 << 10)  # KiB


KEYS = (
    "bits", "group_size", "sym", "dynamic", "meta", "checkpoint_format", "config_groups", "format",
    "ignore", "sparsity_config", "zero_point", "version", "extra_config",
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["gptq", "awq", "int", "group", "channel", "pack-quantized", "re:.*"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["bits", "group_size", "weights", "num_bits", "type", "strategy", "sym"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.fixture(scope="module")
def a_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small("gptq", tmp_path_factory.mktemp("any") / "m")


@settings(max_examples=200)
@given(
    st.sampled_from(["gptq", "awq", "compressed-tensors", "auto-round"]),
    st.dictionaries(st.sampled_from(KEYS), JSON),
)
def test_any_configuration(a_folder: Path, method: str, values: dict[str, Any]) -> None:
    file = a_folder / "config.json"
    good = file.read_text()
    changed = {"quantization_config": values | {"quant_method": method}}
    file.write_text(json.dumps(json.loads(good) | changed))
    try:
        load(a_folder)
    except CheckpointError as error:
        if not str(error).startswith(str(a_folder)):
            raise
    finally:
        file.write_text(good)
