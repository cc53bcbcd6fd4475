"""From a model's name to a folder of heads."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.load import LoadedEngine, load_engine
from octavo.loader.pull import resolve
from octavo.machine.cpu import usable_cpus
from octavo.tools.quantize.text import read_text
from octavo.tools.train import medusa_training, texts
from octavo.tools.train.heads_file import write
from octavo.tools.train.invent import invented, unlike
from octavo.tools.train.prompts import prompts

_MOST_SEQUENCES = 64


def train(
    model: str | Path,
    out: Path,
    recipe: medusa_training.HeadRecipe,
    *,
    text: Path | None = None,
    measure_on: Path | None = None,
    num_prompts: int = 5000,
    share_invented: float = 0.75,
    max_tokens: int = 128,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Writes the heads to ``out`` and returns what the command prints.

    ``text`` has prompts; without one, ``share_invented`` is the share of questions that the model
    is to invent. ``measure_on`` has others: what asks for the same is not learned from.

    Raises `SettingsError`, what `load_engine` does, and `OSError` if ``out`` cannot be written to,
    before anything is trained.
    """
    with _folder(out):
        plan = _Plan(text, measure_on, num_prompts, share_invented, max_tokens)
        return _train(model, out, recipe, plan, threads, progress)


class _Plan(NamedTuple):
    """What is asked."""

    text: Path | None
    measure_on: Path | None
    num_prompts: int
    share_invented: float
    max_tokens: int


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
    recipe: medusa_training.HeadRecipe,
    plan: _Plan,
    threads: int | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    said = None if plan.text is None else read_text(plan.text, SettingsError)
    others = "" if plan.measure_on is None else read_text(plan.measure_on, SettingsError)
    measured_on = texts.lines_of(others)
    config = EngineConfig(max_num_seqs=_MOST_SEQUENCES, threads=threads, seed=recipe.seed)
    loaded = load_engine(resolve(str(model)), config, keep_hidden=True)
    try:
        keep = unlike(measured_on)
        if said is None:
            lines = _questions(loaded, plan, keep, recipe.seed, progress)
        else:
            lines = texts.spread([*filter(keep, texts.lines_of(said))], plan.num_prompts)

        def listen(lines: list[str], whose: str) -> tuple[texts.Texts, list[str]]:
            return texts.listen(
                loaded.engine,
                texts.as_prompts(loaded.checkpoint, lines),
                plan.max_tokens,
                recipe.seed,
                lambda done, total: progress(f"{done} of {total} {whose} answered"),
            )

        asked, _ = listen(measured_on, "prompts to measure on") if measured_on else (None, [])
        answers, refused = listen(lines, "prompts")
    finally:
        loaded.engine.close()
    learned = medusa_training.learn(
        loaded.checkpoint, answers, recipe, threads or usable_cpus()[0], progress, asked
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


def _questions(
    loaded: LoadedEngine,
    plan: _Plan,
    keep: Callable[[str], bool],
    seed: int,
    progress: Callable[[str], None],
) -> list[str]:
    """Invented ones and Octavo's own, mixed."""
    found = invented(
        loaded.engine,
        loaded.checkpoint,
        round(plan.share_invented * plan.num_prompts),
        seed,
        keep,
        lambda done, total: progress(f"{done} of {total} questions invented"),
    )
    ours = list(filter(keep, prompts(seed=seed)))
    mixed = list(dict.fromkeys(found + ours[: plan.num_prompts - len(found)]))
    random.Random(seed).shuffle(mixed)
    return mixed
