"""Counts the parameters of presets with transformers' models, which take no memory.

Run by hand, in an environment with torch and transformers:

    python tests/oracle/count_presets.py [PRESET ...]

Prints the total of each preset (all, unless some are named) that tests/tools/plan/test_presets.py
should have.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.tools.plan.presets import PRESETS

SAME = {"kimi_k2": "deepseek_v3"}  # what has no class of its own


def parameters(file: dict[str, Any]) -> int:
    """What a model has of a config.json: parameters, and what else its files have."""
    values = dict(file)
    model_type = values.pop("model_type")
    cls = CONFIG_MAPPING[SAME.get(model_type, model_type)]
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    model = getattr(transformers, named or cls.__name__.replace("Config", "ForCausalLM"))
    with torch.device("meta"):
        weights = model(cls(**values)).state_dict(keep_vars=True).values()
    return sum({id(weight): weight.numel() for weight in weights}.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("presets", nargs="*", metavar="PRESET", default=list(PRESETS))
    for name in parser.parse_args().presets:
        print(f'    "{name}": {parameters(PRESETS[name]):_},')


if __name__ == "__main__":
    main()
