"""What models have lost, and what they cost: all that `octavo fidelity` prints of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from octavo.engine.config import EngineConfig, SettingsError
from octavo.executor.native.packing import held_bytes
from octavo.loader import load
from octavo.loader.base import Checkpoint
from octavo.loader.pull import resolve
from octavo.machine.limits import Progress
from octavo.tools.bench.drive import BatchShape, Drive
from octavo.tools.quantize import fidelity
from octavo.tools.quantize.distance import Fidelity
from octavo.tools.quantize.fidelity import Distributions, Exact, Int32, Served
from octavo.tools.quantize.kernel_check import check
from octavo.tools.quantize.text import read_text

_SPARE = 4  # steps of `Drive` before all sequences decode


def measure(
    models: Sequence[str],
    engine: EngineConfig,
    *,
    against: str,
    how: str = "exact",
    text: Path | None = None,
    tokens: int | None = None,
    context: int = 1024,
    speed: bool = True,
    kernels: bool = True,
    progress: Progress = lambda _: None,
) -> list[dict[str, Any]]:
    """A row for each model, as ``--json`` prints it; docs/fidelity.md says what it holds.

    ``how``: "exact" or "served" (octavo/tools/quantize/fidelity.py). ``text`` None:
    `default_text`, of which
    ``tokens`` count (None: all), in windows of ``context`` or of the shortest context of a model,
    which nothing that is run is longer than. Raises `CheckpointError` for models
    that cannot be compared, `SettingsError`, and `TextError`.
    """
    if engine.speculation is not None:
        raise SettingsError(
            "speculative_config has no part in fidelity: speculation changes no distribution"
        )
    content = fidelity.default_text() if text is None else read_text(text, fidelity.TextError)
    where = "the default text" if text is None else str(text)
    other = load(resolve(against))
    checkpoints = [load(resolve(model)) for model in models]
    configs = [each.config for each in (other, *checkpoints)]
    lengths = [min(engine.max_model_len or c.default_length, c.context_length) for c in configs]
    context = min(context, *lengths)
    windows = fidelity.windows(other.tokenizer, content, context, where, tokens)
    for each in checkpoints:
        fidelity.check_vocabulary(each, other, windows)
    facts = {
        "against": against,
        "reference": how,
        "text": where,
        "tokens": sum(map(len, windows)),
        "context": context,
    }
    measuring = _Measuring(other, how, engine, content, windows, context, progress)
    rows = []
    try:
        for model, checkpoint in zip(models, checkpoints, strict=True):
            row = {"model": model, "path": str(checkpoint.path)} | facts
            rows.append(row | measuring.row(model, checkpoint, speed, kernels))
    finally:
        measuring.close()
    return rows


@dataclass(slots=True)
class _Measuring:
    """The reference, and models compared with it one after the other."""

    other: Checkpoint
    how: str
    engine: EngineConfig
    content: str
    windows: list[Int32]
    context: int
    progress: Progress
    exact: Exact | None = None
    served: Drive | None = None

    def row(self, model: str, checkpoint: Checkpoint, speed: bool, kernels: bool) -> dict[str, Any]:
        def progress(text: str) -> None:
            self.progress(f"{model}: {text}")

        progress("loading")
        drive = Drive.load(checkpoint, self.engine, self._loads())
        try:
            held, isa = drive.loaded.checkpoint, drive.executor.capabilities.tier
            row = self._lost(drive, model, progress) | {
                "same_tokens": self._same_tokens(checkpoint),
                "settings": _settings(self.engine),
                "isa": isa,
                "threads": drive.threads,
                "kv_bytes_per_token": drive.executor.layout.bytes_per_token,
                **_sizes(held, isa),
            }
            if speed:
                progress("measuring speed")
                row |= self._speed(drive)
        finally:
            drive.close()
        if kernels:
            row["kernels"] = asdict(check(held, isa, progress))
        return row

    def close(self) -> None:
        if self.served is not None:
            self.served.close()

    def _lost(self, drive: Drive, model: str, progress: Progress) -> dict[str, Any]:
        served, reference = _served(drive, model), self._reference(drive)
        found = fidelity.compare(
            served, reference, self.windows, threads=drive.threads, progress=progress
        )
        prompt, new = self._greedy
        prompts = fidelity.prompts(self.windows, fidelity.PROMPTS, prompt)
        greedy = fidelity.divergence(served, reference, prompts, new)
        return asdict(Fidelity.of(found)) | {
            "greedy": {
                "prompts": len(prompts),
                "tokens": greedy.tokens,
                "positions": list(greedy.positions),
                "median": greedy.median,
                "first": greedy.first,
                "never": greedy.never,
            }
        }

    def _reference(self, drive: Drive) -> Distributions:
        if self.how == "served":
            if self.served is None:
                plain = EngineConfig(threads=self.engine.threads, isa=self.engine.isa)
                self.served = Drive.load(self.other, plain, self._loads())
            return _served(self.served, str(self.other.path))
        # Rotary positions may depend on the longest sequence that the engine was loaded for.
        exact = Exact(self.other, drive.loaded.max_model_len, self.progress)
        if self.exact is None or self.exact.program != exact.program:
            self.exact = exact
        return self.exact

    @property
    def _greedy(self) -> tuple[int, int]:
        """Tokens of a prompt and of its continuation, within a short context."""
        quarter = max(1, self.context // 4)
        return min(fidelity.PROMPT_TOKENS, quarter), min(fidelity.NEW_TOKENS, quarter)

    def _loads(self) -> list[BatchShape]:
        """What is run: speed (first), windows, and greedy continuations."""
        new = min(64, max(1, self.context // 4))
        return [
            BatchShape(1, max(1, min(512, self.context - new - _SPARE)), new),
            BatchShape(1, max(1, self.context - 1 - _SPARE), 1),
            BatchShape(fidelity.PROMPTS, *self._greedy),
        ]

    def _same_tokens(self, checkpoint: Checkpoint) -> bool:
        """Whether the model's own tokenizer cuts the text as the reference's does."""
        if checkpoint.path == self.other.path:
            return True
        ours, theirs = checkpoint.tokenizer, self.other.tokenizer
        return ours.encode(self.content) == theirs.encode(self.content)

    def _speed(self, drive: Drive) -> dict[str, float]:
        """One stream: a prompt read, and tokens drawn after it."""
        load = self._loads()[0]
        drive.prefill(drive.prompts(replace(load, prompt_len=min(32, load.prompt_len))))
        prompts = drive.prompts(load)
        prefill = drive.prefill(prompts)
        decode = drive.decode(prompts, load.output_len)
        return {
            "prefill_tokens_per_second": prefill.tokens / prefill.seconds,
            "decode_tokens_per_second": decode.tokens / decode.seconds,
        }


def _served(drive: Drive, name: str) -> Served:
    vocab_size = drive.loaded.checkpoint.config.vocab_size
    return Served(drive.executor, vocab_size, drive.engine.scheduler.kv.tables.shape, name)


def _settings(engine: EngineConfig) -> dict[str, Any]:
    """Those that are not the default."""
    default = EngineConfig()
    values = {field.name: getattr(engine, field.name) for field in fields(engine)}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def _sizes(checkpoint: Checkpoint, isa: str) -> dict[str, Any]:
    """Bytes in all, and a weight over the matrices, as stored and as held."""
    matrices = [weight for weight in checkpoint.weights.values() if len(weight.shape) > 1]
    weights = sum(prod(weight.shape) for weight in matrices)
    return {
        "file_bytes": checkpoint.file_bytes,
        "held_bytes": sum(held_bytes(weight, isa) for weight in checkpoint.weights.values()),
        "bytes_per_weight": sum(weight.stored.nbytes for weight in matrices) / weights,
        "held_bytes_per_weight": sum(held_bytes(weight, isa) for weight in matrices) / weights,
    }
