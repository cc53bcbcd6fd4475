"""The settings of speculation, under vLLM's names, and the drafter that they name."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from octavo.loader.rounding import QUANTIZATIONS, is_known
from octavo.spec_decode import tuning
from octavo.spec_decode.answers import MAX_BRANCHES
from octavo.spec_decode.drafter import Drafter
from octavo.spec_decode.ngram import NgramDrafter
from octavo.spec_decode.suffix import SuffixDrafter
from octavo.strict_json import once

# What ``model`` is for the methods that need one.
_NEEDED_MODEL = {"draft_model": "one", "medusa": "the folder of the heads"}
_METHODS = ("draft_model", "layer_skip", "ngram", "suffix", "medusa", "mtp")
# Methods whose drafters are made for a loaded model.
_COMPUTING = frozenset({"draft_model", "layer_skip", "medusa", "mtp"})


def _fail(reason: str) -> NoReturn:
    raise ValueError(f"speculative_config: {reason}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _of(*methods: str, range: tuple[int, int] | None = None) -> Any:
    """Return a field that only these methods take; (): all do."""
    return field(default=None, metadata={"methods": methods or None, "range": range})


def _number(low: int, high: int, *methods: str) -> Any:
    return _of(*methods, range=(low, high))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """``method`` is "draft_model", "layer_skip", "medusa", "mtp", "ngram", "suffix" or
    "module:Class", a `Drafter` of the user's own.

    Raises `ValueError` naming the field that cannot be honoured.
    """

    method: str
    acceptance_method: str = "replay"  # or "rejection"
    # Pins the length of drafts; None: what pays most.
    num_speculative_tokens: int | None = _number(1, 64)
    # draft_model: name, path or hub id; medusa: the folder of the heads; mtp: that of an assistant
    model: str | None = _of("draft_model", "medusa", "mtp")
    # Tokens of an n-gram; None: 4, or prompt_lookup_min
    prompt_lookup_max: int | None = _number(1, 15, "ngram")
    prompt_lookup_min: int | None = _number(1, 15, "ngram")  # None: 2, or prompt_lookup_max
    # Earlier answers; None: none
    suffix_decoding_max_cached_requests: int | None = _number(0, 1_000_000, "suffix", "medusa")
    # Other guesses beside each draft; None: none
    suffix_decoding_alternatives: int | None = _number(0, 4, "suffix")
    lookup: bool | None = _of("medusa")  # take the draft of `suffix` where likelier; None: yes
    layers: Sequence[int] | None = _of("layer_skip")  # the layers that draft
    quantization: str | None = _of("draft_model")  # rounds a float model while loading

    def __post_init__(self) -> None:
        method = self.method
        if not isinstance(method, str):
            _fail(f"method is {method!r}, not a name")
        if method not in _METHODS and ":" not in method:
            known = ", ".join(map(repr, _METHODS))
            _fail(f"method {method!r} is not one of {known} or a class, written as 'module:Class'")
        if self.acceptance_method not in ("replay", "rejection"):
            _fail(
                f"acceptance_method is {self.acceptance_method!r}; it must be 'replay' or "
                "'rejection'"
            )
        for each in fields(self):
            name, value, methods = each.name, getattr(self, each.name), each.metadata.get("methods")
            if value is None:
                continue
            if methods is not None and method not in methods:
                _fail(f"{name} has no part in method {method!r}")
            if (range := each.metadata.get("range")) is not None:
                low, high = range
                if not _is_int(value) or not low <= value <= high:
                    _fail(f"{name} is {value!r}; it must be an integer from {low} to {high}")
        if (
            method == "mtp"
            and self.model is not None
            and not (isinstance(self.model, str) and self.model)
        ):
            _fail(f"model is {self.model!r}, not the folder of an assistant")
        if method in _NEEDED_MODEL and not (isinstance(self.model, str) and self.model):
            _fail(f"model is {self.model!r}; method {method!r} needs {_NEEDED_MODEL[method]}")
        if self.lookup is not None and not isinstance(self.lookup, bool):
            _fail(f"lookup is {self.lookup!r}, neither true nor false")
        if self.lookup is False and self.suffix_decoding_max_cached_requests is not None:
            _fail("suffix_decoding_max_cached_requests has no part without lookup")
        if method == "layer_skip":
            self._check_layers()
        if self.quantization is not None and not is_known(self.quantization):
            _fail(
                f"quantization {self.quantization!r} is not supported; {', '.join(QUANTIZATIONS)} "
                "are"
            )
        lowest, highest = self.orders
        if lowest > highest:
            _fail(f"prompt_lookup_min {lowest} is above prompt_lookup_max {highest}")

    def _check_layers(self) -> None:
        given = self.layers
        if given is None:
            _fail(
                "method 'layer_skip' needs layers, the numbers of those that guess (octavo search "
                "layer-skip finds them)"
            )
        if not isinstance(given, list | tuple) or not given:
            _fail(f"layers is {given!r}, not a list of numbers")
        for layer in given:
            if type(layer) is not int or layer < 0:
                _fail(f"layers has {layer!r}, which is no layer")
        object.__setattr__(self, "layers", tuple(sorted(given)))

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """Return the settings of a mapping or its JSON. Raises `ValueError`."""
        if isinstance(given, SpeculativeConfig):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given, object_pairs_hook=once)
            except ValueError as error:
                raise ValueError(f"speculative_config is not JSON: {error}") from None
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config is {given!r}, not an object")
        known = [each.name for each in fields(cls)]
        for name in given:
            if name not in known:
                _fail(f"{name!r} is not supported; {', '.join(known)} are")
        if "method" not in given and "model" in given:
            given = {"method": "draft_model", **given}
        if "method" not in given:
            raise ValueError("speculative_config names no method")
        return cls(**given)

    @property
    def orders(self) -> tuple[int, int]:
        """Return the shortest and the longest n-gram looked up."""
        lowest, highest = self.prompt_lookup_min, self.prompt_lookup_max
        return lowest or highest or 2, highest or lowest or 4

    @property
    def longest(self) -> int:
        """Return the most tokens of a draft."""
        return self.num_speculative_tokens or tuning.LONGEST_DRAFT

    @property
    def looks_up(self) -> bool:
        """Return whether drafts are looked up in the text besides being computed."""
        return self.method == "medusa" and self.lookup is not False

    @property
    def max_branches(self) -> int:
        """Return the most alternatives that a step verifies: 0 if the method has none."""
        return MAX_BRANCHES if ":" in self.method or self.suffix_decoding_alternatives else 0

    @property
    def rejection(self) -> bool:
        """Return whether drafts are verified by rejection instead of replay."""
        return self.acceptance_method == "rejection"

    def describe(self, longest: int | None = None) -> str:
        """Return one line for people. ``longest``: tokens of a draft, if the drafter gives fewer
        than the settings allow.
        """
        text = self.method if self.model is None else f"{self.method} {self.model}"
        if self.looks_up:
            text += " with lookup"
        if self.layers is not None:
            text += f" with layers {', '.join(map(str, self.layers))}"
        if self.num_speculative_tokens:
            text += f", {self.num_speculative_tokens} tokens each time"
        else:
            text += f", up to {longest or tuning.LONGEST_DRAFT} tokens, as it pays"
        return text + (", checked by rejection" if self.rejection else "")

    @property
    def own_mtp(self) -> bool:
        """Return whether the model's own layer for multi-token prediction drafts."""
        return self.method == "mtp" and self.model is None

    @property
    def computes(self) -> bool:
        """Return whether the drafter is made for the loaded model (engine/load.py)."""
        return self.method in _COMPUTING

    def drafter(self) -> Drafter:
        """Return a new drafter for the text: that of the method, or the one that looks up beside a
        model. Raises `ValueError` if a user's class cannot be had.
        """
        if self.method == "ngram":
            return NgramDrafter(*self.orders)
        if self.method == "suffix" or self.looks_up:
            return SuffixDrafter(
                self.suffix_decoding_max_cached_requests or 0,
                self.suffix_decoding_alternatives or 0,
            )
        module, _, name = self.method.partition(":")
        try:
            drafter = getattr(importlib.import_module(module), name)()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module may end with sys.exit, and worse
            hint = ": is its folder in PYTHONPATH?" * isinstance(error, ModuleNotFoundError)
            raise ValueError(
                f"speculative_config: method {self.method!r} cannot be had: {error!r}{hint}"
            ) from error
        for method in ("start", "extend", "propose", "end"):
            if not callable(getattr(drafter, method, None)):
                _fail(f"{self.method!r} is no drafter: it has no {method}()")
        return drafter  # type: ignore[no-any-return]
