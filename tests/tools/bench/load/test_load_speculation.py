"""Speculation as the server's metrics tell it, before and after a run."""

import pytest

from octavo.tools.bench.load.speculation import counts, fields

BEFORE = """# HELP octavo:spec_decode_num_drafts_total Passes that checked a draft.
# TYPE octavo:spec_decode_num_drafts_total counter
octavo:spec_decode_num_drafts_total{model_name="m"} 10.0
octavo:spec_decode_num_draft_tokens_total{model_name="m"} 30.0
octavo:spec_decode_num_accepted_tokens_total{model_name="m"} 5.0
octavo:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 4.0
octavo:spec_decode_drafting_seconds_total{model_name="m"} 0.5
octavo:spec_decode_time_saved_seconds{model_name="m"} -1.0
octavo:engine_steps_total{model_name="m"} 7.0
"""
AFTER = """octavo:spec_decode_num_drafts_total{model_name="m"} 30.0
octavo:spec_decode_num_draft_tokens_total{model_name="m"} 90.0
octavo:spec_decode_num_accepted_tokens_total{model_name="m"} 35.0
octavo:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 10.0
octavo:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 19.0
octavo:spec_decode_drafting_seconds_total{model_name="m"} 0.75
octavo:spec_decode_time_saved_seconds{model_name="m"} 2.0
"""


def test_what_came_in_between() -> None:
    assert fields(counts(BEFORE), counts(AFTER)) == {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 20,
        "spec_decode_draft_tokens": 60,
        "spec_decode_accepted_tokens": 30,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.5],
        "spec_decode_drafting_s": 0.25,
        "spec_decode_time_saved_s": 3.0,
    }


def test_a_vllm_server_says_the_same() -> None:
    """Several engines are added up; timestamps may follow."""
    text = AFTER.replace("octavo:", "vllm:").replace("time_saved", "else")
    twice = "\n".join(line + " 1700000000000" for line in (text + text).splitlines())
    found = fields({}, counts(twice))
    assert found["spec_decode_num_drafts"] == 60
    assert "spec_decode_time_saved_s" not in found


@pytest.mark.parametrize(
    "text", ["", "<html>", "octavo:spec_decode_num_drafts_total NaN", BEFORE, "x" * 100]
)
def test_nothing_to_say(text: str) -> None:
    before = counts(BEFORE) if text == BEFORE else {}
    assert fields(before, counts(text)) == {}
