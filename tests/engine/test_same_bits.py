"""Same request, same bits: logits and tokens of a request in any load equal those of it alone.

Each case is drawn from a seed: a model and weight format, an engine (threads, chunk sizes, block
size, pool down to the smallest that admits the requests, prefix cache on or off, with KV connectors
in host memory, on disk and elsewhere, speculation by one of several drafters), and a load of 1 to
32 requests with every sampling option that arrive and are aborted at drawn moments, on a cache that
is warm or cold. Some of the requests are then run alone, on one thread, in one chunk, without a
cache or drafts, and every logits row is compared byte for byte.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import octavo.loader
from engine.connecting import eager_connectors
from executor import tiny
from octavo import _native
from octavo.engine.clock import Clock
from octavo.engine.engine import Engine, Step
from octavo.engine.outputs import Delta
from octavo.engine.step_time import StepTimePredictor, guessed
from octavo.executor.native.executor import NativeExecutor
from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader.base import Checkpoint, WeightFormat
from octavo.models.config import Experts, ModelConfig
from octavo.models.families import program
from octavo.sampling.native import NativeSampler
from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import Float32, Sampled, SamplerState
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import Outcome, Request, RequestRecord, SchedulingParams
from octavo.scheduler.scheduler import Scheduler
from octavo.spec_decode import mtp
from octavo.spec_decode.draft_checkpoint import DraftModel
from octavo.spec_decode.draft_model import DraftModelDrafter
from octavo.spec_decode.drafter import Draft, Drafter, ModelDrafter, Target
from octavo.spec_decode.layer_skip import LayerSkipDrafter
from octavo.spec_decode.mtp import AssistantDrafter, MtpDrafter, MtpModule
from octavo.spec_decode.ngram import NgramDrafter
from octavo.spec_decode.speculator import Speculator
from octavo.spec_decode.suffix import SuffixDrafter
from paths import ORACLE


def oracle(name: str) -> Callable[[], Checkpoint]:
    return lambda: octavo.loader.load(ORACLE / f"{name}.gguf")


MODELS: dict[str, Callable[[], Checkpoint]] = {
    "gemma3 Q4_0": lambda: tiny.checkpoint(tiny.config("gemma3"), WeightFormat.Q4_0),
    "gemma3 Q8_0": lambda: tiny.checkpoint(tiny.config("gemma3"), WeightFormat.Q8_0),
    "gemma3 F32, window of 8, soft-caps": oracle("tiny-gemma3-caps"),
    "gemma3 I4, in orders": lambda: tiny.checkpoint(tiny.config("gemma3"), WeightFormat.I4),
    "llama I3, in orders": lambda: tiny.checkpoint(tiny.config(), WeightFormat.I3),
    "llama I8, in orders": lambda: tiny.checkpoint(tiny.config(), WeightFormat.I8),
    "llama BF16": lambda: tiny.checkpoint(tiny.config(num_kv_heads=4), WeightFormat.BF16),
    "llama F16": lambda: tiny.checkpoint(tiny.config(head_dim=20), WeightFormat.F16),
    "llama F32, odd sizes": oracle("tiny-llama-odd"),
    "llama Q4_0": lambda: tiny.checkpoint(tiny.config(), WeightFormat.Q4_0),
    "llama Q4_0, Q4_1, Q5_0, Q5_1, F16": oracle("tiny-llama-legacy"),
    "llama Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4": oracle("tiny-llama-small"),
    "llama Q4_K, Q5_K, Q6_K, Q8_0, BF16": oracle("tiny-llama-k"),
    "mixtral Q4_0, 2 of 6 experts": lambda: tiny.checkpoint(
        tiny.config("mixtral"), WeightFormat.Q4_0
    ),
    "qwen3moe BF16, 5 of 33 experts": lambda: tiny.checkpoint(
        tiny.config("qwen3moe", Experts(33, 5, 48, True)), WeightFormat.BF16
    ),
    "llama F16, heads of two widths": lambda: tiny.checkpoint(tiny.mixed(), WeightFormat.F16),
    "gemma3 I8, heads of two widths": lambda: tiny.checkpoint(
        tiny.mixed("gemma3"), WeightFormat.I8
    ),
    "lfm2 BF16": lambda: tiny.checkpoint(tiny.config("lfm2"), WeightFormat.BF16),
    "lfm2 Q4_0": lambda: tiny.checkpoint(tiny.config("lfm2"), WeightFormat.Q4_0),
    "qwen35 Q8_0": lambda: tiny.checkpoint(tiny.config("qwen35"), WeightFormat.Q8_0),
    "lfm2moe Q8_0": lambda: tiny.checkpoint(tiny.config("lfm2moe"), WeightFormat.Q8_0),
    "granitehybrid F16": lambda: tiny.checkpoint(tiny.config("granitehybrid"), WeightFormat.F16),
    "gemma4 E, Q8_0": lambda: tiny.checkpoint(tiny.gemma4("e"), WeightFormat.Q8_0),
    "gemma4 F16, experts": lambda: tiny.checkpoint(tiny.gemma4("experts"), WeightFormat.F16),
    "gemma4 Q4_0, keys as values": lambda: tiny.checkpoint(tiny.gemma4("keys"), WeightFormat.Q4_0),
    "qwen3 I8, heads of 32 to 512": lambda: tiny.checkpoint(tiny.widths(), WeightFormat.I8),
    "llama Q8_0": lambda: tiny.checkpoint(tiny.config(num_kv_heads=1), WeightFormat.Q8_0),
}
EOS = 3  # of the tiny models


@cache
def tiny_model(name: str) -> Checkpoint:
    return MODELS[name]()


@dataclass(frozen=True)
class Setting:
    """The engine of a case; the defaults are those of a request alone."""

    threads: int = 1
    block_size: int = 16
    num_blocks: int | None = None
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 512
    itl_target: float | None = None  # ms
    enable_prefix_caching: bool = False
    max_model_len: int = 400
    kv_dtype: KvDtype = KvDtype.FP16
    isa: str | None = None  # None: the best this machine has
    logits_slice: int | None = None
    drafter: str | None = None
    num_drafts: int | None = None
    draft_blocks: float = 4.0  # as many of the longest sequences its cache holds
    spare_rows: int = 7  # of logits, for drafts
    max_branches: int = 0
    state_snapshots: float = 0.5
    host_blocks: int = 0  # of the connector in host memory; 0: no connectors
    disk: bool = False  # a connector on disk too, which now and then loses a block
    remote: bool = False  # one on another machine too


class Doubtful(SuffixDrafter):
    """Right now and then, for a while; guesses where it knows nothing."""

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        drafts = super().propose(sequences, counts)
        for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            rng = random.Random(sequence * 1000 + len(self._sequences[sequence].text.tokens))
            tokens = list(drafts[index].token_ids)[: rng.randint(0, count)]
            tokens += [rng.randrange(EOS + 5) for _ in range(count - len(tokens))]
            drafts[index] = Draft(tokens, rng.randrange(3))
        return drafts


class Forked(SuffixDrafter):
    """Doubtful, with up to four alternatives, some of which go on rightly for a while, and some as
    another does for a while.
    """

    def propose(self, sequences: Sequence[int], counts: Sequence[int]) -> list[Draft]:
        drafts = super().propose(sequences, counts)
        for index, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            rng = random.Random(sequence * 1000 + len(self._sequences[sequence].text.tokens))
            right = list(drafts[index].token_ids)
            paths = [[rng.randrange(EOS + 5) for _ in range(rng.randint(0, 5))] for _ in range(4)]
            for path in paths:
                other = rng.choice((right, right, rng.choice(paths)))
                at = rng.randint(0, len(other))
                path[:at] = other[:at]
            first, *others = paths[: rng.randint(1, 4)]
            drafts[index] = Draft(first[:count], rng.randrange(3), others)
        return drafts


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: NgramDrafter(1, 3),
    "suffix": lambda: SuffixDrafter(10),
    "suffix, several": lambda: SuffixDrafter(alternatives=2),
    "doubtful": Doubtful,
    "forked": Forked,
}


def some_layers(target: Target) -> ModelDrafter:
    """All but the last, which is a window's or not; or all but the first."""
    count = len(target.program.config.layers)
    first = target.scheduler.config.max_num_seqs % 2
    return LayerSkipDrafter(target, range(first, count - 1 + first))


def mtp_layer(target: Target) -> ModelDrafter:
    return MtpDrafter(target, mtp.read(target.checkpoint, None, None, 1))


COMPUTING: dict[str, Callable[[Target], ModelDrafter]] = {"layer_skip": some_layers}


def assistant(target: Target) -> ModelDrafter:
    return AssistantDrafter(target, MtpModule(*tiny.assistant(target.checkpoint), own=False))


OF_SOME_MODELS: dict[str, Callable[[Target], ModelDrafter]] = {
    "mtp": mtp_layer,
    "assistant": assistant,
}


def of_this(config: ModelConfig) -> str | None:
    """The drafter of `OF_SOME_MODELS` that a model may have."""
    if config.mtp_layers:
        return "mtp"
    return "assistant" if config.family == "gemma4" else None


def fewer_layers(checkpoint: Checkpoint) -> Checkpoint:
    config = checkpoint.config
    fewer = replace(config, layers=config.layers[:-1] or config.layers)
    if config.per_layer_input:  # in one matrix for all layers
        return tiny.checkpoint(fewer)
    return replace(checkpoint, config=fewer)


DRAFT_MODELS: dict[str | None, Callable[[Checkpoint], Checkpoint]] = {
    "draft model, the same": lambda checkpoint: checkpoint,
    "draft model, fewer layers": fewer_layers,
}


def draft_model_drafter(draft: Checkpoint, target: Target, sequences: float) -> DraftModelDrafter:
    """``sequences``: of the longest, how many its cache holds."""
    limits, cache = target.scheduler.config, target.executor.layout
    layout = KvLayout.of(draft.config, cache.block_size, cache.dtype)
    blocks = int(sequences * peak_blocks(layout, limits.max_model_len))
    model = DraftModel(draft, program(draft.config), layout, 0)
    return DraftModelDrafter(target, model, blocks)


@dataclass
class Trace:
    """What a request got: per choice its logits rows and deltas, joined."""

    rows: dict[int, list[bytes]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    prompt_logprobs: list[Any] | None = None
    record: RequestRecord | None = None

    def take(self, delta: Delta) -> None:
        self.token_ids.setdefault(delta.choice, []).extend(delta.token_ids)
        self.logprobs.setdefault(delta.choice, []).extend(delta.logprobs or [])
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.record is not None:
            self.record = delta.record


class Recorder(NativeSampler):
    """Draws for an engine, observes it and keeps every request's logits."""

    def __init__(self, vocab_size: int, isa: str, pool: _native.ThreadPool) -> None:
        super().__init__(vocab_size, isa, pool)
        self.traces: dict[str, Trace] = {}
        self.drawn_from: dict[tuple[int, int], bytes] = {}  # by the state's id and place, last
        self.taken = 0  # branches

    def of(self, request_id: str) -> Trace:
        return self.traces.setdefault(request_id, Trace())

    def sample(
        self, logits: Float32 | None, rows: Sequence[int], states: Sequence[SamplerState]
    ) -> Sampled:
        places: dict[int, int] = {}
        for row, state in zip(rows, states, strict=True):
            place = places.get(id(state), state.num_generated)
            places[id(state)] = place + 1
            self.drawn_from[id(state), place] = logits[row].tobytes()
        return super().sample(logits, rows, states)

    def on_step(self, step: Step) -> None:
        for index, (seq, run) in enumerate(
            zip(step.scheduled.samples, step.drawn.runs, strict=True)
        ):
            trace = self.of(seq.owner.request_id)
            state = seq.output.sampler
            places = range(state.num_generated - len(run), state.num_generated)
            rows = [self.drawn_from[id(state), place] for place in places]
            trace.rows.setdefault(seq.choice, []).extend(rows)
            self.taken += step.scheduled.taken(index, run) is not None
        self.drawn_from.clear()

    def on_end(self, record: RequestRecord) -> None:
        pass


class Covered(NamedTuple):
    """What a case really tried."""

    rows: int  # of logits, compared
    preemptions: int
    prefix_hits: int
    accepted: int  # draft tokens
    rejected: int
    taken: int  # branches
    loaded: int  # blocks from connectors


def smallest_pool(layout: KvLayout, setting: Setting) -> int:
    return peak_blocks(layout, setting.max_model_len)


@contextmanager
def running(checkpoint: Checkpoint, setting: Setting) -> Iterator[tuple[Engine, Recorder]]:
    compute = program(checkpoint.config)
    own_mtp = setting.drafter == "mtp"
    layout = KvLayout.of(checkpoint.config, setting.block_size, setting.kv_dtype, mtp=own_mtp)
    num_blocks = setting.num_blocks or 4 * smallest_pool(layout, setting)
    limits = SchedulerConfig(
        max_model_len=setting.max_model_len,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_logits_rows=min(
            setting.max_num_seqs + setting.spare_rows, setting.max_num_batched_tokens
        ),
        itl_target=setting.itl_target,
        max_branches=setting.max_branches,
        enable_prefix_caching=setting.enable_prefix_caching,
        state_snapshots=setting.state_snapshots,
        state_log_rows=2 * setting.spare_rows,
    )
    scheduler = Scheduler(limits, layout, num_blocks)
    if setting.host_blocks:
        disk, remote = setting.disk, setting.remote
        connectors = eager_connectors(layout, setting.host_blocks, disk=disk, remote=remote)
        scheduler.kv.attach(connectors)
    executor = NativeExecutor(
        checkpoint,
        compute,
        layout,
        num_blocks=num_blocks,
        max_tokens=limits.max_num_batched_tokens,
        max_logits_rows=limits.logits_rows,
        max_seqs=scheduler.kv.tables.shape[1],
        max_blocks_per_seq=scheduler.kv.tables.shape[2],
        logits_slice=setting.logits_slice and min(setting.logits_slice, limits.logits_rows),
        threads=setting.threads,
        isa=setting.isa,
        keep_hidden=setting.drafter == "assistant",
        all_hidden=own_mtp,
        state_log_rows=limits.state_log_rows,
    )
    vocab = checkpoint.config.vocab_size
    recorder = Recorder(vocab, executor.capabilities.tier, executor.pool)
    speculator = None
    own = executor.new_sampler(vocab)
    target = Target(checkpoint, compute, executor, scheduler, own)
    drafter: ModelDrafter
    computing = COMPUTING | OF_SOME_MODELS
    if setting.drafter in computing:
        drafter = computing[setting.drafter](target)
        speculator = Speculator(drafter, vocab, setting.num_drafts)
    elif setting.drafter in DRAFT_MODELS:
        smaller = DRAFT_MODELS[setting.drafter](checkpoint)
        drafter = draft_model_drafter(smaller, target, setting.draft_blocks)
        speculator = Speculator(drafter, vocab, setting.num_drafts)
    elif setting.drafter is not None:
        speculator = Speculator(DRAFTERS[setting.drafter](), vocab, setting.num_drafts)
    engine = Engine(
        executor,
        scheduler,
        recorder,
        Clock(),
        vocab_size=vocab,
        eos_token_ids={EOS},
        speculator=speculator,
        step_times=setting.itl_target
        and StepTimePredictor(executor.costs, guessed(setting.threads), measured=False),
    )
    engine.observers.append(recorder)
    try:
        yield engine, recorder
    finally:
        engine.close()


def drain(engine: Engine, recorder: Recorder) -> None:
    while engine.has_work():
        for delta in engine.step():
            recorder.of(delta.request_id).take(delta)
        engine.check_integrity()


def alone(checkpoint: Checkpoint, request: Request, crowd: Setting) -> Trace:
    setting = Setting(max_model_len=crowd.max_model_len, kv_dtype=crowd.kv_dtype, isa=crowd.isa)
    with running(checkpoint, setting) as (engine, recorder):
        engine.add_request(request)
        drain(engine, recorder)
        return recorder.of(request.request_id)


def drawn_params(rng: random.Random, vocab: int, tight: bool) -> SamplingParams:
    """Every sampling option now and then."""

    def sometimes(value: Callable[[], Any], otherwise: Any, chance: float = 0.3) -> Any:
        return value() if rng.random() < chance else otherwise

    max_tokens = rng.choice((60, 90) if tight else (1, 3, 10, 25))
    return SamplingParams(
        n=sometimes(lambda: rng.randint(2, 4), 1, 0.2),
        max_tokens=max_tokens,
        min_tokens=sometimes(lambda: rng.randint(0, max_tokens), 0),
        temperature=rng.choice((0.0, 0.5, 1.0, 1.7)),
        top_k=sometimes(lambda: rng.randint(1, vocab), 0),
        top_p=sometimes(lambda: rng.uniform(0.1, 1.0), 1.0),
        min_p=sometimes(lambda: rng.uniform(0.0, 0.3), 0.0),
        top_n_sigma=sometimes(lambda: rng.uniform(0.0, 3.0), 0.0),
        presence_penalty=sometimes(lambda: rng.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(lambda: rng.uniform(-2, 2), 0.0),
        repetition_penalty=sometimes(lambda: rng.uniform(0.7, 1.5), 1.0),
        logit_bias=sometimes(lambda: {rng.randrange(vocab): rng.uniform(-9, 9)}, {}),
        allowed_token_ids=sometimes(lambda: tuple(rng.sample(range(vocab), 9)), None, 0.1),
        banned_token_ids=sometimes(lambda: (EOS, rng.randrange(vocab)), (), 0.1),
        seed=rng.randrange(2**31),
        stop_token_ids=sometimes(lambda: (rng.randrange(vocab),), ()),
        ignore_eos=rng.random() < 0.5,
        logprobs=sometimes(lambda: rng.randint(0, 4), None),
        prompt_logprobs=sometimes(lambda: rng.randint(0, 2), None, 0.1),
    )


def drawn_setting(
    rng: random.Random, layout_of: Callable[[int, KvDtype], KvLayout], longest: int
) -> Setting:
    max_num_seqs = rng.choice((4, 5, 8, 32))
    block_size, threads = rng.choice((16, 16, 32)), rng.choice((1, 2))
    times = rng.choice((1.0, 1.3, 2.0, 4.0, 10.0))
    setting = Setting(
        threads=threads,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice((0, 1, 5, 16, 33, 100, 512)),
        enable_prefix_caching=rng.random() < 0.8,
        max_model_len=longest,
        kv_dtype=rng.choice(KvDtype.served()),
        isa=rng.choice((None, None, None, "generic")),
        logits_slice=rng.choice((None, None, 8, 16)),
    )
    smallest = smallest_pool(layout_of(block_size, setting.kv_dtype), setting)
    return replace(setting, num_blocks=int(smallest * times))


def check_case(
    checkpoint: Checkpoint,
    seed: int,
    *,
    longest: int = 240,
    compared: int = 3,
    branches: bool = False,
) -> Covered:
    """One drawn case. ``branches``: with drafts that have some, and room for them."""
    rng = random.Random(seed)
    vocab = checkpoint.config.vocab_size
    layout_of = partial(KvLayout.of, checkpoint.config)
    setting = drawn_setting(rng, layout_of, longest)
    guess = random.Random(seed)
    drafters = None, *DRAFTERS, *COMPUTING, *DRAFT_MODELS
    if (own := of_this(checkpoint.config)) is not None:
        drafters += (own,) * len(drafters)
    setting = replace(
        setting,
        drafter=guess.choice(drafters),
        num_drafts=guess.choice((None, 1, 3, 7)),
        draft_blocks=guess.choice((1.0, 1.5, 4.0)),
        spare_rows=guess.choice((7, 7, 60)),
        max_branches=guess.choice((0, 2, 16)),
        itl_target=guess.choice((None, None, None, None, 1e-3, 0.3, 1.0, 10.0)),
    )
    if branches:
        setting = replace(setting, drafter="forked", max_branches=16, itl_target=None)
    if setting.enable_prefix_caching and guess.random() < 0.6:
        host_blocks = max(1, int((setting.num_blocks or 1) * guess.choice((0.5, 3.0))))
        disk, remote = guess.random() < 0.5, guess.random() < 0.3
        setting = replace(setting, host_blocks=host_blocks, disk=disk, remote=remote)
    setting = replace(setting, state_snapshots=guess.choice((0.0, 0.1, 0.5, 1.0)))
    tight = rng.random() < 0.4  # short prompts, long outputs, few blocks: preemptions
    layout = KvLayout.of(checkpoint.config, setting.block_size, setting.kv_dtype)
    smallest = smallest_pool(layout, setting)
    blocks = smallest if tight else max(setting.num_blocks or 0, smallest)
    setting = replace(setting, num_blocks=blocks)
    texts = [[rng.randrange(vocab) for _ in range(longest)] for _ in range(3)]
    requests = []
    for index in range(rng.choice((1, 2, 5, 12, 32))):
        lengths = (1, 2, 15, 16, 17, 32, 60, 150, longest - 100)
        length = rng.choice(lengths[:6] if tight else lengths)
        tail = [rng.randrange(vocab) for _ in range(rng.choice((0, 0, 1, 20)))]
        prompt = (rng.choice(texts)[:length] + tail)[: longest - 100]
        requests.append(
            Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                params=drawn_params(rng, vocab, tight),
                scheduling=SchedulingParams(cache_salt=rng.choice((None, None, "salt"))),
            )
        )
    rows = 0
    with running(checkpoint, setting) as (engine, recorder):
        if rng.random() < 0.75:  # a warm cache
            for index, text in enumerate(texts):
                engine.add_request(
                    Request(
                        request_id=f"warm {index}",
                        prompt_token_ids=text[: rng.randint(1, longest - 100)],
                        params=SamplingParams(max_tokens=rng.randint(1, 20), seed=1),
                    )
                )
            drain(engine, recorder)
        for request in requests:
            engine.add_request(request)
            for _ in range(rng.choice((0, 0, 0, 1, 3))):
                for delta in engine.step():
                    recorder.of(delta.request_id).take(delta)
            if rng.random() < 0.1:
                engine.abort(rng.choice(requests).request_id)
        drain(engine, recorder)
        stats = engine.stats()
        finished = [
            request
            for request in requests
            if (record := recorder.of(request.request_id).record) is not None
            and record.outcome is Outcome.FINISHED
        ]
        for request in rng.sample(finished, min(compared, len(finished))):
            rows += compare(
                recorder.of(request.request_id),
                alone(checkpoint, request, setting),
                f"seed {seed}, request {request.request_id}, {stats}, {setting}",
            )
    accepted, drafted = stats.accepted_tokens, stats.draft_tokens
    preemptions, hits = stats.preemptions, stats.prefix_hits
    loaded = sum(each.loaded_blocks for each in stats.connectors.values())
    return Covered(rows, preemptions, hits, accepted, drafted - accepted, recorder.taken, loaded)


def compare(crowd: Trace, alone: Trace, where: str) -> int:
    assert crowd.token_ids == alone.token_ids, where
    assert crowd.logprobs == alone.logprobs, where
    assert crowd.prompt_logprobs == alone.prompt_logprobs, where
    assert crowd.record.finish_reasons == alone.record.finish_reasons, where
    count = 0
    for choice, rows in alone.rows.items():
        got = crowd.rows[choice][: len(crowd.token_ids[choice])]  # the rest came after a stop
        assert len(got) == len(rows), where
        for index, (one, other) in enumerate(zip(got, rows, strict=True)):
            if one != other:
                a, b = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
                differing = int((a.view(np.int32) != b.view(np.int32)).sum())
                pytest.fail(
                    f"{where}: choice {choice}, token {index}: {differing} of {len(a)} logits "
                    f"differ, by at most {np.abs(a - b).max():g}"
                )
            count += 1
    return count


@pytest.mark.parametrize("group", range(3))
def test_same_bits(group: int) -> None:
    """A case of each model, and more until everything has been tried."""
    names = sorted(MODELS)
    tried = Covered(0, 0, 0, 0, 0, 0, 0)
    for index in range(4 * len(names)):
        seed = 10 * group + index % len(names) + 10_000 * (index // len(names))
        branches = index >= len(names) and not tried.taken
        covered = check_case(tiny_model(names[index % len(names)]), seed, branches=branches)
        tried = Covered(*(before + now for before, now in zip(tried, covered, strict=True)))
        if index + 1 >= len(names) and min(tried) > 0:
            return
    pytest.fail(f"something was never tried: {tried}")


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("group", range(20))
def test_same_bits_long(group: int) -> None:
    for seed in range(1000 + 100 * group, 1000 + 100 * group + 100):
        check_case(tiny_model(sorted(MODELS)[seed % len(MODELS)]), seed, compared=6)


@cache
def real_model(path: Path) -> Checkpoint:
    return octavo.loader.load(path)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_same_bits_of_smollm2(smollm2_path: Path) -> None:
    for seed in range(20):
        check_case(real_model(smollm2_path), seed, compared=2)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_same_bits_of_gemma3(gemma3_path: Path) -> None:
    """Prompts longer than the window of 512."""
    for seed in range(10):
        check_case(real_model(gemma3_path), seed, longest=700, compared=2)
