"""Which policy, and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

PolicyName = Literal["fcfs", "priority", "fair", "deadline"]

# Settings of one policy alone: whose, and what they are if not said.
_OF_ONE: dict[str, tuple[PolicyName, float]] = {
    "priority_ageing": ("priority", 30.0),
    "fair_output_cost": ("fair", 2.0),
    "best_effort_deadline": ("deadline", 60.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Raises `ValueError` for a policy that there is not, and for a setting of another one."""

    scheduling_policy: PolicyName = "fcfs"
    priority_ageing: float | None = None  # seconds in the queue that are worth a level
    fair_output_cost: float | None = None  # of a token of output, in tokens of prompt
    best_effort_deadline: float | None = None  # seconds after arrival, of requests without a target
    max_queue_time: float | None = None  # seconds that a request may wait to be scheduled
    shed_late: bool = False  # send away whoever can no longer be in time for its target

    def __post_init__(self) -> None:
        policy = self.scheduling_policy
        if policy not in get_args(PolicyName):
            known = ", ".join(get_args(PolicyName))
            raise ValueError(f"scheduling_policy {policy!r} is none of {known}")
        for name in (*_OF_ONE, "max_queue_time"):
            value = getattr(self, name)
            if value is None:
                continue
            if name in _OF_ONE and (whose := _OF_ONE[name][0]) != policy:
                raise ValueError(
                    f"{name} has no effect under scheduling_policy {policy}: it is of {whose}"
                )
            if not 0 < value < inf:
                raise ValueError(f"{name} is {value}, not above 0")

    def setting(self, name: str) -> float:
        """A setting of the policy, or what it is if not said."""
        value: float | None = getattr(self, name)
        return _OF_ONE[name][1] if value is None else value
