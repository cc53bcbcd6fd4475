"""What may be said of speculation, and that everything else is refused by name."""

from typing import Any

import pytest

from octavo.engine.config import EngineConfig
from octavo.spec_decode.config import SpeculativeConfig
from octavo.spec_decode.ngram import NgramDrafter
from octavo.spec_decode.suffix import SuffixDrafter


class Mine(NgramDrafter):
    """A user's own."""


class Leaving:
    def __init__(self) -> None:
        raise SystemExit(3)


class Lacking:
    def start(self) -> None: ...


def test_methods_name_their_drafters() -> None:
    assert isinstance(SpeculativeConfig.of('{"method": "ngram"}').drafter(), NgramDrafter)
    assert isinstance(SpeculativeConfig.of({"method": "suffix"}).drafter(), SuffixDrafter)
    mine = SpeculativeConfig(method="spec_decode.test_config:Mine")
    assert type(mine.drafter()).__name__ == "Mine"


@pytest.mark.parametrize(
    ("given", "orders"),
    [
        ({}, (2, 4)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 1}, (1, 1)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 5}, (1, 5)),
    ],
)
def test_orders_of_ngrams(given: dict[str, Any], orders: tuple[int, int]) -> None:
    assert SpeculativeConfig(method="ngram", **given).orders == orders


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("[1]", "not an object"),
        ("{", "not JSON"),
        ('{"method": "ngram", "method": "suffix"}', "'method' appears twice"),
        ({}, "names no method"),
        ({"method": "eagle"}, "'eagle' is not one of .*'ngram', 'suffix'"),
        ({"method": "layer_skip"}, "needs layers, the numbers of those that guess"),
        ({"method": "layer_skip", "layers": []}, r"layers is \[\], not a list of numbers"),
        ({"method": "layer_skip", "layers": "1,2"}, "layers is '1,2', not a list"),
        ({"method": "layer_skip", "layers": [1, -2]}, "layers has -2, which is no layer"),
        ({"method": "layer_skip", "layers": [1, True]}, "layers has True, which is no layer"),
        ({"method": "ngram", "layers": [1]}, "layers has no part in method 'ngram'"),
        ({"method": 3}, "method is 3"),
        ({"model": "x", "quantization": ["int4"]}, "quantization ..int4.. is not supported"),
        ({"method": "ngram", "acceptance_method": "typical"}, "it must be 'replay' or 'rejection'"),
        ({"method": "ngram", "acceptance_method": None}, "acceptance_method is None"),
        ({"method": "ngram", "model": "x"}, "model has no part"),
        ({"method": "ngram", "models": "x"}, "'models' is not supported"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max has no part"),
        ({"method": "ngram", "suffix_decoding_max_cached_requests": 3}, "has no part"),
        ({"method": "ngram", "suffix_decoding_alternatives": 1}, "has no part"),
        ({"method": "suffix", "suffix_decoding_alternatives": 5}, "from 0 to 4"),
        ({"method": "suffix", "lookup": True}, "lookup has no part in method 'suffix'"),
        ({"method": "medusa", "model": "x", "lookup": 1}, "lookup is 1, neither true nor false"),
        ({"method": "medusa", "model": "x", "suffix_decoding_alternatives": 1}, "has no part"),
        (
            {
                "method": "medusa",
                "model": "x",
                "lookup": False,
                "suffix_decoding_max_cached_requests": 1,
            },
            "has no part without lookup",
        ),
        ({"method": "ngram", "num_speculative_tokens": 0}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5"),
        ({"method": "ngram", "prompt_lookup_max": 99}, "prompt_lookup_max is 99"),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2},
            "prompt_lookup_min 5 is above prompt_lookup_max 2",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SpeculativeConfig.of(given)
    if isinstance(given, dict):
        with pytest.raises(ValueError, match=named):
            EngineConfig(speculative_config=given)


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("no_such_module:Drafter", "no_such_module"),
        ("spec_decode.test_config:Absent", "Absent"),
        ("spec_decode.test_config:Leaving", "SystemExit"),
        ("spec_decode.test_config:Lacking", r"has no extend\(\)"),
    ],
)
def test_a_class_that_is_no_drafter_is_refused_at_start(method: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SpeculativeConfig(method=method).drafter()


def test_beside_heads_the_text_is_looked_up_unless_it_is_said() -> None:
    heads: Any = {"method": "medusa", "model": "x"}
    config = SpeculativeConfig.of(heads)
    assert config.computes
    assert config.looks_up
    assert config.longest == 16
    assert config.describe() == "medusa x with lookup, up to 16 tokens, as it pays"
    alone = SpeculativeConfig.of(heads | {"lookup": False})
    assert not alone.looks_up
    assert alone.describe(3) == "medusa x, up to 3 tokens, as it pays"
    remembering = SpeculativeConfig.of(heads | {"suffix_decoding_max_cached_requests": 7})
    assert isinstance(remembering.drafter(), SuffixDrafter)
    assert not SpeculativeConfig(method="suffix").looks_up


def test_layers_are_put_in_order() -> None:
    config = SpeculativeConfig.of('{"method": "layer_skip", "layers": [4, 0, 2]}')
    assert config.layers == (0, 2, 4)
    assert config.computes
    assert "layer_skip with layers 0, 2, 4" in config.describe()


def test_a_step_must_have_room_for_a_draft() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens of 2 or more"):
        EngineConfig(
            max_num_seqs=1, max_num_batched_tokens=1, speculative_config={"method": "ngram"}
        )


def test_logits_rows_are_those_of_sequences_and_drafts() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    assert EngineConfig(max_num_seqs=8).max_logits_rows() == 8
    assert EngineConfig(max_num_seqs=8, speculative_config=ngram).max_logits_rows() == 32
    assert EngineConfig(speculative_config=ngram).max_logits_rows() == 512


def test_rows_for_branches_are_had_where_there_may_be_alternatives() -> None:
    several: Any = {"method": "suffix", "suffix_decoding_alternatives": 2}
    assert EngineConfig(speculative_config={"method": "suffix"}).max_branches == 0
    assert EngineConfig(speculative_config={"method": "ngram"}).max_branches == 0
    assert EngineConfig().max_branches == 0
    for given in several, {"method": "spec_decode.test_config:Mine"}:
        config = EngineConfig(max_num_seqs=1, speculative_config=given)
        assert config.max_branches == 16
        assert config.max_logits_rows() == (1 + 16) * (1 + 16)
