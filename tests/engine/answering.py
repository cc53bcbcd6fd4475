"""One engine, asked some prompts in turn; by itself a process: ``answering.py '{…}'``.

Gives for each, as JSON holds it: tokens, their logprobs to the last bit, and how many of the
prompt's tokens were cached, in which tier.
"""

import json
import sys
from typing import Any
from unittest.mock import patch

from octavo.engine.config import EngineConfig
from octavo.engine.load import load_engine
from octavo.engine.step_time import StepTimePredictor
from octavo.kv_cache.connectors import NAMES
from octavo.sampling.params import SamplingParams
from octavo.scheduler.request import Request


def answers(model: str, config: dict[str, Any], prompts: list[list[int]]) -> list[dict[str, Any]]:
    # Nobody is in a hurry: all that is cached is worth waiting for.
    with patch.object(StepTimePredictor, "seconds_alone", lambda *_: 1e6):
        return _answers(model, config, prompts)


def _answers(model: str, config: dict[str, Any], prompts: list[list[int]]) -> list[dict[str, Any]]:
    engine = load_engine(model, EngineConfig(**config)).engine
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=5, logprobs=3, ignore_eos=True)
    found = []
    for number, prompt in enumerate(prompts):
        before = engine.stats()
        record = engine.add_request(
            Request(request_id=str(number), prompt_token_ids=prompt, params=params)
        )
        tokens: list[int] = []
        logprobs: list[Any] = []
        while engine.has_work():
            for delta in engine.step():
                tokens += delta.token_ids
                for entry in delta.logprobs or ():
                    top = [[token_id, value.hex()] for token_id, value in entry.top]
                    logprobs.append([entry.token_id, entry.logprob.hex(), top])
        after = engine.stats()
        found.append(
            {
                "tokens": tokens,
                "logprobs": logprobs,
                "cached": record.cached_tokens,
                **{
                    name: after.external_hits.get(name, 0) - before.external_hits.get(name, 0)
                    for name in NAMES
                },
                "corrupted": sum(each.corrupted_blocks for each in after.connectors.values()),
            }
        )
    engine.close()
    return found


if __name__ == "__main__":
    print(json.dumps(answers(**json.loads(sys.argv[1]))))
