"""What speculation brings, beside none on the same prompts in the same run.

    python benchmarks/speculation.py [MODEL] [--batch-sizes 1,8,32] [--methods ngram,suffix]
        [--heads DIR] [--draft-model MODEL] [--llama-cpp BUILD/bin] [--json]

Three kinds of work (`_workloads.py`), greedy. An engine for each method and one without speculation
run them side by side, some steps of each in turns, for a machine in the cloud changes its speed
from second to second; and the outputs must be the same to the token. Each round has prompts of its
own: what a drafter reads of a prompt is paid for, and nobody has seen the answer. Speed-ups are of
all rounds together, and in brackets of the worst one; the method "none" is a second engine without
speculation, and says how far apart two that do the same come out.

"theory" is tokens per pass ÷ the relative cost of a pass: the executor's time alone. What is
missing from it to the measured speed-up stands beside it, as shares of the time with the method:
drafting, and the rest, which is sampling (more rows) and bookkeeping, with the rest's share without
speculation in brackets.

With ``--llama-cpp`` its own n-gram speculation runs on the same prompts, one at a time, greedy, in
several settings: the speed as its server gives it, beside its own without speculation.

Drafting itself is timed apart: 32 sequences of 1,000 tokens and more, of which many pairs repeat,
that go on at random (a search each step) or as earlier (the match grows).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from _peers.llama_cpp_speculation import measure
from _script import as_script
from _workloads import workloads
from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine, Step
from octavo.engine.load import load_engine
from octavo.loader import load
from octavo.loader.pull import resolve
from octavo.machine.cpu import usable_cpus
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Request, RequestRecord
from octavo.spec_decode.config import SpeculativeConfig
from octavo.spec_decode.tuning import LONGEST_DRAFT

LONGEST_TEXT = 2048  # tokens of a prompt and its answer
SLICE = 0.06  # seconds that a side runs before the next one does
PAUSE = 0.001  # between, in which what the last one still does in the background comes to its end


@dataclass
class Round:
    """One batch, run once, from the step after the last prompt to the end."""

    seconds: float = 0.0
    tokens: int = 0
    passes: int = 0
    steps: int = 0
    computed: float = 0.0  # seconds in the executor
    drafted: int = 0
    accepted: int = 0
    drafting: float = 0.0  # seconds in the drafter
    outputs: list[list[int]] = field(default_factory=list)


class Side:
    """An engine with one method or none."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._round = Round()
        engine.observers.append(self)

    def on_step(self, step: Step) -> None:
        self._round.steps += 1
        self._round.computed += step.result.duration

    def on_end(self, record: RequestRecord) -> None:
        self._round.drafted += record.draft_tokens
        self._round.accepted += record.accepted_tokens

    def run(self, prompts: list[list[int]], length: int) -> Iterator[Round]:
        """A slice of the round at a time; what is timed is in the `Round` when all are done."""
        engine = self.engine
        outputs: dict[str, list[int]] = {}
        self._round = Round()  # of the prompts, which nobody looks at
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            outputs[str(index)] = []
            engine.add_request(
                Request(request_id=str(index), prompt_token_ids=prompt, params=params)
            )
        while not all(outputs.values()):
            for delta in engine.step():
                outputs[delta.request_id] += delta.token_ids
        done, before = Round(), engine.stats()
        self._round = done
        yield done
        while engine.has_work():
            time.sleep(PAUSE)
            started = time.perf_counter()
            while engine.has_work() and time.perf_counter() < started + SLICE:
                for delta in engine.step():
                    outputs[delta.request_id] += delta.token_ids
            done.seconds += time.perf_counter() - started
            yield done
        after = engine.stats()
        done.tokens = after.generation_tokens - before.generation_tokens
        done.passes = after.decode_passes - before.decode_passes
        done.drafting = after.drafting_seconds - before.drafting_seconds
        done.outputs = list(outputs.values())


@dataclass(frozen=True)
class Row:
    workload: str
    batch: int
    method: str
    plain_tok_s: float
    tok_s: float
    speed_up: float  # median over the rounds
    speed_up_least: float
    tokens_per_pass: float
    acceptance_rate: float
    theory: float
    drafting_share: float  # of the time
    rest_share: float  # neither drafting nor the executor's
    plain_rest_share: float


def compare(
    model: str,
    methods: dict[str, dict[str, Any]],
    batch: int,
    length: int,
    rounds: int,
    only: Collection[str] = (),
) -> list[Row]:
    checkpoint = load(resolve(model))
    config = EngineConfig(
        max_model_len=LONGEST_TEXT, kv_cache_memory_bytes=1 << 30, max_num_seqs=batch
    )
    sides = {
        name: Side(load_engine(model, replace(config, speculative_config=method)).engine)
        for name, method in ({"plain": None, "none": None} | methods).items()
    }
    turns = [workloads(checkpoint, batch, turn) for turn in range(rounds + 1)]
    rows = []
    for workload in only or turns[0]:
        results: dict[str, list[Round]] = {name: [] for name in sides}
        for turn, prompts in enumerate(turns):
            done = {}
            going = {name: side.run(prompts[workload], length) for name, side in sides.items()}
            while going:  # slices in turns, each side first in turn
                for name in _rotated(list(going), turn):
                    if (one := next(going[name], None)) is not None:
                        done[name] = one
                    else:
                        del going[name]
            if turn:  # the first one warms up
                for name, one in done.items():
                    results[name].append(one)
            for name, one in done.items():
                if one.outputs != done["plain"].outputs:
                    sys.exit(f"{workload}, batch {batch}: {name} gives another output")
        plain = results["plain"]
        for name in ("none", *methods):
            mine = results[name]
            ratios = [
                (one.tokens / one.seconds) / (other.tokens / other.seconds)
                for one, other in zip(mine, plain, strict=True)
            ]
            per_pass = sum(r.tokens for r in mine) / sum(r.passes for r in mine)
            cost = (sum(r.computed for r in mine) / sum(r.passes for r in mine)) / (
                sum(r.computed for r in plain) / sum(r.passes for r in plain)
            )
            drafted = sum(r.drafted for r in mine)
            rows.append(
                Row(
                    workload=workload,
                    batch=batch,
                    method=name,
                    plain_tok_s=_speed(plain),
                    tok_s=_speed(mine),
                    speed_up=_speed(mine) / _speed(plain),
                    speed_up_least=min(ratios),
                    tokens_per_pass=per_pass,
                    acceptance_rate=sum(r.accepted for r in mine) / drafted if drafted else 0.0,
                    theory=per_pass / cost,
                    drafting_share=sum(r.drafting for r in mine) / sum(r.seconds for r in mine),
                    rest_share=_rest(mine),
                    plain_rest_share=_rest(plain),
                )
            )
    for side in sides.values():
        side.engine.close()
    return rows


def _speed(rounds: list[Round]) -> float:
    """Tokens a second."""
    return sum(each.tokens for each in rounds) / sum(each.seconds for each in rounds)


def _rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _rest(rounds: list[Round]) -> float:
    seconds = sum(each.seconds for each in rounds)
    return 1 - sum(each.computed + each.drafting for each in rounds) / seconds


@dataclass(frozen=True)
class Drafting:
    """Processor time for 32 sequences, in µs."""

    method: str
    text: str
    median_us: float
    worst_us: float
    start_us: float  # of a sequence, once, for 1,000 tokens of prompt


def drafting(method: dict[str, Any], *, repeats: bool, steps: int = 200) -> Drafting:
    rng = random.Random(1)
    drafter = SpeculativeConfig.of(method).drafter()
    texts = [[int(rng.paretovariate(0.7)) % 5000 for _ in range(1000)] for _ in range(32)]
    began = time.thread_time()
    for number, text in enumerate(texts):
        drafter.start(number, text, None)
    start = (time.thread_time() - began) / len(texts)
    times = []
    for step in range(steps):
        news = [
            text[100 + 3 * step :][:3] if repeats else [int(rng.paretovariate(0.7)) % 5000]
            for text in texts
        ]
        began = time.thread_time()
        for number, new in enumerate(news):
            drafter.extend(number, new)
        drafter.propose(range(32), [LONGEST_DRAFT] * 32)
        times.append(time.thread_time() - began)
    return Drafting(
        method["method"],
        "repeating" if repeats else "random",
        1e6 * statistics.median(times),
        1e6 * max(times),
        1e6 * start,
    )


@dataclass(frozen=True)
class Beside:
    """llama.cpp's n-gram speculation on a workload's first prompt."""

    workload: str
    setting: str
    plain_tok_s: float
    tok_s: float
    speed_up: float
    acceptance_rate: float | None
    same_output: bool


def llama_cpp(arguments: argparse.Namespace) -> list[Beside]:
    checkpoint = load(resolve(arguments.model))
    only = arguments.work.split(",") if arguments.work else ()
    prompts = {
        name: each[0] for name, each in workloads(checkpoint, 1).items() if not only or name in only
    }
    path, threads = str(checkpoint.path), usable_cpus()[0]
    found = measure(arguments.llama_cpp, path, prompts, arguments.length, arguments.rounds, threads)
    plain = found.pop("none")
    return [
        Beside(
            workload,
            setting,
            plain[workload].tok_s,
            speed.tok_s,
            speed.tok_s / plain[workload].tok_s,
            speed.acceptance_rate,
            speed.token_ids == plain[workload].token_ids,
        )
        for workload in prompts
        for setting, speed in ((name, each[workload]) for name, each in found.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--methods", default="ngram,suffix")
    parser.add_argument("--heads", help="a folder that octavo train medusa wrote: measured too")
    parser.add_argument("--draft-model", help="a smaller model of the same vocabulary, likewise")
    parser.add_argument("--pinned", default="", help="and with drafts of these lengths")
    parser.add_argument("--work", default="", help="of copy, facts and chat only these")
    parser.add_argument("--length", type=int, default=160, help="tokens drawn for each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-cpp", metavar="DIR", help="folder with llama-server: beside it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    methods = {name: {"method": name} for name in arguments.methods.split(",") if name}
    given = {"medusa": arguments.heads, "draft_model": arguments.draft_model}
    computing = {
        name if n is None else f"{name}, {n}": {
            "method": name,
            "model": model,
            "num_speculative_tokens": n,
        }
        for name, model in given.items()
        if model
        for n in (None, *map(int, filter(None, arguments.pinned.split(","))))
    }
    rows: list[Row] = []
    for size in map(int, arguments.batch_sizes.split(",")):
        only = arguments.work.split(",") if arguments.work else ()
        all_methods = methods | computing
        rows += compare(
            arguments.model, all_methods, size, arguments.length, arguments.rounds, only
        )
    costs = [
        drafting(method, repeats=repeats)
        for method in methods.values()
        for repeats in (True, False)
    ]
    peers = llama_cpp(arguments) if arguments.llama_cpp else []
    if arguments.json:
        tables = {"rows": rows, "drafting": costs, "llama_cpp": peers}
        print(json.dumps({name: [*map(asdict, table)] for name, table in tables.items()}))
        return
    print(
        "| work | batch | method | none tok/s | tok/s | × (least) | per pass | accepted | theory "
        "| drafting | rest (none) |"
    )
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row.workload} | {row.batch} | {row.method} | {row.plain_tok_s:.0f} "
            f"| {row.tok_s:.0f} | {row.speed_up:.2f} ({row.speed_up_least:.2f}) "
            f"| {row.tokens_per_pass:.2f} | {row.acceptance_rate:.0%} | {row.theory:.2f} "
            f"| {row.drafting_share:.1%} | {row.rest_share:.1%} ({row.plain_rest_share:.1%}) |"
        )
    print("\n| drafting for 32 | text | median µs | worst µs | start, 1,000 tokens, µs |")
    print("|---|---|---:|---:|---:|")
    for cost in costs:
        print(
            f"| {cost.method} | {cost.text} | {cost.median_us:.0f} | {cost.worst_us:.0f} "
            f"| {cost.start_us:.0f} |"
        )

    if peers:
        print("\n| work | llama.cpp | none tok/s | tok/s | × | accepted | same output |")
        print("|---|---|---:|---:|---:|---:|---|")
    for peer in peers:
        rate = "none drafted" if peer.acceptance_rate is None else f"{peer.acceptance_rate:.0%}"
        print(
            f"| {peer.workload} | {peer.setting} | {peer.plain_tok_s:.0f} | {peer.tok_s:.0f} "
            f"| {peer.speed_up:.2f} | {rate} | {'yes' if peer.same_output else 'no'} |"
        )


if __name__ == "__main__":
    as_script(main)
