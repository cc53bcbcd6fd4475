"""Faults are injected into what exists: a test whose target was renamed fails."""

from typing import Any


def patch(target: Any, **attributes: Any) -> None:
    """Replace attributes of an object, all of which it must have."""
    for name, value in attributes.items():
        getattr(target, name)
        setattr(target, name, value)
