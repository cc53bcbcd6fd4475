"""Models, refused for what a command asks of them before their weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.loader.base import Checkpoint


def checkpoint(model: str, *, chat: bool) -> Checkpoint:
    """What ``model`` names, of which only the header is read. ``chat``: it is to answer messages.
    Raises `CheckpointError`, or `ChatTemplateError` for a model that was not taught to chat.
    """
    from octavo.loader import load
    from octavo.loader.base import require_chat
    from octavo.loader.pull import resolve

    found = load(resolve(model))
    if chat:
        require_chat(found)
    return found
