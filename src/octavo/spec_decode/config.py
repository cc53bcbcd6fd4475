"""What may be said of speculation, under vLLM's names; and the drafter that it names."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.loader.rounding import QUANTIZATIONS, is_known
from octavo.spec_decode.checked import BRANCHES
from octavo.spec_decode.drafter import Drafter
from octavo.spec_decode.ngram import NgramDrafter
from octavo.spec_decode.speculator import LONGEST
from octavo.spec_decode.suffix import SuffixDrafter
from octavo.strict_json import once

MOST_TOKENS = 64  # of a draft
_LONGEST_NGRAM = 15
_MOST_REQUESTS = 1_000_000
_MOST_ALTERNATIVES = 4

_OPTIONS = {
    "draft_model": ("model", "quantization"),
    "layer_skip": ("layers",),
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": ("suffix_decoding_max_cached_requests", "suffix_decoding_alternatives"),
    "medusa": ("model", "lookup", "suffix_decoding_max_cached_requests"),
}
# Methods whose drafters are made for a loaded model.
_COMPUTING = frozenset({"draft_model", "layer_skip", "medusa"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """``method`` is "draft_model", "layer_skip", "medusa", "ngram", "suffix" or "module:Class", a
    `Drafter` of the user's own.

    Raises `ValueError` naming the field that cannot be honoured.
    """

    method: str
    acceptance_method: str = "replay"  # or "rejection"
    num_speculative_tokens: int | None = None  # pins the drafts' length; None: what pays most
    model: str | None = None  # draft_model: name, path or hub id; medusa: the folder of the heads
    prompt_lookup_max: int | None = None  # tokens of an n-gram; None: 4, or prompt_lookup_min
    prompt_lookup_min: int | None = None  # None: 2, or prompt_lookup_max
    suffix_decoding_max_cached_requests: int | None = None  # earlier answers; None: none
    suffix_decoding_alternatives: int | None = None  # other guesses beside each draft; None: none
    lookup: bool | None = None  # medusa: where `suffix` has a likelier draft, that; None: yes
    layers: Sequence[int] | None = None  # of the model, that guess
    quantization: str | None = None  # of a float draft model, while loading

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            raise ValueError(f"speculative_config: method is {self.method!r}, not a name")
        if self.method not in _OPTIONS and ":" not in self.method:
            known = ", ".join(map(repr, _OPTIONS))
            raise ValueError(
                f"speculative_config: method {self.method!r} is not one of {known} or a class, "
                "written as 'module:Class'"
            )
        if self.acceptance_method not in ("replay", "rejection"):
            raise ValueError(
                f"speculative_config: acceptance_method is {self.acceptance_method!r}; it must be "
                "'replay' or 'rejection'"
            )
        own = {
            "method",
            "acceptance_method",
            "num_speculative_tokens",
            *_OPTIONS.get(self.method, ()),
        }
        for field in fields(self):
            if field.name not in own and getattr(self, field.name) is not None:
                raise ValueError(
                    f"speculative_config: {field.name} has no part in method {self.method!r}"
                )
        if self.method == "medusa" and not (isinstance(self.model, str) and self.model):
            raise ValueError(
                f"speculative_config: model is {self.model!r}; method 'medusa' needs the folder of "
                "the heads"
            )
        if self.lookup is not None and not isinstance(self.lookup, bool):
            raise ValueError(
                f"speculative_config: lookup is {self.lookup!r}, neither true nor false"
            )
        if self.lookup is False and self.suffix_decoding_max_cached_requests is not None:
            raise ValueError(
                "speculative_config: suffix_decoding_max_cached_requests has no part without lookup"
            )
        self._check("num_speculative_tokens", 1, MOST_TOKENS)
        self._check("prompt_lookup_max", 1, _LONGEST_NGRAM)
        self._check("prompt_lookup_min", 1, _LONGEST_NGRAM)
        self._check("suffix_decoding_max_cached_requests", 0, _MOST_REQUESTS)
        self._check("suffix_decoding_alternatives", 0, _MOST_ALTERNATIVES)
        if self.method == "layer_skip":
            self._check_layers()
        if self.method == "draft_model" and not (isinstance(self.model, str) and self.model):
            raise ValueError(
                f"speculative_config: model is {self.model!r}; method {self.method!r} needs one"
            )
        if self.quantization is not None and not is_known(self.quantization):
            raise ValueError(
                f"speculative_config: quantization {self.quantization!r} is not supported; "
                f"{', '.join(QUANTIZATIONS)} are"
            )
        lowest, highest = self.orders
        if lowest > highest:
            raise ValueError(
                f"speculative_config: prompt_lookup_min {lowest} is above prompt_lookup_max "
                f"{highest}"
            )

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(
                f"speculative_config: {name} is {value!r}; it must be an integer from {low} to "
                f"{high}"
            )

    def _check_layers(self) -> None:
        given = self.layers
        if given is None:
            raise ValueError(
                "speculative_config: method 'layer_skip' needs layers, the numbers of those that "
                "guess (octavo search layer-skip finds them)"
            )
        if not isinstance(given, list | tuple) or not given:
            raise ValueError(f"speculative_config: layers is {given!r}, not a list of numbers")
        for layer in given:
            if not isinstance(layer, int) or isinstance(layer, bool) or layer < 0:
                raise ValueError(f"speculative_config: layers has {layer!r}, which is no layer")
        object.__setattr__(self, "layers", tuple(sorted(given)))

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, Any] | str) -> SpeculativeConfig:
        """From a mapping or its JSON. Raises `ValueError`."""
        if isinstance(given, SpeculativeConfig):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given, object_pairs_hook=once)
            except ValueError as error:
                raise ValueError(f"speculative_config is not JSON: {error}") from None
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config is {given!r}, not an object")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(
                    f"speculative_config: {name!r} is not supported; {', '.join(known)} are"
                )
        if "method" not in given and "model" in given:
            given = {"method": "draft_model", **given}
        if "method" not in given:
            raise ValueError("speculative_config names no method")
        return cls(**given)

    @property
    def orders(self) -> tuple[int, int]:
        """The shortest and the longest n-gram looked up."""
        lowest, highest = self.prompt_lookup_min, self.prompt_lookup_max
        if lowest is None and highest is None:
            return 2, 4
        if lowest is None or highest is None:
            only = lowest or highest or 0
            return only, only
        return lowest, highest

    @property
    def longest(self) -> int:
        """Most tokens of a draft."""
        return self.num_speculative_tokens or LONGEST

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up beside those that are computed."""
        return self.method == "medusa" and self.lookup is not False

    @property
    def max_branches(self) -> int:
        """Most alternatives that a step checks beside the drafts: 0 where the method has none."""
        return BRANCHES if ":" in self.method or self.suffix_decoding_alternatives else 0

    @property
    def rejection(self) -> bool:
        """Whether drafts are checked by rejection, and not by replay."""
        return self.acceptance_method == "rejection"

    def describe(self, longest: int | None = None) -> str:
        """One line for people. ``longest``: tokens of a draft, where the drafter gives fewer than
        the settings allow.
        """
        length = self.num_speculative_tokens
        method = self.method if self.model is None else f"{self.method} {self.model}"
        if self.looks_up:
            method += " with lookup"
        if self.layers is not None:
            method += f" with layers {', '.join(map(str, self.layers))}"
        return (
            f"{method}, "
            + (
                f"{length} tokens each time"
                if length
                else f"up to {longest or LONGEST} tokens, as it pays"
            )
            + (", checked by rejection" if self.rejection else "")
        )

    @property
    def computes(self) -> bool:
        """Whether the drafter is made for the loaded model (engine/load.py)."""
        return self.method in _COMPUTING

    def drafter(self) -> Drafter:
        """A new one, of a method that does not compute, or that looks up beside one that does.
        Raises `ValueError` where a class cannot be had.
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
                raise ValueError(
                    f"speculative_config: {self.method!r} is no drafter: it has no {method}()"
                )
        return drafter  # type: ignore[no-any-return]
