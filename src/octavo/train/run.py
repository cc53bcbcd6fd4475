"""From a model's name to a folder of heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.checkpoint.pull import resolve
from octavo.engine.load import EngineConfig, SettingsError, load_engine
from octavo.execute.cpu import usable_cpus
from octavo.quant.text import read_text
from octavo.train import medusa, texts

_MOST_SEQUENCES = 64


def train(
    model: str | Path,
    out: Path,
    recipe: medusa.Recipe,
    *,
    text: Path | None = None,
    num_prompts: int = 2000,
    max_tokens: int = 200,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Writes the heads to ``out`` and returns what the command prints. Raises `SettingsError`."""
    said = None if text is None else read_text(text, SettingsError)
    config = EngineConfig(max_num_seqs=_MOST_SEQUENCES, threads=threads, seed=recipe.seed)
    loaded = load_engine(resolve(str(model)), config, keep_hidden=True)
    try:
        prompts = texts.read_prompts(loaded.checkpoint, said, num_prompts, recipe.seed)
        answers = texts.listen(
            loaded.engine,
            prompts,
            max_tokens,
            recipe.seed,
            lambda done, total: progress(f"{done} of {total} prompts answered"),
        )
    finally:
        loaded.engine.close()
    learned = medusa.learn(
        loaded.checkpoint, answers, recipe, threads or usable_cpus()[0], progress
    )
    size = medusa.write(out, loaded.checkpoint, learned, recipe)
    return {"model": str(model), "out": str(out), "bytes": size, **learned.report}
