"""GGUF files of recurrent layers whose metadata is wrong: an error that names what is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.loader import loader
from octavo.loader.base import CheckpointError
from octavo.loader.gguf_split import open_gguf
from oracle.tiny_folders import gguf_file

HUGE = 1 << 31
KV = "attention.head_count_kv"
LAYERS = "is not one integer for each of 4 layers"
NAMELESS = "has no tensor for"
# By family: the keys that a file has otherwise, and what the error says.
WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "lfm2": [
        ({"shortconv.l_cache": 0}, "shortconv.l_cache is 0, which is below 1"),
        ({"shortconv.l_cache": 1}, "taps 1, outside 2 to 16"),
        ({"shortconv.l_cache": 4}, "the model's metadata asks for [32, 1, 4]"),
        ({"shortconv.l_cache": HUGE}, "taps 2147483648, outside 2 to 16"),
        ({"shortconv.l_cache": -3}, "shortconv.l_cache is -3, which is below 1"),
        ({"shortconv.l_cache": 3.0}, "is a float, not a int"),
        ({KV: np.zeros(4, np.int32)}, "is not from 1 to"),
        ({KV: np.array([0, 2, 0], np.int32)}, LAYERS),
        ({KV: np.array([0.0, 2.0, 0.0, 0.0])}, LAYERS),
        ({KV: np.array([0, -2, 0, 0], np.int32)}, "is not from 1 to"),
        ({KV: np.array([0, HUGE, 0, 0], np.int64)}, "is not from 1 to"),
        ({KV: np.array([2, 0, 0, 0], np.int32)}, NAMELESS),
        ({KV: np.array([2, 2, 2, 2], np.int32)}, NAMELESS),
        ({KV: 2}, NAMELESS),
    ],
    "lfm2moe": [
        ({"shortconv.l_cache": 0}, "shortconv.l_cache is 0, which is below 1"),
        ({"leading_dense_block_count": -1}, "leading_dense_block_count is -1, which is below 0"),
        ({"leading_dense_block_count": 0}, NAMELESS),
        ({"leading_dense_block_count": HUGE}, "the model's metadata asks for 0 experts"),
        ({"expert_gating_func": 1}, "expert_gating_func is 1, which is not supported, only 2"),
        ({"expert_weights_scale": 2.0}, "expert_weights_scale is 2.0, which is not supported"),
        ({"expert_count": 0}, "expert_used_count is 2, which is not supported"),
        ({"expert_count": 7}, "the model's metadata asks for 7"),
        ({"expert_count": HUGE}, "2147483648 experts, outside 1 to 1024"),
        ({"expert_used_count": 9}, "a token goes to 9 of 6 experts"),
    ],
    "granitehybrid": [
        ({"ssm.conv_kernel": 0}, "ssm.conv_kernel is 0, which is below 1"),
        ({"ssm.conv_kernel": HUGE}, "taps 2147483648, outside 2 to 16"),
        ({"ssm.conv_kernel": 5}, "the model's metadata asks for [128, 1, 5]"),
        ({"ssm.state_size": 0}, "ssm.state_size is 0, which is below 1"),
        ({"ssm.state_size": 17}, NAMELESS),
        ({"ssm.state_size": HUGE}, "state 2147483648, outside 1 to 65536"),
        ({"ssm.group_count": 0}, "ssm.group_count is 0, which is below 1"),
        ({"ssm.group_count": 3}, "4 heads are not a multiple of 3 groups"),
        ({"ssm.group_count": 1}, NAMELESS),
        ({"ssm.inner_size": 0}, "ssm.inner_size is 0, which is below 1"),
        ({"ssm.inner_size": 3}, "is 3, which contradicts the others, which make it 0"),
        ({"ssm.inner_size": 66}, "ssm.inner_size is 66, which contradicts the others"),
        ({"ssm.inner_size": HUGE}, "head_dim 536870912, outside 1 to 65536"),
        ({"ssm.inner_size": 1 << 18}, NAMELESS),
        ({"ssm.time_step_rank": 0}, "ssm.time_step_rank is 0, which is below 1"),
        ({"ssm.time_step_rank": HUGE}, "is 64, which contradicts the others, which make it 0"),
        ({"ssm.time_step_rank": 8}, NAMELESS),
        ({"ssm.time_step_rank": "4"}, "is a str, not a int"),
        ({"expert_shared_feed_forward_length": 0}, "is 0, which is below 1"),
        ({"rope.scaling.finetuned": 0}, "is a int, not a bool"),
        ({KV: np.array([2, 2, 0, 0], np.int32)}, NAMELESS),
    ],
}


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [(family, *each) for family, cases in WRONG.items() for each in cases],
)
def test_wrong_metadata_is_refused_by_name(
    family: str,
    changes: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = gguf_file(family, "base", tmp_path / "model.gguf")
    file = open_gguf(path)
    architecture = file.metadata["general.architecture"]
    file.metadata |= {f"{architecture}.{key}": value for key, value in changes.items()}
    monkeypatch.setattr(loader, "open_gguf", lambda _: file)
    with pytest.raises(CheckpointError) as error:
        loader.load_gguf(path)
    assert str(error.value).startswith(f"{path}: ")
    assert reason in str(error.value)
