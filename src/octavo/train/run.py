"""From a model's name to a folder of heads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from octavo.checkpoint.pull import resolve
from octavo.engine.load import EngineConfig, SettingsError, load_engine
from octavo.execute.cpu import usable_cpus
from octavo.quant.text import read_text
from octavo.train import medusa, texts
from octavo.train.heads_file import write

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
    """Writes the heads to ``out`` and returns what the command prints.

    Raises `SettingsError`, what `load_engine` does, and `OSError` if ``out`` cannot be written to,
    before anything is trained.
    """
    with _folder(out):
        return _train(model, out, recipe, text, num_prompts, max_tokens, threads, progress)


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """A folder that files can be written to; if nothing comes of it, it is left as it was."""
    new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
        yield
    except BaseException:
        if new:
            with suppress(OSError):
                path.rmdir()
        raise


def _train(
    model: str | Path,
    out: Path,
    recipe: medusa.Recipe,
    text: Path | None,
    num_prompts: int,
    max_tokens: int,
    threads: int | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    said = None if text is None else read_text(text, SettingsError)
    config = EngineConfig(max_num_seqs=_MOST_SEQUENCES, threads=threads, seed=recipe.seed)
    loaded = load_engine(resolve(str(model)), config, keep_hidden=True)
    try:
        prompts = texts.read_prompts(loaded.checkpoint, said, num_prompts, recipe.seed)
        answers, refused = texts.listen(
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
    size = write(out, loaded.checkpoint, learned, recipe)
    return {
        "model": str(model),
        "out": str(out),
        "bytes": size,
        "prompts_left_out": len(refused),
        "why_left_out": refused[0] if refused else None,
        **learned.report,
    }
