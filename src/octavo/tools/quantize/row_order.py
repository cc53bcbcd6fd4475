"""The two orders of the rows of q and k: Hugging Face's, where those that are rotated together are
in a head's two halves, and that of GGUF's llama, where they are neighbours.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.models.config import ModelConfig


def row_order(config: ModelConfig, role: str, *, interleaved: bool) -> npt.NDArray[np.intp] | None:
    """Which row of ``role`` comes at each place of a file whose rows are ``interleaved`` or not.
    None: as they are.
    """
    part = role.removesuffix(".bias").rpartition(".")[2]
    if part not in ("attn_q", "attn_k"):
        return None
    layer = config.layers[int(role.split(".")[1])]
    if not layer.rope.rotated or layer.rope.interleaved == interleaved:
        return None
    kv_heads, head_dim = config.heads_of(layer)
    heads = config.num_heads if part == "attn_q" else kv_heads
    rows = np.arange(heads * head_dim)
    halves = rows.reshape((heads, 2, -1) if interleaved else (heads, -1, 2))
    return np.ascontiguousarray(halves.transpose(0, 2, 1)).reshape(-1)
