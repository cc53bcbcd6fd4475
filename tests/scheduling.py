"""What tests of scheduling share: records, and a sample of every policy's requests and settings."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from octavo.scheduler.policies.config import POLICIES
from octavo.scheduler.request import LatencyTarget, RequestRecord, SchedulingParams


class Sample(NamedTuple):
    terms: Callable[[int], dict[str, Any]]  # `SchedulingParams` of the request with this number
    order: Sequence[int]  # in which the first twelve are admitted, if all wait


SAMPLES = {
    "fcfs": Sample(lambda number: {}, range(12)),
    "priority": Sample(
        lambda number: {"priority": -(number % 3)}, (2, 5, 8, 11, 1, 4, 7, 10, 0, 3, 6, 9)
    ),
    "fair": Sample(
        lambda number: {"client": "abcdef"[number // 4]}, (0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11)
    ),
    "deadline": Sample(
        lambda number: {"target": LatencyTarget(ttft=50.0 - number) if number % 2 else None},
        (11, 9, 7, 5, 3, 1, 0, 2, 4, 6, 8, 10),
    ),
}
# Values of each setting of a policy; the second lets nobody wait long where a step takes 1 ms.
SETTINGS = {
    "priority_ageing": (0.001, 0.02, 10.0),
    "fair_output_cost": (0.5, 2.0),
    "best_effort_deadline": (0.001, 0.1, 10.0),
}
assert SAMPLES.keys() == POLICIES.keys(), "each policy has a sample"
for _policy in POLICIES.values():
    assert SETTINGS.keys() >= _policy.settings().keys(), "each setting has values"


def new_record(request_id: str, arrival: float, prompt_tokens: int, **facts: Any) -> RequestRecord:
    """Return a record; ``facts``: its own fields and those of `SchedulingParams`."""
    known = SchedulingParams.__dataclass_fields__
    scheduling = {name: facts.pop(name) for name in [*facts] if name in known}
    return RequestRecord(
        request_id, arrival, prompt_tokens, scheduling=SchedulingParams(**scheduling), **facts
    )
