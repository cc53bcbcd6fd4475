"""The load that figures are taken from: what runs is what was asked for, and nothing besides."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from octavo.engine.config import EngineConfig, SettingsError
from octavo.executor.cost import Rates
from octavo.loader import load
from octavo.loader.base import CheckpointError
from octavo.tools.bench.drive import BatchShape, Drive
from oracle.tiny_folders import folder
from paths import ORACLE, TINY

LOADS = [BatchShape(1, 1, 3), BatchShape(5, 16, 2), BatchShape(3, 37, 9), BatchShape(2, 90, 4)]
BUDGET = 48  # tokens a step: a prompt of 90 takes two


@pytest.fixture(scope="module", params=["tiny-llama.gguf", "tiny-gemma3.gguf", "qwen3_5"])
def drive(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drive]:
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=BUDGET, threads=1)
    model = ORACLE / request.param
    if not model.suffix:
        model = folder(request.param, tmp_path_factory.mktemp("drive") / "model")
    drive = Drive.load(model, config, LOADS)
    yield drive
    drive.close()


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_every_token_is_computed_once(drive: Drive, load: BatchShape) -> None:
    for _ in range(3):  # the later ones in a cache full of earlier prompts
        prompts = drive.prompts(load)
        prefill = drive.prefill(prompts)
        tokens = load.sequences * load.prompt_len
        assert prefill.tokens == sum(batch.num_tokens for batch in prefill.batches) == tokens
        assert sum(len(batch.logits_rows) for batch in prefill.batches) == load.sequences
        assert len(prefill.times) == len(prefill.batches) == -(-tokens // BUDGET)

        decode = drive.decode(prompts, load.output_len)
        assert decode.tokens == load.sequences * load.output_len
        assert len(decode.times) == len(decode.batches) == load.output_len
        assert decode.seconds == pytest.approx(sum(decode.times))
        first = decode.batches[0].positions
        assert len(first) == load.sequences
        assert first.min() == load.prompt_len, "the first token drawn is the first put in"
        assert first.max() <= load.prompt_len + 2
        for before, after in zip(decode.batches, decode.batches[1:], strict=False):
            assert np.array_equal(before.positions + 1, after.positions)
        assert not drive.engine.has_work()
        drive.engine.check_integrity()


def test_prompts_share_nothing(drive: Drive) -> None:
    prompts = drive.prompts(LOADS[2]) + drive.prompts(LOADS[2])
    assert len({tuple(prompt[:8]) for prompt in prompts}) == len(prompts)
    assert all(0 <= token < drive.engine.vocab_size for prompt in prompts for token in prompt)


def test_the_engine_is_no_larger_than_its_loads_need(drive: Drive) -> None:
    layout = drive.loaded.engine.scheduler.kv.layout
    of_states = 6 * layout.state_blocks
    assert drive.loaded.num_blocks <= 8 * (len(layout.groups) * (100 // 16 + 2) + of_states)
    weights = drive.loaded.weight_bytes
    assert weights < drive.working_set(LOADS[0]) < drive.working_set(LOADS[2])


def test_the_limit_is_of_the_steps_that_ran(drive: Drive) -> None:
    """The cost model counts a recorded batch as it would have the one that ran."""
    rates = Rates(1e9, 1e9)
    costs = drive.executor.costs
    phase = drive.prefill(drive.prompts(LOADS[3]))
    ops = [sum(op.ops for op in costs.by_op(batch)) for batch in phase.batches]
    assert all(costs.seconds(batch, rates) > 0 for batch in phase.batches)
    matrices = [shape for shape in costs.program.weights.values() if len(shape) == 2]
    every = 2 * sum(int(np.prod(shape)) for shape in matrices) * phase.tokens
    assert sum(ops) < 2 * every


def test_prompts_that_fell_out_of_the_cache_are_no_endless_wait(drive: Drive) -> None:
    prompts = drive.prompts(LOADS[3]) + drive.prompts(LOADS[3])
    with pytest.raises(RuntimeError, match="no longer held"), drive.decoding(prompts, 1):
        pass
    assert not drive.engine.has_work()


def test_a_load_beyond_the_context_is_refused() -> None:
    with pytest.raises(SettingsError, match="prompt and output take"):
        Drive.load(TINY, EngineConfig(), [BatchShape(1, 1 << 20, 1)])


def test_a_model_that_gives_no_numbers_is_named() -> None:
    checkpoint = load(TINY)
    norm = checkpoint.weights["output_norm"]
    spoilt = np.full(norm.shape, np.nan, np.float32).view(np.uint8)
    weights = checkpoint.weights | {"output_norm": norm._replace(source=spoilt)}
    drive = Drive.load(replace(checkpoint, weights=weights), EngineConfig(threads=1), LOADS[:1])
    try:
        with pytest.raises(CheckpointError, match=r"gguf: cannot be measured: a logit is not"):
            drive.prefill(drive.prompts(LOADS[0]))
    finally:
        drive.close()
