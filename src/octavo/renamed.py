"""Old names of packages and modules, which still import, with a warning.

`octavo.plan.memory` is now `octavo.tools.plan.memory_plan`; scripts of users may have the old name.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Applied one after another to a name below ``octavo``: packages first, then modules.
RENAMED = {
    "bench": "tools.bench",
    "checkpoint": "loader",
    "execute": "executor",
    "kv": "kv_cache",
    "model": "models",
    "plan": "tools.plan",
    "quant": "tools.quantize",
    "sample": "sampling",
    "schedule": "scheduler",
    "serve": "server",
    "speculate": "spec_decode",
    "top": "tools.top",
    "train": "tools.train",
    "verify": "tools.verify",
    "workload": "tools.workload",
    "executor.build": "executor.registry",
    "loader.layout": "loader.quantized_layout",
    "loader.quantization": "loader.quantization_config",
    "loader.section": "models.section",
    "spec_decode.scripted": "spec_decode.scripted_drafter",
    "tools.bench.fidelity": "tools.bench.fidelity_report",
    "tools.bench.load.report": "tools.bench.load.load_report",
    "tools.bench.load.run": "tools.bench.load.load_generator",
    "tools.bench.load.stream": "tools.bench.load.streamed_answer",
    "tools.plan.batching": "tools.plan.continuous_batching",
    "tools.plan.memory": "tools.plan.memory_plan",
    "tools.plan.replay": "tools.plan.load_replay",
    "tools.quantize.awq": "tools.quantize.awq_scaling",
    "tools.quantize.gptq": "tools.quantize.gptq_rounding",
    "tools.quantize.hf_tokenizer": "tools.quantize.hf_tokenizer_writer",
    "tools.quantize.run": "tools.quantize.quantize_checkpoint",
    "tools.train.medusa": "tools.train.medusa_training",
}
# Old names of classes in modules that were renamed, too: (new module, old name) → new name.
RENAMED_CLASSES = {
    ("loader.quantized_layout", "Setting"): "QuantizationArgs",
    ("tools.bench.load.load_generator", "Load"): "LoadGenerator",
    ("tools.bench.load.streamed_answer", "Answer"): "StreamedAnswer",
    ("tools.plan.continuous_batching", "Limits"): "EngineLimits",
    ("tools.quantize.quantize_checkpoint", "Outcome"): "QuantizationResult",
    ("tools.train.medusa_training", "Recipe"): "HeadRecipe",
}


def _new_name(name: str) -> str:
    for old, new in RENAMED.items():
        if name == old or name.startswith(f"{old}."):
            name = new + name.removeprefix(old)
    return name


class _Alias(Loader):
    """A module of the old name that has the attributes of the new one."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def exec_module(self, module: ModuleType) -> None:
        old, new = f"octavo.{self._old}", f"octavo.{self._new}"
        warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        real = import_module(new)

        def attribute(name: str) -> object:
            return getattr(real, RENAMED_CLASSES.get((self._new, name), name))

        module.__getattr__ = attribute  # type: ignore[method-assign]
        module.__path__ = []


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        octavo, _, name = fullname.partition(".")
        if octavo != "octavo" or (new := _new_name(name)) == name:
            return None
        return ModuleSpec(fullname, _Alias(name, new))


def install() -> None:
    """Make the old names importable."""
    sys.meta_path.insert(0, _Finder())
