"""The scheduling policies there are, and which of them an engine follows."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from octavo.scheduler.policies.base import Policy, Setting
from octavo.scheduler.policies.deadline import Deadline
from octavo.scheduler.policies.fair import Fair
from octavo.scheduler.policies.fcfs import FirstCome
from octavo.scheduler.policies.priority import Priority

# A policy is listed here; each of its settings is also a field of `PolicyConfig`.
POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (FirstCome, Priority, Fair, Deadline)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Raises `ValueError` for an unknown policy, and for a setting that the policy does not use."""

    scheduling_policy: str = FirstCome.name
    priority_ageing: float | None = None  # settings of policies; None: the policy's default
    fair_output_cost: float | None = None
    best_effort_deadline: float | None = None
    max_queue_time: float | None = None  # seconds that a request may wait to be scheduled
    shed_late: bool = False  # drop waiting requests that can no longer meet their target

    def __post_init__(self) -> None:
        if self.scheduling_policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"scheduling_policy {self.scheduling_policy!r} is none of {known}")
        users_of = {setting.name: users for setting, users in setting_users().items()}
        for name, users in (users_of | {"max_queue_time": [*POLICIES]}).items():
            value = getattr(self, name)
            if value is None:
                continue
            if self.scheduling_policy not in users:
                raise ValueError(
                    f"{name} has no effect under scheduling_policy {self.scheduling_policy}: it "
                    f"is of {' and '.join(users)}"
                )
            if not 0 < value < inf:
                raise ValueError(f"{name} is {value}, not above 0")

    def new_policy(self) -> Policy:
        """Return the policy, with an empty queue."""
        policy = POLICIES[self.scheduling_policy]
        given = [(getattr(self, each.name), each.default) for each in policy.settings]
        return policy(*(default if value is None else value for value, default in given))


def setting_users() -> dict[Setting, list[str]]:
    """Return for each setting the names of the policies that use it."""
    users: dict[Setting, list[str]] = {}
    for policy in POLICIES.values():
        for setting in policy.settings:
            users.setdefault(setting, []).append(policy.name)
    return users


def field_users(field: str) -> list[str]:
    """Return the names of the policies that go by a field of requests."""
    return [policy.name for policy in POLICIES.values() if field in policy.request_fields]
