"""The bits of logits and KV blocks change only with the version of the numerics."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.executor.native.packing import check_isa
from octavo.kv_cache.layout import KvDtype
from oracle import record_bits


@pytest.mark.parametrize(("model", "tier", "dtype"), record_bits.CASES)
def test_the_bits_are_those_recorded(model: str, tier: str, dtype: KvDtype) -> None:
    try:
        check_isa(tier)
    except ValueError as error:
        pytest.skip(str(error))
    wrong = record_bits.difference(model, tier, dtype)
    assert wrong is None, wrong


def test_other_bits_are_recorded_only_with_other_numerics(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = ("tiny-llama-k", "generic", KvDtype.FP16)
    monkeypatch.setattr(record_bits, "FILE", tmp_path / "bits.json")
    monkeypatch.setattr(record_bits, "CASES", [case])
    record_bits.record()
    assert record_bits.difference(*case) is None
    monkeypatch.setattr(record_bits, "bits", lambda *case: {"logits": "other", "kv": "other"})
    changed = record_bits.difference(*case)
    assert changed is not None
    assert "other bits of logits and kv. If the change is meant, raise `numerics`" in changed
    with pytest.raises(ValueError, match="the bits have changed, and numerics has not"):
        record_bits.record()
    monkeypatch.setattr(record_bits, "NUMERICS", record_bits.NUMERICS + 1)
    assert "record again" in str(record_bits.difference(*case))
    record_bits.record()
    assert record_bits.difference(*case) is None
