"""Memory as sums: the field's worked values, factors that multiply, and what fits."""

import json
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import strict_json
from executor import tiny
from octavo.cli import app
from octavo.cli.simulate import configure
from octavo.engine.config import EngineConfig, SettingsError
from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvDtype, KvKind, KvLayout
from octavo.loader.base import CheckpointError
from octavo.tools.plan.hardware import PUBLISHED
from octavo.tools.plan.memory_plan import (
    DeviceMemory,
    KvCacheSize,
    ServingLoad,
    alternatives,
    kv_cache_bytes,
    kv_cache_steps,
    narrower,
    need,
    sharings,
)
from octavo.tools.plan.quantization import StoredWeights, as_asked, in_scheme
from octavo.tools.plan.schemes import scheme
from octavo.tools.plan.simulation import Setup, weights_on
from octavo.tools.plan.subject import Subject

GIB = 1 << 30
TECHNIQUES: dict[str, Any] = {
    "enable_chunked_prefill": True, "memory": "paged", "speculative_acceptance": None,
}  # fmt: skip


def planned(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", "memory", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    facts: dict[str, Any] = strict_json.loads(done.stdout)
    return facts


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("llama-2-7b --context 4096 --users 1 --kv-dtype fp16", 2 * GIB),
        ("llama-2-7b --context 4096 --users 32 --kv-dtype fp16", 64 * GIB),
        ("llama-2-7b --context 2048 --kv-cache-dtype fp16", GIB),
        ("llama-3-8b --context 8192", GIB),
        ("llama-3-8b --context 8192 --kv-dtype fp16", GIB),
    ],
)
def test_worked_values(arguments: str, expected: int) -> None:
    facts = planned(*arguments.split())
    assert facts["kv_bytes"] == facts["kv_paged_bytes"] == expected
    assert prod(facts["factors"].values()) == expected


def test_plain_numbers() -> None:
    shape = {"layers": 32, "kv_heads": 32, "head_dim": 128, "context": 2048}
    assert kv_cache_bytes(**shape) == GIB  # in fp16
    (step,) = kv_cache_steps(**shape)
    assert step.endswith("= 1,073,741,824 bytes")
    assert kv_cache_bytes(**shape, dtype="int8") == GIB // 2 + 32 * 32 * 2048 * 4
    assert kv_cache_bytes(**shape, dtype="int4") == GIB // 4 + 32 * 32 * 2048 * 8
    assert kv_cache_bytes(**shape, users=3, window=512) == 3 * GIB // 4
    with pytest.raises(ValueError, match="users is 0"):
        kv_cache_bytes(**shape, users=0)


def test_the_engine_has_the_same_cache() -> None:
    """By default, on a GPU and on this machine, and with what is given."""
    subject = Subject.find("llama-3-8b")
    given: dict[str, Any]
    for given in (
        {},
        {"memory_utilization": 0.7, "max_num_batched_tokens": 600},
        {"max_num_seqs": 2048, "max_num_batched_tokens": 4096},
    ):
        for here in (True, False):
            device = replace(PUBLISHED["h100"], measured=here, gpu=not here)
            config, _ = configure(given, TECHNIQUES, device, 8192)
            stored = weights_on(device, subject)
            cache, layout = Setup(subject, stored, device, config).plan()
            assert device.memory_bytes is not None
            place = DeviceMemory(device.name, device.memory_bytes, here, gpu=not here)
            asked = place.usual(replace(EngineConfig(), **given), given)
            found = need(
                ServingLoad(subject, as_asked(subject), 8192, 1, KvDtype.BF16, asked), place
            )
            assert (found.weight_bytes, found.work_bytes) == (stored.bytes, cache.work_bytes)
            assert found.budget // layout.block_bytes == cache.num_blocks


def test_a_device_has_its_own_defaults() -> None:
    facts = planned("llama-3-8b", "--device", "h100", "--context", "8192")
    assert (facts["memory_utilization"], facts["max_num_batched_tokens"]) == (0.92, 2048)
    done = CliRunner().invoke(
        app, ["simulate", "llama-3-8b", "--device", "h100", "--num-prompts", "1", "--json"]
    )
    block = facts["kv_bytes_per_token"] * facts["block_size"]
    blocks = strict_json.loads(done.stdout)["settings"]["kv_blocks"]
    assert facts["devices"][0]["kv_budget_bytes"] // block == blocks
    here = planned("llama-3-8b", "--context", "8192")
    assert (here["memory_utilization"], here["max_num_batched_tokens"]) == (0.5, 512)
    assert here["work_bytes"] < facts["work_bytes"]


def test_why_it_does_not_fit() -> None:
    facts = planned("llama-3-8b", "--device", "t4", "--context", "16")
    assert "weights, work space and runtime leave nothing" in facts["verdict"]
    assert "alone" not in facts["verdict"]
    facts = planned("llama-2-7b", "--device", "memory=1,bf16=1,capacity=4")
    assert "weights alone are too much" in facts["verdict"]


SIZES = st.integers(1, 100)
WINDOWS, WIDTHS = st.none() | st.integers(1, 600), st.integers(2, 300)
KINDS = st.builds(KvKind, WINDOWS, SIZES, WIDTHS, st.just(False))
LATENTS = st.builds(KvKind, WINDOWS, st.just(1), WIDTHS.map(lambda n: 2 * n), st.just(True))


@given(
    layers=st.one_of(
        st.dictionaries(kinds, SIZES, min_size=1, max_size=3) for kinds in (KINDS, LATENTS)
    ),
    context=st.integers(1, 1000),
    users=SIZES,
    dtype=st.sampled_from(KvDtype.served()),
    block_size=st.sampled_from([16, 32]),
)
def test_factors_multiply_and_terms_add_up(
    layers: dict[KvKind, int],
    context: int,
    users: int,
    dtype: KvDtype,
    block_size: int,
) -> None:
    cache = KvCacheSize.made_of(layers, context, users, dtype, block_size)
    assert prod(cache.factors.values()) == cache.numbers
    assert cache.numbers + cache.scales + cache.padding == cache.bytes
    assert cache.padding >= 0
    assert sum(map(cache.kind_bytes, cache.kinds)) == cache.bytes
    assert sum(map(cache.kind_paged_bytes, cache.kinds)) == cache.paged_bytes
    assert cache.bytes <= cache.without_windows
    # Less than two blocks a sequence and layer more than what is kept.
    slack = 2 * block_size * cache.bytes_per_token * users
    assert cache.bytes <= cache.paged_bytes - cache.block_padding < cache.bytes + slack
    assert (cache.block_padding == 0) or not cache.alike
    assert f"{cache.numbers:,}" in " ".join(cache.steps)


@pytest.mark.parametrize("dtype", KvDtype.served())
def test_layers_of_other_heads_are_a_term_each(dtype: KvDtype) -> None:
    """And what their groups leave over of a block counts as the pool has it."""
    model = tiny.mixed()
    cache, layout = KvCacheSize.of(model, 100, 3, dtype), KvLayout.of(model, dtype=dtype)
    near, far = cache.kinds[::-1]
    assert (near.layers, near.kept, near.kv_heads, near.head_dim) == (2, 20, 2, 16)
    assert (far.layers, far.kept, far.kv_heads, far.head_dim) == (1, 100, 1, 56)
    assert cache.numbers == 3 * 2 * (2 * 20 * 2 * 16 + 100 * 56) * cache.number_bytes
    assert prod(cache.factors.values()) == cache.numbers
    assert cache.bytes_per_token == layout.bytes_per_token
    assert cache.paged_bytes == 3 * peak_blocks(layout, 100) * layout.block_bytes
    assert cache.block_padding > 0
    assert cache.steps[0].endswith("1 KV head × 56 wide = 5,600")
    found = sharings(model, cache)
    assert [(each.name, each.kv_heads) for each in found if not each.own] == [
        ("MHA", 4),
        ("MQA", 1),
    ]
    assert found[1] == ("GQA", None, cache.bytes, True)
    assert found[0].bytes > cache.bytes > found[2].bytes


@cache
def stored(name: str) -> tuple[Subject, StoredWeights, list[StoredWeights]]:
    """A model, its weights in BF16, and narrower ones."""
    subject, bf16 = Subject.find(name), scheme("bf16")
    weights = in_scheme(subject, bf16, bf16)
    load = ServingLoad(subject, weights, 1, 1, KvDtype.BF16, EngineConfig())
    return subject, weights, narrower(load, DeviceMemory("somewhere", 0))


@given(
    name=st.sampled_from(["llama-3-8b", "gemma-3-270m", "gemma-2-2b", "mistral-7b-v0.1"]),
    context=st.integers(1, 8192),
    users=st.integers(1, 300),
    dtype=st.sampled_from(KvDtype.served()),
    memory=st.integers(0, 200 << 30),
)
def test_whatever_is_said_to_fit_fits(
    name: str, context: int, users: int, dtype: KvDtype, memory: int
) -> None:
    subject, weights, less = stored(name)
    load = ServingLoad(subject, weights, context, users, dtype, EngineConfig())
    place = DeviceMemory("somewhere", memory)
    found = need(load, place)
    assert found.kv_bytes == load.cache.paged_bytes
    assert found.kv_bytes == users * peak_blocks(load.layout, context) * load.layout.block_bytes
    assert found.fits == (found.sequences >= users) == (found.context >= context)
    if found.fits:
        assert found.bytes <= memory
        return
    others = alternatives(load, less, place)
    for other in others:
        again = need(other.load, place)
        assert again.fits
        assert again == other.need
        assert other.changed
    # What keeps context and users comes first, and none is narrower in both than another.
    kept = ["context" in other.changed or "users" in other.changed for other in others]
    assert kept == sorted(kept)
    if need(replace(load, dtype=KvDtype.INT4), place).fits:  # type: ignore[union-attr]
        assert others


def test_windows_keep_their_tokens_in_whole_blocks() -> None:
    facts = planned("gemma-3-270m", "--context", "8192", "--users", "2")
    far, near = facts["kv_by_kind"]
    assert (near["layers"], near["window"], near["kept"], near["blocks"]) == (15, 512, 512, 33)
    assert (far["layers"], far["window"], far["kept"], far["blocks"]) == (3, None, 8192, 512)
    token = 2 * 1 * 256 * 2
    assert facts["kv_bytes"] == 2 * (15 * 512 + 3 * 8192) * token
    assert facts["kv_paged_bytes"] == 2 * (15 * 528 + 3 * 8192) * token
    assert facts["kv_bytes_without_windows"] == 2 * 18 * 8192 * token
    assert prod(facts["factors"].values()) == facts["kv_bytes"]


def test_scales_are_a_term_of_their_own() -> None:
    facts = planned("llama-3-8b", "--context", "8192", "--kv-dtype", "int8")
    assert facts["kv_number_bytes"] == GIB // 2
    assert facts["kv_scale_bytes"] == 32 * 8 * 8192 * 4
    assert facts["kv_bytes"] == facts["kv_number_bytes"] + facts["kv_scale_bytes"]


def test_kinds_of_attention_side_by_side() -> None:
    sharings = planned("llama-3-8b", "--context", "8192")["attention"]
    assert [(each["name"], each["kv_heads"], each["own"]) for each in sharings] == [
        ("MHA", 32, False),
        ("GQA", 8, True),
        ("MQA", 1, False),
    ]
    assert [each["bytes"] for each in sharings] == [4 * GIB, GIB, GIB // 8]


def test_experts_are_a_part_of_their_own() -> None:
    facts = planned("mixtral-8x7b", "--context", "4096")
    parts = {part["name"]: part["numbers"] for part in facts["weights"]["parts"]}
    assert parts["experts"] == 32 * 8 * 3 * 4096 * 14336
    assert sum(parts.values()) == facts["parameters"] == 46_702_792_704
    assert facts["active_parameters"] == facts["parameters"] - parts["experts"] * 6 // 8


@pytest.mark.parametrize(
    ("device", "users", "fits"),
    [("rtx-4090", 1, True), ("rtx-4090", 32, False), ("h200", 32, True), ("t4", 4, False)],
)
def test_a_verdict_for_a_device(device: str, users: int, fits: bool) -> None:
    arguments = ("llama-2-7b", "--kv-dtype", "fp16", "--users", str(users), "--device", device)
    facts = planned(*arguments)
    asked = facts["devices"][0]
    assert facts["fits"] == asked["fits"] == fits
    assert facts["verdict"].startswith("Fits on" if fits else "Does not fit on")
    assert (facts["alternatives"] == []) == fits
    assert len(facts["devices"]) == 15
    (here,) = [each["name"] for each in facts["devices"] if each["measured"]]
    assert here.startswith("this machine")


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        # 131.4 GiB of weights; 0.92 of 140.4 GiB are 129.2.
        ("llama-3-70b --device h200 --context 16", False),
        ("llama-3-70b --device h200 --context 16 --gpu-memory-utilization 0.97", True),
        ("llama-3-70b --device h200 --format fp8", True),
        # 12.55 GiB of weights; 0.92 of 15 GiB are 13.8, less 1 GiB of runtime.
        ("llama-2-7b --device t4 --context 16", False),
        ("llama-2-7b --device t4 --format fp8", True),
    ],
)
def test_a_runtime_takes_memory_of_a_gpu(arguments: str, fits: bool) -> None:
    facts = planned(*arguments.split())
    asked = facts["devices"][0]
    assert facts["fits"] is fits
    assert asked["runtime_bytes"] == GIB
    share = facts["memory_utilization"]
    held = asked["weight_bytes"] + asked["work_bytes"] + asked["runtime_bytes"]
    assert asked["kv_budget_bytes"] == int(share * asked["memory_bytes"]) - held
    (here,) = [each for each in facts["devices"] if each["measured"]]
    assert here.get("runtime_bytes", 0) == 0


def test_fp8_in_the_sums() -> None:
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        facts = planned("llama-3-8b", "--context", "8192", "--kv-dtype", name, "--format", name)
        assert facts["kv_bytes"] == GIB // 2
        assert facts["kv_dtype"] == "fp8"
        assert facts["weights"]["format"] == "fp8"
        assert not facts["fits"]
        assert facts["verdict"].endswith("no kernel here takes a cache of fp8.")
        others = {each["name"]: each["fits"] for each in facts["devices"]}
        assert others["RTX 4090 24 GB"]
    (first, *_) = planned("llama-3-8b", "--context", "16", "--kv-dtype", "fp8")["alternatives"]
    assert (first["kv_dtype"], first["context"]) == ("int8", 16)
    figures = ("--device", "memory=10,int8=150,capacity=64")
    verdict = planned("llama-3-8b", "--context", "16", "--format", "fp8", *figures)["verdict"]
    assert verdict.endswith("no kernel here takes weights in fp8.")


def test_formats_of_weights() -> None:
    bf16 = planned("llama-2-7b")["weights"]
    assert bf16["format"] == "BF16"
    assert bf16["bytes"] == 2 * 6_738_415_616 + 2 * 266_240  # norms in fp32
    q4 = planned("llama-2-7b", "--format", "q4_0")["weights"]["bytes"]
    assert q4 < 0.35 * bf16["bytes"]
    int4 = planned("llama-2-7b", "-q", "int4")["weights"]
    assert int4["format"] == "int4, rounded"
    assert int4["bytes"] < 0.31 * bf16["bytes"]


def test_text_has_the_verdict_in_its_first_lines() -> None:
    done = CliRunner().invoke(app, ["plan", "memory", "llama-2-7b", "--device", "t4", "-b", "9"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[1].startswith("Does not fit on T4 16 GB: 9 users of 4,096 tokens take ")
    assert "published, not measured" in done.stdout
    assert "What would fit on T4 16 GB, the nearest first:" in done.stdout
    assert max(map(len, lines[2:])) <= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "-1"], "-1"),
        (["--context", "0"], "at least one token"),
        (["--context", "9" * 400 + ".5K"], "is not a size"),
        (["--context", "8193"], "--context 8193 is more than the model's context of 8192 tokens"),
        (["--users", "0"], "--users '0' is not a number from 1 to"),
        (["--users", "1.5"], "--users '1.5'"),
        (["--users", "²"], "is not a number from 1 to"),
        (["--device", "memory=3,int8=4"], "says nothing of how much it holds"),
        (["--device", "memory=3,int8=4,capacity=nan"], "capacity=nan is not from"),
        (["--kv-dtype", "fp32"], "--kv-dtype 'fp32' is not what a cache can hold"),
        (["--format", "q9"], "format 'q9' is not one of"),
        (["--format", "gptq", "--bits", "5"], "gptq has 3 or 4 or 8 bits, not 5"),
        (["--format", "int4", "--bits", "4"], "are not for int4"),
        (["--block-size", "17"], "--block-size is 17, not a multiple of 16"),
        (["--memory-utilization", "0"], "--memory-utilization is 0, outside 0 to 1"),
        (["--max-num-batched-tokens", "3", "--users", "4"], "fewer than the 4 users"),
        (["--draft-model", "nothing-9b"], "unknown model 'nothing-9b'"),
        (["--draft-model", "qwen2.5-0.5b"], "vocabulary of 151,936 tokens and llama-3-8b one of"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["plan", "memory", "llama-3-8b", *arguments, "--json"])
    said = " ".join((done.output + str(done.exception)).replace("│", " ").split())
    assert done.exit_code in (1, 2)
    assert message in said
    assert "kv_bytes" not in done.output


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 90, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 0}}, "factor"),
        ({"rms_norm_eps": 1e400}, "not a finite number|rms_norm_eps|Infinity"),
        ({"quantization_config": 5}, "quantization_config is 5, not an object"),
        ({"quantization_config": ["gptq"]}, "quantization_config is .*, not an object"),
        ({"compression_config": "fp8"}, "compression_config is 'fp8', not an object"),
        ({"model_type": "qwen3_moe", "num_experts": 10**8}, "experts"),
        ({"model_type": "mixtral", "num_key_value_heads": 4, "num_experts_per_tok": 99}, "99 of 8"),
    ],
)
def test_a_hostile_config_is_refused_by_field(
    changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | changes))
    with pytest.raises(CheckpointError, match=field):
        Subject.find(str(path))


@pytest.mark.parametrize("content", ["", "[]", "{", '{"vocab_size": 1, "vocab_size": 2}', "\0"])
def test_no_config_at_all(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    done = CliRunner().invoke(app, ["plan", "memory", str(tmp_path / "config.json"), "--json"])
    assert isinstance(done.exception, CheckpointError)
    assert "config.json" in str(done.exception)


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    facts = planned(str(tmp_path), "--users", "3")
    assert facts["kv_bytes"] == 3 * 128 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "roofline"),
        ("plan", "batching"),
        ("simulate",),
        ("tune", "--slo", "ttft=500"),
        ("tune", "--slo", "ttft=500", "-q", "int4"),
    ],
)
def test_nothing_plans_a_quantized_config_as_bf16(command: tuple[str, ...], tmp_path: Path) -> None:
    how = {"quant_method": "awq"}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": how}))
    done = CliRunner().invoke(app, [*command, str(tmp_path), "--device", "h100", "--json"])
    assert done.exit_code == 1
    assert isinstance(done.exception, SettingsError)
    assert "quantized (awq)" in str(done.exception)


def test_a_quantized_models_config_alone_does_not_pass_for_bf16(tmp_path: Path) -> None:
    how = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": how}))
    done = CliRunner().invoke(app, ["plan", "memory", str(tmp_path), "--json"])
    assert done.exit_code == 1
    assert "quantized (gptq)" in str(done.exception)
    rounded = CliRunner().invoke(app, ["plan", "memory", str(tmp_path), "-q", "int4", "--json"])
    assert "quantized (gptq)" in str(rounded.exception)
    facts = planned(str(tmp_path), "--format", "gptq", "--bits", "4", "--group-size", "32")
    assert facts["weights"]["format"] == "gptq 4 bits, group 32"
