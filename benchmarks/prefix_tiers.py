"""What a prompt's first token takes when its beginning is computed, or taken from each tier of the
prefix cache; and what filling the tiers costs those who gain nothing.

    python benchmarks/prefix_tiers.py [MODEL] [--tokens 2048] [--rounds 3] [--itl-target MS]

Every round asks each kind in turn, so that a machine that drifts drifts for all of them. "restart"
loads the engine anew and answers from the disk. With ``--itl-target`` nothing of that, but the
steps of an answer under way while such a prompt comes back from host memory; in the first rounds
that has just been allocated.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from typing import Any

import octavo.loader
from _script import as_script
from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.load import load_engine
from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.connectors.base import ConnectorStats
from octavo.loader.pull import resolve
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Request, RequestRecord


def ask(engine: Engine, name: str, prompt: list[int]) -> RequestRecord:
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    record = engine.add_request(Request(request_id=name, prompt_token_ids=prompt, params=params))
    while engine.has_work():
        engine.step()
    return record


def ask_beside(engine: Engine, name: str, prompt: list[int]) -> list[float]:
    """The seconds of each step, until its first token, beside an answer under way."""
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    stream = [*range(1000, 1016)]
    engine.add_request(Request(request_id=f"{name} stream", prompt_token_ids=stream, params=params))
    for _ in range(30):  # what a step takes is learned
        engine.step()
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    record = engine.add_request(Request(request_id=name, prompt_token_ids=prompt, params=params))
    steps = []
    while record.first_token is None:
        engine.step()
        steps.append(engine.stats().last_step_seconds)
    while engine.has_work():
        engine.step()
    assert record.cached_tokens > len(prompt) - 17
    return steps


def stats_of(engine: Engine, name: str = "host") -> ConnectorStats:
    return engine.stats().connectors[name]


def ttft(record: RequestRecord) -> float:
    assert record.first_token is not None
    return record.first_token - record.arrival


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--itl-target", type=float, metavar="MS")
    asked = parser.parse_args()
    rng = random.Random(1)
    folder = tempfile.TemporaryDirectory(prefix="octavo-kv-", ignore_cleanup_errors=True)
    # The pool holds little more than one prompt, so that another overwrites it; the tier in host
    # memory three.
    layout = EngineConfig().layout_of(octavo.loader.load(resolve(asked.model)).config)
    length = asked.tokens + 16
    pool = int(1.1 * peak_blocks(layout, length)) * layout.block_bytes
    tiers: dict[str, Any] = {"kv_offload_memory": 3 * pool, "kv_offload_dir": folder.name}

    def engine(**more: Any) -> Engine:
        config = EngineConfig(
            max_model_len=length, max_num_seqs=4, kv_cache_memory_bytes=pool, **more
        )
        return load_engine(asked.model, config).engine

    def prompt() -> list[int]:
        return [rng.randrange(1000, 30_000) for _ in range(asked.tokens)]

    if asked.itl_target is not None:
        paced = engine(kv_offload_memory=3 * pool, itl_target=asked.itl_target)
        for number in range(asked.rounds):
            new = prompt()
            ask(paced, f"n{number}", new)
            ask(paced, f"o{number}", prompt())
            before = stats_of(paced)
            steps = ask_beside(paced, f"h{number}", new)
            after = stats_of(paced)
            print(
                f"target {asked.itl_target:g} ms: {after.loaded_blocks - before.loaded_blocks} "
                f"blocks in, {after.saved_blocks - before.saved_blocks} out, in "
                f"{len(steps)} steps; the first {1e3 * steps[0]:.1f} ms, the longest "
                f"{1e3 * max(steps):.1f} ms, together {1e3 * sum(steps):.1f} ms"
            )
        paced.close()
        return
    plain, tiered = engine(), engine(**tiers)
    for each in (plain, tiered):
        for number in range(5):
            ask(each, f"first {number}", prompt())  # pages are touched
    took: dict[str, list[float]] = {}
    kept = []
    for number in range(asked.rounds):
        new = prompt()
        took.setdefault("computed, no tiers", []).append(ttft(ask(plain, f"n{number}", new)))
        took.setdefault("computed, tiers filled", []).append(ttft(ask(tiered, f"n{number}", new)))
        took.setdefault("pool", []).append(ttft(ask(tiered, f"p{number}", new)))
        ask(tiered, f"o{number}", prompt())
        host = ask(tiered, f"h{number}", new)
        assert host.cached_tokens > asked.tokens - 17
        took.setdefault("host memory", []).append(ttft(host))
        kept.append(new)
        tiered.flush()
    stats, written = stats_of(tiered), stats_of(tiered, "disk").saved_bytes
    tiered.close()
    plain.close()
    restarted = engine(**tiers)
    for number in range(5):
        ask(restarted, f"first {number}", prompt())
    for number, known in enumerate(kept):
        disk = ask(restarted, f"d{number}", known)
        assert disk.cached_tokens > asked.tokens - 17
        took.setdefault("disk, after a restart", []).append(ttft(disk))
    read = stats_of(restarted, "disk").loaded_bytes
    restarted.close()
    base = statistics.median(took["computed, no tiers"])
    for name, seconds in took.items():
        median = statistics.median(seconds)
        print(f"{name:24} {1e3 * median:8.1f} ms  {base / median:6.1f} ×")
    print(
        f"{stats.loaded_blocks} blocks copied in at "
        f"{1e3 * stats.loading_seconds / max(1, stats.loaded_blocks):.3f} ms, "
        f"{read / 2**20:.0f} MiB read, "
        f"{written / 2**20:.0f} MiB written"
    )
    folder.cleanup()


if __name__ == "__main__":
    as_script(main)
