"""The arithmetic of formats, by hand, for models known by their config.json."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

import strict_json
from loader.quantized_writer import gptq, gptq_config, quantize_all, quantized
from machine.test_limits import made_up
from octavo.cli import app
from octavo.cli.plan.quantization import EXAMPLES
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import load_engine
from octavo.executor.cost import Arithmetic, CostModel, Rates
from octavo.kv_cache.layout import KvLayout
from octavo.loader import load
from octavo.loader.base import CheckpointError
from octavo.tools.plan.hardware import Device
from octavo.tools.plan.phase import crossing, decode_batch, prefill_batch
from octavo.tools.plan.quantization import as_stored, held, in_scheme, plan
from octavo.tools.plan.schemes import scheme
from octavo.tools.plan.subject import Subject
from oracle.tiny_folders import FAMILIES, folder, talking_folder
from tools.quantize.quantizing import make, qwen3_folder

# As published; the parameters are what transformers 5.24 counts of each.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama-2-7b": (6_738_415_616, {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }),
    "llama-3-8b": (8_030_261_248, {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }),
    "mistral-7b": (7_241_732_096, {
        "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "sliding_window": 4096,
    }),
    "qwen2.5-0.5b": (494_032_768, {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": True,
    }),
    "qwen3-0.6b": (596_049_920, {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
    }),
    "gemma-2-2b": (2_614_341_888, {
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    }),
    "gemma-3-270m": (268_098_176, {
        "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048,
        "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    }),
    "phi-3-mini": (3_821_079_552, {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "sliding_window": 2047,
    }),
    "mixtral-8x7b": (46_702_792_704, {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "num_local_experts": 8, "num_experts_per_tok": 2,
    }),
}  # fmt: skip

FAST = Rates(100e9, 1e15)  # so much arithmetic that every op is bound by bytes
BALANCED = Rates(100e9, 1e12, int8_ops_per_second=4e12, bf16_ops_per_second=2e12)


def subject(name: str, tmp_path: Path) -> Subject:
    path = tmp_path / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODELS[name][1]))
    return Subject.of_config(path / "config.json")


def machine(rates: Rates) -> Device:
    return Device("hand-made", lambda _: rates)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    assert subject(name, tmp_path).parameters == MODELS[name][0]


def test_llama_2_by_hand(tmp_path: Path) -> None:
    """A layer is 4 · 4096² + 3 · 4096 · 11008 = 202,375,168 weights."""
    llama = subject("llama-2-7b", tmp_path)
    stored = in_scheme(llama, scheme("awq", 4, 128), scheme("bf16"))
    layers = 32 * 202_375_168
    assert stored.part_bytes("layers") == 3_364_487_168 == layers // 2 + layers * 5 // 256
    assert stored.part_bytes("embedding") == stored.part_bytes("head") == 2 * 32000 * 4096
    assert stored.part_bytes("norms") == 4 * (2 * 32 + 1) * 4096
    assert stored.bytes == 3_889_840_128
    found = plan(llama, stored, machine(FAST), context=1024, prompt=512)
    assert found.bytes_per_weight == 0.51953125
    # Layers, head, norms, a row of the embedding; keys and values: 1025 read, 1 written.
    read = 3_364_487_168 + 262_144_000 + 1_064_960 + 8192 + 1026 * 2 * 32 * 4096 * 2
    assert found.decode.bytes == read == 4_165_623_808
    assert found.decode.tokens_per_second == pytest.approx(100e9 / read)
    assert found.decode.bound == "bytes"
    assert found.crossing is None  # with so much arithmetic


def test_batch_from_which_operations_bind(tmp_path: Path) -> None:
    """A weight of 0.51953125 bytes takes 5.1953125 ps to read and 0.5 ps a token to multiply."""
    llama = subject("llama-2-7b", tmp_path)
    stored = in_scheme(llama, scheme("awq", 4, 128), scheme("bf16"))
    found = plan(llama, stored, machine(BALANCED), context=64, prompt=512)
    assert found.layers_crossing == pytest.approx(10.390625)
    wide = plan(llama, stored, machine(BALANCED), context=64, prompt=512, quantized=Arithmetic.BF16)
    assert wide.layers_crossing == pytest.approx(10.390625 / 2)
    # The whole step: W + n·b bytes against n·a operations, whose sums are linear in n.
    assert found.crossing is not None
    model = CostModel(
        llama.program,
        KvLayout.of(llama.program.config),
        weight_bytes=stored.sizes,
        arithmetic=dict.fromkeys(llama.matrices(), Arithmetic.INT8) | {"output": Arithmetic.BF16},
        attention=Arithmetic.BF16,
    )

    def times(sequences: int) -> tuple[float, float]:
        costs = model.by_op(decode_batch(sequences, 64))
        return (
            sum(cost.bytes / BALANCED.bytes_per_second for cost in costs),
            sum(cost.ops / BALANCED.peak(cost.arithmetic) for cost in costs),
        )

    for sequences, operations in ((found.crossing - 1, False), (found.crossing, True)):
        memory, arithmetic = times(sequences)
        assert (arithmetic > memory) is operations
    assert crossing(model, 64, BALANCED) == found.crossing
    # 10 µs of arithmetic a token against 5 µs to read a token of cache: beyond some context, never.
    assert plan(llama, stored, machine(BALANCED), context=4096, prompt=512).crossing is None


def test_prefill_is_bound_by_operations(tmp_path: Path) -> None:
    llama = subject("llama-2-7b", tmp_path)
    stored = in_scheme(llama, scheme("awq", 4, 128), scheme("bf16"))
    found = plan(llama, stored, machine(BALANCED), context=64, prompt=1024)
    assert found.prefill.bound == "operations"
    [layers] = [part for part in found.prefill.parts if part.name == "layers"]
    # After the last attention one row is computed: three quarters of a feed-forward's, and o.
    last = 4096 * 4096 + 3 * 4096 * 11008
    assert layers.ops == 2 * (1024 * (32 * 202_375_168 - last) + last)
    assert found.prefill.seconds >= layers.ops / 4e12
    half = plan(llama, stored, machine(BALANCED), context=64, prompt=1024,
                quantized=Arithmetic.BF16)  # fmt: skip
    assert half.prefill.tokens_per_second < 0.6 * found.prefill.tokens_per_second


def test_the_parts_add_up_to_the_cost_models_step(tmp_path: Path) -> None:
    """One count, divided up: nothing is counted here that the engine's own limit does not count."""
    gemma = subject("gemma-3-270m", tmp_path)
    stored = in_scheme(gemma, scheme("q4_0"), scheme("q8_0"))
    found = plan(gemma, stored, machine(BALANCED), context=900, prompt=700)
    model = CostModel(
        gemma.program,
        KvLayout.of(gemma.program.config),
        weight_bytes=stored.sizes,
        arithmetic=dict.fromkeys(gemma.program.weights, Arithmetic.INT8),
        attention=Arithmetic.BF16,
    )
    for phase, batch in (
        (found.decode, decode_batch(1, 900)),
        (found.prefill, prefill_batch(700)),
    ):
        costs = model.by_op(batch)
        assert phase.ops == sum(cost.ops for cost in costs)
        assert phase.bytes == sum(cost.bytes for cost in costs)
        assert phase.seconds == pytest.approx(model.seconds(batch, BALANCED), rel=1e-12)


def test_experts_are_read_as_they_are_hit(tmp_path: Path) -> None:
    """A token reads two experts of eight; a large batch all, and computes two for each token."""
    mixtral = subject("mixtral-8x7b", tmp_path)
    stored = in_scheme(mixtral, scheme("q4_0"), scheme("bf16"))
    found = plan(mixtral, stored, machine(BALANCED), context=64, prompt=4096)
    attention, expert = 2 * 4096 * 4096 + 2 * 1024 * 4096, 3 * 4096 * 14336
    router = 8 * 4096
    [alone] = [part for part in found.decode.parts if part.name == "layers"]
    assert alone.ops == 2 * 32 * (attention + 2 * expert + router)
    assert alone.weight_bytes == 32 * (attention + 2 * expert + router) * 18 // 32
    [all_hit] = [part for part in found.prefill.parts if part.name == "layers"]
    assert all_hit.weight_bytes == pytest.approx(stored.part_bytes("layers"), rel=0.03)
    assert found.layers_crossing is None
    assert found.crossing is not None
    text = run(str(tmp_path / "mixtral-8x7b"), *DEVICE, "--format", "q4_0")
    assert "8 × 4096·14336" in text
    assert "each expert sees some" in text


def test_what_a_file_has_and_the_engine_holds(tmp_path: Path) -> None:
    path = talking_folder(tmp_path / "talking")
    checkpoint = load(path)
    talking = Subject.of(checkpoint)
    stored = as_stored(talking)
    assert stored.part_bytes("layers") == 2 * sum(
        rows * columns for rows, columns in talking.matrices().values()
    )
    own = held(talking, stored)
    loaded = load_engine(path, EngineConfig(kv_cache_memory_bytes=4 << 20, max_num_seqs=8))
    assert sum(own.values()) == loaded.weight_bytes
    loaded.engine.close()
    assert as_stored(Subject.of_config(path / "config.json")) is None


def test_a_quantized_file_takes_what_its_tensors_take(tmp_path: Path) -> None:
    """fp16 scales and packed zeros, not the wider ones that rows are read as."""
    path = folder("llama", tmp_path / "m")
    quantize_all(path, gptq_config(4, 32), lambda x: (m := quantized(x, 4, 32), gptq(m)))
    stored = as_stored(Subject.of(load(path)))
    tensors = load_file(path / "model.safetensors")
    for part, name in (("attn_q", "self_attn.q_proj"), ("ffn_down", "mlp.down_proj")):
        size = sum(x.nbytes for key, x in tensors.items() if f"layers.0.{name}." in key)
        assert stored.sizes[f"layers.0.{part}"] == size
    assert stored.sizes["output_norm"] == 4 * 32


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (4, None)])
def test_what_quantize_writes_takes_what_was_planned(
    bits: int, group: int | None, tmp_path: Path
) -> None:
    source = qwen3_folder(tmp_path / "source")
    made = make(source, tmp_path / "made", format="gptq", bits=bits, group=group)
    written = as_stored(Subject.of(load(tmp_path / "made")))
    planned = in_scheme(Subject.of(load(source)), scheme("gptq", bits, group or -1), scheme("bf16"))
    assert written.sizes == planned.sizes
    # Norms are counted as they are held, in F32; these are in BF16.
    assert made.nbytes == planned.bytes - planned.part_bytes("norms") // 2


def test_a_format_that_does_not_fit_names_the_matrix(tmp_path: Path) -> None:
    odd = subject("qwen2.5-0.5b", tmp_path)
    with pytest.raises(ValueError, match=r"Q4_K: rows of 896 .* \(layers.0.attn_q\)"):
        in_scheme(odd, scheme("q4_k"), scheme("bf16"))


# --- the command ---------------------------------------------------------------------------------

DEVICE = ("--device", "memory=100,int8=4000,bf16=2000,fp32=1000")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", "quantization", *arguments])
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.stdout


def test_the_table_has_every_format(tmp_path: Path) -> None:
    subject("llama-2-7b", tmp_path)
    text = run(str(tmp_path / "llama-2-7b"), *DEVICE)
    for name in ("F32", "BF16", "Q2_K", "Q4_0", "IQ4_XS", "MXFP4", "gptq 4 bits, group 128"):
        assert f"\n{name} " in text
    assert "0.519531" in text
    assert "not for this model: rows of 11008 are no whole groups" not in text


def test_the_sums_can_be_followed(tmp_path: Path) -> None:
    subject("llama-2-7b", tmp_path)
    text = run(str(tmp_path / "llama-2-7b/config.json"), *DEVICE, "--bits", "4",
               "--group-size", "64", "--format", "awq")  # fmt: skip
    assert "llama, 6,738,415,616 parameters" in text
    assert (
        "4 bits/8 + 2 bytes scale/64 + 0.5 bytes zero/64 = 0.5 + 0.03125 + 0.0078125 = 0.5390625"
        in text
    )
    assert "6,476,005,376 × 0.5390625   =    3,490,971,648 bytes  (awq 4 bits, group 64)" in text
    assert (
        "a weight: 0.539062 bytes ÷ 100 GB/s = 5.391 ps to read; "
        "2 operations ÷ 4,000 Gop/s (int8) = 0.5 ps a sequence:" in text
    )
    assert "are bound by operations from 10.78 sequences on" in text


def test_this_machine_is_what_bench_machine_has_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory's rate is that for as much as is read: here between two measured sizes."""
    monkeypatch.setattr("octavo.machine.limits.Limits.stored", lambda *_: made_up())
    subject("gemma-3-270m", tmp_path)
    facts = strict_json.loads(run(str(tmp_path / "gemma-3-270m"), "--json"))
    assert facts["device"].startswith("this machine (")
    expected = made_up()
    for each in facts["plans"]:
        assert each["rates"]["bytes_per_second"] == expected.bytes_per_second(
            working_set=each["bytes"]
        )
        assert each["rates"]["int8_ops_per_second"] == expected.ops_per_second("int8")


def test_json(tmp_path: Path) -> None:
    subject("gemma-3-270m", tmp_path)
    facts = strict_json.loads(run(str(tmp_path / "gemma-3-270m"), *DEVICE, "--json"))
    assert facts["parameters"] == 268_098_176
    plans = {each["format"]: each for each in facts["plans"]}
    assert plans["BF16"]["bytes"] == 2 * (268_098_176 - 55_936) + 4 * 55_936
    assert (
        plans["Q4_0"]["decode"]["tokens_per_second"] > plans["BF16"]["decode"]["tokens_per_second"]
    )
    assert facts["skipped"]["Q4_K"] == "rows of 640 are no whole groups of 256 (layers.0.attn_q)"
    for each in facts["plans"]:
        parts = each["decode"]["parts"]
        assert sum(p["weight_bytes"] + p["kv_bytes"] for p in parts) == each["decode"]["bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "h999"), "is not known"),
        *(
            (("--device", f"memory={figure},int8=1"), f"memory={figure} is not from 0.001 to 1e+09")
            for figure in ("0", "-1", "inf", "nan", "1e-320")
        ),
        (("--device", "memory=1,int8=1e10"), "int8=1e10 is not from 0.001 to 1e+09 Gop/s"),
        (("--kv-cache-dtype", "int3"), "'int3' is not supported"),
        (("--device", "int8=100"), "memory and at least one"),
        (("--format", "q4_0", "--bits", "4"), "bits and groups of its own"),
        (("--format", "nf4"), "is not one of"),
        (("--bits", "5"), "gptq has 3 or 4 or 8 bits"),
        (("--arithmetic", "fp8"), "none of auto, int8, bf16"),
        (("--embedding-format", "x"), "is not one of"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["plan", "quantization", str(FAMILIES / "llama"), *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("flag", ["--context", "--prompt-len"])
@pytest.mark.parametrize("tokens", ["129", "99999999999999"])
def test_no_more_than_the_models_context(flag: str, tokens: str) -> None:
    path = str(FAMILIES / "llama/config.json")
    arguments = ["plan", "quantization", path, *DEVICE, flag, tokens]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SettingsError)
    assert f"{flag} {tokens} is more than the model's context of 128" in str(result.exception)
    assert strict_json.loads(run(path, *DEVICE, "--json"))["prompt_len"] == 128  # not 512
    facts = strict_json.loads(run(path, *DEVICE, flag, "128", "--json"))
    assert facts[flag.removeprefix("--").replace("-", "_")] == 128


def test_examples_need_no_files() -> None:
    for example in EXAMPLES:
        _, *arguments = shlex.split(example)
        if "smollm2" not in arguments:  # which octavo pull brings
            done = CliRunner().invoke(app, arguments, catch_exceptions=False)
            assert done.exit_code == 0, done.output


def test_a_narrower_cache(tmp_path: Path) -> None:
    subject("llama-2-7b", tmp_path)
    common = (str(tmp_path / "llama-2-7b"), *DEVICE, "--format", "q4_0", "--context", "1024")
    found = {
        name: strict_json.loads(run(*common, "--kv-cache-dtype", name, "--json"))
        for name in ("auto", "int8", "int4")
    }
    assert [each["kv_bytes_per_token"] for each in found.values()] == [
        2 * 32 * 32 * 128 * 2, 32 * 32 * (2 * 128 + 4), 32 * 32 * (128 + 8),
    ]  # fmt: skip
    attention = [
        next(part for part in each["plans"][0]["decode"]["parts"] if part["name"] == "attention")
        for each in found.values()
    ]
    for each, part in zip(found.values(), attention, strict=True):
        assert part["arithmetic"] == ("bf16" if each["kv_cache_dtype"] == "bf16" else "int8")
        assert part["kv_bytes"] == 1026 * each["kv_bytes_per_token"]
    assert "(139,264 bytes a token in int4, whatever" in run(*common, "--kv-cache-dtype", "int4")


def test_a_config_that_is_none(tmp_path: Path) -> None:
    bad = tmp_path / "config.json"
    bad.write_text("{]")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Subject.of_config(bad)
    result = CliRunner().invoke(app, ["plan", "quantization", str(tmp_path / "x.json"), *DEVICE])
    assert isinstance(result.exception, CheckpointError)
