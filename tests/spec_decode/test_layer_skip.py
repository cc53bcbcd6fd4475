"""Drafts by some of the model's layers: what they are, and that nothing else is left behind.

That outputs stay the same to the bit is drawn in tests/engine/test_same_bits.py.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest

from executor import tiny
from faults import patch
from octavo.executor.base import Batch, StepResult
from octavo.kv_cache.layout import KvDtype
from octavo.loader.base import Checkpoint, WeightFormat
from octavo.models.families import program
from octavo.models.subset import keep_layers
from octavo.spec_decode.drafter import Draft
from octavo.spec_decode.layer_skip import LayerSkipDrafter
from spec_decode.house import House


def house_of(checkpoint: Checkpoint, layers: tuple[int, ...] | None, **options: Any) -> House:
    drafter = None if layers is None else partial(LayerSkipDrafter, layers=layers)
    return House(checkpoint, drafter, **options)


@pytest.mark.parametrize("kv_dtype", [KvDtype.BF16, KvDtype.INT8])
@pytest.mark.parametrize(("family", "layers"), [("llama", (0, 2)), ("gemma3", (1, 2))])
def test_a_draft_is_what_these_layers_say_behind_what_all_have_written(
    family: str, layers: tuple[int, ...], kv_dtype: KvDtype
) -> None:
    """Each token again by hand: the text through the whole model, then what was drafted through the
    subset, one token at a time."""
    config = tiny.config(family, tied_embeddings=family != "gemma3")  # or a token is said for ever
    checkpoint = tiny.checkpoint(config, WeightFormat.Q8_0)
    house = house_of(checkpoint, layers, kv_dtype=kv_dtype)
    # Their places in a block differ; the last one's draft begins a block.
    decoding = house.decode(5, 33, 61, max_tokens=100, temperature=0.0)
    drafts = house.drafter.propose(decoding, [6, 0, 20])
    assert [len(draft.token_ids) for draft in drafts] == [6, 0, 20]
    assert len(set(drafts[2].token_ids)) > 2
    for seq, draft in zip(decoding, drafts, strict=True):
        fresh = house_of(checkpoint, None, kv_dtype=kv_dtype)
        kv, executor = fresh.kv, fresh.executor
        subset = executor.add_program(keep_layers(program(checkpoint.config), layers))
        slot = kv.open()
        text = seq.token_ids.tolist()

        def run(token: int, number: int) -> int:
            assert kv.reserve(slot, 1)  # noqa: B023
            batch = Batch(
                np.array([token], np.int32),
                kv.num_tokens[[slot]].copy(),  # noqa: B023
                np.array([0, 1], np.int32),
                np.array([slot], np.int32),  # noqa: B023
                kv.tables,  # noqa: B023
                np.array([0], np.int32),
                kv.take_copies(),  # noqa: B023
            )
            logits = executor.execute(batch, number).logits  # noqa: B023
            kv.advance(slot, 1)  # noqa: B023
            return int(logits[0].argmax())

        for token in text[:-1]:
            run(token, 0)
        said = text[-1]
        for guess in draft.token_ids:
            said = run(said, subset)
            assert said == guess


def test_guesses_are_drawn_with_the_random_numbers_of_the_model() -> None:
    """Two of three layers are often right, at a temperature too: by chance it would be 1.4 %."""
    checkpoint = tiny.checkpoint(tiny.config(), WeightFormat.Q8_0)
    for temperature in (0.0, 1.0):
        house = house_of(checkpoint, (0, 1))
        house.add(20, max_tokens=150, temperature=temperature, repetition_penalty=1.1)
        house.drain()
        stats = house.engine.stats()
        assert stats.accepted_per_position[0] > 0.2 * stats.drafts > 4


@pytest.mark.parametrize("logits_slice", [None, 8])
def test_outputs_are_those_without(logits_slice: int | None) -> None:
    """More sequences than a slice of logits has rows, of every kind, in too few blocks."""
    checkpoint = tiny.checkpoint(tiny.config("gemma3"), WeightFormat.Q4_0)

    def outputs(layers: tuple[int, ...] | None) -> tuple[dict[tuple[str, int], list[int]], House]:
        house = house_of(checkpoint, layers, num_blocks=70, logits_slice=logits_slice)
        for index, length in enumerate((1, 15, 16, 17, 40, 90, 120, 3, 31, 32)):
            temperature, n = (0.0, 0.8)[index % 2], (1, 1, 3)[index % 3]
            house.add(length, max_tokens=40, temperature=temperature, n=n, presence_penalty=0.5)
        return house.drain(), house

    expected, _ = outputs(None)
    got, house = outputs((0, 2))
    assert got == expected
    stats = house.engine.stats()
    assert stats.preemptions > 0
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert stats.drafter_failures == 0


def held(house: House) -> tuple[int, list[int]]:
    return house.kv.pool.num_free, house.kv.num_blocks.tolist()


def test_drafting_leaves_the_cache_as_it_was() -> None:
    """Also for drafts that span blocks, and where there is no room for all that is asked."""
    house = house_of(tiny.checkpoint(tiny.config("gemma3")), (0,), num_blocks=44)
    decoding = house.decode(30, 31, 32, 33, max_tokens=60, temperature=0.0)
    before = held(house)
    drafts = house.drafter.propose(decoding, [40] * 4)
    lengths = [len(draft.token_ids) for draft in drafts]
    assert held(house) == before
    assert max(lengths) > 16
    assert min(lengths) < 40
    house.kv.check()


def test_copies_that_wait_are_made_before_a_draft_and_once() -> None:
    """Where choices part, the block that they share is copied: by the pass that comes first."""
    checkpoint = tiny.checkpoint(tiny.config())
    house = house_of(checkpoint, (0, 2))
    house.add(20, max_tokens=30, temperature=1.0, n=3)
    batches: list[tuple[int, int]] = []
    execute = house.executor.execute

    def seen(batch: Batch, program: int = 0, rows: Any = None) -> StepResult:
        batches.append((program, len(batch.copies)))
        return execute(batch, program, rows)

    patch(house.executor, execute=seen)
    got = house.drain()
    assert [program for program, copies in batches if copies] == [1]
    expected = house_of(checkpoint, None)
    expected.add(20, max_tokens=30, temperature=1.0, n=3)
    assert got == expected.drain()


def test_a_pass_that_fails_loses_no_copy_and_no_block() -> None:
    checkpoint = tiny.checkpoint(tiny.config())
    house = house_of(checkpoint, (0, 2))
    house.add(20, max_tokens=30, temperature=1.0, n=3)
    execute, failures = house.executor.execute, []

    def fragile(batch: Batch, program: int = 0, rows: Any = None) -> StepResult:
        if program:
            failures.append(len(batch.copies))
            raise RuntimeError("injected")
        return execute(batch, program, rows)

    patch(house.executor, execute=fragile)
    got = house.drain()
    assert len(failures) == 1  # it is not asked again
    assert failures[0] > 0
    assert house.engine.stats().drafter_failures == 1
    expected = house_of(checkpoint, None)
    expected.add(20, max_tokens=30, temperature=1.0, n=3)
    assert got == expected.drain()


def test_probabilities_are_those_that_tokens_were_drawn_by() -> None:
    house = house_of(tiny.checkpoint(tiny.config()), (0, 2), probabilities=True, logits_slice=8)
    params = {"max_tokens": 60, "temperature": 0.7, "top_k": 5}
    decoding = house.decode(*range(20, 31), **params)
    drafts = house.drafter.propose(decoding, [3, 1, 0] + [2] * 8)
    assert [len(draft.token_ids) for draft in drafts] == [3, 1, 0] + [2] * 8
    for draft in drafts:
        if not draft.token_ids:
            assert draft.probabilities is None
            continue
        assert draft.probabilities is not None
        q = np.stack(draft.probabilities)
        assert q.shape == (len(draft.token_ids), 70)
        assert np.allclose(q.sum(axis=1), 1.0, atol=1e-5)
        assert ((q > 0).sum(axis=1) <= 5).all()
        assert (q[range(len(q)), list(draft.token_ids)] > 0).all()
    one, other = (draft.probabilities[0] for draft in drafts[:2])  # type: ignore[index]
    assert one.base is other.base is not None  # as they were computed: nothing is held twice
    alone = house.drafter.propose(decoding[:1], [3])[0]
    assert list(alone.token_ids) == list(drafts[0].token_ids)
    assert np.array_equal(alone.probabilities, drafts[0].probabilities)  # type: ignore[arg-type]


def test_it_does_not_remember_and_holds_nothing() -> None:
    house = house_of(tiny.checkpoint(tiny.config()), (1,))
    decoding = house.decode(10, 20, max_tokens=60, temperature=0.0)
    first: list[Draft] = house.drafter.propose(decoding, [4, 4])
    assert house.drafter.propose(decoding, [4, 4]) == first
    before = house.executor.weight_bytes
    assert isinstance(house.drafter, LayerSkipDrafter)
    assert house.executor.weight_bytes == before


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ((0, 1, 2), "layers are all 3 of the model"),
        ((0, 3), "layers: layer 3 is outside 0 to 2"),
        ((1, 1), r"layers: a layer is named twice in \[1, 1\]"),
    ],
)
def test_layers_that_do_not_suit_the_model_are_refused(layers: tuple[int, ...], named: str) -> None:
    with pytest.raises(ValueError, match=f"speculative_config: {named}"):
        house_of(tiny.checkpoint(tiny.config()), layers)
