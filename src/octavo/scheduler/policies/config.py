"""The scheduling policies there are, and which of them an engine follows."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from octavo.scheduler.policies.base import Policy, Setting
from octavo.scheduler.policies.deadline import Deadline
from octavo.scheduler.policies.fair import Fair
from octavo.scheduler.policies.fcfs import FirstCome
from octavo.scheduler.policies.priority import Priority
from octavo.settings import check, setting

# A policy is listed here; each of its settings is also a field of `PolicyConfig`.
POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (FirstCome, Priority, Fair, Deadline)
}


def setting_users() -> dict[Setting, list[str]]:
    """Return for each setting the names of the policies that use it."""
    users: dict[Setting, list[str]] = {}
    for policy in POLICIES.values():
        for each in policy.settings:
            users.setdefault(each, []).append(policy.name)
    return users


def _name_and_help(policy: type[Policy]) -> str:
    return f"{policy.name}, {policy.help}" if policy.help else policy.name


def _policy_setting(name: str) -> Any:
    """Return the field of a policy's own setting."""
    ((given, users),) = (each for each in setting_users().items() if each[0].name == name)
    help = f"Under {' and '.join(users)}: {given.help}."
    shown = f"{given.default:g}"
    return setting(None, help, above=0, below=inf, metavar=given.metavar, show_default=shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Raises `ValueError` for an unknown policy, and for a setting that the policy does not use."""

    # fmt: off
    scheduling_policy: str = setting(FirstCome.name,
        f"Who goes first: {'; '.join(map(_name_and_help, POLICIES.values()))}.", metavar="NAME")
    # Settings of policies; None: the policy's default
    priority_ageing: float | None = _policy_setting("priority_ageing")
    fair_output_cost: float | None = _policy_setting("fair_output_cost")
    best_effort_deadline: float | None = _policy_setting("best_effort_deadline")
    max_queue_time: float | None = setting(None, "Seconds a request may wait; then it is refused.",
        above=0, below=inf, metavar="SECONDS", show_default="no limit")
    shed_late: bool = setting(False,
        "Refuse who waits and can no longer have its first token in time for its target.")
    # fmt: on

    def __post_init__(self) -> None:
        if self.scheduling_policy not in POLICIES:
            known = ", ".join(POLICIES)
            raise ValueError(f"scheduling_policy {self.scheduling_policy!r} is none of {known}")
        users_of = {each.name: users for each, users in setting_users().items()}
        for name, users in users_of.items():
            if getattr(self, name) is not None and self.scheduling_policy not in users:
                raise ValueError(
                    f"{name} has no effect under scheduling_policy {self.scheduling_policy}: "
                    f"it is of {' and '.join(users)}"
                )
        check(self)

    def new_policy(self) -> Policy:
        """Return the policy, with an empty queue."""
        policy = POLICIES[self.scheduling_policy]
        given = [(getattr(self, each.name), each.default) for each in policy.settings]
        return policy(*(default if value is None else value for value, default in given))


def field_users(field: str) -> list[str]:
    """Return the names of the policies that go by a field of requests."""
    return [policy.name for policy in POLICIES.values() if field in policy.request_fields]
