"""A policy by its name."""

from __future__ import annotations

from octavo.schedule.policies.base import Policy
from octavo.schedule.policies.config import PolicyConfig
from octavo.schedule.policies.deadline import Deadline
from octavo.schedule.policies.fair import Fair
from octavo.schedule.policies.fcfs import FirstCome
from octavo.schedule.policies.priority import Priority


def policy_of(config: PolicyConfig) -> Policy:
    if config.scheduling_policy == "priority":
        return Priority(config.setting("priority_ageing"))
    if config.scheduling_policy == "fair":
        return Fair(config.setting("fair_output_cost"))
    if config.scheduling_policy == "deadline":
        return Deadline(config.setting("best_effort_deadline"))
    return FirstCome()
