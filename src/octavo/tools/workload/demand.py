"""What is asked and when, as one set of settings: of servers under load and of simulations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from octavo.tools.workload import datasets, traces
from octavo.tools.workload.arrivals import Ramp, arrival_times
from octavo.tools.workload.classes import LoadClass, classed
from octavo.tools.workload.datasets import Sample

SYNTHETIC = ("random", "prefix_repetition")
TEXTS = ("custom", "sharegpt")
TRACES: dict[str, traces.Format | None] = {
    "trace": None,  # by its first line
    "timed_trace": None,
    "azure": "azure",
    "mooncake": "mooncake",
    "result": "result",
}
DATASETS = (*SYNTHETIC, *TEXTS, *TRACES)
DEFAULT_PROMPTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Fields are the options of ``octavo bench serve``; lengths in tokens, times in seconds."""

    dataset_name: str = "random"
    dataset_path: Path | None = None
    num_prompts: int | None = None
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    custom_output_len: int = 256
    sharegpt_output_len: int | None = None
    disable_shuffle: bool = False
    no_oversample: bool = False
    window: traces.Window = field(default_factory=traces.Window)

    request_rate: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None
    max_concurrency: int | None = None
    classes: tuple[LoadClass, ...] = ()  # of a simulated load
    seed: int = 0

    @property
    def is_trace(self) -> bool:
        return self.dataset_name in TRACES

    def check(self) -> None:
        """Raises `ValueError` for what does not go together."""
        name = self.dataset_name
        if name not in DATASETS:
            raise ValueError(f"--dataset-name {name!r} is none of {', '.join(DATASETS)}")
        if (self.dataset_path is None) is not (name in SYNTHETIC):
            verb = "takes no" if name in SYNTHETIC else "needs a"
            raise ValueError(f"--dataset-name {name} {verb} --dataset-path")
        if not 0 <= self.random_range_ratio < 1:
            ratio = self.random_range_ratio
            raise ValueError(f"--random-range-ratio must be in [0, 1), not {ratio:g}")
        if self.is_trace:
            if not math.isinf(self.request_rate) or self.ramp or self.burstiness != 1:
                raise ValueError(
                    "a trace has its own arrivals: use --trace-speedup to change its rate"
                )
        elif replace(self.window, most=None) != traces.Window():
            raise ValueError("--trace-…, --max-input-len and --max-output-len are for traces")

    def samples(
        self, count: Callable[[str], int], *, strict: bool = False
    ) -> tuple[list[Sample], list[str]]:
        """The requests, and notices of what was changed. ``count`` gives a text's tokens;
        ``strict`` is that of `traces.load`. Raises `ValueError`.
        """
        number = self.num_prompts or DEFAULT_PROMPTS
        if self.dataset_name == "random":
            prompts = datasets.random_prompts(
                number,
                input_len=self.random_input_len,
                output_len=self.random_output_len,
                range_ratio=self.random_range_ratio,
                prefix_len=self.random_prefix_len,
                seed=self.seed,
            )
            return prompts, []
        if self.dataset_name == "prefix_repetition":
            prompts = datasets.prefix_repetition(
                number,
                prefix_len=self.prefix_repetition_prefix_len,
                suffix_len=self.prefix_repetition_suffix_len,
                num_prefixes=self.prefix_repetition_num_prefixes,
                output_len=self.prefix_repetition_output_len,
                seed=self.seed,
                shuffle=not self.disable_shuffle,
            )
            return prompts, []
        path = self.dataset_path
        assert path is not None
        if self.is_trace:
            return traces.load(path, TRACES[self.dataset_name], self.window, strict=strict)
        found = (
            datasets.custom(path, count, self.custom_output_len)
            if self.dataset_name == "custom"
            else datasets.sharegpt(path, count, self.sharegpt_output_len)
        )
        chosen = datasets.take(
            found,
            number,
            seed=self.seed,
            shuffle=not self.disable_shuffle,
            oversample=not self.no_oversample,
        )
        return chosen, []

    def arrivals(self, samples: list[Sample]) -> list[float]:
        """Seconds from the start, ascending."""
        if self.is_trace:
            return [sample.arrival or 0.0 for sample in samples]
        times = arrival_times(
            len(samples), self.request_rate, self.burstiness, self.ramp, self.seed
        )
        return [float(time) for time in times]

    def timed(
        self, count: Callable[[str], int], *, strict: bool = False
    ) -> tuple[list[Sample], list[str]]:
        """As `samples`, each with its arrival and class."""
        samples, notices = self.samples(count, strict=strict)
        samples = classed(samples, self.classes, self.seed)
        timed = zip(samples, self.arrivals(samples), strict=True)
        return [replace(sample, arrival=time) for sample, time in timed], notices
