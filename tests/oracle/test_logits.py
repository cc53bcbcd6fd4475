"""Octavo's logits against transformers' in float32, recorded (README.md here, record.py)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from octavo import loader
from octavo.executor.base import Batch
from octavo.executor.native.executor import NativeExecutor
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.models import families
from paths import ORACLE

Float = npt.NDArray[np.floating[Any]]
Int32 = npt.NDArray[np.int32]

# Largest mean and maximal difference of a logit (their standard deviation is 1.4 to 2.2), about
# twice what was seen. Float weights differ by the KV cache's half precision; quantized ones by
# activations in 8 bits.
TINY = {
    "tiny-llama": (0.002, 0.02),
    "tiny-llama-odd": (0.003, 0.03),
    "tiny-gemma3": (0.003, 0.03),
    "tiny-gemma3-caps": (0.003, 0.04),
    "tiny-llama-legacy": (0.06, 0.4),
    "tiny-llama-k": (0.08, 0.5),
    "tiny-llama-small": (0.08, 0.5),
}
TEXTS = ("alice", "code", "tongues", "jargon")
# Mean over a text's positions of sum p (log p - log q) over the 20 most probable tokens, in nats;
# and the share of positions whose most probable token is the same.
REAL = {"smollm2": (0.01, 0.92), "gemma3-270m": (0.01, 0.92)}
MARGIN = 0.25  # nats between first and second from which a greedy token must be the recorded one


class Runner:
    """One sequence at a time through the native executor, in chunks of `chunk` tokens."""

    def __init__(self, path: Path, tokens: int, chunk: int, kv_dtype: str = "auto") -> None:
        checkpoint = loader.load(path)
        layout = KvLayout.of(checkpoint.config, dtype=KvDtype.of(kv_dtype))
        blocks, groups = -(-tokens // layout.block_size), len(layout.groups)
        self.chunk = chunk
        self._tables = np.arange(groups * blocks, dtype=np.int32).reshape(groups, 1, blocks)
        self._executor = NativeExecutor(
            checkpoint,
            families.program(checkpoint.config),
            layout,
            num_blocks=groups * blocks,
            max_tokens=chunk,
            max_logits_rows=chunk,
            logits_slice=chunk,
            max_seqs=1,
            max_blocks_per_seq=blocks,
        )

    def extend(self, ids: Int32, start: int) -> Float:
        """[len(ids), vocab]: logits of ids put at positions start, start + 1, …"""
        rows = []
        for first in range(0, len(ids), self.chunk):
            part = np.ascontiguousarray(ids[first : first + self.chunk])
            count = len(part)
            result = self._executor.execute(
                Batch(
                    token_ids=part,
                    positions=np.arange(start + first, start + first + count, dtype=np.int32),
                    seq_offsets=np.array([0, count], np.int32),
                    seq_slots=np.zeros(1, np.int32),
                    block_tables=self._tables,
                    logits_rows=np.arange(count, dtype=np.int32),
                    copies=np.zeros((0, 2), np.int32),
                )
            )
            assert result.logits is not None
            rows.append(np.array(result.logits))
        return np.concatenate(rows)

    def close(self) -> None:
        self._executor.close()


def assert_greedy(runner: Runner, ids: Int32, expected: Int32, margins: Float) -> None:
    """The recorded continuation, up to the first step too close to call."""
    last = runner.extend(ids, 0)[-1]
    for step, (token, margin) in enumerate(zip(expected, margins, strict=True)):
        if int(last.argmax()) != int(token):
            assert margin < MARGIN, f"step {step}: {int(last.argmax())} instead of {int(token)}"
            return
        last = runner.extend(np.array([token], np.int32), len(ids) + step)[-1]


def log_softmax(logits: Float) -> Float:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_have_the_recorded_logits(name: str) -> None:
    with np.load(ORACLE / f"{name}.npz") as data:
        runner = Runner(ORACLE / f"{name}.gguf", tokens=64, chunk=17, kv_dtype="fp16")
        difference = np.abs(runner.extend(data["ids"], 0) - data["logits"])
        mean, most = TINY[name]
        assert difference.mean() < mean
        assert difference.max() < most
        assert_greedy(runner, data["ids"][:12], data["greedy"], data["greedy_margins"])
        runner.close()


@pytest.fixture(scope="module", params=sorted(REAL))
def real(request: pytest.FixtureRequest) -> Iterator[tuple[str, Runner]]:
    paths = {"smollm2": "smollm2_path", "gemma3-270m": "gemma3_path"}
    runner = Runner(request.getfixturevalue(paths[request.param]), tokens=768, chunk=64)
    yield request.param, runner
    runner.close()


def test_real_models_are_as_sure_of_the_next_token(real: tuple[str, Runner]) -> None:
    name, runner = real
    divergence, agreement = [], []
    with np.load(ORACLE / f"{name}.npz") as data:
        for text in TEXTS:
            rows, top = data[f"{text}_rows"], data[f"{text}_top_ids"]
            logits = runner.extend(data[f"{text}_ids"], 0)[rows]
            p = data[f"{text}_top_logprobs"].astype(np.float64)
            q = np.take_along_axis(log_softmax(logits), top, axis=1)
            divergence.append(float((np.exp(p) * (p - q)).sum(axis=1).mean()))
            agreement.append(float((logits.argmax(axis=1) == top[:, 0]).mean()))
    most, least = REAL[name]
    assert max(divergence) < most, dict(zip(TEXTS, divergence, strict=True))
    assert np.mean(agreement) > least, dict(zip(TEXTS, agreement, strict=True))


def test_real_models_continue_as_recorded(real: tuple[str, Runner]) -> None:
    name, runner = real
    with np.load(ORACLE / f"{name}.npz") as data:
        for index in range(len(json.loads(str(data["meta"]))["prompts"])):
            key = f"prompt{index}"
            assert_greedy(runner, data[f"{key}_ids"], data[f"{key}_greedy"], data[f"{key}_margins"])
