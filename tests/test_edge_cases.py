"""Cases that other servers got wrong, and the tests that hold their right values here."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LIVE = "serve/test_edge_cases_live.py"

# What happens, and what of ours shows that it goes right: file and function.
CACHE = {
    "many requests that share a prefix in a small pool; a preempted one returns and hits": (
        ("schedule/test_scheduler.py", "resumes_before_newcomers_and_from_the_cache"),
        ("engine/test_lives.py", "test_random_lives"),
    ),
    "block 16, two requests of 34 + 35 tokens: one preemption in 7 blocks, none in 10": (
        ("engine/test_engine.py", "test_block_16_two_requests_of_34_and_35_in_7_blocks"),
    ),
    "hash forced to collide": (
        ("kv/test_prefix.py", "test_a_forced_collision_is_refused_and_harmless"),
        ("engine/test_lives.py", "test_random_lives"),  # Setting.hashes
    ),
    "a prompt that can never be scheduled": (
        ("schedule/test_scheduler.py", "test_what_can_never_run_is_refused_with_the_arithmetic"),
    ),
    "four streams that together exceed the pool": (
        ("schedule/test_scheduler.py", "test_four_streams_that_exceed_the_pool_all_finish"),
    ),
    "sequence limit full of low priority, then a high one": (
        ("schedule/test_policies.py", "test_the_limit_full_of_low_priority_and_then_a_high_one"),
    ),
    "a victim decoding while a prompt 100 times longer arrives, and a short newcomer": (
        ("schedule/test_scheduler.py", "test_a_long_prompt_neither_stalls_a_decode_nor_a_short"),
    ),
}
SAMPLING = {
    "two requests together, one seeded, one not, repeatedly": (
        (LIVE, "test_a_seeded_request_among_unseeded_ones"),
    ),
    "prompts one at a time and together, greedy": (
        (LIVE, "test_one_at_a_time_and_together"),
        ("serve/test_real_model.py", "test_together_as_alone"),
        ("engine/test_same_bits.py", "test_same_bits"),
    ),
    "the same greedy request three times on a fresh server, prefix cache on and off": (
        (LIVE, "test_greedy_three_times_and_without_a_cache"),
    ),
    "min_tokens with a stop string seen early, and with EOS forced by logit_bias": (
        ("engine/test_detokenize.py", "test_a_stop_string_completed_before_min_tokens_does_not"),
        ("sample/test_sampler.py", "test_min_tokens_holds_off_a_forced_end_until_the_fifth_token"),
        (LIVE, "test_min_tokens"),
    ),
    "frequency_penalty 2.0; presence_penalty with words only in the prompt": (
        ("sample/test_sampler.py", "test_presence_and_frequency_count_generated_tokens_only"),
        (LIVE, "test_penalties_count_generated_tokens_only"),
    ),
}
FAULTS = {
    "executor, sampler, texts, memory and clock fail at any point": (
        ("engine/test_lives.py", "test_random_lives_with_faults"),
        ("engine/test_lives.py", "test_a_million_steps"),
    ),
    "an observer raises": (("engine/test_async_faults.py", "test_an_observer_that_raises"),),
    "the engine's thread dies": (
        ("engine/test_async_faults.py", "test_when_the_thread_ends_so_does_every_request"),
    ),
    "a step hangs": (
        ("engine/test_async_faults.py", "test_a_step_that_comes_back_after_it_was_given_up_on"),
        ("engine/test_async_faults.py", "test_a_process_whose_engine_hangs_can_end"),
    ),
    "clients that read late, never, or whose event loop is gone; a storm while it drains": (
        ("engine/test_async_faults.py", "test_clients_of_all_manners_on_an_engine_that_fails"),
    ),
    "kill -9 under load, and a start on the same port": (
        (LIVE, "test_killed_under_load_and_started_again"),
    ),
}


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


@pytest.mark.parametrize("case", [*CACHE, *SAMPLING, *FAULTS])
def test_the_case_has_its_tests(case: str) -> None:
    for file, name in (CACHE | SAMPLING | FAULTS)[case]:
        assert any(name in function for function in functions(file)), f"{file}: {name}"
