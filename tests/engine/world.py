"""Random loads and faults on an engine whose cache content, progress and outcomes are checked at
each step.

Driven by hypothesis (short, shrinks) and by a seeded generator (a million steps). What happens in a
world is a list of actions that can be done again (engine/recipe.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from engine.checking import VOCAB, FakeState, build, layout
from engine.connecting import FaultyDisk, Remote, told_connectors
from engine.drafting import Branching, Oracle
from engine.shooting import Shot, shooting
from faults import patch
from octavo.engine.clock import VirtualClock
from octavo.engine.engine import Step
from octavo.engine.outputs import Delta, SequenceOutput
from octavo.kv_cache.transfer_cost import Measured
from octavo.sampling.params import InvalidParameter, SamplingParams
from octavo.scheduler.policies.config import POLICIES
from octavo.scheduler.policies.fcfs import FirstCome
from octavo.scheduler.request import (
    AdmissionError,
    FinishReason,
    LatencyTarget,
    Outcome,
    Request,
    RequestRecord,
    SchedulingParams,
)
from octavo.scheduler.sequence import Status
from octavo.spec_decode.speculator import Speculator
from scheduling import SETTINGS

BROKEN_SEED = 13  # such a request's logits are not numbers
LATE_SEED = 14  # nor are this one's, from its fourth token on
POISON = 63  # the executor crashes on a batch with this token


P = ParamSpec("P")
R = TypeVar("R")


TARGETS = ("schedule", "_prompts", "build", "draw", "learn", "commit", "_deliver", "finish", "_end")


class WrongStep(BaseException):
    """No `Exception`: those of observers are the log's."""


class Leaping(VirtualClock):
    """A clock that is set, forwards and backwards."""

    def jump(self, seconds: float) -> None:
        self._now += seconds


class Words(SequenceOutput):
    """A word a token, the last of which is held back. The next push after ``fail`` fails."""

    fail = False

    def __init__(self, *args: Any) -> None:
        super().__init__(None, *args)
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> tuple[str, int, FinishReason | None, Any]:
        if Words.fail:
            Words.fail = False
            raise UnicodeError("injected")
        _, count, reason, stop = super().push(token_ids)
        words = [self._held, *(f"{token} " for token in token_ids[:count])]
        self._held = "" if reason else words.pop()
        return "".join(words), count, reason, stop

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class Raising:
    """An observer as it must not be."""

    fail = False

    def on_step(self, step: Step) -> None:
        if self.fail:
            raise MemoryError("injected")

    def on_end(self, record: RequestRecord) -> None:
        if self.fail:
            raise RuntimeError("injected")


def plain_hash(parent: int, content: bytes) -> int:
    """The same in every process, so that a life can be lived again."""
    return hash((parent, int.from_bytes(content, "little"), len(content)))


def action(
    method: Callable[Concatenate[World, P], R],
) -> Callable[Concatenate[World, P], R]:
    """Something that can happen: it is noted, so that it can be done again."""

    @wraps(method)
    def noted(world: World, *args: P.args, **kwargs: P.kwargs) -> R:
        world.recipe.append((method.__name__, args, kwargs))
        return method(world, *args, **kwargs)

    return noted


@dataclass
class Life:
    """What the test knows of a request."""

    record: RequestRecord
    params: SamplingParams
    prompt: list[int]
    texts: dict[int, list[int]] = field(default_factory=dict)  # choice -> tokens delivered
    words: dict[int, str] = field(default_factory=dict)  # choice -> text delivered
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    deltas: int = 0
    ended: bool = False


@dataclass(frozen=True)
class Setting:
    """One engine under test."""

    windows: Sequence[int | None] = (None,)
    block_size: int = 4
    num_blocks: int = 24
    max_model_len: int = 48
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_logits_rows: int | None = None
    itl_target: float | None = None  # ms
    max_branches: int = 0
    enable_prefix_caching: bool = True
    vocab: int = 3
    hashes: int = 0  # how many different hashes there are, to force collisions; 0: all
    max_num_queued_reqs: int | None = None
    host_blocks: int = 0  # of the connector in host memory; 0: no connectors
    load_seconds: float = 0.0  # that copying a block in from there takes
    disk: bool = False  # a connector on disk too, which now and then loses a block
    remote: bool = False  # one on another machine too, whose answers arrive late
    drafter: str | None = None  # a kind of `Oracle`
    num_drafts: int | None = None
    rejection: bool = False
    batching: Literal["continuous", "static"] = "continuous"
    memory: Literal["paged", "reserve"] = "paged"
    chunked_prefill: bool = True
    slice_rows: int | None = None  # of logits
    policy: Mapping[str, Any] = field(default_factory=dict)  # its settings
    state_pages: int = 0
    state_log_rows: int = 0
    state_snapshots: float = 0.5

    @staticmethod
    def drawn(rng: random.Random) -> Setting:
        block_size = rng.choice((1, 2, 4, 5, 16))
        max_model_len = rng.choice((8, 24, 48, 100))
        windows = rng.choice(
            ((None,), (None, None), (6,), (None, 5), (9, None, 1), (3, 17), (4, 8))
        )
        whole = len(windows) * (-(-max_model_len // block_size))
        max_num_seqs = rng.choice((1, 2, 4, 7))
        setting = Setting(
            windows=windows,
            block_size=block_size,
            num_blocks=max(1, int(whole * rng.choice((0.5, 0.8, 1.0, 1.3, 2.0, 5.0)))),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice((0, 1, 3, 16, 64)),
            max_logits_rows=rng.choice((None, max_num_seqs + 5, max_num_seqs + 100)),
            enable_prefix_caching=rng.random() < 0.8,
            vocab=rng.choice((1, 2, 3, 60)),
            hashes=rng.choice((0, 0, 0, 5, 30, 200)),
            max_num_queued_reqs=rng.choice((None, None, 3)),
            max_branches=rng.choice((0, 1, 3, 20)),
            drafter=rng.choice((None, "tree", "tree", *Oracle.KINDS)),
            num_drafts=rng.choice((None, 1, 2, 5, 20)),
            rejection=rng.random() < 0.4,
            slice_rows=rng.choice((None, None, 1, 3, 16)),
        )
        if setting.enable_prefix_caching and rng.random() < 0.5:
            host_blocks = max(1, int(setting.num_blocks * rng.choice((0.3, 1.0, 4.0))))
            disk, remote = rng.random() < 0.5, rng.random() < 0.3
            setting = replace(setting, host_blocks=host_blocks, disk=disk, remote=remote)
        if rng.random() < 0.15:
            setting = replace(setting, batching="static")
        if rng.random() < 0.15:
            setting = replace(
                setting,
                memory="reserve",
                enable_prefix_caching=False,
                max_branches=0,
                host_blocks=0,
            )
        if rng.random() < 0.15:
            most = max(max_model_len, setting.max_num_batched_tokens)
            setting = replace(setting, chunked_prefill=False, max_num_batched_tokens=most)
        elif rng.random() < 0.5:
            setting = replace(setting, itl_target=rng.choice((1e-6, 0.2, 1.0, 2.0, 1000.0)))
        setting = replace(setting, policy=drawn_policy(rng))
        if rng.random() < 0.4:
            pages = rng.choice((1, 2, 5))
            setting = replace(
                setting,
                num_blocks=setting.num_blocks + pages * rng.choice((1, 1, 2, 5, 30)),
                state_pages=pages,
                state_log_rows=rng.choice((0, 1, 3, 40, 400)),
                state_snapshots=rng.choice((0.0, 0.1, 0.5, 1.0)),
            )
        return replace(setting, load_seconds=rng.choice((0.0, 0.0, 1e-5, 1e-4, 1e-3)))


def drawn_policy(rng: random.Random) -> dict[str, Any]:
    """A step takes a millisecond."""
    name = rng.choice([*POLICIES])
    settings: dict[str, Any] = {"scheduling_policy": name, "shed_late": rng.random() < 0.3}
    if rng.random() < 0.2:
        settings["max_queue_time"] = rng.choice((0.002, 0.05))
    return settings | {own: rng.choice(SETTINGS[own]) for own in POLICIES[name].settings()}


def random_terms(rng: random.Random) -> dict[str, Any]:
    """Whose request it is, how urgent, and promised what."""
    limits = (None, None, 0.001, 0.02, 0.2, 5.0)
    target = LatencyTarget(*(rng.choice(limits) for _ in range(3)))
    return {
        "client": rng.choice("aaab") if rng.random() < 0.8 else str(rng.random()),
        "weight": rng.choice((0.5, 1.0, 1.0, 4.0)),
        "priority": rng.choice((0, 0, 1, 2, 5, -100)),
        "target": rng.choice((None, target)),
    }


class World:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting

        def hasher(parent: int, content: bytes) -> int:
            value = plain_hash(parent, content)
            return value % setting.hashes if setting.hashes else value

        self.connectors = None
        clock = Leaping()
        if setting.host_blocks:
            shape = layout(setting.windows, setting.block_size, setting.state_pages)
            disk = FaultyDisk(shape.block_bytes, 40, clock.now) if setting.disk else None
            remote = Remote() if setting.remote else None
            self.connectors = told_connectors(
                shape, setting.host_blocks, disk=disk, remote=remote, clock=clock
            )
        self.engine = build(
            connectors=self.connectors,
            clock=clock,
            windows=setting.windows,
            block_size=setting.block_size,
            num_blocks=setting.num_blocks,
            max_model_len=setting.max_model_len,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            max_logits_rows=setting.max_logits_rows,
            itl_target=setting.itl_target,
            max_branches=setting.max_branches,
            enable_prefix_caching=setting.enable_prefix_caching,
            max_num_queued_reqs=setting.max_num_queued_reqs,
            vocab=setting.vocab,
            hasher=hasher,
            batching=setting.batching,
            memory=setting.memory,
            chunked_prefill=setting.chunked_prefill,
            state_pages=setting.state_pages,
            state_log_rows=setting.state_log_rows,
            state_snapshots=setting.state_snapshots,
            seed=0,
            **setting.policy,
        )
        self.executor = self.engine.executor
        self.sampler = self.engine.sampler
        self.sampler.broken.update({BROKEN_SEED: 0, LATE_SEED: 3})
        self.executor.poison = POISON
        self.executor.slice_rows = setting.slice_rows
        if self.connectors is not None and setting.load_seconds:
            self.connectors.cost.loading = Measured(setting.load_seconds, clock.now)
            import_blocks = self.executor.import_blocks

            def slow_import(blocks: Any, data: Any) -> None:
                clock.jump(setting.load_seconds)
                import_blocks(blocks, data)

            patch(self.executor, import_blocks=slow_import)
        self.engine.new_output = Words  # type: ignore[assignment]
        Words.fail = False
        if setting.drafter is not None:
            oracle = Oracle(setting.drafter, self.sampler)
            kind = Branching if setting.drafter == "tree" else Speculator
            self.engine.speculator = oracle.speculator = kind(
                oracle,
                VOCAB,
                setting.num_drafts,
                rejection=setting.rejection,
                now=self.engine.clock.now,
            )
        self.raising = Raising()
        self.engine.observers += [self.raising, self]
        self.recipe: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.lives: dict[str, Life] = {}
        self.outcomes: list[RequestRecord] = []
        self.paused: set[str] = set()
        self.pauses = 0
        self.count = 0
        self.steps = 0
        self.ran: list[Any] = []  # sequences, as the step began
        self.to_load: dict[Any, int] = {}  # blocks, of those of them that are not through
        self.crashes = 0  # faults that were set up
        self.struck = 0  # of them, those that struck since the last step's end: each may cost
        self.victims = 0  # one request that fails, and not by itself; so many since then
        self.aim: tuple[int, str] | None = None  # for the next action: `Shot`
        self.shots = 0  # that hit
        self.sizes: list[int] = []  # the longest run of tokens of each step

    # The engine's observer

    def on_step(self, step: Step) -> None:
        try:
            self.look(step)
        except AssertionError as error:
            raise WrongStep("a step is not as it should be") from error

    def look(self, step: Step) -> None:
        self.steps += 1
        scheduler = self.engine.scheduler
        unfinished = [
            seq
            for life in self.lives.values()
            if (state := self.engine.requests.get(life.record.request_id))
            for seq in state.sequences
            if seq.status not in (Status.FORKING, Status.FETCHING, Status.PAUSED, Status.FINISHED)
        ]
        whole = not self.setting.chunked_prefill  # then a prompt may wait for others to end
        if unfinished and not step.scheduled.stale and scheduler.isolated is None and not whole:
            rank = scheduler.policy.rank
            # Among those that run: who waits comes to its turn. With a disk or a remote, too: who
            # was admitted while another waited for it, or was paused, is not preempted for that.
            slow = self.setting.disk or self.setting.remote
            if not isinstance(scheduler.policy, FirstCome) or slow or self.pauses:
                unfinished = scheduler.decoding + scheduler.prefilling
            if self.setting.itl_target is not None:
                # Who is let in by a step, ahead of others by rank, may find no time left in it.
                seqs, ran = step.scheduled.sequences, self.ran
                unfinished = [seq for seq in unfinished if seq in seqs or seq in ran]
            running = scheduler.decoding + scheduler.prefilling
            # Or its blocks may have taken all of it, and the first one's turn.
            loaded = [seq for seq in running if seq not in self.ran and seq.hit is not None]
            if scheduler.policy.by_client and any(seq not in self.ran for seq in running):
                unfinished = []  # who is let in is charged for it, and ranked by that from then on
            first = min(unfinished, key=rank, default=None)
            if (
                first is not None
                and first not in step.scheduled.sequences
                and not any(rank(seq) < rank(first) for seq in loaded)
            ):
                to_load = scheduler.kv.num_to_load(first.slot)
                assert to_load < self.to_load.get(first, 0), "the first does not progress"
        assert 0.0 <= scheduler.kv.waste() <= 1.0
        self.sizes.append(max(map(len, step.drawn.runs), default=0))

    def on_end(self, record: RequestRecord) -> None:
        assert record.outcome is not None
        self.outcomes.append(record)

    # What can happen

    @action
    def submit(
        self,
        prompt: list[int],
        salt: str | None = None,
        terms: Mapping[str, Any] | None = None,
        **params: object,
    ) -> None:
        self.count += 1
        self.add(f"r{self.count}", prompt, salt, params, dict(terms or {}))

    @action
    def submit_again(self, request_id: str) -> None:
        """The id is in use."""
        known = self.lives.get(request_id)
        if known is None or known.record.outcome:
            return
        self.count += 1
        self.add(request_id, [1, 2, 3], None, {}, {})
        assert self.lives[request_id] is known

    def add(
        self,
        name: str,
        prompt: list[int],
        salt: str | None,
        params: dict[str, object],
        terms: dict[str, Any],
    ) -> None:
        if "priority" not in self.engine.scheduler.policy.request_fields:
            terms["priority"] = 0
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            params=SamplingParams(ignore_eos=True, **params),  # type: ignore[arg-type]
            scheduling=SchedulingParams(cache_salt=salt, **terms),
        )
        before = len(self.outcomes)
        queued = self.engine.scheduler.waiting.tokens
        try:
            with self.shot():
                record = self.engine.add_request(request)
        except (AdmissionError, InvalidParameter):
            assert [record.outcome for record in self.outcomes[before:]] == [Outcome.REJECTED]
        except MemoryError:
            ended = [record.outcome for record in self.outcomes[before:]]
            assert ended in ([Outcome.FAILED], [])
            self.count -= not ended  # there was no record yet
            self.fail()
        else:
            self.lives[record.request_id] = Life(record, request.params, prompt)
            return
        assert self.engine.scheduler.waiting.tokens == queued

    @action
    def abort(self, request_id: str) -> None:
        self.end_now(request_id)

    def end_now(self, request_id: str) -> None:
        if request_id not in self.lives or self.lives[request_id].record.outcome:
            return  # in a recipe cut short
        free = self.engine.scheduler.kv.pool.num_free
        with self.shot():
            assert self.engine.abort(request_id)
        assert self.engine.scheduler.kv.pool.num_free >= free
        outcome = self.lives[request_id].record.outcome
        assert outcome is Outcome.ABORTED or (self.crashes and outcome is Outcome.FAILED)
        assert not self.engine.abort(request_id)

    @action
    def pause(self, request_id: str) -> None:
        self.paused.add(request_id)
        self.pauses += 1
        self.engine.pause(request_id)

    @action
    def resume(self, request_id: str) -> None:
        self.paused.discard(request_id)
        with self.shot():
            self.engine.resume(request_id)

    @action
    def abort_during_next_step(self, request_id: str) -> None:
        def during() -> None:
            self.executor.during = lambda: None
            self.end_now(request_id)

        self.executor.during = during

    @action
    def crash_next_step(self, kind: str = "half", times: int = 1) -> None:
        """``kind``: "before" anything is computed, "half" way or "after" it; so many in a row."""
        self.crashes += times
        self.executor.crashes += [kind] * times

    @action
    def fail_sampling(self, after: int) -> None:
        """So many draws from now."""
        self.crashes += 1
        self.sampler.fail_after = after

    @action
    def fail_state(self) -> None:
        """The next request's sampler state cannot be made."""
        self.crashes += 1
        self.sampler.fail_state = True

    @action
    def fail_logits(self) -> None:
        self.crashes += 1
        self.executor.fail_logits = True

    @action
    def fail_transfer(self, way: str) -> None:
        """Blocks cannot be copied out ("export") or in ("import"), the next time."""
        self.crashes += 1
        self.executor.fail_transfer = way

    @action
    def fail_text(self) -> None:
        """The next tokens that come are no text."""
        self.crashes += 1
        Words.fail = True

    @action
    def raise_in_observer(self, fail: bool) -> None:
        self.raising.fail = fail

    @action
    def jump(self, seconds: float) -> None:
        """The clock is set."""
        self.engine.clock.jump(seconds)

    @action
    def shoot(self, line: int, since: str = "") -> None:
        """Memory runs out in the next action, in the so-many-th call of function ``since``."""
        self.aim = line, since

    @property
    def armed(self) -> int:
        """Faults that have been set up and have not struck."""
        return (
            len(self.executor.crashes)
            + bool(self.executor.fail_transfer)
            + self.executor.fail_logits
            + (self.sampler.fail_after is not None)
            + self.sampler.fail_state
            + Words.fail
        )

    @contextmanager
    def shot(self) -> Iterator[Shot | None]:
        """Around what may fail."""
        aim, self.aim = self.aim, None
        self.crashes += aim is not None
        armed = self.armed
        shot = None
        try:
            with shooting(aim) as shot:
                yield shot
        finally:
            self.struck += max(0, armed - self.armed)
            self.struck += shot is not None and shot.hit is not None

    def fail(self) -> None:
        """A request failed, and not by itself."""
        self.victims += 1
        assert self.victims <= self.struck, "a request failed for another's fault"

    @action
    def step(self) -> None:
        scheduler = self.engine.scheduler
        self.ran = scheduler.decoding + scheduler.prefilling
        num_to_load = scheduler.kv.num_to_load
        self.to_load = {seq: num_to_load(seq.slot) for seq in scheduler.prefilling}
        held = [] if scheduler.isolated else [*scheduler._pausing]
        with self.shot() as shot:
            deltas = self.engine.step()
        for delta in deltas:  # but for a last word of one that is ended
            paused = any(state.request_id == delta.request_id for state in held)
            begun = delta.request_id in self.lives and self.lives[delta.request_id].deltas
            assert not (paused and begun and delta.token_ids), "a paused request went on"
        self.shots += shot is not None and shot.hit is not None
        for delta in deltas:
            self.deliver(delta)
        self.struck = self.victims = 0  # what it did not cost by now it does not cost any more
        scheduler.check_integrity()
        for seq in scheduler.decoding:
            written = int(scheduler.kv.num_tokens[seq.slot])
            assert written == len(seq.token_ids) - 1
            held = written  # rejected drafts keep no blocks
            if self.setting.memory == "reserve":
                held = seq.max_length - 1
            assert scheduler.kv.num_blocks[seq.slot] == -(-held // self.setting.block_size)
        if not self.engine.has_work():
            self.engine.check_integrity()

    def deliver(self, delta: Delta) -> None:
        life = self.lives[delta.request_id]
        assert not life.ended, "a delta after the last"
        assert delta.choice not in life.reasons, "a delta after a choice's last"
        life.deltas += 1
        tokens = life.texts.setdefault(delta.choice, [])
        state = FakeState(life.params.seed or 0, delta.choice, tokens)
        for token in delta.token_ids:
            assert token == self.sampler.draw(state), "another sequence's token"
            tokens.append(token)
        life.words[delta.choice] = life.words.get(delta.choice, "") + delta.text
        if life.params.prompt_logprobs is not None and life.deltas == 1 and delta.token_ids:
            scored = delta.prompt_logprobs
            assert scored[0] is None
            assert [entry.token_id for entry in scored[1:] if entry] == life.prompt[1:]
        else:
            assert delta.prompt_logprobs is None
        if delta.finish_reason is not None:
            life.reasons[delta.choice] = delta.finish_reason
            stops = [
                at for at, token in enumerate(tokens, 1) if token in life.params.stop_token_ids
            ]
            if delta.finish_reason is FinishReason.LENGTH:
                assert len(tokens) == life.record.max_tokens
                assert not stops
            elif delta.finish_reason is FinishReason.STOP:
                assert stops == [len(tokens)]
                assert delta.stop_reason == tokens[-1]
            else:
                assert not stops
            whole = "".join(f"{token} " for token in tokens)
            cut_off = delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
            if cut_off and self.crashes:  # what was held back may be lost
                assert whole.startswith(life.words[delta.choice])
            elif delta.finish_reason is not FinishReason.STOP:
                assert whole == life.words[delta.choice]
        if delta.record is not None:
            self.end(life, delta)

    def end(self, life: Life, delta: Delta) -> None:
        life.ended = True
        record = life.record
        assert delta.record is record
        assert len(life.reasons) == life.params.n
        assert record.finish_reasons == [life.reasons[choice] for choice in range(life.params.n)]
        assert record.completion_tokens == sum(map(len, life.texts.values()))
        assert record.accepted_tokens <= min(record.completion_tokens, record.draft_tokens)
        assert sum(each is record for each in self.outcomes) == 1
        if record.outcome is Outcome.FINISHED:
            assert set(life.reasons.values()) <= {FinishReason.LENGTH, FinishReason.STOP}
        elif record.outcome is Outcome.REJECTED:
            assert record.error
            assert record.completion_tokens == 0
            if set(life.reasons.values()) == {FinishReason.REPLACED}:
                assert record.scheduled is None
                assert self.setting.max_num_queued_reqs is not None
                assert self.engine.scheduler.policy.replaces
            else:
                assert set(life.reasons.values()) == {FinishReason.SHED}
                assert self.setting.policy["shed_late"] or "max_queue_time" in self.setting.policy
        elif record.outcome is Outcome.FAILED:
            assert record.error
            broken = life.params.seed in (BROKEN_SEED, LATE_SEED)
            poisoned = POISON in life.prompt
            stopped = FinishReason.STOP in life.reasons.values()
            if life.params.seed == LATE_SEED and not (poisoned or stopped or self.crashes):
                assert max(map(len, life.texts.values())) == 3
            if not (broken or poisoned):
                self.fail()
        del self.lives[record.request_id]

    def finish(self) -> None:
        """No more faults: let everything end; nothing may be left over."""
        self.executor.crashes.clear()
        self.executor.fail_transfer = ""
        self.executor.fail_logits = Words.fail = self.raising.fail = False
        self.sampler.fail_after = self.aim = None
        for name in sorted(self.paused):
            self.engine.resume(name)
        limit = 100 + sum(
            20 * (len(life.prompt) + (life.record.max_tokens or 0) * life.params.n)
            for life in self.lives.values()
        )
        while self.engine.has_work():
            self.step()
            limit -= 1
            assert limit > 0, "a request is stuck"
        assert not self.lives
        pool = self.engine.scheduler.kv.pool
        assert pool.num_free == pool.num_blocks
        if self.connectors is not None:
            self.connectors.settle()
            assert not self.connectors.staging.num_pins
        assert len({id(record) for record in self.outcomes}) == self.count == len(self.outcomes)
        stats = self.engine.stats()
        if not self.shots:  # which may hit between two counters
            assert stats.draft_tokens == sum(record.draft_tokens for record in self.outcomes)
            assert stats.accepted_tokens == sum(record.accepted_tokens for record in self.outcomes)
            assert stats.accepted_tokens == sum(stats.accepted_per_position)
            total = sum(record.completion_tokens for record in self.outcomes)
            assert stats.generation_tokens == total
        speculator = self.engine.speculator
        assert speculator is None or not speculator.num_known


def random_prompt(rng: random.Random, limit: int) -> list[int]:
    """Prompts share prefixes of all lengths: each is the start of one of few texts, and a tail."""
    base = random.Random(rng.randrange(3))
    length = rng.randint(0, limit)
    text = [base.randrange(3) for _ in range(length)]
    tail = [rng.randrange(POISON) for _ in range(rng.choice((0, 0, 1, 5)))]
    return text + tail + [POISON] * (rng.random() < 0.01)


def random_action(world: World, rng: random.Random) -> None:
    setting = world.setting
    roll = rng.random()
    if roll < 0.25 and len(world.lives) < 40:
        world.submit(
            random_prompt(rng, setting.max_model_len),
            rng.choice((None, None, "a", "b")),
            random_terms(rng),
            n=rng.choice((1, 1, 1, 2, 3)),
            max_tokens=rng.choice((None, 1, 2, 5, 20)),
            seed=rng.choice((1, 2, 3, 4, BROKEN_SEED, LATE_SEED) if roll < 0.02 else (1, 2, 3, 4)),
            prompt_logprobs=rng.choice((None, None, None, 0)),
            stop_token_ids=rng.choice(((), (), (), (1,), (0, 2))),
        )
    elif roll < 0.28 and world.lives:
        alive = [name for name, life in world.lives.items() if not life.record.outcome]
        if alive:
            name = rng.choice(alive)
            rng.choice((world.abort, world.abort_during_next_step))(name)
    elif roll < 0.282:
        world.crash_next_step()
    elif roll < 0.31 and world.lives:
        world.pause(rng.choice([*world.lives]))
    elif roll < 0.35 and world.paused:
        world.resume(rng.choice(sorted(world.paused)))
    else:
        world.step()


def random_fault(world: World, rng: random.Random) -> None:
    """One of each kind that has a place in an engine, as often as another."""
    kind = rng.randrange(10)
    if kind == 0:
        world.crash_next_step(rng.choice(("before", "half", "after")), rng.choice((1, 1, 2, 7)))
    elif kind == 1:
        world.fail_sampling(rng.randrange(8))
    elif kind == 2:
        world.fail_logits()
    elif kind == 3:
        world.fail_text()
    elif kind == 4:
        world.fail_state()
    elif kind == 5:
        world.raise_in_observer(rng.random() < 0.5)
    elif kind == 6:
        world.jump(rng.choice((-1e9, -1.0, 1e-9, 3600.0, 1e9)))
    elif kind == 7 and world.lives:
        world.submit_again(rng.choice([*world.lives]))
    elif kind == 8:
        since = rng.choice(("", "", *TARGETS))
        world.shoot(int(rng.expovariate(1 / rng.choice((10, 40, 200)))), since)
    elif kind == 9 and world.setting.host_blocks:
        world.fail_transfer(rng.choice(("export", "import")))
