"""Drafts by the model's own layer for multi-token prediction.

That outputs stay the same to the bit is drawn in tests/engine/test_same_bits.py.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from executor import tiny
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import load_engine
from octavo.executor.reference import evaluate
from octavo.kv_cache.layout import KvDtype
from octavo.loader.base import Checkpoint, CheckpointError, Weight, WeightFormat
from octavo.models.families import mtp_program, program
from octavo.models.program import Values
from octavo.spec_decode import mtp
from octavo.spec_decode.mtp import AssistantDrafter, MtpDrafter, MtpModule
from oracle.assistant_folders import assistant_folder
from oracle.mtp_folders import mtp_folder
from oracle.tiny_folders import folder
from spec_decode.house import House

Float32 = npt.NDArray[np.float32]


def house_of(checkpoint: Checkpoint, *, drafts: bool = True, **options: Any) -> House:
    layer = mtp.read(checkpoint, None, None, 1)
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


@pytest.mark.parametrize("family", ["qwen35", "qwen35moe"])
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


Outputs = dict[tuple[str, int], list[int]]


def outputs(house: House) -> Outputs:
    """Those of every kind of sequence."""
    for index, length in enumerate((1, 15, 16, 17, 40, 90, 120, 3, 31, 32)):
        temperature, n = (0.0, 0.8)[index % 2], (1, 1, 3)[index % 3]
        house.add(length, max_tokens=40, temperature=temperature, n=n, presence_penalty=0.5)
    return house.drain()


def test_outputs_are_those_without() -> None:
    """Right drafts and wrong ones, in too few blocks."""
    checkpoint = agreeing()
    house = house_of(checkpoint, num_blocks=90)
    assert outputs(house) == outputs(house_of(checkpoint, drafts=False, num_blocks=90))
    stats = house.engine.stats()
    assert stats.preemptions > 0
    assert 0.05 * stats.draft_tokens < stats.accepted_tokens < stats.draft_tokens
    assert stats.drafter_failures == 0
    assert stats.drafting_seconds > 0


def test_outputs_with_an_assistant_are_those_without() -> None:
    checkpoint = tiny.checkpoint(tiny.gemma4("experts"), WeightFormat.F16)
    module = MtpModule(*tiny.assistant(checkpoint), own=False)
    drafter = partial(AssistantDrafter, assistant=module)
    house = House(checkpoint, drafter, num_blocks=90, keep_hidden=True)
    assert outputs(house) == outputs(House(checkpoint, None, num_blocks=90))
    stats = house.engine.stats()
    assert stats.preemptions > 0
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert stats.drafter_failures == 0


def test_an_assistant_waits_where_its_window_has_lost_a_block() -> None:
    """The window of 20 that the last token saw: the next one needs a block less, once in 16."""
    checkpoint = tiny.checkpoint(tiny.gemma4("keys"), WeightFormat.F16)
    module = MtpModule(*tiny.assistant(checkpoint), own=False)
    house = House(checkpoint, partial(AssistantDrafter, assistant=module), keep_hidden=True)
    (seq,) = house.decode(40, steps=0, max_tokens=80, temperature=0.0)
    lengths = []
    for _ in range(48):
        house.kv.reserve(seq.slot, 1)  # as the next step begins
        (draft,) = house.drafter.propose([seq], [3])
        lengths.append(len(draft.token_ids))
        house.engine.step()
    assert lengths.count(3) >= 44
    assert lengths.count(0) == 48 - lengths.count(3) > 0


def test_drafting_leaves_the_cache_as_it_was() -> None:
    house = house_of(tiny.checkpoint(tiny.config("qwen35")), num_blocks=50)
    decoding = house.decode(30, 31, 32, 33, max_tokens=60, temperature=0.0)
    before = house.kv.pool.num_free, house.kv.num_blocks.tolist()
    drafts = house.drafter.propose(decoding, [20] * 4)
    assert max(len(draft.token_ids) for draft in drafts) > 16
    assert (house.kv.pool.num_free, house.kv.num_blocks.tolist()) == before
    assert (
        house.drafter.propose(decoding, [20] * 4) == drafts
    )  # what they have written is no matter
    house.kv.check()


def test_sequences_that_begin_with_a_restored_prefix_are_drafted_for() -> None:
    """Their first token is read without the row before it."""
    house = house_of(agreeing())
    for _ in range(2):
        (seq,) = house.decode(100, steps=1, max_tokens=30, temperature=0.0)
        (draft,) = house.drafter.propose([seq], [4])
        assert len(draft.token_ids) == 4
        house.drain()
    stats = house.engine.stats()
    assert stats.prefix_hits > 0
    assert stats.drafter_failures == 0


def test_memory_is_as_planned(tmp_path: Path) -> None:
    """Weights, and blocks with keys and values of the layer, only where it drafts."""
    model = mtp_folder("qwen3_5", tmp_path / "model")
    config = EngineConfig(kv_cache_memory_bytes=1 << 20, max_num_seqs=2, threads=1)
    sizes = {}
    for method in (None, {"method": "mtp"}):
        loaded = load_engine(model, replace(config, speculative_config=method))
        executor = loaded.engine.executor
        assert executor.weight_bytes == loaded.weight_bytes
        held = executor.export_blocks(np.arange(loaded.num_blocks, dtype=np.int32)).nbytes
        assert held == loaded.kv_cache_bytes <= 1 << 20
        assert loaded.checkpoint.config.mtp_layers == 1
        sizes[method is None] = loaded.weight_bytes, executor.layout.bytes_per_token
        loaded.engine.close()
    assert sizes[True][0] < sizes[False][0]
    assert 2 * sizes[True][1] == sizes[False][1]  # one layer with attention, and this one


def test_memory_with_an_assistant_is_as_planned(tmp_path: Path) -> None:
    target = folder("gemma4", tmp_path / "target")
    own = {"method": "mtp", "model": str(assistant_folder("gemma4", tmp_path / "own"))}
    config = EngineConfig(kv_cache_memory_bytes=1 << 20, max_num_seqs=2, threads=1)
    plain = load_engine(target, config)
    loaded = load_engine(target, replace(config, speculative_config=own))
    assert loaded.engine.executor.weight_bytes == loaded.weight_bytes > plain.weight_bytes
    assert loaded.kv_cache_bytes == plain.kv_cache_bytes  # it has none of its own
    for each in (plain, loaded):
        each.engine.close()


def test_models_without_such_a_layer_are_refused(tmp_path: Path) -> None:
    llama = tiny.checkpoint(tiny.config())
    settings = EngineConfig(speculative_config={"method": "mtp"}, threads=1)
    with pytest.raises(SettingsError, match="method 'mtp': llama has no layer for multi-token"):
        load_engine(llama, settings)
    many = tiny.checkpoint(tiny.config("qwen35"))
    many = replace(many, config=replace(many.config, mtp_layers=3))
    with pytest.raises(SettingsError, match="qwen35 has 3 layers for multi-token prediction"):
        load_engine(many, settings)
    half = mtp_folder("qwen3_5", tmp_path / "half")
    tensors = load_file(half / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, half / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"half: has no tensor for layers\.3\.nextn\.eh_proj"):
        load_engine(half, settings)
    load_engine(half, EngineConfig(max_num_seqs=2, threads=1)).engine.close()
