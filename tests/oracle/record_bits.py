"""The bits of the native executor: digests of the logits and KV blocks of tiny models.

    python tests/oracle/record_bits.py [--record]

Without ``--record``, compares this machine's bits with bits.json, as test_recorded_bits.py does.
With it, writes bits.json again, on a CPU that has every instruction-set tier. The bits of a tier
are the same on every CPU that has it: kernels use no instruction that approximates as the CPU
likes. The weights come from files, and the tokens from a formula, so that no other library's random
numbers decide them.
"""

from __future__ import annotations

import argparse
import json
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import octavo.loader
from executor.driving import Driver
from octavo.executor.native.executor import NativeExecutor
from octavo.executor.native.packing import check_isa
from octavo.kv_cache.layout import KvDtype

HERE = Path(__file__).resolve().parent
FILE = HERE / "bits.json"
MODELS = ("tiny-llama-k", "tiny-gemma3-caps")
TIERS = ("generic", "avx2", "avx512", "avx512_bf16")
CASES = [(model, tier, dtype) for model in MODELS for tier in TIERS for dtype in KvDtype.served()]
NUMERICS = NativeExecutor.capabilities.numerics
TOKENS = 48  # whole blocks: what is behind a sequence's last token is not defined
RAISE = (
    "If the change is meant, raise `numerics` in the `Capabilities` of NativeExecutor "
    "(src/octavo/executor/native/executor.py), so that blocks cached on disk with other bits are "
    "not found any more, and record again: python tests/oracle/record_bits.py --record"
)


def bits(model: str, tier: str, dtype: KvDtype) -> dict[str, str]:
    """Return digests of a sequence's logits and KV blocks."""
    checkpoint = octavo.loader.load(HERE / f"{model}.gguf")
    driver = Driver(checkpoint, isa=tier, kv_dtype=dtype)
    vocab = checkpoint.config.vocab_size
    sequence = driver.start([(37 * index + 11) % vocab for index in range(TOKENS)])
    for count in (29, 1, 1, TOKENS - 31):  # a prompt, two tokens alone, and a chunk behind them
        driver.step([(sequence, count)])
    table = driver.tables[:, sequence.slot]
    blocks = driver.executor.export_blocks(table[table >= 0])
    logits = np.array(sequence.logits)
    driver.executor.close()
    parts = {"logits": logits, "kv": blocks}
    return {name: sha256(data).hexdigest()[:32] for name, data in parts.items()}


def difference(model: str, tier: str, dtype: KvDtype) -> str | None:
    """Return what is wrong with the bits of a case; None: they are as recorded."""
    recorded = json.loads(FILE.read_text())
    if recorded["numerics"] != NUMERICS:
        return (
            f"bits.json is of numerics {recorded['numerics']}, and NativeExecutor's are {NUMERICS}:"
            " record again, with python tests/oracle/record_bits.py --record"
        )
    known, found = recorded["bits"][f"{model} {tier} {dtype}"], bits(model, tier, dtype)
    changed = " and ".join(name for name in known if known[name] != found[name])
    return f"{model}, {tier}, {dtype}: other bits of {changed}. {RAISE}" if changed else None


def record() -> None:
    """Write bits.json. Raise `ValueError` for a tier that this CPU does not have, or for other bits
    of the same numerics.
    """
    found = {f"{model} {tier} {dtype}": bits(model, tier, dtype) for model, tier, dtype in CASES}
    if FILE.exists():
        recorded = json.loads(FILE.read_text())
        same = recorded["numerics"] == NUMERICS
        for case, known in recorded["bits"].items() if same else ():
            if found.get(case, known) != known:
                raise ValueError(f"{case}: the bits have changed, and numerics has not. {RAISE}")
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(found[case])}" for case in found)
    FILE.write_text(f'{{"numerics": {NUMERICS}, "bits": {{\n{lines}\n}}}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write bits.json again")
    if parser.parse_args().record:
        try:
            record()
        except ValueError as error:
            sys.exit(str(error))
    for case in CASES:
        try:
            check_isa(case[1])
        except ValueError as error:
            print(f"{', '.join(case)}: not compared: {error}")
        else:
            print(difference(*case) or f"{', '.join(case)}: as recorded")


if __name__ == "__main__":
    main()
