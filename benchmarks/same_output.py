"""Whether drafters leave every answer as it is: tokens and logprobs, at several batch sizes.

    python benchmarks/same_output.py [MODEL] [--prompts 500] [--batch-sizes 1,4,16] [--json]
        [--heads FOLDER] [--config '{"method": "ngram"}' --config …]

With every drafter there is for any model (`octavo verify` has the same: ngram, suffix, suffix with
branches, the model as its own draft model, some of its layers), with trained ``--heads`` of the
model besides, or, with ``--config``, with those given instead. Drafts are checked by replay.

The prompts are pieces of the standard library of the Python that runs this, of 16 to 96 tokens, the
same each time. Every other one is answered greedily, the others by drawing with a seed of their
own. The answers without drafts come from one thread, one request at a time; all others from all
threads. Drafts of a fixed length make sure that there are some: where the configuration says none,
of 4 tokens, or of 2 for drafters that compute, since every token costs them a pass.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import octavo.loader
from _script import as_script
from octavo.engine.config import DoesNotFit, EngineConfig
from octavo.loader import pull
from octavo.loader.base import Checkpoint
from octavo.sampling.params import SamplingParams
from octavo.spec_decode.config import SpeculativeConfig
from octavo.tools.verify.certificate import methods
from octavo.tools.verify.guessing import NUM_TOKENS, pinned
from octavo.tools.verify.running import Answers, running
from octavo.tools.verify.trials import Trial

_COMPUTED = 2  # tokens of a draft that is computed


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


def drafters(
    checkpoint: Checkpoint, config: EngineConfig, heads: str | None, only: list[str] | None
) -> dict[str, SpeculativeConfig]:
    """By name, with drafts of a fixed length. Raises `ValueError` for one that has no part here."""
    given = [SpeculativeConfig.of(each) for each in only or ()]
    if heads is not None:
        given.append(SpeculativeConfig(method="medusa", model=heads))
    for each in given:
        if each.acceptance_method != "replay":
            raise ValueError(
                f"speculative_config: acceptance_method is {each.acceptance_method!r}; only by "
                "'replay' is the output the same (octavo verify tests the other rule)"
            )
    every = methods(checkpoint, config, given)
    return {
        name: pinned(each, checkpoint, _COMPUTED if each.computes else NUM_TOKENS)
        for name, each in every.items()
        if not only or each in given
    }


def compared(
    checkpoint: Checkpoint,
    config: EngineConfig,
    trials: list[Trial],
    expected: Answers,
    sizes: list[int],
) -> Iterator[dict[str, Any]]:
    """One engine, with a drafter; a row for each batch size."""
    with running(checkpoint, config) as engine:
        for size in sizes:
            began, before = time.monotonic(), engine.stats
            answers = engine.answers(trials, size)
            after = engine.stats
            differing = [t for t in trials if answers[t.name] != expected[t.name]]
            yield {
                "batch": size,
                "prompts": len(trials),
                "tokens": after.generation_tokens - before.generation_tokens,
                "drafted": after.draft_tokens - before.draft_tokens,
                "accepted": after.accepted_tokens - before.accepted_tokens,
                "greedy_differ": sum(trial.greedy for trial in differing),
                "drawn_differ": sum(not trial.greedy for trial in differing),
                "seconds": round(time.monotonic() - began, 1),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--length", type=int, default=16, help="tokens drawn for each prompt")
    parser.add_argument("--batch-sizes", default="1,4,16")
    parser.add_argument("--heads", metavar="FOLDER", help="trained heads of the model, too")
    parser.add_argument("--config", action="append", help="only this drafter, JSON (repeatable)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    checkpoint = octavo.loader.load(pull.resolve(arguments.model))
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    config = EngineConfig(max_model_len=96 + arguments.length, max_num_seqs=max(sizes))
    try:
        named = drafters(checkpoint, config, arguments.heads, arguments.config)
    except ValueError as error:
        sys.exit(str(error))
    trials = pieces(checkpoint, arguments.prompts, arguments.length)
    began = time.monotonic()
    with running(checkpoint, replace(config, threads=1)) as engine:
        expected = engine.answers(trials, 1)
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for name, method in named.items():
        drafting = replace(config, speculative_config=method)
        settings = {field: v for field, v in asdict(method).items() if v is not None}
        try:
            for row in compared(checkpoint, drafting, trials, expected, sizes):
                rows.append({"drafter": name, "method": settings} | row)
                if not arguments.json:
                    print(rows[-1], flush=True)
        except DoesNotFit as error:
            if arguments.config:
                raise
            left_out[name] = str(error)
    seconds = round(time.monotonic() - began, 1)
    wrong = any(row["greedy_differ"] or row["drawn_differ"] for row in rows)
    idle = sorted({row["drafter"] for row in rows if not row["drafted"]})
    if arguments.json:
        result = {"rows": rows, "equal": not wrong, "left_out": left_out, "seconds": seconds}
        print(json.dumps(result))
    else:
        for name, why in left_out.items():
            print(f"not tried: {name}: {why}")
        total = sum(row["prompts"] for row in rows)
        said = "SOME DIFFER" if wrong else "all the same"
        print(f"{total} answers, tokens and logprobs: {said} ({seconds:.0f} s)")
    if wrong:
        sys.exit("some answers differ")
    if idle or not rows:
        sys.exit(f"nothing was drafted by {', '.join(idle or left_out)}")


if __name__ == "__main__":
    as_script(main)
