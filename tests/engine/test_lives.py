"""Whatever happens in whatever order: right cache content, progress, no leak, one outcome each."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.recipe import shrunk, told
from engine.world import (
    BROKEN_SEED,
    LATE_SEED,
    Setting,
    World,
    random_action,
    random_fault,
    random_prompt,
    random_terms,
)


class Lives(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.world = World(Setting.drawn(random.Random(seed)))

    def alive(self) -> list[str]:
        return [name for name, life in self.world.lives.items() if not life.record.outcome]

    @rule(
        seed=st.integers(0, 2**16),
        n=st.integers(1, 3),
        max_tokens=st.none() | st.integers(1, 30),
        sampling_seed=st.sampled_from((1, 2, 3, BROKEN_SEED, LATE_SEED)),
        salt=st.none() | st.sampled_from("ab"),
        prompt_logprobs=st.sampled_from((None, None, 0)),
    )
    def submit(
        self,
        seed: int,
        n: int,
        max_tokens: int | None,
        sampling_seed: int,
        salt: str | None,
        prompt_logprobs: int | None,
    ) -> None:
        self.world.submit(
            random_prompt(random.Random(seed), self.world.setting.max_model_len),
            salt,
            random_terms(random.Random(seed)),
            n=n,
            max_tokens=max_tokens,
            seed=sampling_seed,
            prompt_logprobs=prompt_logprobs,
        )

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), during=st.booleans())
    def abort(self, data: st.DataObject, during: bool) -> None:
        name = data.draw(st.sampled_from(self.alive()))
        (self.world.abort_during_next_step if during else self.world.abort)(name)

    @rule()
    def crash(self) -> None:
        self.world.crash_next_step()

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "world"):
            self.world.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def live(seed: int, steps: int, faults: float = 0.0) -> int:
    """Random engines, each living for some hundred steps, until ``steps`` have been executed; of
    what happens, a share of ``faults`` are faults.
    """
    rng = random.Random(seed)
    executed = 0
    while executed < steps:
        world = World(Setting.drawn(rng))
        try:
            for _ in range(rng.choice((50, 200, 1000))):
                if rng.random() < faults:
                    random_fault(world, rng)
                random_action(world, rng)
            world.finish()
        except BaseException:
            print(f"after {executed} steps of seed {seed}, made short:")
            print(told(world.setting, shrunk(world.setting, world.recipe)))
            raise
        executed += world.executor.steps
    return executed


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(seed: int) -> None:
    live(seed, 500)


@pytest.mark.parametrize("seed", range(4))
def test_random_lives_with_faults(seed: int) -> None:
    live(1000 + seed, 700, faults=0.05)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(100))
def test_a_million_steps(seed: int) -> None:
    """Every fifth seed without faults, the others with few to many."""
    assert live(2026 + seed, 10_000, faults=(0.0, 0.002, 0.01, 0.05, 0.2)[seed % 5]) >= 10_000
