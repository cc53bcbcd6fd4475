"""Times of steps and drafting are learned, and the length of drafts that gives most is chosen."""

import random
from itertools import pairwise
from math import hypot
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.spec_decode.acceptance import Offer
from octavo.spec_decode.draft_length import choose_lengths, could_pay
from octavo.spec_decode.times import KNOTS, SpeculationTimes
from octavo.spec_decode.tuning import LEAST_GAIN


def machine(num_tokens: int) -> float:
    """A roofline with a step after each panel of 8 rows, as kernels have."""
    rows = -(-num_tokens // 8) * 8
    return 1e-4 + max(3e-3, 3e-4 * rows)


def seasoned(rng: random.Random, sizes: list[int], noise: float = 0.1) -> SpeculationTimes:
    times = SpeculationTimes()
    times.observe(400, 0.1, prompts=True)
    for _ in range(400):
        for size in sizes:
            times.observe(size, machine(size) * rng.uniform(1 - noise, 1 + noise), prompts=False)
    return times


SEASONED = seasoned(random.Random(0), list(range(1, 20)), noise=0)


def lengths(*args: Any) -> list[int]:
    return choose_lengths(*args)[0]


def test_knots_rise() -> None:
    assert all(low < high for low, high in pairwise(KNOTS))


def test_step_times_are_learned_under_noise_and_bursts() -> None:
    rng = random.Random(1)
    sizes = [1, 2, 3, 5, 8, 9, 16, 17, 40]
    times = seasoned(rng, sizes)
    times.observe(5, 10.0, prompts=False)  # somebody else had the machine
    for size in sizes:
        assert times.predict(size) == pytest.approx(machine(size), rel=0.2)


def test_a_slower_machine_is_slower_at_all_sizes() -> None:
    times = seasoned(random.Random(1), [1, 5], noise=0)
    before = times.predict(1)
    for _ in range(60):
        times.observe(5, 2 * machine(5), prompts=False)
    assert times.predict(5) == pytest.approx(2 * machine(5), rel=0.1)
    assert times.predict(1) > 1.1 * before


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.0])
def test_rows_beside_a_prompt_take_their_arithmetic_at_the_speed_of_now(slower: float) -> None:
    """Whether prompts were seen before the machine's speed changed, since, or both."""

    def seconds(num_tokens: int) -> float:
        return hypot(3e-3, 3e-4 * num_tokens)

    for before, since in ((4, 0), (0, 4), (4, 4)):
        times = SpeculationTimes()
        for factor, prompts in ((1.0, before), (slower, since)):
            for _ in range(60):
                for size in (1, 2):
                    times.observe(size, factor * seconds(size), prompts=False)
            for _ in range(prompts):
                times.observe(400, factor * seconds(400), prompts=True)
        plain = times.predict(2)
        assert plain == pytest.approx(slower * seconds(2), rel=0.02)
        for size, predicted in times.sizes(2, 100, 108):
            assert predicted - plain == pytest.approx(slower * 3e-4 * (size - 100), rel=0.15)
        assert times.predict(400) == pytest.approx(slower * seconds(400), rel=0.15)


@pytest.mark.parametrize("seen", [(32,), (1, 2), (9, 32)])
def test_what_prompts_show_of_arithmetic_says_nothing_of_sizes_that_were_seen(
    seen: tuple[int, ...],
) -> None:
    times = SpeculationTimes()
    times.observe(1280, 0.25, prompts=True)
    for _ in range(30):
        for size in seen:
            times.observe(size, machine(size), prompts=False)
    before = [times.predict(size) for size in seen]
    times.observe(72, 0.05, prompts=True)  # somebody else had the machine
    assert [times.predict(size) for size in seen] == pytest.approx(before, rel=0.02)


def test_nothing_is_predicted_of_steps_that_take_no_time() -> None:
    times = SpeculationTimes()
    times.observe(1, 0.0, prompts=False)
    times.observe(100, 0.0, prompts=True)
    assert not times.known
    assert not could_pay(times, 1, 1, 16)


@given(
    gains=st.lists(
        st.lists(st.floats(0.01, 0.98), max_size=6).map(
            lambda each: sorted(each, reverse=True)  # they never rise
        ),
        min_size=1,
        max_size=3,
    ),
    room=st.integers(1, 20),
)
def test_no_other_choice_gives_more_tokens_a_second(gains: list[list[float]], room: int) -> None:
    times = SEASONED
    num_tokens = len(gains)

    def speed(counts: list[int]) -> float:
        expected = num_tokens + sum(
            sum(each[:count]) for each, count in zip(gains, counts, strict=True)
        )
        return expected / times.predict(num_tokens + sum(counts))

    chosen, _ = choose_lengths(times, gains, num_tokens, room)
    assert sum(chosen) <= room
    others: list[list[int]] = [[]]
    for each in gains:
        others = [[*other, count] for other in others for count in range(len(each) + 1)]
    best = max(speed(other) for other in others if sum(other) <= room)
    assert speed(chosen) * (LEAST_GAIN + 0.001) >= best


def test_drafting_takes_what_it_took() -> None:
    times = SpeculationTimes()
    assert times.drafting(3, 4, begun=False) == 0.0
    rng = random.Random(4)
    for _ in range(200):
        passes = rng.randint(1, 8)
        seconds = 0.001 * passes * rng.uniform(0.9, 1.1)
        times.observe_drafting(2, passes, seconds, begun=False)
        times.observe_drafting(2, passes, seconds / 10, begun=True)
    times.observe_drafting(2, 4, 5.0, begun=False)  # something else had the machine
    for passes in (0, 1, 4, 8, 16):
        for begun, share in ((False, 1.0), (True, 0.1)):
            predicted = times.drafting(2, passes, begun=begun)
            assert predicted == pytest.approx(share * 0.001 * passes, rel=0.2)
    for _ in range(20):
        times.observe_drafting(30, 3, 0.3, begun=False)
    assert times.drafting(20, 6, begun=False) == pytest.approx(0.6, rel=0.01)
    assert times.drafting(5, 1, begun=False) < 0.004


def test_what_costs_more_to_draft_than_it_brings_is_not_drafted() -> None:
    gains = [[0.9, 0.8, 0.7, 0.6]]
    for each, chosen in ((1e-4, 4), (1e-2, 0)):
        counts, _ = choose_lengths(
            SEASONED, gains, 1, 16, price=lambda _, passes, each=each: each * passes
        )
        assert counts == [chosen]


def test_it_turns_itself_off_where_rows_cost_what_they_bring() -> None:
    times = seasoned(random.Random(0), [1, 2, 4, 8, 9, 10, 64, 72, 128], noise=0)
    assert could_pay(times, 1, 1, 16)
    assert sum(lengths(times, [[0.9, 0.8, 0.7]], 1, 16)) == 3
    assert not any(lengths(times, [[0.7, 0.5]] * 64, 64, 400))
    assert not could_pay(times, 64, 64, 8)  # the next panel takes what it brings
    assert not any(lengths(times, [[0.1, 0.01]], 8, 16))  # the next panel costs as much again


def test_a_machine_that_is_much_slower_drafts_as_much() -> None:
    slow = SpeculationTimes()
    for _ in range(20):
        for size in range(1, 20):
            slow.observe(size, 1000 * machine(size), prompts=False)
    for gains in ([[0.9, 0.8, 0.7]], [[0.1, 0.01]] * 8, [[0.03]]):
        assert lengths(slow, gains, len(gains), 16) == lengths(SEASONED, gains, len(gains), 16)


def test_an_alternative_brings_the_gain_of_all_its_rows() -> None:
    """Of four rows here, in a panel that is read anyway: 0.6 tokens together, or 0.006."""
    for each, taken in ((0.2, True), (0.002, False)):
        offer = Offer(sequence=0, rank=1, start=0, gains=[each] * 3)
        found = choose_lengths(SEASONED, [[0.01]], 1, 16, [offer])
        assert found == (([1], [(offer, 3)]) if taken else ([0], []))


def test_beside_a_prompt_a_draft_is_worth_what_it_would_be_without_and_costs_its_rows() -> None:
    assert sum(lengths(SEASONED, [[0.9, 0.8]], 102, 16)) == 2
    assert not any(lengths(SEASONED, [[0.05, 0.01]], 102, 16))
    assert could_pay(SEASONED, 1, 102, 16)
