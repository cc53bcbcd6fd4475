"""What the config classes of `transformers` make of a config.json.

tests/oracle/check_config_classes.py compares what the families state with the classes themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.models.config import MAX_LAYERS
from octavo.models.section import Section

TRANSFORMERS = "5.24.0"  # the release that the families describe
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # layer types


class Rule(NamedTuple):
    """How a class computes a key: of all values of the file and of the defaults."""

    says: str  # for people
    value: Callable[[Section], Any]
    always: bool = False  # over what the file has, too; else where it has nothing or null


def layers(values: Section) -> range:
    """Return the layers' numbers, of which there are not too many for a list of them."""
    count = values.count("num_hidden_layers")
    if count > MAX_LAYERS:
        values.fail(f"num_hidden_layers is {count}, above {MAX_LAYERS}")
    return range(count)


def layer_types(values: Section, sliding: Callable[[int], bool]) -> list[str]:
    """Return the type of each layer."""
    return [SLIDING if sliding(index) else FULL for index in layers(values)]


HEAD_DIM = Rule(
    "hidden_size // num_attention_heads",
    lambda values: values.count("hidden_size") // values.count("num_attention_heads"),
)
KV_HEADS = Rule("num_attention_heads", lambda values: values.count("num_attention_heads"))
USED_WINDOW = Rule(
    "sliding_window if use_sliding_window",
    lambda values: values.values["sliding_window"] if values.flag("use_sliding_window") else None,
    always=True,
)
# What most classes have in common.
LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# Some pairs are rotated, with the frequencies that they have where all are (Gemma 4).
PROPORTIONAL = "proportional"
ROPE_TYPES = {name: name for name in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")}


@dataclass(frozen=True, kw_only=True, eq=False)
class HfType:
    """A ``model_type`` of config.json, and its config class as far as the computation depends on
    it.

    What a model has follows from the keys that its class has: windows from ``sliding_window`` and
    ``layer_types``, experts from ``num_experts_per_tok``, biases from `Family.bias_keys`.
    """

    model_type: str
    classes: str  # what the names of its classes begin with: "Llama"
    causal_lm: str = ""  # the model's class, if it is not called as the others
    # Every key that is a field of the class and means something here, and its default.
    defaults: Mapping[str, Any]
    computed: Mapping[str, Rule] = field(default_factory=dict)  # by key
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of keys
    # Keys of older files, which overrule those that they are now.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # The width of feed-forward layers, if the model makes another of it than intermediate_size.
    feed_forward: Callable[[Section], int] | None = None
    # The rope types that the class knows, and the one that it computes for each.
    rope_types: Mapping[str, str] = field(default_factory=lambda: ROPE_TYPES)
    # The default of rope_theta by layer type, or that of all layers as "".
    rope_theta: Mapping[str, float] = field(default_factory=lambda: {"": 10000.0})
    local_theta: str = "rope_local_base_freq"  # the key of sliding layers' in old files, or none
    rope_keys: frozenset[str] = frozenset()  # of the rotary section, that any rope type may have
    # Layers that ``layer_types`` calls sliding have no window where ``sliding_window`` is null; for
    # other classes the two contradict each other.
    null_window: bool = False
    # The default of partial_rotary_factor; 0: unscaled rotary positions do not heed it.
    partial_rotary: float = 0.0
    # The tokenizer's class (models/auto/tokenization_auto.py). "": tokenizer.json as it is; None:
    # that which the folder names.
    tokenizer: str | None = None
    tokenizer_overrules: bool = False  # whatever class a folder names

    @property
    def config_class(self) -> str:
        return f"{self.classes}Config"

    @property
    def model_classes(self) -> tuple[str, str]:
        """The model with a head, which files name, and the one without."""
        return self.causal_lm or f"{self.classes}ForCausalLM", f"{self.classes}Model"


@dataclass(frozen=True, kw_only=True, eq=False)
class HfWrapper:
    """A ``model_type`` that sees or hears, too. Of its config.json only ``text_config`` is read:
    what it says of its language model, which has a model type of its own.
    """

    model_type: str
    classes: str  # as in `HfType`
    texts: tuple[str, ...]  # the model types that text_config may name; it means the first by none
    tied: bool = True  # the default of tie_word_embeddings, which is read beside text_config
    passed_over: tuple[str, ...] = ()  # keys of text_config that such a model does not heed
    tokenizer: str | None = None  # as in `HfType`
    tokenizer_overrules: bool = False

    @property
    def model_classes(self) -> tuple[str, str]:
        """As in `HfType`."""
        return f"{self.classes}ForConditionalGeneration", f"{self.classes}Model"
