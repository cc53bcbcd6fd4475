"""The engine on the checking executor: whole lives of requests."""

from __future__ import annotations

from engine.checking import build
from octavo.engine.engine import Engine
from octavo.engine.outputs import Delta
from octavo.sample.params import SamplingParams
from octavo.schedule.request import Outcome, Request


def request(name: str, prompt: list[int], **params: object) -> Request:
    params.setdefault("ignore_eos", True)
    params.setdefault("seed", 1)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )


def run(engine: Engine, limit: int = 10_000) -> list[Delta]:
    deltas = []
    while engine.has_work():
        deltas += engine.step()
        engine.check_integrity()
        limit -= 1
        assert limit, "the engine does not come to an end"
    return deltas


def test_two_requests_finish_with_the_tokens_asked_for() -> None:
    engine = build()
    records = [
        engine.add_request(request("a", list(range(20)), max_tokens=5)),
        engine.add_request(request("b", list(range(40)), max_tokens=30, n=3)),
    ]
    deltas = run(engine)
    assert [record.outcome for record in records] == [Outcome.FINISHED] * 2
    assert records[0].completion_tokens == 5
    assert records[1].completion_tokens == 90
    for choice in range(3):
        mine = [d for d in deltas if d.request_id == "b" and d.choice == choice]
        assert sum(len(d.token_ids) for d in mine) == 30
        assert [d.finish_reason for d in mine][:-1] == [None] * (len(mine) - 1)
    assert sum(d.record is not None for d in deltas) == 2


def test_block_16_two_requests_of_34_and_35_in_7_blocks_preempt_once() -> None:
    for num_blocks, preemptions in ((7, 1), (10, 0), (11, 0), (20, 0)):
        engine = build(num_blocks=num_blocks, vocab=64, enable_prefix_caching=False)
        for name, first in (("a", 0), ("b", 20)):
            prompt = [first + index % 20 for index in range(34)]
            engine.add_request(request(name, prompt, max_tokens=35, seed=first))
        run(engine)
        assert engine.stats().preemptions == preemptions, num_blocks
