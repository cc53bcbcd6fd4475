"""Whether every drafter leaves every answer as it is: tokens and logprobs, at several batch sizes.

    python benchmarks/same_output.py MODEL [--prompts 500] [--batch-sizes 1,4,16] [--json]
        [--config '{"method": "ngram"}' --config …]

The prompts are pieces of the standard library of the Python that runs this, of 16 to 96 tokens, the
same each time. Every other one is answered greedily, the others by drawing with a seed of their
own. The answers without drafts come from one thread, one request at a time; all others from all
threads. Pinned drafts (4 tokens where the configuration pins none) make sure that there are some.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import octavo.checkpoint
from octavo.checkpoint import pull
from octavo.checkpoint.base import Checkpoint
from octavo.engine.load import EngineConfig
from octavo.sample.params import SamplingParams
from octavo.speculate.config import SpeculativeConfig
from octavo.verify.guessing import pinned
from octavo.verify.running import running
from octavo.verify.trials import Trial


def pieces(checkpoint: Checkpoint, count: int, length: int) -> list[Trial]:
    rng = random.Random(5)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    trials: list[Trial] = []
    while len(trials) < count:
        text = rng.choice(files).read_text(errors="ignore")
        begin = rng.randrange(max(1, len(text) - 2000))
        ids = checkpoint.tokenizer.encode(text[begin : begin + 600])[: rng.randint(16, 96)]
        if not ids:
            continue
        index = len(trials)
        params = SamplingParams(
            max_tokens=length,
            temperature=0.0 if index % 2 == 0 else 0.8,
            seed=index,
            logprobs=1,
            ignore_eos=True,
        )
        trials.append(Trial(f"piece-{index}", ids, params))
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--length", type=int, default=16, help="tokens drawn for each prompt")
    parser.add_argument("--batch-sizes", default="1,4,16")
    parser.add_argument("--config", action="append", help="a drafter, as JSON (repeatable)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    checkpoint = octavo.checkpoint.load(pull.resolve(arguments.model))
    layers = len(checkpoint.config.layers)
    default: list[dict[str, Any]] = [
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "suffix", "suffix_decoding_alternatives": 2},
    ]
    if layers > 2:
        default.append({"method": "layer_skip", "layers": [*range(2), *range(3, layers)]})
    methods = [SpeculativeConfig.of(each) for each in arguments.config or default]
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    trials = pieces(checkpoint, arguments.prompts, arguments.length)
    config = EngineConfig(max_model_len=96 + arguments.length, max_num_seqs=max(sizes))
    with running(checkpoint, replace(config, threads=1)) as engine:
        expected = engine.answers(trials, 1)
    rows: list[dict[str, Any]] = []
    for method in methods:
        speculation = pinned(method, checkpoint)
        with running(checkpoint, replace(config, speculative_config=speculation)) as engine:
            for size in sizes:
                began, before = time.monotonic(), engine.stats
                answers = engine.answers(trials, size)
                after = engine.stats
                differing = [t for t in trials if answers[t.name] != expected[t.name]]
                row = {
                    "method": {name: v for name, v in asdict(speculation).items() if v is not None},
                    "batch": size,
                    "prompts": len(trials),
                    "tokens": after.generation_tokens - before.generation_tokens,
                    "drafted": after.draft_tokens - before.draft_tokens,
                    "accepted": after.accepted_tokens - before.accepted_tokens,
                    "greedy_differ": sum(trial.greedy for trial in differing),
                    "drawn_differ": sum(not trial.greedy for trial in differing),
                    "seconds": round(time.monotonic() - began, 1),
                }
                rows.append(row)
                if not arguments.json:
                    print(row, flush=True)
    wrong = any(row["greedy_differ"] or row["drawn_differ"] for row in rows)
    idle = any(not row["drafted"] for row in rows)
    if arguments.json:
        print(json.dumps({"rows": rows, "equal": not wrong}))
    else:
        total = sum(row["prompts"] for row in rows)
        print(f"{total} answers, tokens and logprobs: {'SOME DIFFER' if wrong else 'all the same'}")
    if wrong or idle:
        sys.exit("a drafter drafted nothing" if idle else "some answers differ")


if __name__ == "__main__":
    main()
