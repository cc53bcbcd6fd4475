"""A draft model: what it guesses, its cache, its memory, its failures. Outputs never change.

engine/test_same_bits.py draws loads with draft models too; here is what must be seen by itself.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.test_same_bits import Setting, draft_model_drafter, fewer_layers
from executor import tiny
from faults import patch
from octavo.engine.cache_plan import plan_cache
from octavo.engine.clock import Clock
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.engine import Engine
from octavo.engine.load import load_engine
from octavo.executor.base import Batch, StepResult
from octavo.executor.native.executor import NativeExecutor
from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader.base import Checkpoint, WeightFormat
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import Outcome, Request
from octavo.scheduler.scheduler import Scheduler
from octavo.spec_decode.config import SpeculativeConfig
from octavo.spec_decode.draft_checkpoint import DraftModel, check_vocabulary
from octavo.spec_decode.draft_model import DraftModelDrafter, needed_blocks
from octavo.spec_decode.drafter import Target
from octavo.spec_decode.speculator import Speculator
from octavo.tools.verify.chi_square import chi_square
from paths import ORACLE, TINY

VOCAB = tiny.config().vocab_size
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "min_tokens": 5}


@cache
def small() -> Checkpoint:
    return tiny.checkpoint(tiny.config(), WeightFormat.Q8_0)


@cache
def windowed() -> Checkpoint:
    return tiny.checkpoint(tiny.config("gemma3"), WeightFormat.Q8_0)


@contextmanager
def running(
    setting: Setting,
    draft: Checkpoint | None,
    model: Checkpoint | None = None,
    sequences: float | None = None,
    rejection: bool = False,
) -> Iterator[tuple[Engine, DraftModelDrafter | None]]:
    """``sequences``: of the longest, how many the draft model's cache holds; None: enough."""
    model = model or small()
    layout = KvLayout.of(model.config, setting.block_size, setting.kv_dtype)
    enough = setting.max_num_seqs * peak_blocks(layout, setting.max_model_len)
    limits = SchedulerConfig(
        max_model_len=setting.max_model_len,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_logits_rows=setting.max_num_batched_tokens,
        enable_prefix_caching=setting.enable_prefix_caching,
    )
    scheduler = Scheduler(limits, layout, setting.num_blocks or enough)
    executor = NativeExecutor(
        model,
        program(model.config),
        layout,
        num_blocks=setting.num_blocks or enough,
        max_tokens=limits.max_num_batched_tokens,
        max_logits_rows=limits.logits_rows,
        max_seqs=limits.max_num_seqs,
        max_blocks_per_seq=scheduler.kv.tables.shape[2],
        threads=1,
    )
    sampler = executor.new_sampler(VOCAB)
    drafter = None
    if draft is not None:
        target = Target(
            model, program(model.config), executor, scheduler, sampler, rejection=rejection
        )
        drafter = draft_model_drafter(
            draft, target, setting.max_num_seqs if sequences is None else sequences
        )
    engine = Engine(
        executor,
        scheduler,
        sampler,
        Clock(),
        vocab_size=VOCAB,
        speculator=drafter and Speculator(drafter, VOCAB, setting.num_drafts, rejection=rejection),
    )
    try:
        yield engine, drafter
    finally:
        engine.close()


def prompt(index: int, length: int) -> list[int]:
    return [(index * 31 + at * at * 7 + at) % VOCAB for at in range(length)]


def outputs(
    engine: Engine,
    count: int,
    length: Callable[[int], int] = lambda index: 5 + 9 * index,
    **params: Any,
) -> dict[tuple[str, int], list[int]]:
    """Every choice's tokens; all accounts are checked after every step."""
    settings = {"max_tokens": 24, "ignore_eos": True} | params
    for index in range(count):
        engine.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=prompt(index, length(index)),
                params=SamplingParams(seed=index, **settings),
            )
        )
    got: dict[tuple[str, int], list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            got.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)
        engine.check_integrity()
    return got


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, SAMPLED, {**SAMPLED, "n": 3}])
def test_the_model_itself_guesses_everything(batch: int, params: dict[str, Any]) -> None:
    """It draws with the target's random numbers, penalties and masks, from the same bits."""
    setting = Setting(max_num_seqs=16, num_drafts=3)
    count = max(1, batch // params.get("n", 1))
    with running(setting, None) as (engine, _):
        expected = outputs(engine, count, **params)
    with running(setting, small()) as (engine, _):
        assert outputs(engine, count, **params) == expected
        stats = engine.stats()
        assert stats.accepted_tokens == stats.draft_tokens > 0
        assert stats.drafter_failures == 0
        drafted_for = sum(map(len, expected.values()))
        assert stats.decode_passes < 0.5 * drafted_for


@pytest.mark.parametrize("kv_dtype", [KvDtype.BF16, KvDtype.INT8])
@pytest.mark.parametrize("model", [small, windowed])
@pytest.mark.parametrize("pinned", [None, 1, 5])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, SAMPLED])
def test_outputs_are_the_same(
    kv_dtype: KvDtype, model: Callable[[], Checkpoint], pinned: int | None, params: dict[str, Any]
) -> None:
    """With chunked prompts, shared prefixes, preemptions and a draft cache that is too small."""
    layout = KvLayout.of(model().config, 16, kv_dtype)
    setting = Setting(
        max_num_seqs=8,
        max_num_batched_tokens=40,
        num_blocks=peak_blocks(layout, 300),
        max_model_len=300,
        enable_prefix_caching=True,
        kv_dtype=kv_dtype,
        num_drafts=pinned,
    )
    with running(replace(setting, num_blocks=None), None, model()) as (engine, _):
        expected = outputs(engine, 8, lambda index: 12 + 9 * index, max_tokens=90, **params)
    with running(setting, fewer_layers(model()), model(), sequences=2.5) as (engine, _):
        got = outputs(engine, 8, lambda index: 12 + 9 * index, max_tokens=90, **params)
        assert got == expected
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.drafter_failures == 0
        if pinned:
            assert stats.accepted_tokens > 0
            # Greedy, so small a model may repeat itself, and fewer layers too.
            assert stats.draft_tokens > stats.accepted_tokens or params["temperature"] == 0


def test_by_rejection_the_distribution_is_the_targets() -> None:
    """Pairs of tokens are compared, the second of which was drafted by a model that differs."""
    text, allowed = prompt(3, 20), (11, 23, 42)
    params = {"max_tokens": 3, "temperature": 1.0, "allowed_token_ids": allowed}
    exact = np.empty((3, 3))
    with running(Setting(), None) as (engine, _):
        for one, first in enumerate(allowed):
            for other, second in enumerate(allowed):
                asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, seed=1)
                ids = [*text, first, second]
                engine.add_request(Request(request_id="a", prompt_token_ids=ids, params=asked))
                (delta,) = engine.step()
                scored = delta.prompt_logprobs
                assert scored
                logprobs = [entry.logprob for entry in scored[-2:] if entry is not None]
                exact[one, other] = np.exp(sum(logprobs))
    # A mask makes each draw's own three sum to one.
    rows = exact.sum(axis=1, keepdims=True)
    exact = exact / rows * _first(text, allowed)[:, None]
    counts = np.zeros((3, 3), np.int64)
    setting = Setting(max_num_seqs=16, num_drafts=2)
    other = tiny.checkpoint(tiny.config(), seed=7)
    with running(setting, other, rejection=True) as (engine, _):
        for seed in range(3000):
            settings = SamplingParams(seed=seed, ignore_eos=True, **params)  # type: ignore[arg-type]
            request = Request(request_id=str(seed), prompt_token_ids=text, params=settings)
            engine.add_request(request)
        got: dict[str, list[int]] = {}
        while engine.has_work():
            for delta in engine.step():
                got.setdefault(delta.request_id, []).extend(delta.token_ids)
        stats = engine.stats()
        assert stats.draft_tokens > 2000
        assert 0.2 < stats.accepted_tokens / stats.draft_tokens < 0.9
        assert stats.drafter_failures == 0
    for tokens in got.values():
        counts[allowed.index(tokens[0]), allowed.index(tokens[1])] += 1
    assert chi_square(counts.reshape(-1), exact.reshape(-1)) > 1e-4


def _first(text: list[int], allowed: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """The target's probabilities of the tokens behind a text, when there are no others."""
    logprobs = []
    with running(Setting(), None) as (engine, _):
        for token in allowed:
            asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, seed=1)
            ids = [*text, token]
            engine.add_request(Request(request_id="a", prompt_token_ids=ids, params=asked))
            (delta,) = engine.step()
            assert delta.prompt_logprobs
            last = delta.prompt_logprobs[-1]
            logprobs.append(last.logprob)
    shares = np.exp(logprobs)
    return shares / shares.sum()


def test_a_long_text_is_read_in_pieces_beside_others() -> None:
    setting = Setting(max_num_seqs=4, max_model_len=480, num_drafts=2)
    with running(setting, small()) as (engine, drafter):
        sizes: list[int] = []
        execute = drafter._executor.execute

        def watched(batch: Batch) -> StepResult:
            sizes.append(batch.num_tokens)
            return execute(batch)

        patch(drafter._executor, execute=watched)
        outputs(engine, 2, lambda index: (10, 400)[index], max_tokens=60)
        assert 128 <= max(sizes) <= 128 + 2 * 33
        assert engine.stats().accepted_tokens == engine.stats().draft_tokens > 60


def test_choices_share_what_one_of_them_has_read() -> None:
    setting = Setting(max_num_seqs=4, num_drafts=2, enable_prefix_caching=True)
    with running(setting, small()) as (engine, drafter):
        outputs(engine, 1, lambda _: 100, n=4, temperature=1.0)
        assert drafter.kv.pool.num_used == 0
        # 100 tokens are six blocks, and each choice has at most three of its own.
        assert drafter.kv.pool._never_used <= 6 + 4 * 3


def test_what_is_to_be_read_is_known_before() -> None:
    """All of a text, what no other left of it, and next to nothing once it has been drafted for."""
    setting = Setting(max_num_seqs=4, num_drafts=2, enable_prefix_caching=True)
    with running(setting, small()) as (engine, drafter):
        assert drafter is not None
        for again in (False, True):
            params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
            request = Request(request_id="a", prompt_token_ids=prompt(1, 100), params=params)
            engine.add_request(request)
            while not engine.scheduler.decoding:
                engine.step()
            (seq,) = engine.scheduler.decoding
            assert drafter.unread(seq) == len(seq.token_ids) - (96 if again else 0)
            engine.step()
            assert drafter.unread(seq) <= 3
            while engine.has_work():
                engine.step()
        assert not drafter._found


def test_a_long_text_keeps_no_short_one_waiting() -> None:
    """The text that lacks least is read first."""
    setting = Setting(max_num_seqs=4, max_model_len=480, num_drafts=2)
    with running(setting, small()) as (engine, drafter):
        assert drafter is not None
        for name, length in (("long", 400), ("short", 70)):
            params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
            ids = prompt(len(name), length)
            engine.add_request(Request(request_id=name, prompt_token_ids=ids, params=params))
        while len(engine.scheduler.decoding) < 2:
            engine.step()
        long, short = engine.scheduler.decoding
        assert drafter.unread(long) > 128
        engine.step()
        assert drafter.unread(short) <= 3
        assert drafter.unread(long) > 128


def test_what_another_has_read_in_the_meantime_is_found() -> None:
    setting = Setting(max_num_seqs=4, num_drafts=2, enable_prefix_caching=True)
    with running(setting, small()) as (engine, drafter):
        assert drafter is not None
        params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1, n=2)
        request = Request(request_id="a", prompt_token_ids=prompt(1, 100), params=params)
        engine.add_request(request)
        while len(engine.scheduler.decoding) < 2:
            engine.step()
        first, second = engine.scheduler.decoding
        assert drafter.unread(second) >= 100
        engine.step()
        assert drafter.unread(first) <= 3
        assert drafter.unread(second) <= len(second.token_ids) - 96


def test_aborts_give_everything_back() -> None:
    setting = Setting(max_num_seqs=8, num_drafts=3)
    with running(setting, small()) as (engine, drafter):
        assert drafter is not None
        for index in range(6):
            params = SamplingParams(seed=1, max_tokens=100, n=2 if index == 1 else 1)
            request = Request(
                request_id=str(index), prompt_token_ids=prompt(index, 50), params=params
            )
            engine.add_request(request)
        for step in range(10):
            engine.step()
            if step >= 4:
                assert drafter.kv.pool.num_used > 0
                engine.abort(str(step - 4))
                engine.check_integrity()
        assert not engine.requests
        assert drafter.kv.pool.num_used == 0
        assert drafter.kv.num_free_slots == 8


@pytest.mark.parametrize("at", [0, 1, 7])
def test_an_executor_that_fails_is_given_up(at: int, caplog: pytest.LogCaptureFixture) -> None:
    """At any pass of a draft; and what it holds is given back at once."""
    setting = Setting(max_num_seqs=4, num_drafts=4)
    with running(setting, None) as (engine, _):
        expected = outputs(engine, 4, temperature=1.0)
    with running(setting, small()) as (engine, drafter):
        execute, calls = drafter._executor.execute, iter(range(1000))

        def failing(batch: Batch) -> StepResult:
            if next(calls) == at:
                raise RuntimeError("injected")
            return execute(batch)

        patch(drafter._executor, execute=failing)
        with caplog.at_level(logging.WARNING):
            assert outputs(engine, 4, temperature=1.0) == expected
        assert engine.stats().drafter_failures == 1
        assert len(caplog.records) == 1
        assert drafter.kv.pool.num_used == 0


def test_memory_is_planned_for_both(tmp_path: Path) -> None:
    config = {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 128, "max_num_seqs": 4}
    alone = load_engine(TINY, EngineConfig(**config))  # type: ignore[arg-type]
    alone.engine.close()
    given = {"model": str(TINY), "num_speculative_tokens": 3}
    both = load_engine(TINY, EngineConfig(**config, speculative_config=given))  # type: ignore[arg-type]
    try:
        drafter = both.engine.speculator and both.engine.speculator._model
        assert isinstance(drafter, DraftModelDrafter)
        executor = drafter._executor
        held = drafter.kv.pool.num_blocks * both.draft.layout.block_bytes
        held += both.num_blocks * both.engine.executor.layout.block_bytes
        assert held == both.kv_cache_bytes <= 1 << 20
        assert executor.weight_bytes == both.draft.weight_bytes
        assert abs(2 * both.capacity_tokens - alone.capacity_tokens) <= 32  # a token costs twice
        assert drafter.kv.pool.num_blocks == both.num_blocks + 1  # free for drafts
        assert "drafts up to 128 tokens" in both.report()
        assert "draft_model" in both.report()
        assert f"{both.draft_blocks} blocks" in both.report()
        for params in ({"temperature": 0.0}, {"temperature": 1.0}):
            request = Request(
                request_id=str(params),
                prompt_token_ids=[5, 6, 7],
                params=SamplingParams(max_tokens=30, ignore_eos=True, **params),
            )
            record = both.engine.add_request(request)
            while both.engine.has_work():
                both.engine.step()
            assert record.outcome is Outcome.FINISHED
            assert record.accepted_tokens == record.draft_tokens > 0
    finally:
        both.engine.close()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("draft_family", ["llama", "gemma3"])
@pytest.mark.parametrize("context", [100, 512])
@pytest.mark.parametrize("budget", [91 << 10, 300 << 10, 8 << 20])
@pytest.mark.parametrize("wanted", [None, 100])
def test_what_fits_is_drafted_for(
    family: str, draft_family: str, context: int, budget: int, wanted: int | None
) -> None:
    """Whatever windows the two have: a sequence that the model's cache holds has place in the draft
    model's, as far as that one reads; and where many fit, as many do.
    """
    model, other = tiny.config(family), replace(tiny.config(draft_family), context_length=context)
    layout, draft_layout = KvLayout.of(model), KvLayout.of(other)
    checkpoint = tiny.checkpoint(tiny.config(draft_family))
    checkpoint = replace(checkpoint, config=other)
    draft = DraftModel(checkpoint, program(other), draft_layout, 1000)
    config = EngineConfig(kv_cache_memory_bytes=budget, max_model_len=wanted)
    made = plan_cache(config, program(model), layout, 1000, 1 << 30, draft)
    used = made.num_blocks * layout.block_bytes + made.draft_blocks * draft_layout.block_bytes
    assert budget - layout.block_bytes - draft_layout.block_bytes <= used == made.kv_cache_bytes
    assert used <= budget
    longest = min(made.max_model_len, context)
    assert needed_blocks(draft_layout, longest) <= made.draft_blocks
    ours = made.num_blocks / peak_blocks(layout, made.max_model_len)
    theirs = made.draft_blocks / peak_blocks(draft_layout, longest)
    assert made.capacity_sequences == ours >= 1
    if ours > 10:
        assert theirs == pytest.approx(ours, rel=0.1)


class Words:
    """A vocabulary, as far as it is compared."""

    kind = "words"

    def __init__(self, words: list[str], special: frozenset[int] = frozenset()) -> None:
        self.words = words
        self.special = special

    def spelling(self, token_id: int) -> str:
        return self.words[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special


@pytest.mark.parametrize(
    ("words", "special", "named"),
    [
        (["a", "b"], {0}, "a vocabulary of 2 tokens, the model one of 3"),
        (["a", "x", "y"], {0}, "token 1 is 'x', the model's is 'b'"),
        (["a", "b", "c"], {0, 2}, "token 2, 'c', is a special token, but not in model"),
        (["a", "b", "c"], set(), "token 0, 'a', is a special token, but not in draft"),
    ],
)
def test_another_vocabulary_is_refused(words: list[str], special: set[int], named: str) -> None:
    def checkpoint(name: str, words: list[str], special: set[int]) -> Checkpoint:
        tokenizer: Any = Words(words, frozenset(special))
        config = tiny.config(vocab_size=len(words))
        return Checkpoint(Path(name), config, {}, tokenizer, None)

    model = checkpoint("model", ["a", "b", "c"], {0})
    check_vocabulary(checkpoint("draft", ["a", "b", "c"], {0}), model)
    with pytest.raises(ValueError, match=named):
        check_vocabulary(checkpoint("draft", words, special), model)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "draft_model"}, "model is None; method 'draft_model' needs one"),
        ({"model": 3}, "model is 3"),
        ({"model": "x", "quantization": "int7"}, "quantization 'int7' is not supported"),
        ({"method": "ngram", "quantization": "int8"}, "quantization has no part"),
        ({"model": "x", "prompt_lookup_max": 3}, "prompt_lookup_max has no part"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SpeculativeConfig.of(given)


def test_a_draft_model_that_does_not_suit_is_refused_at_start() -> None:
    other = {"model": str(ORACLE / "tiny-llama-odd.gguf")}
    with pytest.raises(SettingsError, match="vocabulary"):
        load_engine(ORACLE / "tiny-gemma3.gguf", EngineConfig(speculative_config=other))
    rounded = {"model": str(ORACLE / "tiny-llama-k.gguf"), "quantization": "int8"}
    with pytest.raises(ValueError, match="quantized already"):
        load_engine(ORACLE / "tiny-llama-k.gguf", EngineConfig(speculative_config=rounded))


def test_the_method_may_be_left_out() -> None:
    config = SpeculativeConfig.of(json.dumps({"model": "smollm2", "num_speculative_tokens": 4}))
    assert config.method == "draft_model"
    assert config.computes
    assert config.describe() == "draft_model smollm2, 4 tokens each time"
