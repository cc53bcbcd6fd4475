"""Drafts by the model's own layer for multi-token prediction.

That outputs stay the same to the bit is drawn in tests/engine/test_same_bits.py.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from executor import tiny
from octavo.executor.reference import evaluate
from octavo.kv_cache.layout import KvDtype
from octavo.loader.base import Checkpoint, Weight, WeightFormat
from octavo.models.families import mtp_program, program
from octavo.models.program import Values
from octavo.spec_decode import mtp
from octavo.spec_decode.mtp import MtpDrafter
from spec_decode.house import TEXT, House

Float32 = npt.NDArray[np.float32]


def house_of(checkpoint: Checkpoint, *, drafts: bool = True, **options: Any) -> House:
    layer = mtp.read(checkpoint, None, 1)
    drafter = partial(MtpDrafter, layer=layer) if drafts else None
    return House(checkpoint, drafter, mtp=True, **options)


def said(checkpoint: Checkpoint, text: list[int], count: int) -> list[int]:
    """The likeliest draft of so many tokens behind a text, by the ops' definitions: the whole text
    through the model, then through the layer, with what is drafted.
    """
    weights = {
        role: tiny.dequantize(weight).astype(np.float32)
        for role, weight in (checkpoint.weights | checkpoint.mtp_weights()).items()
    }

    def run(of: Any, tokens: list[int], **values: Float32) -> Values:
        found: Values = dict(values)
        ids = np.array([tokens])
        evaluate.run(of.ops, checkpoint.config, weights, found, ids)
        return found

    hidden = run(program(checkpoint.config), text[:-1])["x"]
    rows = np.concatenate([np.zeros_like(hidden[:, :1]), hidden], axis=1)
    for _ in range(count):
        found = run(mtp_program(checkpoint.config), text, hidden=rows)
        rows = np.concatenate([rows, found["x"][:, -1:]], axis=1)
        text = [*text, int(found["logits"][0, -1].argmax())]
    return text[-count:]


@pytest.mark.parametrize("family", ["qwen35"])
def test_a_draft_is_what_the_layer_says_behind_the_whole_text(family: str) -> None:
    """Texts in chunks, in decoding and over drafts that were right and wrong."""
    checkpoint = tiny.checkpoint(tiny.config(family, tied_embeddings=False))
    house = house_of(checkpoint, kv_dtype=KvDtype.FP16)
    decoding = house.decode(5, 33, 100, steps=6, max_tokens=100, temperature=0.0)
    drafts = house.drafter.propose(decoding, [6, 0, 18])
    assert [len(draft.token_ids) for draft in drafts] == [6, 0, 18]
    for seq, draft in zip(decoding, drafts, strict=True):
        if draft.token_ids:
            expected = said(checkpoint, seq.token_ids.tolist(), len(draft.token_ids))
            assert list(draft.token_ids) == expected


def agreeing(family: str = "qwen35", **changes: Any) -> Checkpoint:
    """A model that mostly goes by the last token, and a layer that does so, too."""
    config = tiny.config(family, tied_embeddings=False, **changes)
    checkpoint = tiny.checkpoint(config)

    def quiet(weights: dict[str, Weight]) -> dict[str, Weight]:
        for role, weight in weights.items():
            values = weight.data.view(np.float32).reshape(weight.shape)
            if role.endswith(("attn_output", "ssm_out", "ffn_down")):
                values = 0.02 * values
            elif role.endswith("eh_proj"):
                values = np.concatenate([np.eye(len(values)), 0.02 * values[:, : len(values)]], 1)
            data = tiny.quantize(np.ascontiguousarray(values, np.float32), WeightFormat.F32)
            weights[role] = weight._replace(source=data)
        return weights

    own, read = quiet(dict(checkpoint.weights)), checkpoint.mtp_weights
    return replace(checkpoint, weights=own, mtp_weights=lambda: quiet(read()))


@pytest.mark.parametrize("probabilities", [False, True])
def test_outputs_are_those_without(probabilities: bool) -> None:
    """Right drafts and wrong ones, of every kind of sequence, in too few blocks."""
    checkpoint = agreeing()

    def outputs(*, drafts: bool) -> tuple[dict[tuple[str, int], list[int]], House]:
        house = house_of(checkpoint, drafts=drafts, num_blocks=90, probabilities=probabilities)
        for index, length in enumerate((1, 15, 16, 17, 40, 90, 120, 3, 31, 32)):
            temperature, n = (0.0, 0.8)[index % 2], (1, 1, 3)[index % 3]
            house.add(length, max_tokens=40, temperature=temperature, n=n, presence_penalty=0.5)
        return house.drain(), house

    expected, _ = outputs(drafts=False)
    got, house = outputs(drafts=True)
    assert got == expected
    stats = house.engine.stats()
    assert stats.preemptions > 0
    assert 0.2 * stats.draft_tokens < stats.accepted_tokens < stats.draft_tokens
    assert stats.drafter_failures == 0
    assert stats.drafting_seconds > 0
