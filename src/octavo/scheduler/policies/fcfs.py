"""First come, first served: in order of arrival; a preempted sequence returns to its position."""

from __future__ import annotations

from octavo.scheduler.policies.base import Policy


class FirstCome(Policy):
    """All running sequences came before all waiting ones: admission and preemption follow the
    same order.
    """

    name = "fcfs"
