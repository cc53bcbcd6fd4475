"""What a model takes of memory while it serves: weights, KV cache and work space, as sums.

The KV cache is a product (Pope et al., 2022, section 3.3; Kwon et al., 2023, section 3):

    2 for keys and values × layers × KV heads × head width × tokens × users × bytes a number

with the scales of int8 and int4 as a product of their own. A layer with a sliding window keeps
its window at most. The engine's cache holds whole blocks, so that what it allocates is a little
more: `KvCacheSize.paged_bytes`, which equals what an executor allocates, byte for byte, as `Need`'s
weights do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import NamedTuple

from octavo.engine.cache_plan import all_work_bytes
from octavo.engine.config import EngineConfig
from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import (
    KvDtype,
    KvKind,
    KvLayout,
    layers_by_kind,
    lengths_by_kind,
    peak_of_window,
)
from octavo.kv_cache.state_layout import StateLayout
from octavo.loader.base import WeightFormat
from octavo.loader.rounding import FLOATS, QUANTIZATIONS
from octavo.models.config import ModelConfig
from octavo.models.family import LAYER_INPUTS
from octavo.spec_decode.draft_model import needed_blocks
from octavo.tools.plan.defaults import engine_defaults
from octavo.tools.plan.gpu import RUNTIME_BYTES
from octavo.tools.plan.quantization import StoredWeights, as_rounded, for_gpus, held, in_scheme
from octavo.tools.plan.schemes import GGUF, scheme
from octavo.tools.plan.subject import Subject, part

MOST_USERS = 1 << 20
_NUMBER_BYTES = {
    KvDtype.BF16: Fraction(2),
    KvDtype.FP16: Fraction(2),
    KvDtype.INT8: Fraction(1),
    KvDtype.INT4: Fraction(1, 2),
    KvDtype.FP8: Fraction(1),
}
# Of a key or value on a head: a scale of two bytes, and of int4 a least value beside.
_SCALE_BYTES = {KvDtype.INT8: 2, KvDtype.INT4: 4}


# --- the cache -----------------------------------------------------------------------------------


class LayerKind(NamedTuple):
    """Layers that keep the same tokens of a sequence, with as many heads as wide. A ``latent`` is
    one key on one head, which is the value, too.
    """

    layers: int
    window: int | None
    kept: int  # tokens: the context, or the window if that is less
    blocks: int  # most that a sequence holds of one layer, whole ones
    kv_heads: int
    head_dim: int
    layers_per_group: int  # those whose keys and values share a block
    latent: bool


@dataclass(frozen=True)
class KvCacheSize:
    """The KV cache of ``users`` sequences of ``context`` tokens each. Sizes in bytes."""

    kinds: tuple[LayerKind, ...]
    context: int
    users: int
    dtype: KvDtype
    block_size: int
    longest: int  # the model's context, by which layers are divided into groups
    state: StateLayout | None = None  # of recurrent layers, for each sequence

    @staticmethod
    def of(
        model: ModelConfig, context: int, users: int, dtype: KvDtype, block_size: int = 16
    ) -> KvCacheSize:
        state = KvLayout.of(model, block_size, dtype).state
        counts = {kind: len(layers) for kind, layers in layers_by_kind(model).items()}
        longest = model.context_length
        made = KvCacheSize.made_of(counts, context, users, dtype, block_size, longest)
        return replace(made, state=state)

    @staticmethod
    def made_of(
        layers: Mapping[KvKind, int],
        context: int,
        users: int,
        dtype: KvDtype,
        block_size: int = 16,
        longest: int | None = None,
    ) -> KvCacheSize:
        """``layers``: how many there are of each kind; ``longest``: the model's context, if it is
        not ``context``.
        """
        longest = context if longest is None else longest
        for name, value in (
            *(("layers", count) for count in layers.values()),
            *(("window", kind.window) for kind in layers if kind.window is not None),
            *(("kv_heads", kind.kv_heads) for kind in layers),
            *(("head_dim", kind.head_dim) for kind in layers),
            *(("context", context), ("users", users), ("block_size", block_size)),
            ("longest", longest),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}, below 1")
        if len({kind.latent for kind in layers}) > 1:
            raise ValueError("some layers keep latents and others keys and values")
        kinds = tuple(
            LayerKind(
                layers[kind],
                kind.window,
                context if kind.window is None else min(context, kind.window),
                peak_of_window(kind.window, context, block_size),
                kind.kv_heads,
                kind.head_dim,
                length,
                kind.latent,
            )
            for kind, length in lengths_by_kind(layers, dtype, longest, block_size).items()
        )
        return KvCacheSize(kinds, context, users, dtype, block_size, longest)

    def with_kv_heads(self, count: int) -> KvCacheSize:
        """Return the same with so many KV heads in every layer."""
        layers = Counter[KvKind]()
        for kind in self.kinds:
            layers[KvKind(kind.window, count, kind.head_dim)] += kind.layers
        made = KvCacheSize.made_of(
            layers, self.context, self.users, self.dtype, self.block_size, self.longest
        )
        return replace(made, state=self.state)

    @property
    def alike(self) -> bool:
        """Whether all layers have as many KV heads, as wide."""
        return len({(kind.kv_heads, kind.head_dim) for kind in self.kinds}) == 1

    @property
    def latent(self) -> bool:
        """Whether the layers keep latents; all do, or none."""
        return self.kinds[0].latent

    @property
    def _each(self) -> int:
        """What a token has on a head: key and value, or a latent."""
        return 1 if self.latent else 2

    def token_bytes(self, kind: LayerKind) -> int:
        """Return the bytes of a token in one layer."""
        return kind.kv_heads * self.dtype.token_bytes(kind.head_dim, kind.latent)

    @property
    def token_layers(self) -> int:
        """Tokens kept of a sequence, added up over the layers."""
        return sum(kind.layers * kind.kept for kind in self.kinds)

    @property
    def number_bytes(self) -> float:
        """The bytes of one number, without its share of a scale."""
        return float(_NUMBER_BYTES[self.dtype])

    @property
    def numbers(self) -> int:
        """Bytes of keys and values themselves."""
        numbers = self._each * self._vector_numbers * self.users
        return int(numbers * _NUMBER_BYTES[self.dtype])

    @property
    def _vectors(self) -> int:
        """The keys of a sequence: of each token kept, in each layer, on each head."""
        return sum(kind.layers * kind.kept * kind.kv_heads for kind in self.kinds)

    @property
    def _vector_numbers(self) -> int:
        """The numbers of those keys."""
        return sum(kind.layers * kind.kept * kind.kv_heads * kind.head_dim for kind in self.kinds)

    @property
    def scales(self) -> int:
        return self._each * self._vectors * self.users * _SCALE_BYTES.get(self.dtype, 0)

    @property
    def padding(self) -> int:
        """Bytes that keys in whole words and odd heads leave unused; usually none."""
        return self.bytes - self.numbers - self.scales - self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of recurrent layers, without padding."""
        return 0 if self.state is None else self.state.payload_bytes * self.users

    @property
    def state_paged_bytes(self) -> int:
        """The same in whole blocks."""
        return 0 if self.state is None else self.state.pages * self._block_bytes * self.users

    @property
    def bytes(self) -> int:
        return sum(map(self.kind_bytes, self.kinds)) + self.state_bytes

    @property
    def without_windows(self) -> int:
        """What it would take if every layer kept the whole context."""
        return self.bytes_per_token * self.context * self.users + self.state_bytes

    @property
    def paged_bytes(self) -> int:
        """In whole blocks, as the engine holds it."""
        return sum(map(self.kind_paged_bytes, self.kinds)) + self.state_paged_bytes

    @property
    def block_padding(self) -> int:
        """What of `paged_bytes` is at the end of blocks, where groups of layers take less than the
        largest.
        """
        slots = (
            kind.layers * kind.blocks * self.block_size * self.token_bytes(kind)
            for kind in self.kinds
        )
        return self.paged_bytes - self.state_paged_bytes - sum(slots) * self.users

    @property
    def bytes_per_token(self) -> int:
        """The bytes of the next token while it is inside every window."""
        return sum(kind.layers * self.token_bytes(kind) for kind in self.kinds)

    @property
    def factors(self) -> dict[str, int | float]:
        """By name; their product is `numbers`."""
        first, *others = self.kinds
        layers, tokens = {"layers": first.layers}, {"context": first.kept}
        if others:
            layers, tokens = {"layers_times_tokens": self.token_layers}, {}
        both = {"keys_and_values": 2}
        heads = {"kv_heads": first.kv_heads, "head_dim": first.head_dim}
        if self.latent:
            both, heads = {}, {"latent": first.head_dim}
        if not self.alike:
            layers, heads = (
                {"layers_times_tokens_times_heads_times_width": self._vector_numbers},
                {},
            )
        size = self.number_bytes
        return {
            **both,
            **layers,
            **heads,
            **tokens,
            "users": self.users,
            "bytes_per_number": int(size) if size.is_integer() else size,
        }

    @property
    def steps(self) -> list[str]:
        """The sum as it would be written down, a line a step."""
        if not self.alike:
            return self._unlike_steps()
        kv_heads = _count(self.kinds[0].kv_heads, "KV head")
        heads = f"{kv_heads} × {self.kinds[0].head_dim:,} wide"
        if self.latent:
            heads, kv_heads = f"{self.kinds[0].head_dim:,} (latent and rotary key)", "1 latent"
        lines = []
        if len(self.kinds) > 1:
            for kind in self.kinds:
                lines.append(
                    f"{_count(kind.layers, 'layer')} × {kind.kept:,} tokens "
                    f"({_reach(kind, self.context)}) = {kind.layers * kind.kept:,}"
                )
            lines.append(f"layers × tokens: {self.token_layers:,}")
            layers, tokens = f"{self.token_layers:,} (layers × tokens)", ""
        else:
            (kind,) = self.kinds
            layers = _count(kind.layers, "layer")
            tokens = f"{kind.kept:,} tokens × "
            if kind.window is not None:
                lines.append(f"tokens kept: {_reach(kind, self.context)}")
        return lines + self._last_steps(
            f"{layers} × {heads} × {tokens}", f"{layers} × {kv_heads} × {tokens}"
        )

    def _unlike_steps(self) -> list[str]:
        """The same where layers have heads of their own."""
        lines = [
            f"{_count(kind.layers, 'layer')} × {kind.kept:,} tokens ({_reach(kind, self.context)}) "
            f"× {_count(kind.kv_heads, 'KV head')} × {kind.head_dim:,} wide = "
            f"{kind.layers * kind.kept * kind.kv_heads * kind.head_dim:,}"
            for kind in self.kinds
        ]
        return lines + self._last_steps(
            f"{self._vector_numbers:,} (together) × ",
            f"{self._vectors:,} (layers × tokens × KV heads) × ",
        )

    def _last_steps(self, numbers: str, vectors: str) -> list[str]:
        """The lines from keys' numbers, and how many keys there are, to bytes."""
        people = _count(self.users, "user")
        both = "" if self.latent else "2 (keys and values) × "
        lines = [
            f"{both}{numbers}{people} × "
            f"{self.number_bytes:g} {'byte' if self.number_bytes == 1 else 'bytes'} "
            f"({self.dtype}) = {self.numbers:,} bytes"
        ]
        if self.scales:
            what = _count(self._each, "scale")
            if self.dtype is KvDtype.INT4:
                what += f" and {_count(self._each, 'least value')}"
            lines.append(
                f"scales: {vectors}{people} × "
                f"{self._each * _SCALE_BYTES[self.dtype]} bytes ({what}) = {self.scales:,} bytes"
            )
        if self.padding:
            lines.append(f"keys in whole words: {self.padding:,} bytes")
        if self.state_bytes:
            lines.append(f"states of recurrent layers: {self.state_bytes:,} bytes")
        if self.scales or self.padding or self.state_bytes:
            lines.append(f"together: {self.bytes:,} bytes")
        return lines

    def kind_bytes(self, kind: LayerKind) -> int:
        return kind.layers * kind.kept * self.token_bytes(kind) * self.users

    def kind_paged_bytes(self, kind: LayerKind) -> int:
        blocks = kind.layers // kind.layers_per_group * kind.blocks
        return blocks * self._block_bytes * self.users

    @property
    def _block_bytes(self) -> int:
        largest = max(each.layers_per_group * self.token_bytes(each) for each in self.kinds)
        size = largest * self.block_size
        return size if self.state is None else self.state.page_bytes(size)


def kv_cache_bytes(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    users: int = 1,
    dtype: str = "fp16",
    window: int | None = None,
) -> int:
    """Bytes of a KV cache, of plain numbers.

    2 (keys and values) × ``layers`` × ``kv_heads`` × ``head_dim`` × tokens × ``users`` × bytes,
    where tokens are ``context`` or, with a sliding ``window``, no more than that; int8 and int4
    have scales beside (`KvDtype`). Raises `ValueError` for a number below 1 or an unknown dtype.

    Llama 2 7B, 4,096 tokens in fp16: 2 × 32 × 32 × 128 × 4,096 × 1 × 2 bytes = 2 GiB; its steps
    are `kv_cache_steps` of the same arguments.

    >>> kv_cache_bytes(layers=32, kv_heads=32, head_dim=128, context=4096)
    2147483648
    """
    return _plain(layers, kv_heads, head_dim, context, users, dtype, window).bytes


def kv_cache_steps(
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    users: int = 1,
    dtype: str = "fp16",
    window: int | None = None,
) -> list[str]:
    """How `kv_cache_bytes` of the same arguments comes about, a line a step.

    >>> kv_cache_steps(layers=32, kv_heads=8, head_dim=128, context=8192)[0].partition(" = ")[2]
    '1,073,741,824 bytes'
    """
    return _plain(layers, kv_heads, head_dim, context, users, dtype, window).steps


def _plain(
    layers: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    users: int,
    dtype: str,
    window: int | None,
) -> KvCacheSize:
    kinds = {KvKind(window, kv_heads, head_dim): layers}
    return KvCacheSize.made_of(kinds, context, users, KvDtype.of(dtype))


class Sharing(NamedTuple):
    """Attention with some number of KV heads for the query heads (Shazeer, 2019; Ainslie et al.,
    2023).
    """

    name: str
    kv_heads: int | None  # None: layers differ
    bytes: int  # of the cache
    own: bool  # the model's own


def sharings(model: ModelConfig, cache: KvCacheSize) -> list[Sharing]:
    """The same cache with as many KV heads as heads, as it is, and with one. Latents have no heads
    (MLA; DeepSeek-AI, 2024).
    """
    if cache.latent:
        return [Sharing("MLA", 1, cache.bytes, True)]
    names = {model.num_heads: "MHA", 1: "MQA"}
    counts = {kind.kv_heads for kind in cache.kinds}
    own = counts if len(counts) == 1 else set()
    found = [
        Sharing(names.get(count, "GQA"), count, cache.with_kv_heads(count).bytes, count in own)
        for count in sorted({model.num_heads, 1} | own, reverse=True)
    ]
    if not own:
        found.insert(1, Sharing("GQA", None, cache.bytes, own=True))
    return found


# --- weights -------------------------------------------------------------------------------------


class WeightPart(NamedTuple):
    name: str
    formats: tuple[str, ...]
    numbers: int
    bytes: int


def weight_parts(subject: Subject, stored: StoredWeights) -> list[WeightPart]:
    """The sum of the weights by what they do, largest first."""
    roles: dict[str, list[str]] = {}
    for role in subject.program.weights:
        roles.setdefault(_purpose(role), []).append(role)
    parts = [
        WeightPart(
            name,
            tuple(sorted({stored.formats[role].name for role in members})),
            sum(prod(subject.program.weights[role]) for role in members),
            sum(stored.sizes[role] for role in members),
        )
        for name, members in roles.items()
    ]
    return sorted(parts, key=lambda each: -each.bytes)


def _purpose(role: str) -> str:
    if (name := part(role)) != "layers":
        return {"norms": "norms and biases"}.get(name, name)
    own = role.split(".")[2] if role.startswith("layers.") else role  # layers.N.own
    if own in LAYER_INPUTS:
        return "layer inputs"
    if own.startswith("attn"):
        return "attention"
    if own.startswith("ffn_gate_inp") or own == "exp_probs_b":
        return "router"
    return "experts" if own.endswith("_exps") else "feed-forward"


def active_parameters(subject: Subject) -> int:
    """Numbers that one token is multiplied with: of experts those that are chosen. The embedding
    counts, as in published totals.
    """
    experts = subject.program.config.experts
    if experts is None:
        return subject.parameters
    routed = sum(
        prod(shape)
        for role, shape in subject.program.weights.items()
        if _purpose(role) == "experts"
    )
    return subject.parameters - routed + routed * experts.chosen // experts.count


# --- on devices ----------------------------------------------------------------------------------


class DeviceMemory(NamedTuple):
    """Some memory, in bytes. ``here``: of this machine, where the engine holds weights packed;
    ``gpu``: a runtime takes some of it, too; ``fp8``: a GPU that computes in fp8.
    """

    name: str
    memory_bytes: int
    here: bool = False
    gpu: bool = False
    fp8: bool = False

    def usual(self, config: EngineConfig, given: Collection[str] = ()) -> EngineConfig:
        """With the defaults of such a device, but for the settings that are ``given``. A step has a
        token for each sequence that runs.
        """
        values = engine_defaults(self.here, self.gpu)._asdict()
        values["max_num_batched_tokens"] = max(
            values["max_num_batched_tokens"], config.max_num_seqs
        )
        return replace(config, **{k: v for k, v in values.items() if k not in given})


class PlannedDraftModel(NamedTuple):
    """A draft model beside the model: its weights, and a cache of its own."""

    subject: Subject
    stored: StoredWeights


@dataclass(frozen=True)
class ServingLoad:
    """What is to be served: a model in some formats, to so many users at once."""

    subject: Subject
    stored: StoredWeights
    context: int  # tokens of each sequence, prompt and output
    users: int
    dtype: KvDtype
    # Its block size, the limits of a step, how it drafts, and the cache's share of the memory that
    # is left. Each place has its own defaults: `DeviceMemory.usual`.
    config: EngineConfig
    draft: PlannedDraftModel | None = None

    @cached_property
    def cache(self) -> KvCacheSize:
        model = self.subject.program.config
        return KvCacheSize.of(model, self.context, self.users, self.dtype, self.config.block_size)

    @cached_property
    def draft_cache(self) -> KvCacheSize | None:
        """The cache of the draft model, which reads as much of a sequence as its context takes."""
        if self.draft is None:
            return None
        model = self.draft.subject.program.config
        context = min(self.context, model.context_length)
        return KvCacheSize.of(model, context, self.users, self.dtype, self.config.block_size)

    @cached_property
    def layout(self) -> KvLayout:
        return self._layout_of(self.subject)

    def _layout_of(self, subject: Subject) -> KvLayout:
        return KvLayout.of(subject.program.config, self.config.block_size, self.dtype)

    @cached_property
    def work_bytes(self) -> int:
        """Activations and logits of the engine's largest step."""
        draft = None if self.draft is None else self.draft.subject.program
        return all_work_bytes(self.config, self.subject.program, draft)

    def weight_bytes(self, place: DeviceMemory) -> int | None:
        """The draft model's too; None: the engine cannot hold such a format or such a cache, or
        does not compute such a model (here).
        """
        total = 0
        unserved = self.dtype not in KvDtype.served() or for_gpus(self.stored)
        if not place.gpu and (unserved or not self.subject.served):
            return None
        for subject, stored in ((self.subject, self.stored), *([self.draft] if self.draft else [])):
            sizes = held(subject, stored, self.config.isa) if place.here else stored.sizes
            if sizes is None:
                return None
            total += sum(sizes.values())
        return total

    def sequence_bytes(self, context: int | None = None) -> tuple[int, int]:
        """Return the bytes of the cache in whole blocks: what a sequence takes, and what the draft
        model's cache takes once beside.
        """
        length = self.context if context is None else context
        size, once = peak_blocks(self.layout, length) * self.layout.block_bytes, 0
        if self.draft is not None:
            layout = self._layout_of(self.draft.subject)
            read = min(length, self.draft.subject.program.config.context_length)
            blocks = peak_blocks(layout, read)
            size += blocks * layout.block_bytes
            once = (needed_blocks(layout, read) - blocks) * layout.block_bytes
        return size, once


class Need(NamedTuple):
    """What a load takes on a place, and what of it the place has. Sizes in bytes."""

    place: DeviceMemory
    weight_bytes: int
    work_bytes: int
    runtime_bytes: int  # of a GPU: its context, workspaces, graphs
    kv_bytes: int  # in whole blocks
    budget: int  # for the cache, beside the others; may be negative
    sequences: int  # of the load's context that fit at once
    context: int  # the longest, in tokens, at which all users fit; 0: not even one token

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.work_bytes + self.runtime_bytes + self.kv_bytes

    @property
    def fits(self) -> bool:
        return self.kv_bytes <= self.budget


def need(load: ServingLoad, place: DeviceMemory) -> Need | None:
    """None when the engine cannot hold the weights' format there."""
    weights = load.weight_bytes(place)
    return None if weights is None else _need(load, place, weights)


def _need(load: ServingLoad, place: DeviceMemory, weights: int) -> Need:
    share = load.config.memory_utilization
    runtime = RUNTIME_BYTES if place.gpu else 0
    if place.gpu:  # as vLLM's gpu_memory_utilization: of all there is, for all that is held
        budget = int(place.memory_bytes * share) - runtime - weights - load.work_bytes
    else:
        left = place.memory_bytes - weights - load.work_bytes
        budget = int(left * share) if left > 0 else left
    each, once = load.sequence_bytes()
    return Need(
        place,
        weights,
        load.work_bytes,
        runtime,
        each * load.users + once,
        budget,
        max(0, budget - once) // each,
        _longest(load, budget),
    )


def _longest(load: ServingLoad, budget: int) -> int:
    """Tokens of each of the load's users that so many bytes hold, within the model's context."""

    def takes(context: int) -> int:
        each, once = load.sequence_bytes(context)
        return each * load.users + once

    low, high = 0, load.subject.program.config.context_length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if takes(middle) <= budget else (low, middle - 1)
    return low


# --- what would fit ------------------------------------------------------------------------------


class Alternative(NamedTuple):
    load: ServingLoad
    need: Need
    changed: tuple[str, ...]  # "weights", "kv_dtype", "context", "users"


def narrower(load: ServingLoad, place: DeviceMemory) -> list[StoredWeights]:
    """The weights in formats that take less, the widest first: rounded while loading where they are
    floats, on a GPU to fp8 before 4 bits; else in other GGUF formats.
    """
    subject = load.subject
    floats = all(
        load.stored.formats[role] in FLOATS for role, shape in subject.program.weights.items()
    )
    found = [load.stored]
    rounded = ("fp8", "int4") if place.fp8 else tuple(QUANTIZATIONS)
    for name in rounded if floats else ("q8_0", "q4_k", "q3_k", "q2_k"):
        try:
            less = (
                as_rounded(subject, name)
                if floats
                else in_scheme(subject, scheme(name), GGUF[WeightFormat.Q8_0])
            )
        except ValueError:  # rows that are no whole groups of this format
            continue
        if less.bytes < 0.95 * found[-1].bytes:
            found.append(less)
    return found[1:]


def alternatives(
    load: ServingLoad, variants: Sequence[StoredWeights], place: DeviceMemory
) -> list[Alternative]:
    """What fits where ``load`` does not, the nearest first: narrower formats that keep context and
    users, each without need of a still narrower one; then fewer users and a shorter context, in the
    load's own formats if that is enough, else in the narrowest.

    ``variants``: the weights in narrower formats, the widest first.
    """
    weights = [load.stored, *variants]
    codes = (KvDtype.FP8,) if place.fp8 else (KvDtype.INT8, KvDtype.INT4)
    served = place.gpu or load.dtype in KvDtype.served()
    dtypes = [load.dtype] if served else [KvDtype.INT8]
    dtypes += [dtype for dtype in codes if _narrower(dtype, dtypes[0])]
    sizes = [
        replace(load, stored=stored, dtype=dtypes[0]).weight_bytes(place) for stored in weights
    ]

    def fit(other: ServingLoad, w: int) -> Need | None:
        size = sizes[w]
        return None if size is None else _need(other, place, size)

    found: list[Alternative] = []
    kept: list[tuple[int, int]] = []
    pairs = sorted(
        ((w, k) for w in range(len(weights)) for k in range(len(dtypes))),
        key=lambda pair: (sum(pair), pair),
    )
    for w, k in pairs[served:]:  # the first is what was asked for
        if any(w >= other_w and k >= other_k for other_w, other_k in kept):
            continue
        other = replace(load, stored=weights[w], dtype=dtypes[k])
        if (now := fit(other, w)) is not None and now.fits:
            kept.append((w, k))
            found.append(_changed(load, other, now))
    narrowest = len(dtypes) - 1
    for w, k in ((0, 0), (0, narrowest), (len(weights) - 1, narrowest)):
        other = replace(load, stored=weights[w], dtype=dtypes[k])
        if (now := fit(other, w)) is None or (w, k) in kept:
            continue
        less = [(each, fit(each, w)) for each in _fewer(other, now)]
        found += [_changed(load, each, then) for each, then in less if then is not None]
        if less:
            break
    return found


def _fewer(load: ServingLoad, fit: Need) -> Iterator[ServingLoad]:
    """The same with fewer users, and with a shorter context."""
    if 0 < fit.sequences < load.users:
        yield replace(load, users=fit.sequences)
    # In whole blocks, and not so short that nobody would call it an alternative.
    context = fit.context // load.config.block_size * load.config.block_size
    if load.context > context >= max(load.config.block_size, load.context // 32):
        yield replace(load, context=context)


def _changed(asked: ServingLoad, found: ServingLoad, fit: Need) -> Alternative:
    differs: dict[str, Callable[[ServingLoad], object]] = {
        "weights": lambda load: load.stored.name,
        "kv_dtype": lambda load: load.dtype,
        "context": lambda load: load.context,
        "users": lambda load: load.users,
    }
    names = tuple(name for name, of in differs.items() if of(asked) != of(found))
    return Alternative(found, fit, names)


def _narrower(one: KvDtype, other: KvDtype) -> bool:
    return _NUMBER_BYTES[one] < _NUMBER_BYTES[other]


# --- words ---------------------------------------------------------------------------------------


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _reach(kind: LayerKind, context: int) -> str:
    if kind.window is None:
        return "the whole context"
    if kind.window < context:
        return f"their window, of {context:,}"
    return f"all of the context, their window is {kind.window:,}"
