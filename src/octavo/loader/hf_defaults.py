"""What transformers' config classes make of a config.json.

A class fills in the keys that a file leaves out, computes some from others, and brings old and new
spellings of the rotary settings together. Its defaults and rules are in the family's record
(`HfType`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from octavo.models.hf_type import FULL, PROPORTIONAL, SLIDING, HfType
from octavo.models.section import Section

_BOTH = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}
_YARN = {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
# The keys that each rope type reads. Those with the last one get it if the file has none.
ROPE_KEYS: dict[str, set[str]] = {
    "default": _BOTH,
    PROPORTIONAL: _BOTH | {"factor"},
    "linear": _BOTH | {"factor"},
    "dynamic": _BOTH | {"factor"},
    "llama3": _BOTH | _LLAMA3,
    "yarn": _BOTH | _YARN | {"truncate", _ORIGINAL},
    "longrope": _BOTH | {"factor", "attention_factor", "short_factor", "long_factor", _ORIGINAL},
}


def completed(
    file: dict[str, Any],
    kind: HfType,
    fail: Callable[[str], NoReturn],
    note: Callable[[str], None],
) -> dict[str, Any]:
    """All keys of the class as they are after its construction, and the file's others.

    ``rope_parameters`` has the rotary settings, for every layer type apart where the class keeps
    them apart. ``note`` hears what the class passes over.
    """
    values = {kind.aliases.get(key, key): value for key, value in kind.defaults.items()}
    # Fields first: what else a file has is set afterwards, under whichever name.
    for known in (True, False):
        values |= {
            kind.aliases.get(key, key): value
            for key, value in file.items()
            if (key in kind.defaults) == known
        }
    values |= {key: file[old] for old, key in kind.renamed.items() if old in file}
    section = Section(fail, values)
    for key, rule in kind.computed.items():
        if rule.always or values.get(key) is None:
            values[key] = rule.value(section)
    ropes = _Ropes(values, kind, fail, note)
    values["rope_parameters"] = ropes.by_layer_type() if len(kind.rope_theta) > 1 else ropes.flat()
    return values


class _Ropes:
    """Old and new spellings of the rotary settings."""

    def __init__(
        self,
        values: dict[str, Any],
        kind: HfType,
        fail: Callable[[str], NoReturn],
        note: Callable[[str], None],
    ) -> None:
        self.values = values
        self.kind = kind
        self.fail = fail
        self.note = note

    def flat(self) -> dict[str, Any]:
        """One section for all layers: rope_scaling, or if it is empty rope_parameters."""
        old, new = self.object(self.values, "rope_scaling"), self.new
        if old and new and old != new:
            self.note("rope_parameters is passed over, since there is rope_scaling")
        name = "rope_scaling" if old else "rope_parameters"
        if nested := [key for key in (FULL, SLIDING) if key in (old or new)]:
            self.fail(
                f"{name} has {nested[0]}, and a section for each layer type is not supported for "
                f"{self.kind.config_class}"
            )
        return self.standard(dict(old or new), name, "rope_theta", "")

    def by_layer_type(self) -> dict[str, Any]:
        """A section for each layer type. rope_scaling is of the layers that see everything."""
        old = self.object(self.values, "rope_scaling")
        new = self.new
        plain = {"rope_type": "default"}
        full, sliding = (
            plain if new.get(kind) is None else self.object(new, kind) for kind in (FULL, SLIDING)
        )
        if "type" in old and "rope_type" not in old and full.get("rope_type") != old["type"]:
            self.note(
                f"rope_scaling's type {old['type']!r} is passed over, as transformers does for "
                f"{self.kind.config_class}: it heeds rope_type"
            )
        for key in sorted(new.keys() - {FULL, SLIDING, "truncate"}):
            self.note(f"rope_parameters: {key} is passed over, being of no layer type")
        bases = {FULL: "rope_theta", SLIDING: self.kind.local_theta}
        return {
            kind: self.standard(section, f"rope_parameters: {kind}", bases[kind], kind)
            | {"truncate": new.get("truncate", True)}
            for kind, section in ((FULL, full | old), (SLIDING, dict(sliding)))
        }

    @property
    def new(self) -> dict[str, Any]:
        return self.object(self.values, "rope_parameters")

    def standard(self, rope: dict[str, Any], name: str, base: str, layer: str) -> dict[str, Any]:
        """The section under its new names, with what stands beside it in old files."""
        theta = self.values.get(base, self.kind.rope_theta[layer])
        if rope.setdefault("rope_theta", theta) != theta and base in self.values:
            self.note(f"{base} {theta} is passed over, since {name} has {rope['rope_theta']}")
        part = self.values.get("partial_rotary_factor")
        if part is not None:
            rope.setdefault("partial_rotary_factor", part)
        written = rope.setdefault("rope_type", rope.get("type", "default"))
        kind = self.kind.rope_types.get(written) if isinstance(written, str) else None
        if kind is None:
            self.fail(
                f"rope type {written!r} is not supported for {self.kind.config_class}; supported "
                f"are {', '.join(self.kind.rope_types)}"
            )
        rope["rope_type"] = kind
        if _ORIGINAL in ROPE_KEYS[kind]:
            if _ORIGINAL in self.values and not layer:
                rope[_ORIGINAL] = self.values[_ORIGINAL]
            else:
                rope.setdefault(_ORIGINAL, self.values["max_position_embeddings"])
        for key in sorted(rope.keys() - ROPE_KEYS[kind] - self.kind.rope_keys):
            self.note(f"{name}: {key} is passed over by rope type {kind!r}")
        return rope

    def object(self, values: dict[str, Any], key: str) -> dict[str, Any]:
        """An empty one if there is none: an empty object is an absent one."""
        value = values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.fail(f"{key} is not an object")
        return value
