"""From a model argument to a running engine: what fits, and the arithmetic when it does not."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import octavo.checkpoint
from octavo.checkpoint import pull
from octavo.checkpoint.base import Checkpoint, CheckpointError
from octavo.checkpoint.rounding import is_known, rounded, summary
from octavo.engine.clock import RealClock
from octavo.engine.detokenize import IncrementalDetokenizer
from octavo.engine.engine import Engine
from octavo.engine.offload import STAGING_BYTES, check_disk, make_tiers
from octavo.engine.pace import Pace, guessed
from octavo.execute.batch import slice_rows
from octavo.execute.cpu import usable_cpus
from octavo.execute.memory import available_memory
from octavo.kv.cache import peak_blocks
from octavo.kv.layout import KvDtype, KvLayout
from octavo.model.config import ModelConfig
from octavo.model.families import program
from octavo.model.program import Program
from octavo.schedule.config import SchedulerConfig
from octavo.schedule.policies.config import PolicyConfig, PolicyName
from octavo.schedule.scheduler import Scheduler
from octavo.speculate import draft_checkpoint, draft_model, layer_skip, medusa
from octavo.speculate.config import SpeculativeConfig
from octavo.speculate.draft_checkpoint import DraftModel
from octavo.speculate.drafter import Drafter, ModelDrafter, Target
from octavo.speculate.guess import most_drawn
from octavo.speculate.heads import Heads, read_heads
from octavo.speculate.speculator import Speculator

_TABLES_ALWAYS = 64 << 20  # bytes of block tables that need no place in the plan


class SettingsError(ValueError):
    """Settings that contradict each other, or that this machine or build cannot honour."""


class DoesNotFit(SettingsError):
    """The settings ask for more than the machine has; the message carries the arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Names and meanings of vLLM's flags. None: derived from the model or the machine."""

    max_model_len: int | None = None  # tokens; None: the model's context, or what fits of it
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512  # a step's token budget
    itl_target: float | None = None  # ms that a step may take in which somebody decodes
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    scheduling_policy: PolicyName = "fcfs"
    priority_ageing: float | None = None  # as in `PolicyConfig`, and the next four
    fair_output_cost: float | None = None
    best_effort_deadline: float | None = None
    max_queue_time: float | None = None
    shed_late: bool = False
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None  # wins over memory_utilization
    memory_utilization: float = 0.5  # share of the memory available beside the weights
    kv_cache_dtype: str = "auto"  # "auto" (bf16), "bf16", "fp16", "int8" or "int4"
    enable_prefix_caching: bool = True
    max_logprobs: int = 20
    threads: int | None = None
    seed: int | None = None  # of requests that bring none; None: random
    isa: str | None = None  # force an instruction-set tier
    quantization: str | None = None  # "int8" or "int4": round a float checkpoint while loading
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None  # None: no speculation
    kv_offload_memory: int | None = None  # bytes, for what the KV cache has no room for
    kv_offload_dir: str | None = None  # a folder for them, which outlives the process
    kv_offload_disk: int | None = None  # bytes of files in it; None: some of what is free

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, below 1")
        # The shortest sequence is a token of prompt and a new one.
        for name, least in (
            ("max_model_len", 2),
            ("kv_cache_memory_bytes", 1),
            ("threads", 1),
            ("kv_offload_memory", 1),
            ("kv_offload_disk", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, below {least}")
        if self.itl_target is not None and not 0 < self.itl_target < inf:
            raise ValueError(f"itl_target is {self.itl_target} ms, not above 0")
        if self.block_size % 16:
            raise ValueError(f"block_size is {self.block_size}, not a multiple of 16")
        if not 0 < self.memory_utilization <= 1:
            raise ValueError(f"memory_utilization is {self.memory_utilization}, outside 0 to 1")
        KvDtype.of(self.kv_cache_dtype)  # refuses
        if self.kv_offload_disk is not None and self.kv_offload_dir is None:
            raise ValueError("kv_offload_disk is a budget of kv_offload_dir, which is not given")
        if self.kv_offload_bytes and not self.enable_prefix_caching:
            raise ValueError(
                "kv_offload_memory and kv_offload_dir are tiers of the prefix cache, which "
                "enable_prefix_caching turns off"
            )
        _ = self.policy  # refuses
        if self.quantization is not None and not is_known(self.quantization):
            raise ValueError(
                f"quantization {self.quantization!r} is not supported; int8 and int4 round a float "
                "checkpoint, and a quantized one is recognised by itself"
            )
        if self.speculative_config is not None:
            speculation = SpeculativeConfig.of(self.speculative_config)
            object.__setattr__(self, "speculative_config", speculation)
            if self.max_num_batched_tokens < 2:
                raise ValueError(
                    "speculation needs max_num_batched_tokens of 2 or more, a token and a draft; "
                    f"it is {self.max_num_batched_tokens}"
                )

    @property
    def kv_offload_bytes(self) -> int:
        """Of host memory: a tier on disk is read through it."""
        if self.kv_offload_memory is None:
            return STAGING_BYTES if self.kv_offload_dir is not None else 0
        return self.kv_offload_memory

    @property
    def policy(self) -> PolicyConfig:
        names = [each.name for each in fields(PolicyConfig)]
        return PolicyConfig(**{name: getattr(self, name) for name in names})

    @property
    def speculation(self) -> SpeculativeConfig | None:
        given = self.speculative_config
        return None if given is None else SpeculativeConfig.of(given)

    def max_logits_rows(self, longest: int | None = None) -> int:
        """Most rows of logits in a step: one of every sequence, and its drafts as they fit.

        ``longest``: tokens of a draft, where the drafter gives fewer than the settings allow.
        """
        speculation = self.speculation
        if speculation is None:
            return self.max_num_seqs
        paths = self.max_num_seqs + speculation.max_branches
        return min(self.max_num_batched_tokens, paths * (1 + (longest or speculation.longest)))

    @property
    def step_target(self) -> float | None:
        """`itl_target` in seconds."""
        return None if self.itl_target is None else self.itl_target / 1000

    @property
    def max_branches(self) -> int:
        """Most alternatives that a step checks beside the drafts."""
        return 0 if self.speculation is None else self.speculation.max_branches

    def layout_of(self, model: ModelConfig) -> KvLayout:
        return KvLayout.of(model, self.block_size, KvDtype.of(self.kv_cache_dtype))


class CachePlan(NamedTuple):
    """How the memory is divided. Sizes in bytes unless they say otherwise."""

    num_blocks: int
    max_model_len: int  # tokens
    kv_cache_bytes: int  # the draft model's too, as in the next two
    weight_bytes: int
    work_bytes: int  # activations and logits of the largest step, and what drafting holds
    capacity_tokens: int
    capacity_sequences: float
    draft_blocks: int = 0  # of the draft model's cache


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine ready to run, and what the start report says about it."""

    engine: Engine
    checkpoint: Checkpoint
    config: EngineConfig
    max_model_len: int
    num_blocks: int
    kv_cache_bytes: int
    weight_bytes: int
    capacity_tokens: int  # tokens of cache if every slot is filled
    capacity_sequences: float  # sequences of max_model_len tokens that fit at once
    draft: DraftModel | None = None
    draft_blocks: int = 0
    heads: Heads | None = None

    @property
    def draft_tokens(self) -> int:
        """The longest sequence that the draft model drafts for."""
        if self.draft is None:
            return 0
        layout = self.draft.layout
        most = min(self.max_model_len, self.draft.checkpoint.config.context_length)
        return _longest(
            most, lambda length: draft_model.needed_blocks(layout, length) <= self.draft_blocks
        )

    def report(self) -> str:
        """The start report: one line a fact."""
        model = self.checkpoint.config
        speculation, quantization = self.config.speculation, self.config.quantization
        stop = sorted(self.checkpoint.tokenizer.eos_token_ids)
        shown = ", ".join(f"{self.checkpoint.tokenizer.token_text(i)!r} ({i})" for i in stop)
        return "\n".join(
            (
                f"model: {model.name or self.checkpoint.path.name}, family {model.family}, "
                f"{len(model.layers)} layers, weights {_size(self.weight_bytes)}",
                *(
                    [f"quantization: {summary(self.checkpoint, quantization)}"]
                    if quantization
                    else ()
                ),
                f"context: {self.max_model_len} tokens (the model has {model.context_length})",
                f"kv cache: {_size(self.kv_cache_bytes)} of "
                f"{KvDtype.of(self.config.kv_cache_dtype)}, {self.num_blocks} blocks of "
                f"{self.config.block_size} tokens: {self.capacity_tokens} tokens, or "
                f"{self.capacity_sequences:.1f} sequences of {self.max_model_len}",
                *self._offload(),
                f"batch: up to {self.config.max_num_seqs} sequences and "
                f"{self.config.max_num_batched_tokens} tokens a step"
                + (
                    ""
                    if self.config.itl_target is None
                    else f", which is to take no longer than {self.config.itl_target:g} ms"
                ),
                *(
                    [f"speculation: {speculation.describe(_longest_draft(self.heads))}"]
                    if speculation
                    else ()
                ),
                *(
                    [
                        f"draft model: {len(self.draft.checkpoint.config.layers)} layers, weights "
                        f"{_size(self.draft.weight_bytes)}; of the kv cache "
                        f"{_size(self.draft_blocks * self.draft.layout.block_bytes)}, "
                        f"{self.draft_blocks} blocks; drafts up to {self.draft_tokens} tokens of "
                        "context"
                    ]
                    if self.draft
                    else ()
                ),
                f"stop tokens: {shown or 'none'}",
            )
        )

    def _offload(self) -> Iterator[str]:
        tiers = self.engine.scheduler.kv.tiers
        if tiers is None:
            return
        stats = tiers.stats()
        line = f"kv offload: {_size(stats.host_capacity)} of host memory"
        if self.config.kv_offload_dir is not None:
            line += (
                f", {_size(stats.disk_capacity)} in {self.config.kv_offload_dir}, which holds "
                f"{stats.disk_blocks} blocks of this model ({_size(stats.disk_bytes)} in all)"
            )
        yield line


def plan_cache(
    config: EngineConfig,
    compute: Program,
    layout: KvLayout,
    weight_bytes: int,
    available: int,
    draft: DraftModel | None = None,
    heads: Heads | None = None,
) -> CachePlan:
    """Divide ``available`` bytes between weights, work space and blocks. A ``draft`` model's cache
    holds as many of the longest sequences as the model's, as far as its own context goes.
    ``weight_bytes`` are the model's with those of ``heads``.

    Raises `DoesNotFit` with the arithmetic.
    """
    model = compute.config
    work = all_work_bytes(config, compute, None if draft is None else draft.program, heads)
    groups = len(layout.groups)
    if draft is not None:
        weight_bytes += draft.weight_bytes
    host = config.kv_offload_bytes
    left = available - weight_bytes - work - host
    if config.kv_cache_memory_bytes is not None:
        budget, asked = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    else:
        budget, asked = int(left * config.memory_utilization), "memory_utilization"
    division = (
        f"{_size(available)} available - {_size(weight_bytes)} weights - {_size(work)} work space "
        f"{f'- {_size(host)} kv offload ' if host else ''}= {_size(left)}"
    )
    if budget > left or left <= 0:
        raise DoesNotFit(f"{asked} asks for {_size(max(budget, 0))} of KV cache; {division}")
    wanted = min(config.max_model_len or model.context_length, model.context_length)
    if config.max_model_len is not None and config.max_model_len > model.context_length:
        raise DoesNotFit(
            f"max_model_len {config.max_model_len} is more than the model's context of "
            f"{model.context_length} tokens"
        )
    # A model of windows only needs few blocks however long its context, but tables for all of it.
    table_rows = config.max_num_seqs + config.max_branches
    table_bytes = 4 * len(layout.groups) * table_rows  # a block of each
    table_room = max(left // 8, _TABLES_ALWAYS)
    longest_table = table_room // table_bytes * layout.block_size
    if wanted > longest_table and (config.max_model_len is not None or not longest_table):
        raise DoesNotFit(
            f"block tables of {config.max_num_seqs} sequences of {wanted} tokens take "
            f"{_size(-(-wanted // layout.block_size) * table_bytes)}, more than "
            f"{_size(table_room)}: lower max_num_seqs or max_model_len"
        )
    wanted = min(wanted, longest_table)

    def needed(length: int) -> tuple[int, int]:
        """Bytes of a sequence in both caches; and what the draft model's takes once beside."""
        size = peak_blocks(layout, length) * layout.block_bytes
        if draft is None:
            return size, 0
        blocks, spare = _draft_blocks(draft, length)
        return size + blocks * draft.layout.block_bytes, spare * draft.layout.block_bytes

    fits = _longest(wanted, lambda length: sum(needed(length)) <= budget)
    least = max(wanted if config.max_model_len else 2, 2)
    if fits < least and (fits < 2 or config.max_model_len is not None):
        blocks = peak_blocks(layout, least)
        raise DoesNotFit(
            f"a sequence of {least} tokens needs {blocks} KV blocks of {_size(layout.block_bytes)}"
            f"{' and the draft model its own' if draft else ''} = {_size(sum(needed(least)))}; "
            f"{_size(budget)} of KV cache hold "
            f"{f'{fits} tokens' if draft else budget // layout.block_bytes} ({division})"
        )
    both, once = needed(fits)
    num_blocks = (budget - once) * peak_blocks(layout, fits) // both
    draft_blocks = draft_bytes = 0
    if draft is not None:
        blocks, spare = _draft_blocks(draft, fits)
        draft_blocks, draft_bytes = (
            (budget - once) * blocks // both + spare,
            draft.layout.block_bytes,
        )
    return CachePlan(
        num_blocks,
        fits,
        num_blocks * layout.block_bytes + draft_blocks * draft_bytes,
        weight_bytes,
        work,
        num_blocks // groups * layout.block_size,
        num_blocks / peak_blocks(layout, fits),
        draft_blocks,
    )


def all_work_bytes(
    config: EngineConfig,
    compute: Program,
    draft: Program | None = None,
    heads: Heads | None = None,
) -> int:
    """Bytes of what steps work in, and of what drafting holds beside: a ``draft`` model's steps, or
    those of ``heads``.
    """
    vocab_size = compute.config.vocab_size
    rows = config.max_logits_rows(_longest_draft(heads))
    work = work_bytes(compute, config.max_num_batched_tokens, rows)
    speculation = config.speculation
    if speculation is not None and speculation.computes and speculation.rejection:
        work += 4 * vocab_size * min(most_drawn(vocab_size), rows)
    if heads is not None:
        work += medusa.work_bytes(
            heads, compute, config.max_num_batched_tokens, config.max_num_seqs, rows
        )
    if draft is not None:
        work += work_bytes(draft, config.max_num_batched_tokens, config.max_num_seqs)
    return work


def work_bytes(compute: Program, max_tokens: int, max_logits_rows: int) -> int:
    """Bytes of the largest step's activations and held logits, in 32-bit floats."""
    widths = compute.widths
    activations = max_tokens * sum(widths.values())
    if (experts := compute.config.experts) is not None:
        # An expert's rows begin a panel of 8, so that up to 7 stay empty (kernels/experts.h).
        empty = 7 * min(experts.count, max_tokens * experts.chosen)
        row = widths["expert_gate"] + widths["expert_up"] + widths["expert_out"]
        activations += empty * row // experts.chosen
    vocab_size = compute.config.vocab_size
    return 4 * (activations + slice_rows(max_logits_rows, vocab_size) * vocab_size)


def _longest_draft(heads: Heads | None) -> int | None:
    """Tokens of a draft; None: as many as the settings allow."""
    return None if heads is None else heads.num_heads


def _draft_blocks(draft: DraftModel, length: int) -> tuple[int, int]:
    """Blocks that a sequence takes in the draft model's cache, and that must be free beside."""
    read = min(length, draft.checkpoint.config.context_length)
    blocks = peak_blocks(draft.layout, read)
    return blocks, draft_model.needed_blocks(draft.layout, read) - blocks


def _longest(wanted: int, fits: Callable[[int], bool]) -> int:
    """The longest sequence, up to ``wanted`` tokens, that fits."""
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _size(count: float) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def load_engine(
    model: str | Path | Checkpoint,
    config: EngineConfig | None = None,
    *,
    keep_hidden: bool = False,
) -> LoadedEngine:
    """Checkpoint → Program → layout → number of blocks → NativeExecutor → Engine.

    A ``str`` is a known name, a path or a hub id (`octavo.checkpoint.pull.resolve`).
    ``keep_hidden``: steps give `StepResult.hidden`. Raises `CheckpointError`, `SettingsError`, or
    `DoesNotFit` before anything large is allocated.
    """
    try:
        return _load(model, config or EngineConfig(), keep_hidden)
    except (CheckpointError, SettingsError):
        raise
    except ValueError as error:  # what the rooms below refuse
        raise SettingsError(str(error)) from error


def _load(model: str | Path | Checkpoint, config: EngineConfig, keep_hidden: bool) -> LoadedEngine:
    # The compiled module is needed from here on, not to name the types above.
    from octavo.execute.native import NativeExecutor, all_held_bytes, scaled_bytes
    from octavo.sample.native import NativeSampler

    if config.kv_offload_dir is not None:
        check_disk(config.kv_offload_dir)  # before anything large is read
    if isinstance(model, str):
        model = pull.resolve(model)
    checkpoint = octavo.checkpoint.load(model) if isinstance(model, Path) else model
    speculation = config.speculation
    drafter: Drafter | ModelDrafter | None = None
    if speculation is not None and not speculation.computes:
        drafter = speculation.drafter()  # which may be refused: before anything large is read
    if config.quantization is not None:
        threads = config.threads or usable_cpus()[0]
        checkpoint = rounded(checkpoint, config.quantization, threads)
    heads: Heads | None = None
    weights = dict(checkpoint.weights)
    if speculation is not None and speculation.method == "medusa":
        heads = read_heads(Path(speculation.model or ""), checkpoint)
        if (speculation.num_speculative_tokens or 0) > heads.num_heads:
            raise SettingsError(
                f"num_speculative_tokens is {speculation.num_speculative_tokens}, and "
                f"{heads.path} has {heads.num_heads} heads: each drafts one token"
            )
        weights |= medusa.head_weights(heads, checkpoint)
    draft: DraftModel | None = None
    if speculation is not None and speculation.method == "draft_model":
        draft = draft_checkpoint.read(
            speculation.model or "",
            speculation.quantization,
            checkpoint,
            config.layout_of,
            threads=config.threads or usable_cpus()[0],
            isa=config.isa,
        )
    compute = program(checkpoint.config)
    if speculation is not None and speculation.layers is not None:
        layer_skip.subset(compute, speculation.layers)  # refuses
    layout = config.layout_of(checkpoint.config)
    weight_bytes = all_held_bytes(weights.values(), str(checkpoint.path), config.isa)
    weight_bytes += sum(scaled_bytes(compute).values())
    plan = plan_cache(config, compute, layout, weight_bytes, available_memory(), draft, heads)
    compute = program(checkpoint.config, plan.max_model_len)
    limits = SchedulerConfig(
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logits_rows=config.max_logits_rows(_longest_draft(heads)),
        itl_target=config.step_target,
        max_branches=config.max_branches,
        enable_prefix_caching=config.enable_prefix_caching,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        policy=config.policy,
    )
    scheduler = Scheduler(limits, layout, plan.num_blocks)
    executor = NativeExecutor(
        checkpoint,
        compute,
        layout,
        num_blocks=plan.num_blocks,
        max_tokens=limits.max_num_batched_tokens,
        max_logits_rows=limits.logits_rows,
        max_seqs=scheduler.kv.tables.shape[1],
        max_blocks_per_seq=scheduler.kv.tables.shape[2],
        threads=config.threads,
        isa=config.isa,
        keep_hidden=keep_hidden or heads is not None,
        digest=config.kv_offload_dir is not None,
    )
    pace: Pace | None = None
    if config.itl_target is not None or config.kv_offload_bytes:
        pace = Pace(executor.costs, guessed(executor.threads), measured=False)
    if config.kv_offload_bytes:
        assert pace is not None
        try:
            tiers = make_tiers(
                executor,
                pace,
                compute,
                checkpoint.tokenizer,
                quantization=config.quantization,
                host_bytes=config.kv_offload_bytes,
                folder=config.kv_offload_dir,
                disk_bytes=config.kv_offload_disk,
            )
        except BaseException:
            executor.close()
            raise
        scheduler.kv.extend(tiers)
    sampler = NativeSampler(checkpoint.config.vocab_size, executor.isa, executor.pool)
    if speculation is not None and speculation.computes:
        try:
            target = Target(
                checkpoint, compute, executor, scheduler, sampler, speculation.rejection
            )
            if heads is not None:
                drafter = medusa.MedusaDrafter(heads, target)
            elif draft is not None:
                drafter = draft_model.make(target, draft, plan.draft_blocks)
            else:
                drafter = layer_skip.make(target, speculation.layers or ())
        except BaseException:
            executor.close()
            raise
    speculator = None
    if speculation is not None and drafter is not None:
        speculator = Speculator(
            drafter,
            checkpoint.config.vocab_size,
            speculation.num_speculative_tokens,
            rejection=speculation.rejection,
            longest=_longest_draft(heads) or speculation.longest,
        )
    checkpoint.release()  # the executor has its own packed copy
    tokenizer = checkpoint.tokenizer
    engine = Engine(
        executor,
        scheduler,
        sampler,
        RealClock(),
        vocab_size=checkpoint.config.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        text=lambda params, ending_ids: IncrementalDetokenizer(tokenizer, params, ending_ids),
        max_logprobs=config.max_logprobs,
        seed=config.seed,
        speculator=speculator,
        pace=pace,
    )
    gc.freeze()  # what was loaded stays: the collector need not walk it between steps
    return LoadedEngine(
        engine,
        checkpoint,
        config,
        plan.max_model_len,
        plan.num_blocks,
        plan.kv_cache_bytes,
        weight_bytes,
        plan.capacity_tokens,
        plan.capacity_sequences,
        draft,
        plan.draft_blocks,
        heads,
    )
