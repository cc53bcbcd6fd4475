"""What is predicted is what the engine allocates, byte for byte (architecture, invariant 7)."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import tiny
from octavo.engine.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.executor.native.executor import NativeExecutor
from octavo.executor.native.packing import held_bytes, scaled_bytes
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader import load
from octavo.loader.base import Checkpoint, Tokenizer, Weight, WeightFormat
from octavo.loader.rounding import rounded
from octavo.models import families
from octavo.tools.plan.memory_plan import DeviceMemory, PlannedDraftModel, ServingLoad, need
from octavo.tools.plan.quantization import as_rounded, as_stored, held, in_scheme
from octavo.tools.plan.schemes import GGUF, GROUPED, scheme
from octavo.tools.plan.subject import Subject
from oracle.tiny_folders import FAMILIES, QUANTIZED, folder, quantized_folder
from paths import ORACLE

HERE = DeviceMemory("here", 1 << 40, here=True)

GGUFS = sorted(path.name for path in ORACLE.glob("*.gguf"))
FOLDERS = sorted(path.name for path in FAMILIES.iterdir())


def load_of(subject: Subject, **changes: object) -> ServingLoad:
    stored = as_stored(subject)
    assert stored is not None
    made = ServingLoad(subject, stored, 64, 1, KvDtype.BF16, EngineConfig())
    return replace(made, **changes)  # type: ignore[arg-type]


def check(path: Path, planned: ServingLoad, **settings: object) -> None:
    """Loads it with the planned cache, and compares."""
    predicted = need(replace(planned, config=replace(planned.config, memory_utilization=1.0)), HERE)
    config = replace(
        planned.config,
        max_model_len=planned.context,
        kv_cache_dtype=planned.dtype,
        kv_cache_memory_bytes=predicted.kv_bytes,
        threads=1,
        **settings,  # type: ignore[arg-type]
    )
    loaded = load_engine(path, config)
    executor = cast(NativeExecutor, loaded.engine.executor)
    try:
        drafting = 0 if loaded.draft is None else loaded.draft.weight_bytes
        assert executor.weight_bytes + drafting == predicted.weight_bytes
        assert loaded.kv_cache_bytes == predicted.kv_bytes
        arena = executor._open.arena_bytes
        draft = 0 if loaded.draft is None else loaded.draft_blocks * loaded.draft.layout.block_bytes
        assert arena + draft == predicted.kv_bytes
        assert arena == planned.cache.paged_bytes
        assert int(loaded.capacity_sequences) == planned.users
    finally:
        executor.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every recorded model: files, folders of each family, quantized folders."""
    path = tmp_path_factory.mktemp("models")
    found = {name: ORACLE / name for name in GGUFS}
    found |= {name: folder(name, path / name) for name in FOLDERS}
    found |= {f"{name} bf16": folder(name, path / f"{name}-bf16", bf16=True) for name in FOLDERS}
    return found | {name: quantized_folder(name, path / name) for name in QUANTIZED}


NAMES = (*GGUFS, *FOLDERS, *(f"{name} bf16" for name in FOLDERS), *QUANTIZED)


@pytest.mark.parametrize("dtype", KvDtype.served())
@pytest.mark.parametrize("name", NAMES)
def test_every_model_takes_what_is_predicted(
    name: str, dtype: KvDtype, models: dict[str, Path]
) -> None:
    subject = Subject.of(load(models[name]))
    context = min(50, subject.program.config.context_length)
    check(models[name], load_of(subject, context=context, users=3, dtype=dtype))


@settings(max_examples=40)
@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(KvDtype.served()),
    context=st.integers(2, 200),
    users=st.integers(1, 40),
    block_size=st.sampled_from([16, 32, 48]),
)
def test_whatever_context_users_and_blocks(
    models: dict[str, Path], name: str, dtype: KvDtype, context: int, users: int, block_size: int
) -> None:
    subject = Subject.of(load(models[name]))
    context = min(context, subject.program.config.context_length)
    config = EngineConfig(block_size=block_size, max_num_seqs=40, max_num_batched_tokens=64)
    planned = load_of(subject, context=context, users=users, dtype=dtype, config=config)
    check(models[name], planned)


@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("name", FOLDERS)
def test_rounding_while_loading(name: str, rounding: str, models: dict[str, Path]) -> None:
    subject = Subject.of(load(models[name]))
    check(
        models[name], load_of(subject, stored=as_rounded(subject, rounding)), quantization=rounding
    )


@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_rounded_is_what_the_loader_rounds(
    name: str, rounding: str, models: dict[str, Path]
) -> None:
    """Each weight in the loader's format and groups, and in the bytes that the executor holds."""
    checkpoint = load(models[name])
    subject = Subject.of(checkpoint)
    stored = as_rounded(subject, rounding)
    weights = {
        role: weight
        for role, weight in rounded(checkpoint, rounding).weights.items()
        if role in subject.program.weights
    }
    assert stored.formats == {role: weight.format for role, weight in weights.items()}
    assert stored.groups == {role: weight.group for role, weight in weights.items()}
    again = scaled_bytes(subject.program)
    assert held(subject, stored) == {
        role: held_bytes(weight) + again.get(role, 0) for role, weight in weights.items()
    }


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512", "avx512_bf16"])
@pytest.mark.parametrize("format", [*GGUF, *GROUPED.values()], ids=lambda format: format.name)
def test_every_format(format: WeightFormat, isa: str) -> None:
    """Known by its shape alone, and held by an executor."""
    changes = {"hidden_size": 256, "num_heads": 16, "intermediate_size": 512}
    experts = replace(tiny.EXPERTS, intermediate_size=256)
    model = tiny.config("mixtral", experts, **changes)
    subject = Subject("tiny", families.program(model))
    own = (
        scheme("compressed-tensors", 8 if format is WeightFormat.I8 else 4, 64, symmetric=False)
        if format.grouped
        else GGUF[format]
    )
    if format is WeightFormat.I3:
        own = scheme("gptq", 3, 64)
    stored = in_scheme(subject, own, own)
    planned = ServingLoad(subject, stored, 64, 1, KvDtype.BF16, EngineConfig(isa=isa))
    weights = {}
    for role, shape in subject.program.weights.items():
        matrix = len(shape) > 1
        kept = format if matrix else WeightFormat.F32
        rows, columns = prod(shape[:-1]), shape[-1]
        size, group = GGUF[WeightFormat.F32].matrix_bytes(rows, columns), 0
        if matrix and format.grouped:
            bits = format - WeightFormat.I8 + 8
            size, group = rows * (5 * columns // 64 + columns * bits // 8), 64
        elif matrix:
            size = GGUF[format].matrix_bytes(rows, columns)
        weights[role] = Weight(role, kept, shape, np.zeros(size, np.uint8), group=group)
    checkpoint = Checkpoint(Path("tiny"), model, weights, cast(Tokenizer, None), None)
    try:
        executor = NativeExecutor(
            checkpoint, subject.program, KvLayout.of(model), num_blocks=4, max_tokens=16,
            max_logits_rows=4, max_seqs=4, max_blocks_per_seq=4, threads=1, isa=isa,
        )  # fmt: skip
    except ValueError as error:
        if "isa" in str(error) or "tier" in str(error) or "instruction" in str(error):
            pytest.skip(str(error))
        raise
    assert planned.weight_bytes(HERE) == executor.weight_bytes
    executor.close()


@pytest.mark.parametrize("dtype", KvDtype.served())
def test_a_draft_model_beside_it(dtype: KvDtype, models: dict[str, Path]) -> None:
    path = models["tiny-llama.gguf"]
    subject = Subject.of(load(path))
    speculation = {"method": "draft_model", "model": str(path)}
    stored = as_stored(subject)
    assert stored is not None
    planned = load_of(
        subject,
        users=5,
        dtype=dtype,
        config=EngineConfig(speculative_config=speculation),
        draft=PlannedDraftModel(subject, stored),
    )
    check(path, planned)


@pytest.mark.parametrize("dtype", [KvDtype.BF16, KvDtype.INT4])
@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_real_models(model: str, dtype: KvDtype, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    subject = Subject.of(load(path))
    check(path, load_of(subject, context=1000, users=4, dtype=dtype))
