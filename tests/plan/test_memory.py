"""Memory as sums: the field's worked values, factors that multiply, and what fits."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.plan.memory import kv_cache_bytes, kv_cache_steps

GIB = 1 << 30


def planned(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", "memory", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("llama-2-7b --context 4096 --users 1 --kv-dtype fp16", 2 * GIB),
        ("llama-2-7b --context 4096 --users 32 --kv-dtype fp16", 64 * GIB),
        ("llama-2-7b --context 2048 --kv-cache-dtype fp16", GIB),
        ("llama-3-8b --context 8192", GIB),
        ("llama-3-8b --context 8192 --kv-dtype fp16", GIB),
    ],
)
def test_worked_values(arguments: str, expected: int) -> None:
    facts = planned(*arguments.split())
    assert facts["kv_bytes"] == facts["kv_paged_bytes"] == expected
    assert prod(facts["factors"].values()) == expected


def test_plain_numbers() -> None:
    shape = {"layers": 32, "kv_heads": 32, "head_dim": 128, "context": 2048}
    assert kv_cache_bytes(**shape) == GIB  # in fp16
    (step,) = kv_cache_steps(**shape)
    assert step.endswith("= 1,073,741,824 bytes")
    assert kv_cache_bytes(**shape, dtype="int8") == GIB // 2 + 32 * 32 * 2048 * 4
    assert kv_cache_bytes(**shape, dtype="int4") == GIB // 4 + 32 * 32 * 2048 * 8
    assert kv_cache_bytes(**shape, users=3, window=512) == 3 * GIB // 4
    with pytest.raises(ValueError, match="users is 0"):
        kv_cache_bytes(**shape, users=0)
