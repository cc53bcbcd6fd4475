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

import numpy as np
import numpy.typing as npt

from octavo.models.config import Activation, ModelConfig
from octavo.models.hf_type import HfType, HfWrapper
from octavo.models.program import Program
from octavo.models.recurrence_shape import RecurrenceShape
from octavo.models.section import Section

IntArray = npt.NDArray[np.intp]
Float32 = npt.NDArray[np.float32]

QKV = frozenset({"attn_q", "attn_k", "attn_v"})
ATTENTION = QKV | {"attn_output"}
FFN = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
# The matrices of what each layer gets of a token beside the residual stream (Gemma 4).
LAYER_INPUTS = frozenset({"per_layer_token_embd", "per_layer_model_proj", "inp_gate", "proj"})
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


# What the names of tensors begin with that a language model has no use for, without "model.".
TOWERS = ("vision_tower.", "multi_modal_projector.")


class Fused(NamedTuple):
    """Matrices that are stored as one, and their order in it. A format that has each by itself has
    "" for a name. Of several with one name, a layer has the parts of one.
    """

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


class ArrayForm(NamedTuple):
    """The same for arrays of fp32."""

    read: Callable[[Float32], Float32]
    write: Callable[[Float32], Float32]


LOG_OF_NEGATIVE = ArrayForm(lambda x: -np.exp(x), lambda x: np.log(-x))


def _square(x: float) -> float:
    square: float = x**-2.0  # an integer is written as one: `transformers` wants it
    return round(square) if abs(square - round(square)) < 1e-6 * square else square


PLAIN = Form(float, float)
COUNT = Form(int, int)
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


class Gather(NamedTuple):
    """Matrices whose rows are interleaved in one. A format without it has "" for a name."""

    hf: str
    gguf: str
    parts: tuple[str, ...]
    rows: Callable[[ModelConfig], dict[str, IntArray]]  # of each part, in the whole

    def order(self, config: ModelConfig) -> IntArray:
        """Return which row of the parts, one below the other, comes at each place of the whole."""
        rows = self.rows(config)
        return np.argsort(np.concatenate([rows[part] for part in self.parts]))


class RecurrentLayers(NamedTuple):
    """Layers of another kind than attention: what files call them, and the numbers of their shape.

    The reader of GGUF files hands in what gives the number of a key.
    """

    layer_type: str  # in config.json's ``layer_types``
    hf: Callable[[Section], RecurrenceShape]
    gguf: Callable[[Callable[[str], int]], RecurrenceShape]
    # Of a shape, which is as `hf` makes it.
    hf_keys: Callable[[Any, ModelConfig], Mapping[str, Any]]
    gguf_keys: Callable[[Any], Mapping[str, int]]
    # Vectors that a GGUF file has as matrices of these shapes.
    gguf_matrices: Callable[[Any], Mapping[str, tuple[int, ...]]] = lambda _: {}
    period: int = 0  # one layer in so many is none, if a GGUF file does not say; 0: none is one


RMS_EPS = Key("norm_eps", "rms_norm_eps", "attention.layer_norm_rms_epsilon")


class Windows(NamedTuple):
    """What GGUF files say of sliding windows."""

    default: int = 0  # tokens, of a file without the key; 0: there are none
    period: int = 0  # one layer in so many sees everything, if the file does not say; 0: none does
    theta: float | None = None  # their rotary base; None: that of the others
    scaled: bool = True  # their rotary positions are scaled as those of the others are
    flags: bool = False  # files have a flag for each layer, not the period


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Everything that is particular to a family. What is not stated is as in most."""

    name: str
    title: str  # for people
    note: str = ""  # the same
    program: Callable[[ModelConfig], Program]
    # Of the layer for multi-token prediction, from hidden rows and tokens to logits, if it has any.
    mtp: Callable[[ModelConfig], Program] | None = None
    eps: Key = RMS_EPS
    keys: tuple[Key, ...] = ()  # numbers that not all families have
    fixed: tuple[Fixed, ...] = ()
    switches: Mapping[str, str] = field(default_factory=dict)  # config.json's keys, by field
    recurrent: RecurrentLayers | None = None
    embedding_root: bool = False  # embeddings are multiplied by the root of hidden_size
    attention_scale: float | None = None  # None: 1/sqrt(head_dim), unless a key says otherwise
    sinks: bool = False  # attention has a sink a head
    experts: Mapping[str, Any] = field(
        default_factory=dict
    )  # fields of `Experts`, whatever files say
    modules: Mapping[str, str] = field(default_factory=dict)  # see `MODULES`, which these add to
    rotates_windows: bool = False  # layers without a window have no rotary positions
    temperature: bool = False  # queries may grow with their position (`Temperature`)
    gathers: tuple[Gather, ...] = ()
    fused: tuple[Fused, ...] = ()  # of the files that are written; `FUSED` are read in any case

    # Hugging Face: the model types. The first that has a place for what a model has is written.
    hf: tuple[HfType, ...]
    wrappers: tuple[HfWrapper, ...] = ()  # types of which such a model is a part
    ignored: tuple[str, ...] = ()  # prefixes of tensors that are passed over: see `TOWERS`
    biases: frozenset[str] = frozenset()  # projections that have a bias whatever a file says
    # Keys that say whether projections have one.
    bias_keys: Mapping[str, frozenset[str]] = field(
        default_factory=lambda: {"attention_bias": ATTENTION, "mlp_bias": FFN}
    )
    passed_over: tuple[str, ...] = ()  # keys that the class has and the model does not heed
    hf_interleaved: bool = False  # neighbours are rotated together in a folder, too
    interleaved_experts: bool = False  # gate and up are in one tensor, row by row in turn
    norm_offset: float = 0.0  # what norms' weights in a folder lack
    whole_norms: frozenset[str] = frozenset()  # those that lack nothing
    # Vectors that a folder has as other numbers, and under names without "weight" or "bias".
    bare: Mapping[str, str] = field(default_factory=dict)  # their names, by role
    forms: Mapping[str, ArrayForm] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)  # keys of no consequence

    # GGUF
    architecture: str | None = ""  # if it is not called as here; None: GGUF has none
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # of roles with another name there
    activation: Activation = Activation.SILU
    interleaved: bool = False  # q and k are permuted so that neighbours are rotated together
    windows: Windows | None = None
    # What readers ask for of positions in images, which are not served.
    rotary_sections: tuple[int, ...] = ()
    rotary_switch: str = ""  # the key of a flag that says whether positions are rotary
    unrotated_period: int = 0  # one layer in so many has no rotary positions; 0: none
    expert_size: str = ""  # the key of an expert's width: the family has experts
    also_dense: bool = False  # … or none
    leading_dense: bool = False  # a key says how many layers have none before the first with any
    keys_as_values: bool = False  # layers without a projection to values take the keys' one
    shared_expert_size: str = ""  # the key of the shared expert's
    # The one size whose attention scale is 1/sqrt(hidden_size / heads), by its number of layers.
    hidden_scale_layers: int = 0
    merged_spaces: bool = False  # a SentencePiece vocabulary reaches runs of spaces by merging
    greedy_tokens: bool = False  # added tokens of one take the white space behind them along

    @property
    def gguf(self) -> str:
        """The architecture; "": there is none."""
        return self.name if self.architecture == "" else self.architecture or ""

    @property
    def gguf_keys(self) -> tuple[Key, ...]:
        """Its numbers in a GGUF file."""
        own = {key.field: key for key in (*SOFT_CAPS, *self.keys) if key.gguf}
        return tuple(own.values())

    @cached_property
    def fusions(self) -> dict[str, list[tuple[str, ...]]]:
        """The parts of the matrices that a folder may have fused, by its names for these; of
        several, a layer has one.
        """
        found: dict[str, list[tuple[str, ...]]] = {}
        for each in (*FUSED, *self.fused):
            found.setdefault(each.hf, []).append(each.parts)
        return found

    @cached_property
    def gguf_fusions(self) -> dict[str, tuple[str, ...]]:
        """The parts of the matrices that a GGUF file may have fused, by its names for these."""
        return {each.gguf: each.parts for each in (*FUSED, *self.fused) if each.gguf}

    @cached_property
    def roles(self) -> dict[str, str]:
        """The roles by what a folder may call them, the usual names included."""
        own = {module: role for role, module in {**self.modules, **self.bare}.items()}
        return {module: role for role, module in MODULES.items()} | own

    def shift(self, role: str) -> float:
        """Return what is added to a weight of a folder."""
        name = role.rpartition(".")[2]
        whole = not name.endswith("norm") or name in self.whole_norms
        return 0.0 if whole else self.norm_offset

    def form(self, role: str) -> ArrayForm | None:
        """Return how a folder has a vector that it has as other numbers."""
        return self.forms.get(role.rpartition(".")[2])
