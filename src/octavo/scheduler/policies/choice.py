"""A policy by its name."""

from __future__ import annotations

from octavo.scheduler.policies.base import Policy
from octavo.scheduler.policies.config import PolicyConfig
from octavo.scheduler.policies.deadline import Deadline
from octavo.scheduler.policies.fair import Fair
from octavo.scheduler.policies.fcfs import FirstCome
from octavo.scheduler.policies.priority import Priority


def policy_of(config: PolicyConfig) -> Policy:
    if config.scheduling_policy == "priority":
        return Priority(config.setting("priority_ageing"))
    if config.scheduling_policy == "fair":
        return Fair(config.setting("fair_output_cost"))
    if config.scheduling_policy == "deadline":
        return Deadline(config.setting("best_effort_deadline"))
    return FirstCome()
