"""Tiny models of the families from GGUF files, against llama.cpp's recorded logits.

llama.cpp computes with float32 weights in float32, on keys and values in float16, as Octavo does
here, but it rounds queries and attention probabilities to float16, too. A token of a hundred may go
to another expert for that.
"""

from pathlib import Path

import numpy as np
import pytest

from octavo.loader import load
from oracle.test_families import EXACT, run
from oracle.tiny_folders import FAMILIES, LLAMA_CPP, gguf_file, recorded

# Octavo agrees with transformers on these files (test_families.py). llama.cpp disables the windows
# of Phi 3 (its phi3.cpp warns of it). It reads the base of OLMo 3's layers with windows, but
# rotates these with the other layers' base (its olmo2.cpp).
KNOWN = {("phi4-mini", "window"), ("olmo3", "linear"), ("olmo3", "yarn")}
NAMES = sorted(path.parent.name for path in FAMILIES.glob(f"*/{LLAMA_CPP}"))


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, tmp_path: Path) -> None:
    expected = recorded(name)
    with np.load(FAMILIES / name / LLAMA_CPP) as logits:
        recorded_by_llama_cpp = dict(logits)
    for label, theirs in recorded_by_llama_cpp.items():
        if (name, label) in KNOWN:
            continue
        count, some = theirs.shape
        checkpoint = load(gguf_file(name, label, tmp_path / f"{label}.gguf"))
        ours = run(checkpoint, "generic", expected.tokens(label), [expected.prompt])[:count]
        kept = np.take_along_axis(ours, expected.columns[:count, :some], axis=1)
        difference = np.abs(kept - theirs) / theirs.std()
        print(f"{label}: mean {difference.mean():.1e}, most {difference.max():.1e}")
        assert np.quantile(difference, 0.97) < 2 * EXACT[1], label
