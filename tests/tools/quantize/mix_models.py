"""Small models on which the rules of mixes are recorded, and tried."""

from pathlib import Path
from typing import Any

from tools.quantize.quantizing import make, random_folder, speaking

# The family, and what its configuration has: 256 wide, so that K-quants' blocks fit most matrices.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared": ("llama", {"num_key_value_heads": 1, "head_dim": 64}),
    "unshared": ("llama", {"num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 96}),
    "fused": ("phi3", {}),
    "experts": ("qwen3moe", {"num_experts": 8, "num_hidden_layers": 9, "intermediate_size": 256}),
}
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 17}


def mix_folder(name: str, folder: Path) -> Path:
    family, changes = MODELS[name]
    layers = (SIZES | changes)["num_hidden_layers"]
    more: dict[str, Any] = {"layer_types": None, "max_window_layers": layers}
    return speaking(random_folder(family, folder / name, **SIZES | more | changes))


def mix_file(name: str, folder: Path) -> Path:
    """The same as a GGUF file of 8 bits."""
    out = folder / f"{name}.gguf"
    make(mix_folder(name, folder), out, format="gguf", bits=8, symmetric=True, embedding=8)
    return out
