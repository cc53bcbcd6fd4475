"""What other guesses beside a draft bring: tokens and rows a pass of `suffix`, with and without.

    python benchmarks/alternatives.py [MODEL] [--prompts 8] [--length 256] [--json]

The model answers the prompts of benchmarks/_workloads.py once, greedily; then the drafter drafts
along the answers, with pinned lengths. Nothing is timed: how many tokens a pass gives and how many
rows it takes depends on the text alone.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass

from _script import as_script
from _workloads import workloads
from octavo.engine.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Request
from octavo.spec_decode.replay import agreement
from octavo.spec_decode.suffix import SuffixDrafter

# Tokens of a draft, alternatives beside it, tokens of each.
SHAPES = ((3, 0, 0), (7, 0, 0), (11, 0, 0), (3, 1, 3), (7, 1, 1), (7, 1, 3), (7, 1, 7), (7, 2, 3))


@dataclass(frozen=True)
class Row:
    workload: str
    draft: int
    alternatives: int
    their_length: int
    tokens_per_pass: float
    rows_per_pass: float


def answered(model: str, count: int, length: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    """By workload each prompt and the model's answer."""
    config = EngineConfig(max_model_len=2048, kv_cache_memory_bytes=1 << 30, max_num_seqs=count)
    loaded = load_engine(model, config)
    engine = loaded.engine
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    answers = {}
    for workload, prompts in workloads(loaded.checkpoint, count).items():
        for at, prompt in enumerate(prompts):
            engine.add_request(Request(request_id=str(at), prompt_token_ids=prompt, params=params))
        texts: list[list[int]] = [[] for _ in prompts]
        while engine.has_work():
            for delta in engine.step():
                texts[int(delta.request_id)] += delta.token_ids
        answers[workload] = list(zip(prompts, texts, strict=True))
    engine.close()
    return answers


def passes(
    prompt: list[int], answer: list[int], draft: int, alternatives: int, length: int
) -> tuple[int, int]:
    """Passes after the first token, and their rows."""
    drafter = SuffixDrafter(alternatives=alternatives)
    drafter.start(0, [*prompt, answer[0]], None)
    at, count, rows = 1, 0, 0
    while at < len(answer):
        (guess,) = drafter.propose([0], [min(draft, len(answer) - at - 1)])
        others = [each[:length] for each in guess.alternatives]
        rows += 1 + len(guess.token_ids) + sum(1 + len(each) for each in others)
        best = max(agreement(path, answer[at:]) for path in (guess.token_ids, *others))
        drafter.extend(0, answer[at : at + best + 1])
        at += best + 1
        count += 1
    return count, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows = []
    for workload, texts in answered(arguments.model, arguments.prompts, arguments.length).items():
        for shape in SHAPES:
            done = [passes(prompt, answer, *shape) for prompt, answer in texts]
            total = sum(count for count, _ in done)
            tokens = sum(len(answer) - 1 for _, answer in texts) / total
            rows.append(Row(workload, *shape, tokens, sum(size for _, size in done) / total))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(
        "| work | draft | alternatives | tokens a pass | rows a pass |\n|---|---:|---:|---:|---:|"
    )
    for row in rows:
        beside = f"{row.alternatives} of {row.their_length}" if row.alternatives else "none"
        print(
            f"| {row.workload} | {row.draft} | {beside} | {row.tokens_per_pass:.2f} "
            f"| {row.rows_per_pass:.1f} |"
        )


if __name__ == "__main__":
    as_script(main)
