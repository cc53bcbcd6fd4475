"""Where the repository and the recorded models are."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
ORACLE = TESTS / "oracle"
TINY = ORACLE / "tiny-llama.gguf"
