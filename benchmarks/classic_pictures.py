"""What serving learned, one technique after another, on the engine's own scheduler and cache.

    python benchmarks/classic_pictures.py [--model llama-2-7b] [--device a100-40gb]

Four pictures, simulated:

1. A pool of 96 blocks and eight requests that grow. Reserving each one's longest answer lets four
   run; pages let all run on arrival.
2. Where memory goes: reserved for the longest answer, most of it is never filled (Kwon et al.,
   "Efficient memory management for large language model serving with PagedAttention", 2023,
   figure 2: 20–38 % of it holds tokens); in pages only the last block of each sequence is not full.
3. Static against continuous batching (Yu et al., "Orca", 2022), and with what memory allows, on the
   same device: a static batch waits for its longest answer.
4. What paging brings where memory is short: a model of 13 billion parameters on 40 GB, and
   conversations of the mean lengths of ShareGPT's (161 tokens in, 338 out: Kwon et al., section
   6.1). Reserving 2,048 tokens for each lets six run; they report 2 to 4 times the throughput.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from _script import as_script
from octavo.engine.config import EngineConfig
from octavo.tools.plan.hardware import device
from octavo.tools.plan.report import figures
from octavo.tools.plan.simulation import Setup, Simulation, simulate, weights_on
from octavo.tools.plan.subject import Subject
from octavo.tools.workload.datasets import RANDOM, Part, Sample

Memory = Literal["reserve", "paged"]
Batching = Literal["static", "continuous"]
KINDS: dict[Memory, str] = {"reserve": "reserved", "paged": "paged"}
CONTEXT = 2048  # tokens that a request may take, prompt and answer together
SLO = {"ttft": 1000.0, "tpot": 100.0}


def setup(model: str, on: str, config: EngineConfig | None = None) -> Setup:
    subject, where = Subject.find(model), device(on, _silent)
    defaults = EngineConfig(
        max_model_len=CONTEXT, memory_utilization=0.9, max_num_batched_tokens=2048
    )
    return Setup(subject, weights_on(where, subject), where, config or defaults)


def _silent() -> Any:
    raise RuntimeError("only published devices: nothing is measured")


def prompt(index: int, prompt_len: int, output_len: int, arrival: float = 0.0) -> Sample:
    """A request that shares nothing with others."""
    return Sample(prompt_len, output_len, (Part(RANDOM + 1 + index, prompt_len),), arrival=arrival)


def skewed(count: int, seed: int = 0, means: tuple[int, int] = (401, 201)) -> list[Sample]:
    """Lengths as of conversations, many short ones and a long tail (exponential); all at once.
    ``means``: tokens of a prompt and of an answer, before the tail is cut.
    """
    rng = np.random.default_rng(seed)
    inputs, outputs = (
        np.minimum(1 + rng.exponential(mean - 1, count), 1024).astype(int).tolist()
        for mean in means
    )
    return [
        prompt(index, *lengths) for index, lengths in enumerate(zip(inputs, outputs, strict=True))
    ]


# --- the pictures --------------------------------------------------------------------------------


def eight_in_96_blocks(base: Setup, memory: Memory) -> Simulation:
    """Eight requests of 32 tokens arrive at once. Each may grow to 24 blocks of 16 tokens, and ends
    by itself in its 12th.
    """
    subject = base.subject
    block = base.config.layout_of(subject.program.config).block_bytes
    config = EngineConfig(
        max_model_len=384, kv_cache_memory_bytes=96 * block, enable_prefix_caching=False
    )
    requests = [prompt(index, 32, 12 * 16 - 32) for index in range(8)]
    return simulate(replace(base, config=config, memory=memory), requests)


def where_memory_goes(base: Setup, memory: Memory) -> dict[str, Any]:
    """A load that the device serves with ease, four requests a second."""
    requests = [replace(sample, arrival=index / 4) for index, sample in enumerate(skewed(240))]
    return figures(simulate(_without_sharing(base, memory=memory), requests), SLO)


def throughput(
    base: Setup, batching: Batching, memory: Memory, max_num_seqs: int, count: int = 500
) -> dict[str, Any]:
    """All requests are there at once: what the device can do."""
    config = replace(base.config, max_num_seqs=max_num_seqs)
    chosen = _without_sharing(replace(base, config=config), memory=memory, batching=batching)
    return figures(simulate(chosen, skewed(count)), SLO)


SHAREGPT = 161, 338  # tokens in and out, the means
SHORT_OF_MEMORY = "llama-2-13b", "a100-40gb"


def what_paging_brings(memory: Memory, count: int = 300) -> dict[str, Any]:
    """Conversations that are all there at once, continuously batched, where memory is short."""
    chosen = _without_sharing(setup(*SHORT_OF_MEMORY), memory=memory)
    return figures(simulate(chosen, skewed(count, means=SHAREGPT)), SLO)


def _without_sharing(base: Setup, **techniques: Any) -> Setup:
    config = replace(base.config, enable_prefix_caching=False)
    return replace(base, config=config, **techniques)


# --- for people ----------------------------------------------------------------------------------


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  " + row[0].ljust(widths[0]) + "".join(
            "  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
        )
        for row in rows
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-2-7b")
    parser.add_argument("--device", default="a100-40gb")
    arguments = parser.parse_args()
    base = setup(arguments.model, arguments.device)
    print(f"{base.subject.name} ({base.stored.name}) on {base.device.name}, simulated\n")

    print("1. 96 blocks of 16 tokens, eight requests that may take 24 blocks and take 12")
    rows = [["", "run at once", "wait", "done after", "blocks in use", "of them unfilled"]]
    for memory in KINDS:
        run = eight_in_96_blocks(base, memory)
        found = figures(run, SLO)
        rows.append(
            [
                KINDS[memory],
                f"{found['running']['max']:.0f}",
                f"{found['waiting']['max']:.0f}",
                f"{found['duration']:.2f} s",
                f"{100 * found['kv_usage']['max']:.0f} %",
                f"{100 * found['kv_waste']:.1f} %",
            ]
        )
    print(table(rows))
    print(
        "  in pages half of each sequence's last block is not filled yet, 8 tokens of 7 blocks in\n"
        "  the mean here: 7 %. From 200 tokens on, 13 blocks, that is less than 4 %."
    )

    print(f"\n2. Where memory goes: four requests a second that may take {CONTEXT} tokens each")
    rows = [["", "allocated, not filled", "blocks in use", "output tokens/s"]]
    for memory in KINDS:
        found = where_memory_goes(base, memory)
        rows.append(
            [
                KINDS[memory],
                f"{100 * found['kv_waste']:.1f} %",
                f"{100 * found['kv_usage']['mean']:.1f} %",
                f"{found['output_throughput']:,.0f}",
            ]
        )
    print(table(rows))

    print("\n3. 500 requests at once")
    rows = [["", "sequences", "on average", "output tokens/s", "times"]]
    first = 0.0
    for batching, memory, most in (
        ("static", "reserve", 256),
        ("static", "paged", 32),
        ("continuous", "reserve", 256),
        ("continuous", "paged", 32),
        ("continuous", "paged", 256),
    ):
        found = throughput(base, batching, memory, most)
        rate = found["output_throughput"]
        first = first or rate
        rows.append(
            [
                f"{batching}, {KINDS[memory]}",
                f"at most {found['running']['max']:.0f}",
                f"{found['running']['mean']:.1f}",
                f"{rate:,.0f}",
                f"{rate / first:.1f}",
            ]
        )
    print(table(rows))

    model, where = SHORT_OF_MEMORY
    print(f"\n4. {model} on {where}: 300 conversations at once, {CONTEXT} tokens reserved or paged")
    rows = [["", "sequences", "on average", "not filled", "output tokens/s", "times"]]
    first = 0.0
    for memory in KINDS:
        found = what_paging_brings(memory)
        rate = found["output_throughput"]
        first = first or rate
        rows.append(
            [
                KINDS[memory],
                f"at most {found['running']['max']:.0f}",
                f"{found['running']['mean']:.1f}",
                f"{100 * found['kv_waste']:.1f} %",
                f"{rate:,.0f}",
                f"{rate / first:.1f}",
            ]
        )
    print(table(rows))


if __name__ == "__main__":
    as_script(main)
