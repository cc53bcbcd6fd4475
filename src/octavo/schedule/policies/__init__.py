"""Who is next: a file for each policy."""

from __future__ import annotations

from octavo.schedule.config import SchedulerConfig
from octavo.schedule.policies.base import Policy
from octavo.schedule.policies.fcfs import FirstCome


def policy_of(config: SchedulerConfig) -> Policy:
    return FirstCome()
