"""The scheduling policies there are, and which of them an engine follows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any

from octavo.scheduler.policies.base import Policy
from octavo.scheduler.policies.deadline import Deadline
from octavo.scheduler.policies.fair import Fair
from octavo.scheduler.policies.fcfs import FirstCome
from octavo.scheduler.policies.priority import Priority
from octavo.settings import check, setting

# A policy is listed here; each of its settings is also a field of `PolicyConfig`.
POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (FirstCome, Priority, Fair, Deadline)
}


def setting_users(name: str) -> list[str]:
    """Return the names of the policies that have a setting."""
    return [policy.name for policy in POLICIES.values() if name in policy.settings()]


def _name_and_help(policy: type[Policy]) -> str:
    return f"{policy.name}, {policy.help}" if policy.help else policy.name


def _policy_setting(name: str, help: str, metavar: str | None = None) -> Any:
    """Return the field of a policy's own setting."""
    users = setting_users(name)
    help = f"Under {' and '.join(users)}: {help}."
    shown = f"{POLICIES[users[0]].settings()[name]:g}"
    return setting(None, help, above=0, below=inf, metavar=metavar, show_default=shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Raises `ValueError` for an unknown policy, and for a setting that the policy does not use."""

    # fmt: off
    scheduling_policy: str = setting(FirstCome.name,
        f"Who goes first: {'; '.join(map(_name_and_help, POLICIES.values()))}.", metavar="NAME")
    # Settings of policies; None: the policy's default
    priority_ageing: float | None = _policy_setting("priority_ageing",
        "seconds in the queue that are worth a level", "SECONDS")
    fair_output_cost: float | None = _policy_setting("fair_output_cost",
        "what a token of output counts, in tokens of prompt")
    best_effort_deadline: float | None = _policy_setting("best_effort_deadline",
        "seconds after which requests without a target are due", "SECONDS")
    max_queue_time: float | None = setting(None, "Seconds a request may wait; then it is refused.",
        above=0, below=inf, metavar="SECONDS", show_default="no limit")
    shed_late: bool = setting(False,
        "Refuse who waits and can no longer have its first token in time for its target.")
    # fmt: on

    def __post_init__(self) -> None:
        if self.scheduling_policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"scheduling_policy {self.scheduling_policy!r} is none of {known}")
        own = POLICIES[self.scheduling_policy].settings()
        for name in chain.from_iterable(policy.settings() for policy in POLICIES.values()):
            if name not in own and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} has no effect under scheduling_policy {self.scheduling_policy}: "
                    f"it is of {' and '.join(setting_users(name))}"
                )
        check(self)

    def new_policy(self) -> Policy:
        """Return the policy, with an empty queue."""
        policy = POLICIES[self.scheduling_policy]
        given = {name: getattr(self, name) for name in policy.settings()}
        return policy(**{name: value for name, value in given.items() if value is not None})


def field_users(field: str) -> list[str]:
    """Return the names of the policies that go by a field of requests."""
    return [policy.name for policy in POLICIES.values() if field in policy.request_fields]
