"""Heads of no learning on small models: the output is the one without them, to the bit; and what
they compute is what their definition says.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import octavo.loader
from octavo.engine.cache_plan import plan_cache, work_bytes
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.engine import Step
from octavo.engine.load import load_engine
from octavo.executor.native.executor import NativeExecutor
from octavo.llm import LLM, RequestOutput
from octavo.loader.base import Checkpoint, CheckpointError
from octavo.loader.dequantize import dequantize
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import Float32, Sampled, Sampler, SamplerState
from octavo.scheduler.request import Request, RequestRecord
from octavo.spec_decode.drafter import NO_DRAFT
from octavo.spec_decode.heads import (
    RECURRENT,
    Heads,
    heads_folder,
    own_heads,
    read_heads,
)
from octavo.spec_decode.medusa import MedusaDrafter, head_weights
from octavo.spec_decode.speculator import Speculator
from paths import ORACLE
from spec_decode.random_heads import folder


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return octavo.loader.load(ORACLE / "tiny-llama-k.gguf")


def llm(checkpoint: Checkpoint, heads: Path | None, drafts: int | None = 3, **settings: Any) -> LLM:
    config: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 1 << 20,
        "threads": 1,
        "seed": 1,
    } | settings
    method, lookup = config.pop("acceptance_method", "replay"), config.pop("lookup", False)
    if heads is not None:
        config["speculative_config"] = {
            "method": "medusa",
            "model": str(heads),
            "num_speculative_tokens": drafts,
            "acceptance_method": method,
            "lookup": lookup,
        }
    return LLM(load_engine(checkpoint, EngineConfig(**config)))


def requests(checkpoint: Checkpoint, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = np.random.default_rng(count)
    vocab = checkpoint.config.vocab_size
    prompts = [rng.integers(4, vocab, rng.integers(1, 40)).tolist() for _ in range(count)]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 0.7, "top_k": 5, "n": 3},
        {"temperature": 1.2, "top_p": 0.8, "min_tokens": 10},
        {"temperature": 0.0, "banned_token_ids": (5, 6, 7), "logit_bias": {9: 4.0}},
        {"temperature": 1.0, "allowed_token_ids": (10, 11, 12)},
        {"temperature": 1.5, "top_n_sigma": 1.0, "banned_token_ids": (5, 6, 7)},
    ]
    params = [
        SamplingParams(seed=index, max_tokens=24, **ways[index % len(ways)])
        for index in range(count)
    ]
    return prompts, params


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(each.token_ids, each.text, each.logprobs, each.finish_reason) for each in one.outputs]
        for one in outputs
    ]


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("lookup", [True, False])
@pytest.mark.parametrize("count", [1, 7, 16])
def test_the_output_is_the_one_without_heads(
    checkpoint: Checkpoint, tmp_path: Path, recurrent: bool, lookup: bool, count: int
) -> None:
    heads = folder(tmp_path / "heads", checkpoint, recurrent=recurrent, layers=2)
    prompts, params = requests(checkpoint, count)
    with llm(checkpoint, None) as plain:
        expected = plain.generate(prompts, params, use_tqdm=False)
    with llm(checkpoint, heads, lookup=lookup) as drafting:
        found = drafting.generate(prompts, params, use_tqdm=False)
        stats = drafting.loaded.engine.stats()
    assert told(found) == told(expected)
    assert stats.draft_tokens > 0
    assert stats.drafter_failures == 0


def test_the_output_is_the_same_where_sequences_are_preempted(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    heads = folder(tmp_path / "heads", checkpoint)
    prompts, params = requests(checkpoint, 12)
    with llm(checkpoint, None) as plain:
        expected = plain.generate(prompts, params, use_tqdm=False)
        block = plain.loaded.kv_cache_bytes // plain.loaded.num_blocks
    scarce = {"kv_cache_memory_bytes": 14 * block, "enable_prefix_caching": False, "lookup": True}
    with llm(checkpoint, heads, **scarce) as drafting:
        found = drafting.generate(prompts, params, use_tqdm=False)
        stats = drafting.loaded.engine.stats()
    assert stats.preemptions > 0
    assert stats.drafter_failures == 0
    assert told(found) == told(expected)


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("method", ["replay", "rejection"])
def test_more_sequences_draft_than_logits_are_held_of(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recurrent: bool,
    method: str,
) -> None:
    heads = folder(tmp_path / "heads", checkpoint, recurrent=recurrent)
    prompts, params = requests(checkpoint, 21)
    found = []
    for rows in (None, 8):
        if rows is not None:
            monkeypatch.setattr("octavo.executor.native.executor.slice_rows", lambda *_: 8)
        with llm(checkpoint, heads, acceptance_method=method) as drafting:
            outputs = drafting.generate(prompts, params, use_tqdm=False)
            stats = drafting.loaded.engine.stats()
        assert stats.drafter_failures == 0
        found.append((told(outputs), stats.draft_tokens, stats.accepted_per_position))
    assert found[0] == found[1]


@pytest.mark.parametrize(("recurrent", "lookup"), [(True, True), (True, False), (False, False)])
def test_under_rejection_the_distribution_stays(
    checkpoint: Checkpoint, tmp_path: Path, recurrent: bool, lookup: bool
) -> None:
    """Beginnings of three tokens, as often as without drafts: Pearson's test of two samples."""
    vocab = checkpoint.config.vocab_size
    heads = folder(tmp_path / "heads", checkpoint, recurrent=recurrent, size=vocab)
    counts = []
    for drafting in (None, heads):
        with llm(checkpoint, drafting, acceptance_method="rejection", lookup=lookup) as model:
            params = [
                SamplingParams(
                    temperature=1.5, seed=seed, max_tokens=6, allowed_token_ids=(9, 20, 31)
                )
                for seed in range(1000 * (drafting is not None), 1000 + 1000 * bool(drafting))
            ]
            outputs = model.generate([[5, 6, 7]] * 1000, params, use_tqdm=False)
            counts.append(Counter(tuple(one.outputs[0].token_ids[:3]) for one in outputs))
            stats = model.loaded.engine.stats()
    assert stats.drafter_failures == 0
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    pooled = counts[0] + counts[1]
    often = [each for each, count in pooled.items() if count >= 20]
    table = np.array([[count[each] for each in often] for count in counts], float)
    table = np.hstack((table, 1000 - table.sum(axis=1, keepdims=True)))
    table = table[:, table.sum(axis=0) > 0]
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    degrees = table.shape[1] - 1
    deviation = ((table - expected) ** 2 / expected).sum() - degrees
    assert deviation < 5.5 * np.sqrt(2 * degrees) + 10


def test_heads_of_all_tokens_that_repeat_the_model_are_right_behind_a_loop(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Heads that change nothing guess what the model would say to the same row again."""
    size = checkpoint.config.vocab_size
    path = folder(tmp_path / "heads", checkpoint, recurrent=False, size=size)
    _zero(path)
    with llm(checkpoint, path) as drafting:
        (found,) = drafting.generate(
            [[5, 6, 7]],
            SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={9: 90.0}),
            use_tqdm=False,
        )
        stats = drafting.loaded.engine.stats()
    assert found.outputs[0].token_ids == [9] * 40
    assert stats.accepted_tokens == stats.draft_tokens > 20


def test_where_the_text_repeats_itself_it_is_looked_up(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """… at any length, the heads guessing three tokens; with one kind of drafts and the other."""
    path = folder(tmp_path / "heads", checkpoint)
    rng = np.random.default_rng(1)
    period, other = rng.integers(4, checkpoint.config.vocab_size, (2, 20)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    loop = replace(params, allowed_token_ids=(9,))
    passes = {}
    for lookup in (False, True):
        with llm(checkpoint, path, 8 if lookup else 3, lookup=lookup) as drafting:
            found = drafting.generate([period * 2, other], [loop, params], use_tqdm=False)
            stats = drafting.loaded.engine.stats()
        assert found[0].outputs[0].token_ids == [9] * 60
        assert stats.drafter_failures == 0
        passes[lookup] = found[1].outputs[0].token_ids, stats.decode_passes
        assert len(stats.accepted_per_position) == (8 if lookup else 3)
    assert passes[True][0] == passes[False][0]
    assert passes[True][1] < passes[False][1]


def _zero(path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for name, values in tensors.items():
        if name.startswith("blocks"):
            values[...] = 0
    save_file(tensors, path / "model.safetensors")


class Failing:
    """A sampler whose second draw of a step fails, once."""

    def __init__(self, inner: Sampler) -> None:
        self.inner = inner
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def sample(
        self, logits: Float32 | None, rows: Sequence[int], states: Sequence[SamplerState]
    ) -> Sampled:
        found = self.inner.sample(logits, rows, states)
        if self.failed or len(states) < 2:
            return found
        self.failed = True
        states[1].rewind(1)
        tokens = [*found.token_ids[:1], -1, *found.token_ids[2:]]
        return found._replace(token_ids=tokens, errors={1: "fails"})


def test_nothing_is_kept_of_choices_that_end_with_another(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The step in which one fails has drawn for the others, too."""
    heads = folder(tmp_path / "heads", checkpoint)
    with llm(checkpoint, heads) as drafting:
        engine = drafting.loaded.engine
        engine.sampler = failing = Failing(engine.sampler)
        params = SamplingParams(n=3, seed=1, max_tokens=8)
        engine.add_request(Request(request_id="a", prompt_token_ids=[5, 6, 7], params=params))
        while engine.has_work():
            engine.step()
        assert failing.failed
        assert drafter_of(drafting)._rows == {}


def test_after_steps_without_drafts_one_can_be_made(checkpoint: Checkpoint, tmp_path: Path) -> None:
    heads = folder(tmp_path / "heads", checkpoint)
    with llm(checkpoint, heads, None) as drafting:
        engine, drafter = drafting.loaded.engine, drafter_of(drafting)
        params = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)
        engine.add_request(Request(request_id="a", prompt_token_ids=[5, 6, 7], params=params))
        for _ in range(4):
            engine.speculator._rest = 2
            engine.step()
        (seq,) = engine.scheduler.decoding
        (draft,) = drafter.propose([seq], [2])
        assert len(draft.token_ids) > 0
        assert drafter.propose([seq], [2]) == [NO_DRAFT]  # the heads have computed since
        while engine.has_work():
            engine.step()
        assert drafter._rows == {}


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_drafts_that_are_begun_ahead_are_the_same(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recurrent: bool,
    threads: int,
) -> None:
    """Greedy sequences join and leave; drafts that nobody asks for change nothing."""
    heads = folder(tmp_path / "heads", checkpoint, recurrent=recurrent)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(4, checkpoint.config.vocab_size, 9).tolist() for _ in range(12)]
    params = [SamplingParams(temperature=0.0, max_tokens=5 + 3 * at) for at in range(12)]
    found = []
    begin = MedusaDrafter.begin
    for ahead in (True, False):
        begun: list[bool] = []

        def counted(
            drafter: MedusaDrafter, *args: Any, ahead: bool = ahead, begun: list[bool] = begun
        ) -> None:
            (begin if ahead else MedusaDrafter.observe)(drafter, *args)
            begun.append(drafter.begun)

        monkeypatch.setattr(MedusaDrafter, "begin", counted)
        with llm(checkpoint, heads, threads=threads, max_num_seqs=4) as drafting:
            outputs = drafting.generate(prompts, params, use_tqdm=False)
            stats = drafting.loaded.engine.stats()
            drafter = drafter_of(drafting)
        assert stats.drafter_failures == 0
        assert (sum(begun) > 20) == ahead
        assert not drafter._begun
        assert not drafter._counts
        found.append((told(outputs), stats.draft_tokens, stats.accepted_per_position))
        monkeypatch.undo()
    assert found[0] == found[1]


def test_no_step_waits_for_a_draft_that_is_not_asked_for(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun is given up before; and where no draft can follow, nothing is begun."""
    calls: list[str] = []

    def recorded(name: str) -> Any:
        inner = getattr(NativeExecutor, name)

        def call(*args: Any) -> Any:
            calls.append(name)
            return inner(*args)

        return call

    for name in ("start_draft", "finish_draft", "cancel_draft", "execute"):
        monkeypatch.setattr(NativeExecutor, name, recorded(name))
    with llm(checkpoint, folder(tmp_path / "heads", checkpoint)) as drafting:
        engine = drafting.loaded.engine
        assert engine.speculator is not None
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        engine.add_request(Request(request_id="a", prompt_token_ids=[5, 6, 7], params=params))
        for step in count():
            if not engine.has_work():
                break
            engine.speculator._rest = int(step % 4 == 3)
            engine.step()
    followed = Counter(pairwise(calls))
    assert followed["start_draft", "execute"] == 0
    assert followed["start_draft", "finish_draft"] > followed["start_draft", "cancel_draft"] > 2
    assert calls[-1] == "execute"


def test_nothing_is_begun_behind_drafts_of_which_nothing_was_kept(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llm(checkpoint, folder(tmp_path / "heads", checkpoint)) as drafting:
        engine, drafter = drafting.loaded.engine, drafter_of(drafting)
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        engine.add_request(Request(request_id="a", prompt_token_ids=[5, 6, 7], params=params))
        while drafter._begun is None:
            engine.step()
        monkeypatch.setattr(Speculator, "propose", unused(Speculator.propose))
        engine.step()
        assert drafter._begun is None
        assert not drafter._counts


def unused(propose: Callable[..., list[list[int]]]) -> Callable[..., list[list[int]]]:
    return lambda *args: [[] for _ in propose(*args)]


def drafter_of(model: LLM) -> MedusaDrafter:
    speculator = model.loaded.engine.speculator
    drafter = speculator._model
    assert isinstance(drafter, MedusaDrafter)
    return drafter


@pytest.mark.parametrize("recurrent", [True, False])
def test_heads_compute_what_their_definition_says(
    checkpoint: Checkpoint, tmp_path: Path, recurrent: bool
) -> None:
    path = folder(tmp_path / "heads", checkpoint, recurrent=recurrent, layers=2)
    with llm(checkpoint, path) as drafting:
        drafter = drafter_of(drafting)
        heads = read_heads(path, checkpoint)
        rng = np.random.default_rng(1)
        rows = rng.normal(size=(5, checkpoint.config.hidden_size)).astype(np.float32)
        tokens = rng.integers(0, checkpoint.config.vocab_size, 5).astype(np.int32)
        for at in range(3):
            result = drafter.compute(at, rows, tokens.tolist())
            logits, hidden = result.logits, result.hidden
            assert logits is not None
            x, expected = _reference(heads, checkpoint, at, rows, tokens)
            assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()
            if recurrent:
                assert hidden is not None
                assert np.abs(hidden - x).max() < 0.05 * np.abs(x).max()


def _reference(
    heads: Heads, checkpoint: Checkpoint, at: int, rows: np.ndarray, tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    weights = head_weights(heads, checkpoint)
    e = dequantize(checkpoint.weights["token_embd"])[tokens]
    x = rows
    if heads.recurrent:
        m = {name: dequantize(weights[f"medusa.{name}"]).T for name in RECURRENT}
        gate = x @ m["gate"] + e @ m["gate_token"]
        z = gate / (1 + np.exp(-gate)) * (x @ m["up"] + e @ m["up_token"])
        x = (
            z @ m["down"]
            + x @ m["skip"]
            + e @ m["skip_token"]
            + dequantize(heads.weights["skip.bias"])
        )
    for layer in range(heads.num_layers):
        name = f"blocks.{at}.layers.{layer}"
        bias = dequantize(heads.weights[f"{name}.bias"])
        inner = x @ dequantize(weights[f"medusa.{name}"]).T + bias
        x = x + inner / (1 + np.exp(-inner))
    role = "token_embd" if checkpoint.config.tied_embeddings else "output"
    return x, x @ dequantize(checkpoint.weights[role])[heads.token_map].T


def test_weights_are_in_the_plan(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = folder(tmp_path / "heads", checkpoint)
    with llm(checkpoint, path) as drafting:
        loaded = drafting.loaded
        assert loaded.weight_bytes == loaded.engine.executor.weight_bytes  # type: ignore[attr-defined]


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("lookup", [True, False])
@pytest.mark.parametrize("method", ["replay", "rejection"])
def test_what_drafting_holds_is_in_the_plan(
    checkpoint: Checkpoint, tmp_path: Path, recurrent: bool, lookup: bool, method: str
) -> None:
    path = folder(tmp_path / "heads", checkpoint, recurrent=recurrent)
    prompts, _ = requests(checkpoint, 16)
    params = [SamplingParams(seed=seed, max_tokens=24, ignore_eos=True) for seed in range(16)]
    given = {
        "method": "medusa",
        "model": str(path),
        "acceptance_method": method,
        "lookup": lookup,
    }
    with llm(checkpoint, path, acceptance_method=method, lookup=lookup) as drafting:
        engine = drafting.loaded.engine
        drafter = drafter_of(drafting)
        held = []

        class Watch:
            def on_step(self, step: Step) -> None:
                drawn_from = [
                    row for rows in step.scheduled.probabilities or () for row in rows or ()
                ]
                hidden = step.result.hidden
                assert hidden is not None
                arrays = [drafter._whole, hidden, *drawn_from]
                held.append(sum(array.nbytes for array in arrays))

            def on_end(self, record: RequestRecord) -> None: ...

        engine.observers.append(Watch())
        drafting.generate(prompts, params, use_tqdm=False)
        config = replace(drafting.loaded.config, speculative_config=given)
    compute, layout = program(checkpoint.config), config.layout_of(checkpoint.config)
    heads = read_heads(path, checkpoint)
    with_heads = plan_cache(config, compute, layout, 0, 1 << 30, heads=heads).work_bytes
    rows = config.max_logits_rows(None if lookup else heads.num_heads)
    without = work_bytes(compute, config.max_num_batched_tokens, rows)
    assert max(held) <= with_heads - without
    if method == "rejection":  # 16 sequences, 64 tokens a step: 48 drafts of them
        assert with_heads - without >= 4 * checkpoint.config.vocab_size * (48 + 16)


def test_drafts_are_as_long_as_there_are_heads(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """… in the report, and where rows of logits are held for them."""
    path = folder(tmp_path / "heads", checkpoint)
    with llm(checkpoint, path, None, max_num_seqs=2) as drafting:
        engine = drafting.loaded.engine
        assert "up to 3 tokens, as it pays" in drafting.loaded.report()
        assert engine.executor.max_logits_rows == 2 * (1 + 3)  # type: ignore[attr-defined]
        assert engine.speculator._longest == 3
    with llm(checkpoint, path, None, max_num_seqs=2, lookup=True) as drafting:
        engine = drafting.loaded.engine
        assert "with lookup, up to 16 tokens, as it pays" in drafting.loaded.report()
        assert engine.executor.max_logits_rows == 2 * (1 + 16)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "needs the folder"),
        ({"model": 3}, "needs the folder"),
        ({"model": "nowhere"}, "is no folder: heads are trained"),
        ({"model": "heads", "num_speculative_tokens": 4, "lookup": False}, "3 heads"),
        ({"model": "heads", "prompt_lookup_max": 4}, "no part"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    checkpoint: Checkpoint, tmp_path: Path, given: dict[str, Any], reason: str
) -> None:
    folder(tmp_path / "heads", checkpoint)
    if given.get("model") == "heads":
        given = given | {"model": str(tmp_path / "heads")}
    with pytest.raises((SettingsError, CheckpointError, ValueError), match=reason):
        load_engine(checkpoint, EngineConfig(speculative_config={"method": "medusa"} | given))


def test_heads_that_come_with_octavo_are_for_smollm2(
    smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name; a folder of that name comes first."""
    monkeypatch.chdir(tmp_path)
    assert own_heads() == ["smollm2-heads"]
    checkpoint = octavo.loader.load(smollm2_path)
    heads = read_heads(heads_folder("smollm2-heads"), checkpoint)
    assert heads.num_heads == 3
    assert len(heads.token_map) <= 4096
    for name in ("", "..", "nothing", "./smollm2-heads"):
        assert heads_folder(name) == Path(name)
    (tmp_path / "smollm2-heads").mkdir()
    assert heads_folder("smollm2-heads") == Path("smollm2-heads")
