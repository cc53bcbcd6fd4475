"""What fits, and the arithmetic when it does not."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo.loader
from executor import tiny
from loader.quantized_writer import gptq, gptq_config, quantize_all, quantized
from octavo.engine.cache_plan import CachePlan, plan_cache, work_bytes
from octavo.engine.config import DoesNotFit, EngineConfig, SettingsError
from octavo.engine.load import load_engine
from octavo.executor.native.executor import NativeExecutor
from octavo.executor.native.lower import lower
from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvLayout
from octavo.loader.base import CheckpointError, WeightFormat
from octavo.models.config import Experts, Layer, Rope
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Outcome, Request
from oracle.tiny_folders import folder
from paths import ORACLE, TINY

MIB = 1 << 20
WEIGHTS = 10 * MIB


def plan(available: int, family: str = "gemma3", **values: Any) -> CachePlan:
    model = tiny.config(family)
    layout = KvLayout.of(model)
    return plan_cache(EngineConfig(**values), program(model), layout, WEIGHTS, available)


@given(
    available=st.integers(0, 64 * MIB),
    share=st.floats(0.01, 1.0),
    max_model_len=st.none() | st.integers(2, 512),
    family=st.sampled_from(["llama", "gemma3"]),
)
def test_a_plan_never_exceeds_the_memory_and_holds_what_it_says(
    available: int, share: float, max_model_len: int | None, family: str
) -> None:
    layout = KvLayout.of(tiny.config(family))
    try:
        made = plan(available, family, memory_utilization=share, max_model_len=max_model_len)
    except DoesNotFit:
        return
    assert made.weight_bytes + made.work_bytes + made.kv_cache_bytes <= available
    assert made.kv_cache_bytes == made.num_blocks * layout.block_bytes
    assert peak_blocks(layout, made.max_model_len) <= made.num_blocks
    assert made.capacity_sequences >= 1.0
    if max_model_len is not None:
        assert made.max_model_len == max_model_len


def test_without_a_wish_the_context_is_what_fits() -> None:
    work = work_bytes(program(tiny.config()), 512, 256)
    block = KvLayout.of(tiny.config()).block_bytes
    room = WEIGHTS + work + 10 * block
    assert plan(room, "llama", memory_utilization=1.0).max_model_len == 160
    assert plan(4 * room, "llama", memory_utilization=1.0).max_model_len == 512


@pytest.mark.parametrize("max_tokens", [1, 8, 64, 512])
@pytest.mark.parametrize("experts", [Experts(128, 8, 96, True), Experts(8, 2, 448, True)])
def test_the_work_space_holds_the_experts_slots(experts: Experts, max_tokens: int) -> None:
    class Kernels:
        def activation_bytes(self, format: int, k: int) -> int:
            return 2 * k  # as of 8 bits with what belongs to them

        def same_activations(self, a: int, b: int) -> bool:
            return a == b

        def slots_row_bytes(self, experts: int, chosen: int, slot_bytes: int) -> int:
            slots = max_tokens * chosen + 7 * min(experts, max_tokens * chosen)
            return -(-slots * slot_bytes // max_tokens)

    compute = program(tiny.config("qwen3moe", experts, hidden_size=256))
    formats = dict.fromkeys(compute.weights, WeightFormat.Q4_0)
    taken = lower(compute, formats, Kernels()).row_bytes * max_tokens
    assert taken <= work_bytes(compute, max_tokens, 0)


def test_the_start_report_gives_codes_more_tokens(smollm2_path: Path) -> None:
    def tokens(kv_cache_dtype: str) -> int:
        config = EngineConfig(
            kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=32 * MIB, threads=1
        )
        loaded = load_engine(smollm2_path, config)
        loaded.engine.close()
        line = next(line for line in loaded.report().splitlines() if line.startswith("kv cache"))
        assert f" of {'bf16' if kv_cache_dtype == 'auto' else kv_cache_dtype}," in line
        assert f": {loaded.capacity_tokens} tokens" in line
        return loaded.capacity_tokens

    bf16 = tokens("auto")
    assert tokens("int8") >= 1.9 * bf16
    assert tokens("int4") >= 3.5 * bf16


@pytest.mark.parametrize("sequences", [1, 256])
def test_what_drafts_were_drawn_from_is_planned(sequences: int) -> None:
    """Under rejection, and where the drafter computes: of a large vocabulary up to 64 MiB."""
    model = replace(tiny.config(), vocab_size=1 << 18)
    layout = KvLayout.of(model)

    def work(method: str, rule: str, **values: Any) -> int:
        given = {"method": method, "acceptance_method": rule} | values
        config = EngineConfig(max_num_seqs=sequences, speculative_config=given)
        return plan_cache(config, program(model), layout, WEIGHTS, 4 << 30).work_bytes

    for method, values in (("layer_skip", {"layers": [0]}), ("draft_model", {"model": "x"})):
        more = work(method, "rejection", **values) - work(method, "replay", **values)
        assert more == (64 * MIB if sequences > 1 else (16 + 1) * MIB)
    assert work("ngram", "rejection") == work("ngram", "replay")


def test_a_context_without_end_is_cut_to_what_its_tables_may_take() -> None:
    windows = (Layer(Rope(10000.0, 16, False), window=100),) * 2
    model = tiny.config("gemma3", context_length=1 << 27, layers=windows)
    layout = KvLayout.of(model)

    def made(**values: Any) -> CachePlan:
        return plan_cache(EngineConfig(**values), program(model), layout, WEIGHTS, 4 << 30)

    assert 4 * 256 * made().max_model_len // 16 <= 4 << 27  # an eighth
    assert made(max_num_seqs=1).max_model_len == 1 << 27
    with pytest.raises(DoesNotFit, match="256 sequences of 134217728 tokens take 8 GiB, more than"):
        made(max_model_len=1 << 27)
    with pytest.raises(
        DoesNotFit, match=r"block tables of 200000000 sequences .* lower max_num_seqs"
    ):
        made(max_num_seqs=200_000_000)


@pytest.mark.parametrize(
    ("available", "values", "message"),
    [
        (9 * MIB, {}, r"itself leaves nothing .*: 9 MiB available - 10 MiB weights - .* = -"),
        (64 * MIB, {"kv_offload_memory": 60 * MIB}, r"kv_offload_memory asks for 60 MiB of host"),
        (64 * MIB, {"kv_cache_memory_bytes": 60 * MIB}, r"asks for 60 MiB of KV cache; 64 MiB"),
        (64 * MIB, {"max_model_len": 1000}, r"1000 is more than the model's context of 512"),
        (
            64 * MIB,
            {"max_model_len": 512, "kv_cache_memory_bytes": 2048 * 20},
            r"512 tokens needs 38 KV blocks of 2 KiB = 76 KiB; 40 KiB of KV cache hold 20",
        ),
        (64 * MIB, {"kv_cache_memory_bytes": 1}, r"2 tokens needs 3 KV blocks .* hold 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    available: int, values: dict[str, int], message: str
) -> None:
    with pytest.raises(DoesNotFit, match=message):
        plan(available, **values)


@pytest.mark.parametrize("setting", ["kv_cache_dtype", "quantization"])
def test_fp8_is_for_plans(setting: str, tmp_path: Path) -> None:
    config = EngineConfig(**{setting: "fp8"})
    with pytest.raises((SettingsError, CheckpointError), match="CPUs have no fp8 units"):
        load_engine(folder("llama", tmp_path / "m"), config)


@pytest.mark.parametrize(
    "values",
    [
        {"max_num_seqs": 0},
        {"block_size": -1},
        {"block_size": 24},
        {"max_model_len": 0},
        {"memory_utilization": 0.0},
        {"memory_utilization": 1.5},
        {"kv_cache_dtype": "fp9"},
        {"threads": 0},
    ],
)
def test_settings_without_sense_are_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        EngineConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_batched_tokens": 128}, "128 is below max_num_seqs 256"),
        ({"threads": 5000}, "threads is 5000"),
        ({"isa": "mmx"}, "unknown instruction set 'mmx'"),
    ],
)
def test_settings_that_cannot_be_honoured_are_no_internal_error(
    smollm2_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load_engine(smollm2_path, EngineConfig(kv_cache_memory_bytes=16 * MIB, **values))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_float_weights_are_rounded_when_asked(quantization: str) -> None:
    """What is planned, held and reported is what was rounded; quantized checkpoints are refused."""
    path = ORACLE / "tiny-gemma3-caps.gguf"
    config = EngineConfig(kv_cache_memory_bytes=MIB, max_num_seqs=2, threads=1)
    plain = load_engine(path, config)
    loaded = load_engine(path, replace(config, quantization=quantization))
    assert "quantization" not in plain.report()
    assert f"quantization: {quantization}, rounded to nearest while loading" in loaded.report()
    assert loaded.weight_bytes < 0.75 * plain.weight_bytes
    executor = loaded.engine.executor
    assert executor.weight_bytes == loaded.weight_bytes
    plain.engine.close()
    loaded.engine.close()
    with pytest.raises(CheckpointError, match=f"{quantization} is for float weights, and tensor"):
        load_engine(path.with_name("tiny-llama-k.gguf"), replace(config, quantization=quantization))


def test_rotary_positions_of_changing_length_are_by_default_those_of_training(
    tmp_path: Path,
) -> None:
    """Dynamic NTK and LongRoPE: a longer context is asked for, and the report says what runs."""

    def answer(path: Path, **values: Any) -> tuple[list[int], str, int]:
        config = EngineConfig(kv_cache_memory_bytes=MIB, max_num_seqs=2, threads=1, **values)
        loaded = load_engine(path, config)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        loaded.engine.add_request(
            Request(request_id="a", prompt_token_ids=list(range(2, 40)), params=params)
        )
        tokens: list[int] = []
        while loaded.engine.has_work():
            tokens += [i for delta in loaded.engine.step() for i in delta.token_ids]
        loaded.engine.close()
        (line,) = [x for x in loaded.report().splitlines() if x.startswith("rope")] or [""]
        return tokens, line, loaded.max_model_len

    plain = folder("llama", tmp_path / "plain")
    ntk = {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    dynamic = folder("llama", tmp_path / "dynamic", ntk)
    assert answer(dynamic) == (
        answer(plain)[0],
        "rope: dynamic NTK, positions of sequences of up to 128 tokens; longer ones need others",
        128,
    )
    tokens, line, longest = answer(dynamic, max_model_len=500)
    assert longest == 500
    assert line.startswith("rope: dynamic NTK, positions of sequences of 500 tokens for all, alth")
    assert tokens != answer(plain)[0]

    factors = {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
    long = {"rope_parameters": None, "original_max_position_embeddings": 64}
    long |= {"rope_scaling": {"type": "longrope", "attention_factor": 1.0} | factors}
    short = long | {"rope_scaling": long["rope_scaling"] | {"long_factor": [1.5] * 8}}
    short_only = folder("phi3", tmp_path / "short", short)
    both = folder("phi3", tmp_path / "both", long)
    assert answer(both) == answer(short_only)
    assert answer(both)[2] == 64
    assert answer(both, max_model_len=65)[0] != answer(short_only, max_model_len=65)[0]
    with pytest.raises(DoesNotFit, match="max_model_len 129 is more than the model's context"):
        answer(both, max_model_len=129)


def test_a_real_model_is_loaded_and_answers(smollm2_path: Path) -> None:
    config = EngineConfig(kv_cache_memory_bytes=64 * MIB, max_num_seqs=4)
    loaded = load_engine(smollm2_path, config)
    tokenizer = loaded.checkpoint.tokenizer
    assert loaded.kv_cache_bytes == loaded.num_blocks * 16 * 23_040
    assert loaded.max_model_len == loaded.num_blocks * 16 == loaded.capacity_tokens
    report = loaded.report()
    for fact in (str(loaded.num_blocks), str(loaded.capacity_tokens), "<|im_end|>", "llama"):
        assert fact in report
    prompt = tokenizer.encode("The capital of France is")
    params = SamplingParams(temperature=0, max_tokens=4)
    record = loaded.engine.add_request(
        Request(request_id="a", prompt_token_ids=prompt, params=params)
    )
    text = ""
    while loaded.engine.has_work():
        text += "".join(delta.text for delta in loaded.engine.step())
    assert text.startswith(" Paris")
    assert record.outcome is Outcome.FINISHED
    loaded.engine.close()


def test_a_model_too_large_for_the_memory_is_refused_before_it_is_loaded(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.load.available_memory", lambda: 50 * MIB)
    with pytest.raises(DoesNotFit, match="50 MiB available"):
        load_engine(smollm2_path, replace(EngineConfig(), max_num_seqs=4))


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([0, 900], "layer 900 is outside"),
        ([1, 1], "named twice"),
        (None, "all .* of the model"),
    ],
)
def test_layers_that_cannot_guess_are_refused_before_the_model_is_loaded(
    layers: list[int] | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = octavo.loader.load(ORACLE / "tiny-gemma3.gguf")
    given = {
        "method": "layer_skip",
        "layers": list(range(len(checkpoint.config.layers))) if layers is None else layers,
    }
    monkeypatch.setattr(NativeExecutor, "__init__", None)
    with pytest.raises(SettingsError, match=reason):
        load_engine(checkpoint, EngineConfig(speculative_config=given))


@pytest.mark.parametrize("damage", ["shape", "none"])
def test_a_draft_model_in_pieces_is_refused_before_the_model_is_loaded(
    damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ORACLE / "tiny-gemma3.gguf"
    checkpoint, draft = octavo.loader.load(path), octavo.loader.load(path)
    weights = dict(draft.weights)
    damaged = weights.pop("layers.1.ffn_down")
    if damage == "shape":
        weights["layers.1.ffn_down"] = damaged._replace(shape=damaged.shape[::-1])
    draft = replace(draft, weights=weights)
    monkeypatch.setattr("octavo.loader.load", lambda _: draft)
    monkeypatch.setattr(NativeExecutor, "__init__", None)
    with pytest.raises(CheckpointError, match=damaged.name if damage == "shape" else "no weight"):
        load_engine(checkpoint, EngineConfig(speculative_config={"model": str(path)}))


def test_the_model_is_given_back_where_its_drafter_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[NativeExecutor] = []

    class Kept(NativeExecutor):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            made.append(self)

    def fail(*_: object) -> None:
        raise ValueError("it cannot be made")

    monkeypatch.setattr("octavo.executor.native.executor.NativeExecutor", Kept)
    monkeypatch.setattr("octavo.spec_decode.layer_skip.LayerSkipDrafter", fail)
    given = {"method": "layer_skip", "layers": [0]}
    config = EngineConfig(
        kv_cache_memory_bytes=MIB, max_num_seqs=2, threads=1, speculative_config=given
    )
    with pytest.raises(SettingsError, match="it cannot be made"):
        load_engine(ORACLE / "tiny-gemma3.gguf", config)
    with pytest.raises(RuntimeError, match="the executor is closed"):
        _ = made[0].pool


def test_inputs_that_no_kernel_takes_are_refused_by_file_and_tensor(tmp_path: Path) -> None:
    path = folder("llama", tmp_path / "m")  # whose down_proj has 48 inputs
    quantize_all(path, gptq_config(4, 32), lambda x: (m := quantized(x, 4, 32), gptq(m)))
    with pytest.raises(CheckpointError) as error:
        load_engine(path, EngineConfig(threads=1, kv_cache_memory_bytes=1 << 20))
    tensor = "model.layers.0.mlp.down_proj.qweight"
    assert str(error.value).startswith(f"{path}: tensor {tensor!r} has 48 inputs; kernels take")


def test_of_a_closed_engine_nothing_stays(tmp_path: Path) -> None:
    """Though what is loaded is kept from the collector as long as it runs."""
    loaded = load_engine(TINY, EngineConfig(kv_cache_memory_bytes=MIB, kv_offload_dir=tmp_path))
    kept = [weakref.ref(each) for each in (loaded.engine.scheduler.kv, loaded.engine.executor)]
    loaded.engine.close()
    del loaded
    gc.collect()
    assert [each() for each in kept] == [None, None]
