"""Cases that other servers got wrong, and the tests that hold their right values here."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
Cases = dict[str, tuple[tuple[str, ...], ...]]

LIVE = "server/test_edge_cases_live.py"

ERRORS = "server/test_errors.py"
OVERLOAD = "server/test_overload.py"
WITH_ENGINE = "server/test_with_engine.py"
PROCESS = "server/test_process.py"
DETOKENIZE = "engine/test_detokenize.py"
SCHEDULER = "scheduler/test_scheduler.py"
FAULTY = "engine/test_async_faults.py"
REFUSED = "test_refused_by_name"

# What happens, and what of ours shows that it goes right: file, function, and, where the function
# has many cases, how the file spells those meant.
REQUESTS: Cases = {
    "a prompt of no tokens": (
        (LIVE, REFUSED, '{"prompt": [""]}'),
        (ERRORS, REFUSED, '{"prompt": ""}', '{"prompt": []}', '{"prompt": [[]]}'),
    ),
    "token ids below 0 and past the vocabulary": (
        (LIVE, REFUSED, '{"prompt": [-1]}', '{"prompt": [[-1]]}', '{"prompt": [49152]}'),
        (ERRORS, REFUSED, '{"prompt": [VOCAB]}'),
    ),
    "logit_bias past the vocabulary": ((LIVE, REFUSED, '{"logit_bias": {"49152": 1}}'),),
    "stop_token_ids past the vocabulary with min_tokens; the neighbour's bits": (
        (LIVE, REFUSED, '{"stop_token_ids": [49152], "min_tokens": 1}'),
        (LIVE, "test_a_neighbour_of_what_is_refused_is_unchanged"),
    ),
    "numbers without sense, NaN and Infinity as tokens and strings; the error is JSON": (
        (LIVE, REFUSED, '"temperature": 999999', '"top_p": -1', '"repetition_penalty": 0'),
        (LIVE, REFUSED, '"temperature": "NaN"', "strict_json"),
        (ERRORS, REFUSED, '"temperature": "Infinity"'),
        (LIVE, "test_numbers_that_json_has_not", '"NaN", "Infinity", "-Infinity"'),
        (ERRORS, "test_an_error_body_is_always_json"),
    ),
    "a fraction as top_k, and one far above the vocabulary": (
        (LIVE, REFUSED, '"top_k": 0.01'),
        (LIVE, "test_a_large_top_k_means_all"),
    ),
    "a stream of n = 0": ((LIVE, REFUSED, '{"stream": True, "n": 0}'),),
    "n = 2": (
        (LIVE, "test_two_choices_share_the_prompt"),
        (SCHEDULER, "test_n_sequences_share_the_prompts_blocks"),
    ),
    "one message of 10 MB": (
        (LIVE, "test_a_message_of_ten_megabytes"),
        (ERRORS, "test_ten_megabytes_in_one_message", "engine.submitted == []"),
    ),
    "huge logprobs and prompt_logprobs; those allowed, of a long prompt": (
        (LIVE, REFUSED, '"logprobs": 100_000', '"prompt_logprobs": 100_000'),
        (
            SCHEDULER,
            "test_logits_rows_cap_the_chunks_of_a_prompt_with_logprobs",
        ),
    ),
    "two user messages where the template wants turns": (
        ("server/test_chat.py", "test_template_refusals_are_the_clients", "must alternate"),
        ("loader/test_chat_template.py", "test_the_templates_own_message"),
    ),
    "text in parts; null beside tool calls": (
        (LIVE, "test_text_parts_reach_the_prompt"),
        ("server/test_chat.py", "test_messages_are_named", '"tool_calls": [{"id": "1"}]'),
    ),
    "one token all over the advertised context": (
        (LIVE, "test_what_is_advertised_runs"),
        (SCHEDULER, "test_the_largest_request_that_is_admitted_runs"),
    ),
    "settings that leave nothing": (
        ("engine/test_load.py", "test_what_does_not_fit_is_refused_with_the_arithmetic"),
        ("engine/test_load.py", "test_settings_without_sense_are_refused_by_name"),
    ),
    "a parameter nobody knows, or that is not supported": (
        (LIVE, REFUSED, "no_such_parameter"),
        (ERRORS, REFUSED, '"best_of": 2', '"tools": []'),
        ("server/test_body.py", "test_completion_fields_are_named"),
        ("server/test_body.py", "test_chat_fields_are_named"),
    ),
    "prompt and max_tokens beyond the context": (
        (LIVE, REFUSED, '{"max_tokens": 10**6}'),
        (ERRORS, "test_the_arithmetic_is_given"),
    ),
}
STREAMING: Cases = {
    "characters whose bytes fall into several tokens": (
        (DETOKENIZE, "test_a_character_split_over_tokens_arrives_whole"),
        (DETOKENIZE, "test_equals_decoding_everything_and_searching_all_of_it"),
        (LIVE, "test_characters_of_several_tokens_arrive_whole"),
    ),
    "thousands of steps of what decodes to U+FFFD": (
        (DETOKENIZE, "test_thousands_of_invalid_bytes_keep_flowing_and_nothing_piles_up"),
        (DETOKENIZE, "test_leads_without_followers_are_replaced_as_soon_as_that_is_certain"),
    ),
    "a stop string over several tokens, and what only looks like one": (
        (DETOKENIZE, "test_a_stop_string_across_tokens_is_never_sent"),
        (DETOKENIZE, "test_text_that_only_looked_like_a_stop_string_is_released_in_order"),
        (DETOKENIZE, "test_holds_back_exactly_what_may_become_a_stop_string"),
    ),
    "an end inside a block of accepted drafts, with logprobs": (
        (DETOKENIZE, "test_a_block_of_tokens_ends_at_the_stop"),
        (
            "engine/test_speculation.py",
            "test_answers_end_where_they_would_have_ended",
            '"stop": ("ab", "c"), "logprobs": 2',
        ),
    ),
    "include_usage true, false and absent": (
        (LIVE, "test_usage_of_a_stream", "[True, False, None]"),
    ),
    "the same request streamed and not": ((WITH_ENGINE, "test_streamed_and_not_are_the_same"),),
    "the first delta, and the reason before the end": (
        (LIVE, "test_the_first_delta_and_the_reason_before_the_end"),
        ("server/test_chat.py", "test_stream"),
    ),
}
CLIENTS: Cases = {
    "killed while it generates, streaming or not": (
        (OVERLOAD, "test_who_is_killed_frees_its_blocks_within_a_step", "[False, True]"),
        ("server/test_leaving.py", "test_killed_in_every_state"),
    ),
    "killed while it waits": (
        (WITH_ENGINE, "test_a_request_that_waits_never_runs_when_its_client_leaves"),
    ),
    "300 streams aborted, then a normal load": (
        (WITH_ENGINE, "test_many_streams_aborted_and_then_a_normal_load", "range(300)"),
        ("engine/test_engine.py", "test_three_hundred_aborted_requests_leave_the_engine_as_it_was"),
    ),
}
OPERATING: Cases = {
    "a key is set: every route without it": (("server/test_routes.py", "test_keys"),),
    "five aborted streams, in every counter": (
        (OVERLOAD, "test_one_life_of_five_that_leave_in_every_count"),
        (WITH_ENGINE, "test_counters_reconcile_with_usage"),
    ),
    "the engine's thread stops or hangs": (
        (OVERLOAD, "test_a_stopped_engine_fails_the_probe_and_all_who_wait"),
        (WITH_ENGINE, "test_an_engine_that_hangs_is_noticed"),
    ),
    "SIGTERM with streams and clients on kept connections": (
        (PROCESS, "test_streams_finish_and_new_requests_are_refused"),
        (PROCESS, "test_at_the_timeout_streams_end_with_an_error"),
        (PROCESS, "test_an_idle_keep_alive_connection_does_not_hold_the_exit"),
        (PROCESS, "test_an_engine_that_hangs_does_not_hold_the_exit"),
    ),
}
CACHE: Cases = {
    "many requests that share a prefix in a small pool; a preempted one returns and hits": (
        (
            SCHEDULER,
            "test_a_preempted_request_resumes_before_newcomers_and_from_the_cache",
        ),
        ("engine/test_lives.py", "test_random_lives"),
    ),
    "block 16, two requests of 34 + 35 tokens: one preemption in 7 blocks, none in 10": (
        (
            "engine/test_engine.py",
            "test_block_16_two_requests_of_34_and_35_in_7_blocks_preempt_once",
        ),
    ),
    "hash forced to collide": (
        ("kv_cache/test_prefix.py", "test_a_forced_collision_is_refused_and_harmless"),
        ("engine/test_lives.py", "test_random_lives"),  # Setting.hashes
    ),
    "a prompt that can never be scheduled": (
        (SCHEDULER, "test_what_can_never_run_is_refused_with_the_arithmetic"),
    ),
    "four streams that together exceed the pool": (
        (SCHEDULER, "test_four_streams_that_exceed_the_pool_all_finish"),
    ),
    "sequence limit full of low priority, then a high one": (
        ("scheduler/test_policies.py", "test_the_limit_full_of_low_priority_and_then_a_high_one"),
    ),
    "a victim decoding while a prompt 100 times longer arrives, and a short newcomer": (
        (SCHEDULER, "test_a_long_prompt_neither_stalls_a_decode_nor_a_short_newcomer"),
    ),
}
SAMPLING: Cases = {
    "two requests together, one seeded, one not, repeatedly": (
        (LIVE, "test_a_seeded_request_among_unseeded_ones"),
    ),
    "prompts one at a time and together, greedy": (
        (LIVE, "test_one_at_a_time_and_together"),
        ("server/test_real_model.py", "test_together_as_alone"),
        ("engine/test_same_bits.py", "test_same_bits"),
    ),
    "the same greedy request three times on a fresh server, prefix cache on and off": (
        (LIVE, "test_greedy_three_times_and_without_a_cache"),
    ),
    "min_tokens with a stop string seen early, and with EOS forced by logit_bias": (
        (
            "engine/test_detokenize.py",
            "test_a_stop_string_completed_before_min_tokens_does_not_stop",
        ),
        (
            "sampling/test_sampler.py",
            "test_min_tokens_holds_off_a_forced_end_until_the_fifth_token",
        ),
        (LIVE, "test_min_tokens"),
    ),
    "frequency_penalty 2.0; presence_penalty with words only in the prompt": (
        ("sampling/test_sampler.py", "test_presence_and_frequency_count_generated_tokens_only"),
        (LIVE, "test_penalties_count_generated_tokens_only"),
    ),
}
FAULTS: Cases = {
    "executor, sampler, texts, memory and clock fail at any point": (
        ("engine/test_lives.py", "test_random_lives_with_faults"),
        ("engine/test_lives.py", "test_a_million_steps"),
    ),
    "an observer raises": ((FAULTY, "test_an_observer_that_raises_changes_nothing"),),
    "the engine's thread dies": ((FAULTY, "test_when_the_thread_ends_so_does_every_request"),),
    "a step hangs": (
        (FAULTY, "test_a_step_that_comes_back_after_it_was_given_up_on_is_the_last"),
        (FAULTY, "test_a_process_whose_engine_hangs_can_end"),
    ),
    "clients that read late, never, or whose event loop is gone; a storm while it drains": (
        (FAULTY, "test_clients_of_all_manners_on_an_engine_that_fails"),
    ),
    "kill -9 under load, and a start on the same port": (
        (LIVE, "test_killed_under_load_and_started_again"),
    ),
}


ALL = (REQUESTS, STREAMING, CLIENTS, OPERATING, CACHE, SAMPLING, FAULTS)


@cache
def source(file: str) -> str:
    return (TESTS / file).read_text()


@cache
def functions(file: str) -> frozenset[str]:
    """Those that run: not the ones that are skipped whatever happens."""
    return frozenset(
        node.name
        for node in ast.parse(source(file)).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("mark.skip" in ast.unparse(each) for each in node.decorator_list)
    )


@pytest.mark.parametrize("case", [case for cases in ALL for case in cases])
def test_the_case_has_its_tests(case: str) -> None:
    (shown,) = (cases[case] for cases in ALL if case in cases)
    for file, name, *values in shown:
        assert name in functions(file), f"{file}: {name}"
        for value in values:
            assert value in source(file), f"{file}: {name}: {value}"
