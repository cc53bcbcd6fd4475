"""Compares the records of the families with transformers' config classes.

Run by hand, in an environment with torch and transformers:

    python tests/oracle/check_config_classes.py [MODEL_TYPE ...]

Of each model type (all that a family states, unless some are named) it prints what `HfType` should
say and does not: the defaults of the class, the keys that it computes and by which rule of
those that families state (tried on drawn values: one that none of them explains has None), the rope
types that it takes, and their base. A type that no family states is printed whole: that is what to
write down for a new one. A key that is computed by a rule of its own needs that written first.
"""

import argparse
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from octavo.models.families import HF_TYPES, HF_WRAPPERS
from octavo.models.hf_type import FULL, SLIDING, TRANSFORMERS, HfType, Rule
from octavo.models.section import Section

# Of training, generation and running: no logit depends on them.
UNUSED = {
    "initializer_range", "use_cache", "attention_dropout", "resid_pdrop", "embd_pdrop",
    "pretraining_tp", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "rope_parameters", "hidden_dropout", "pad_token_id", "bos_token_id",
    "use_bidirectional_attention", "mamba_chunk_size",
}  # fmt: skip
NOT_COMPARED = (
    "renamed",
    "feed_forward",
    "tokenizer",
    "tokenizer_overrules",
    "null_window",
    "local_theta",
    "rope_keys",
)
DRAWS = 200
LONG: dict[str, Any] = {
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
SECTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"factor": 2.0} | LONG,  # Phi-3 takes it for longrope
    "longrope": LONG,
    "su": LONG,
}  # fmt: skip
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 6,
         "vocab_size": 96, "pad_token_id": None, "max_position_embeddings": 128,
         "sliding_window": 16, "mamba_n_heads": 4}  # fmt: skip


def own_fields(cls: Any) -> dict[str, Any]:
    common = {field.name for field in fields(transformers.PreTrainedConfig)}
    return {field.name: field.default for field in fields(cls) if field.name not in common | UNUSED}


def drawn(rng: random.Random, known: dict[str, Any]) -> dict[str, Any]:
    """Values of the keys that others are computed from, missing, null or set."""
    heads = rng.choice([1, 2, 4, 8])
    layers = rng.randrange(1, 20)
    values: dict[str, Any] = {
        "hidden_size": heads * rng.randrange(4, 40),
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": rng.choice([None, heads]),
        "head_dim": rng.choice([None, 16]),
        "max_window_layers": rng.randrange(0, 20),
        "sliding_window": rng.choice([None, 7]),
        "use_sliding_window": rng.choice([True, False]),
        "sliding_window_pattern": rng.randrange(1, 8),
        "layer_types": rng.choice(
            [None, None, [rng.choice([FULL, SLIDING]) for _ in range(layers)]]
        ),
        "mlp_only_layers": rng.choice([None, [1], []]),
        "mamba_n_heads": heads,
    }
    extra = {"sliding_window_pattern"}
    kept = {key: value for key, value in values.items() if key in known or key in extra}
    return {key: value for key, value in kept.items() if rng.random() < 0.7}


RULES = {rule: None for _, kind in HF_TYPES.values() for rule in kind.computed.values()}


def computed(cls: Any, known: dict[str, Any], stated: Mapping[str, Rule]) -> dict[str, Rule | None]:
    """The keys that the class computes, and the rule that gives the same every time."""

    def fail(reason: str) -> NoReturn:
        raise ValueError(reason)

    rng = random.Random(0)
    cases = []
    while len(cases) < DRAWS:
        given = drawn(rng, known)
        try:
            made = cls(**given)
        except Exception:  # what the class refuses is compared elsewhere
            continue
        cases.append((known | given, made))
    found: dict[str, Rule | None] = {}
    for key in known:
        if all(getattr(made, key) == values[key] for values, made in cases):
            continue

        def explains(rule: Rule, key: str = key) -> bool:
            for values, made in cases:
                before = values | {other: getattr(made, other) for other in found}
                value = values[key]
                try:
                    if rule.always or value is None:
                        value = rule.value(Section(fail, before | {key: value}))
                except (KeyError, ValueError):
                    return False
                if value != getattr(made, key):
                    return False
            return True

        rules = [stated[key], *RULES] if key in stated else RULES
        found[key] = next((rule for rule in rules if explains(rule)), None)
    return found


def rope_types(cls: Any) -> dict[str, str]:
    """Those that the class can be made with, and what it makes of their names."""
    found = {}
    for kind, section in SECTIONS.items():
        try:
            made = cls(**SIZES, rope_parameters=nested(cls, {"rope_type": kind} | section))
        except Exception:
            continue
        rope = made.rope_parameters.get(FULL, made.rope_parameters)
        if rope["rope_type"] in SECTIONS and rope["rope_type"] != "su":
            found[kind] = rope["rope_type"]
    return found


def nested(cls: Any, section: dict[str, Any]) -> dict[str, Any]:
    return {FULL: section, SLIDING: {}} if by_layer(cls) else section


def by_layer(cls: Any) -> bool:
    """Whether the class keeps the settings of layer types apart, given none."""
    return FULL in cls(**SIZES).rope_parameters


def bases(cls: Any) -> dict[str, float]:
    rope = cls(**SIZES).rope_parameters
    if by_layer(cls):
        return {kind: float(rope[kind]["rope_theta"]) for kind in (FULL, SLIDING)}
    return {"": float(rope["rope_theta"])}


def partial_rotary(cls: Any, causal_lm: str) -> float:
    """The default of partial_rotary_factor if unscaled rotary positions heed it, else 0."""
    section = nested(cls, {"rope_type": "default", "partial_rotary_factor": 0.5})
    config = cls(**SIZES, rope_parameters=section)
    module = sys.modules[getattr(transformers, causal_lm).__module__]
    name = next(n for n in dir(module) if n.endswith("RotaryEmbedding") and "Vision" not in n)
    rotary = getattr(module, name)(config)
    buffer = getattr(rotary, f"{FULL}_inv_freq" if by_layer(cls) else "inv_freq")
    if len(buffer) != SIZES["head_dim"] // 4:
        return 0.0
    return float(cls(**SIZES).rope_parameters.get("partial_rotary_factor", 1.0))


def _kept(stated: Mapping[str, Rule], known: Mapping[str, Any]) -> dict[str, Rule]:
    """The rules of keys that the class computes and has no field for."""
    return {key: rule for key, rule in stated.items() if key not in known}


def found(model_type: str, ours: HfType | None) -> HfType:
    """What the class says."""
    cls = CONFIG_MAPPING[model_type]
    known = own_fields(cls)
    stated = ours.computed if ours else {}
    classes = cls.__name__.removesuffix("Config")
    causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    kind = HfType(
        model_type=model_type,
        classes=classes,
        causal_lm="" if causal_lm == f"{classes}ForCausalLM" else causal_lm,
        defaults=known,
        computed=computed(cls, known, stated) | _kept(stated, known),
        aliases=dict(cls.attribute_map),
        rope_types=rope_types(cls),
        rope_theta=bases(cls),
        partial_rotary=partial_rotary(cls, causal_lm),
        # Of another table, or of code, and not compared here.
        **{name: getattr(ours, name) for name in NOT_COMPARED if ours},
    )
    assert kind.model_classes[1] == MODEL_MAPPING_NAMES[model_type], model_type
    return kind


def differences(model_type: str) -> list[str]:
    """The fields in which the record differs from the class, each as the class has it."""
    if model_type in HF_WRAPPERS:
        return wrapper_differences(model_type)
    ours = HF_TYPES[model_type][1] if model_type in HF_TYPES else None
    theirs = found(model_type, ours)
    return [
        f"{field.name}={getattr(theirs, field.name)!r}"
        for field in fields(HfType)
        if ours is None or getattr(ours, field.name) != getattr(theirs, field.name)
    ]


def wrapper_differences(model_type: str) -> list[str]:
    ours, cls = HF_WRAPPERS[model_type], CONFIG_MAPPING[model_type]
    theirs = {
        "model_classes": (
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type],
            MODEL_MAPPING_NAMES[model_type],
        ),
        "classes": cls.__name__.removesuffix("Config"),
        "tied": cls(text_config={"model_type": ours.texts[0]}).tie_word_embeddings,
    }
    text = cls.sub_configs_defaults["text_config"].model_type
    found = [f"{name}={value!r}" for name, value in theirs.items() if getattr(ours, name) != value]
    return found if text == ours.texts[0] else [*found, f"texts[0]={text!r}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument(
        "model_types", nargs="*", metavar="MODEL_TYPE", default=[*HF_TYPES, *HF_WRAPPERS]
    )
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}; the records are of {TRANSFORMERS}")
    wrong = {name: lines for name in args.model_types if (lines := differences(name))}
    for name, lines in wrong.items():
        print(f"{name}:", *lines, sep="\n    ")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
