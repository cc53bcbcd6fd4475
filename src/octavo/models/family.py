"""A model family: its computation, and what the files of both formats call its parts.

A family is one `Family` (``FAMILY`` of a file beside this one). What reads and writes Hugging Face
folders (loader/hf_config.py, loader/hf.py, tools/quantize/hf_model.py) and GGUF files
(loader/metadata.py, loader/loader.py, tools/quantize/gguf_model.py) is derived from it, and so is
the table of families in docs/models.md.

A weight's role is what GGUF calls it, so only Hugging Face's names are stated: ``layers.3.attn_q``
is ``blk.3.attn_q.weight`` there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from typing import Any, NamedTuple

from octavo.models.config import Activation, ModelConfig
from octavo.models.hf_type import HfType
from octavo.models.program import Program

QKV = frozenset({"attn_q", "attn_k", "attn_v"})
ATTENTION = QKV | {"attn_output"}
FFN = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
# What Hugging Face usually calls the roles, without the prefix "model." and the layer's; {} stands
# for an expert's number.
MODULES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Fused(NamedTuple):
    """Matrices that are stored as one, and their order in it."""

    hf: str
    gguf: str
    parts: tuple[str, ...]


# Every family's files may have these.
FUSED = (
    Fused("self_attn.qkv_proj", "attn_qkv", ("attn_q", "attn_k", "attn_v")),
    Fused("mlp.gate_up_proj", "ffn_up", ("ffn_gate", "ffn_up")),
)


class Form(NamedTuple):
    """How files state a number of the config: ``read`` gives the config's number from the file's,
    ``write`` the file's from the config's.
    """

    read: Callable[[float], float]
    write: Callable[[float], float]


def _square(x: float) -> float:
    square: float = x**-2.0  # an integer is written as one: `transformers` wants it
    return round(square) if abs(square - round(square)) < 1e-6 * square else square


PLAIN = Form(float, float)
INVERSE = Form(lambda number: 1.0 / (number or 1.0), lambda x: 1.0 / x)  # of 0 there is none
INVERSE_SQUARE = Form(lambda number: 1.0 / sqrt(number), _square)


class Key(NamedTuple):
    """A number of `ModelConfig`, and the keys under which files have it ("": they have none)."""

    field: str
    hf: str = ""
    gguf: str = ""
    default: float = 1.0  # of GGUF files without the key
    form: Form = PLAIN
    null: float | None = None  # what a null in config.json means; None: it is refused


# In GGUF every family may have these.
SOFT_CAPS = (
    Key("attention_softcap", gguf="attn_logit_softcapping", default=0.0),
    Key("logits_softcap", gguf="final_logit_softcapping", default=0.0),
)


class Fixed(NamedTuple):
    """A switch, and its keys. A file that has it otherwise means another computation."""

    value: bool
    hf: str = ""
    gguf: str = ""
    otherwise: str = ""  # what that means, for the refusal


RMS_EPS = Key("norm_eps", "rms_norm_eps", "attention.layer_norm_rms_epsilon")


class Windows(NamedTuple):
    """What GGUF files say of sliding windows."""

    default: int = 0  # tokens, of a file without the key; 0: there are none
    period: int = 0  # one layer in so many sees everything, if the file does not say; 0: none does
    # The rotary base of layers with a window, which are never scaled; None: they are as the others.
    theta: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Everything that is particular to a family. What is not stated is as in most."""

    name: str
    title: str  # for people
    note: str = ""  # the same
    program: Callable[[ModelConfig], Program]
    eps: Key = RMS_EPS
    keys: tuple[Key, ...] = ()  # numbers that not all families have
    fixed: tuple[Fixed, ...] = ()
    embedding_root: bool = False  # embeddings are multiplied by the root of hidden_size
    modules: Mapping[str, str] = field(default_factory=dict)  # see `MODULES`, which these add to
    fused: tuple[Fused, ...] = ()  # of the files that are written; `FUSED` are read in any case

    # Hugging Face: the model types. The first that has a place for what a model has is written.
    hf: tuple[HfType, ...]
    biases: frozenset[str] = frozenset()  # projections that have a bias whatever a file says
    # Keys that say whether projections have one.
    bias_keys: Mapping[str, frozenset[str]] = field(
        default_factory=lambda: {"attention_bias": ATTENTION, "mlp_bias": FFN}
    )
    passed_over: tuple[str, ...] = ()  # keys that the class has and the model does not heed
    norm_offset: float = 0.0  # what norms' weights in a folder lack
    written: Mapping[str, Any] = field(default_factory=dict)  # keys of no consequence

    # GGUF
    architecture: str = ""  # if it is not called as here
    activation: Activation = Activation.SILU
    interleaved: bool = False  # q and k are permuted so that neighbours are rotated together
    windows: Windows | None = None
    expert_size: str = ""  # the key of an expert's width: the family has experts
    # The one size whose attention scale is 1/sqrt(hidden_size / heads), by its number of layers.
    hidden_scale_layers: int = 0
    merged_spaces: bool = False  # a SentencePiece vocabulary reaches runs of spaces by merging
    greedy_tokens: bool = False  # added tokens of one take the white space behind them along

    @property
    def gguf(self) -> str:
        """The architecture."""
        return self.architecture or self.name

    @property
    def gguf_keys(self) -> tuple[Key, ...]:
        """Its numbers in a GGUF file."""
        own = {key.field: key for key in (*SOFT_CAPS, *self.keys) if key.gguf}
        return tuple(own.values())

    @cached_property
    def fusions(self) -> dict[str, tuple[str, ...]]:
        """The parts of the matrices that a folder may have fused, by its names for these."""
        return {each.hf: each.parts for each in (*FUSED, *self.fused)}

    @cached_property
    def gguf_fusions(self) -> dict[str, tuple[str, ...]]:
        """The parts of the matrices that a GGUF file may have fused, by its names for these."""
        return {each.gguf: each.parts for each in (*FUSED, *self.fused)}

    @cached_property
    def roles(self) -> dict[str, str]:
        """The roles by what a folder may call them, the usual names included."""
        own = {module: role for role, module in self.modules.items()}
        return {module: role for role, module in MODULES.items()} | own

    def shift(self, role: str) -> float:
        """Return what is added to a weight of a folder."""
        return self.norm_offset if role.endswith("norm") else 0.0
