"""Kinds of requests in one load: whose they are, how urgent, and what latency they are promised."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from octavo.tools.workload.metrics import GOODPUT, parse_slo

if TYPE_CHECKING:
    from octavo.tools.workload.datasets import Sample

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_CLIENTS = 10**5
_MOST_PRIORITY = 2**31
_CHOOSING = 0xC1A55  # keeps the choice apart from what else the seed draws


@dataclass(frozen=True, slots=True)
class LoadClass:
    """``limits``: its own, in milliseconds by metric; None: the load's; empty: it is promised
    nothing.
    """

    name: str
    share: float  # of the requests, against the other classes'
    clients: int = 1  # that its requests come from, in turn by chance
    weight: float = 1.0  # of each of them, where shares are fair
    priority: int = 0  # lower runs first
    limits: Mapping[str, float] | None = None


def parse_class(text: str) -> LoadClass:
    """``chat:share=0.2,clients=4,weight=2,priority=-1,ttft=300,tpot=30``, or ``slo=none``. Raises
    `ValueError`.
    """
    name, _, rest = text.partition(":")
    if not _NAME.fullmatch(name):
        raise ValueError(f"--class {text!r} is not NAME:KEY=VALUE,…, such as chat:share=0.2")
    given: dict[str, str] = {}
    for pair in rest.split(",") if rest else ():
        key, found, value = pair.strip().partition("=")
        if not found or key in given:
            wrong = "there twice" if found else "not KEY=VALUE"
            raise ValueError(f"--class {name}: {pair!r} is {wrong}")
        given[key] = value
    limits: Mapping[str, float] | None = None
    if own := {key: given.pop(key) for key in GOODPUT if key in given}:
        try:
            limits = parse_slo(",".join(f"{key}={value}" for key, value in own.items()))
        except ValueError as error:
            raise ValueError(f"--class {name}: {error}") from None
    if (slo := given.pop("slo", None)) is not None:
        if slo != "none" or limits:
            raise ValueError(f"--class {name}: slo is none, or there are {', '.join(GOODPUT)}")
        limits = {}
    share = _number(name, "share", given.pop("share", "1"), 1e-9, 1e9)
    weight = _number(name, "weight", given.pop("weight", "1"), 1e-9, 1e9)
    clients = _whole(name, "clients", given.pop("clients", "1"), 1, _MOST_CLIENTS)
    priority = _whole(
        name, "priority", given.pop("priority", "0"), -_MOST_PRIORITY, _MOST_PRIORITY - 1
    )
    if given:
        known = ", ".join(("share", "clients", "weight", "priority", *GOODPUT, "slo"))
        raise ValueError(f"--class {name}: {next(iter(given))!r} is none of {known}")
    return LoadClass(name, share, clients, weight, priority, limits)


def _number(name: str, key: str, text: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ValueError(f"--class {name}: {key} is {text!r}, not from {low:g} to {high:g}")
    return value


def _whole(name: str, key: str, text: str, low: int, high: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ValueError(f"--class {name}: {key} is {text!r}, no whole number from {low} to {high}")
    return value


def parse_classes(texts: Sequence[str]) -> tuple[LoadClass, ...]:
    """Raises `ValueError`, for a name that is there twice, too."""
    classes = tuple(map(parse_class, texts))
    names = [each.name for each in classes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--class {name} is there twice")
    return classes


def classed(samples: Sequence[Sample], classes: Sequence[LoadClass], seed: int) -> list[Sample]:
    """Each sample of one of the classes, by chance and their shares, and of one of its clients."""
    if not classes:
        return list(samples)
    rng = np.random.default_rng((_CHOOSING, seed))
    shares = np.array([each.share for each in classes])
    chosen = rng.choice(len(classes), len(samples), p=shares / shares.sum())
    turns = rng.random(len(samples))
    return [
        replace(sample, kind=classes[index], client=int(turn * classes[index].clients))
        for sample, index, turn in zip(samples, chosen.tolist(), turns.tolist(), strict=True)
    ]
