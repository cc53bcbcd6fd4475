"""A model to plan for, known by its shape: of a preset, a config.json, or a file's header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod
from pathlib import Path

import octavo.loader
from octavo.loader.base import Checkpoint, CheckpointError, Weight
from octavo.loader.hf_config import model_config
from octavo.loader.hf_folder import CONFIG, HfFolder
from octavo.loader.names import preset
from octavo.loader.pull import KNOWN, cached, hub_config, known, resolve
from octavo.models.families import FAMILIES, program
from octavo.models.program import Program
from octavo.tools.plan.latent import latent_config, latent_program
from octavo.tools.plan.presets import PRESETS, Preset


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to plan for: its shape, and its weights as a file has them, if there is one."""

    name: str
    program: Program
    stored: Mapping[str, Weight] | None = None
    quantized: str | None = None  # how a config.json alone says that weights are stored

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Subject:
        config = checkpoint.config
        return cls(config.name or checkpoint.path.name, program(config), checkpoint.weights)

    @classmethod
    def of_config(cls, path: Path) -> Subject:
        """From a Hugging Face config.json alone. Raises `CheckpointError`."""
        return cls.of_folder(HfFolder(path.parent))

    @classmethod
    def of_folder(cls, folder: HfFolder) -> Subject:
        """From what the folder's config.json says."""
        if (file := latent_config(folder)) is not None:
            compute = latent_program(folder, file)
        else:
            compute = program(model_config(folder))
        return cls(compute.config.name, compute, quantized=_quantized(folder))

    @classmethod
    def find(cls, model: str) -> Subject:
        """Find what a name means: a preset, a config.json, a folder with one, a file, a short
        name that `octavo pull` knows, a Hugging Face id, of which the config.json is enough.
        Weights are not read, and none are fetched: of a model that can be pulled and is not here
        the preset's shape is taken.

        Raises `CheckpointError`.
        """
        path = Path(model).expanduser()
        if model in KNOWN or not (model and path.exists()):
            pulled = known(model)
            if pulled and (here := cached(pulled.name)):
                return cls.of(octavo.loader.load(here))
            if name := preset(pulled.also[0] if pulled and pulled.also else model):
                return cls.of_folder(Preset(name))
        if path.suffix == ".json" and path.name != CONFIG:
            raise CheckpointError(f"{path}: give a model's {CONFIG}")
        if path.name == CONFIG:
            return cls.of_config(path)
        if (path / CONFIG).is_file() and not any(path.glob("*.safetensors")):
            return cls.of_config(path / CONFIG)
        plain = "/" not in model and path.suffix != ".gguf" and not path.exists()
        if plain and model not in KNOWN:
            names = (*PRESETS, *KNOWN)
            near = get_close_matches(model.lower(), names, n=1)
            raise CheckpointError(
                f"unknown model {model!r}{f': did you mean {near[0]}?' if near else ';'} known "
                f"presets are {', '.join(PRESETS)}; else give a known name ({', '.join(KNOWN)}), a "
                f"{CONFIG}, a GGUF file or folder, or a Hugging Face id"
            )
        if (config := hub_config(model)) is not None:
            return replace(cls.of_config(config), name=model)
        return cls.of(octavo.loader.load(resolve(model)))

    @property
    def parameters(self) -> int:
        return sum(map(prod, self.program.weights.values()))

    @property
    def served(self) -> bool:
        """Whether the engine computes it, and does not only plan for it."""
        return self.program.config.family in FAMILIES

    def program_for(self, length: int) -> Program:
        """Return the Program for sequences of up to ``length`` tokens."""
        return program(self.program.config, length) if self.served else self.program

    def matrices(self) -> dict[str, tuple[int, ...]]:
        """The layers' matrices, which quantizers work on, without embedding and head."""
        return {
            role: shape
            for role, shape in self.program.weights.items()
            if is_matrix(shape) and part(role) == "layers"
        }


def _quantized(folder: HfFolder) -> str | None:
    """How a config.json says that weights are stored. Raises `CheckpointError`."""
    for field in ("quantization_config", "compression_config"):
        how = folder.json(CONFIG).get(field)
        if how is None:
            continue
        if not isinstance(how, dict):
            raise CheckpointError(f"{folder.path / CONFIG}: {field} is {how!r:.40}, not an object")
        return str(how.get("quant_method") or "without a quant_method")
    return None


def is_matrix(shape: tuple[int, ...]) -> bool:
    """Whether it is a matrix or a stack of them. Vectors and weights of convolutions, [channels, 1,
    taps], are not: they are kept as floats.
    """
    return len(shape) > 1 and not (len(shape) == 3 and shape[1] == 1)


def part(role: str) -> str:
    """The line of a sum that a weight belongs to; a tied head is the embedding."""
    name = role.split(".")[2] if role.startswith("layers.") else role
    if role.endswith(".bias") or "norm" in name or name == "layer_output_scale":
        return "norms"
    return {"token_embd": "embedding", "output": "head"}.get(role, "layers")
