"""Load a model and build a running engine."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from pathlib import Path

import octavo.loader
from octavo.engine.cache_plan import longest_draft, longest_length, plan_cache
from octavo.engine.clock import Clock
from octavo.engine.config import EngineConfig, SettingsError
from octavo.engine.engine import Engine
from octavo.engine.offload import check_disk, make_connectors
from octavo.engine.step_time import StepTimePredictor, guessed
from octavo.executor.registry import executor_class
from octavo.kv_cache.layout import KvDtype
from octavo.loader import pull
from octavo.loader.base import Checkpoint, CheckpointError
from octavo.loader.rounding import rounded, summary
from octavo.machine.cpu import usable_cpus
from octavo.machine.memory import as_size, available_memory
from octavo.models.families import program
from octavo.scheduler.scheduler import Scheduler
from octavo.spec_decode import draft_checkpoint, draft_model, layer_skip, medusa, mtp
from octavo.spec_decode.draft_checkpoint import DraftModel
from octavo.spec_decode.drafter import Drafter, ModelDrafter, Target
from octavo.spec_decode.heads import Heads, heads_folder, read_heads
from octavo.spec_decode.speculator import Speculator
from octavo.words import plural

log = logging.getLogger(__name__)


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

    def report(self) -> str:
        """Return the start report: one line per fact."""
        config, draft, tokenizer = self.config, self.draft, self.checkpoint.tokenizer
        model, speculation = self.checkpoint.config, config.speculation
        stop = sorted(tokenizer.eos_token_ids)
        target = ""
        if config.itl_target is not None:
            target = f", which is to take no longer than {config.itl_target:g} ms"
        facts = {
            "model": f"{model.name or self.checkpoint.path.name}, family {model.family}, "
            f"{plural(len(model.layers), 'layer')}, weights {as_size(self.weight_bytes)}",
            "quantization": config.quantization and summary(self.checkpoint, config.quantization),
            "context": f"{self.max_model_len} tokens (the model has {model.context_length})",
            "rope": model.rope_of_length(self.max_model_len),
            "kv cache": f"{as_size(self.kv_cache_bytes)} of {KvDtype.of(config.kv_cache_dtype)}, "
            f"{plural(self.num_blocks, 'block')} of {config.block_size} tokens: "
            f"{self.capacity_tokens} tokens, or {self.capacity_sequences:.1f} sequences of "
            f"{self.max_model_len}",
            "state": self._state(),
            "kv offload": self._offload(),
            "batch": f"up to {plural(config.max_num_seqs, 'sequence')} and "
            f"{plural(config.max_num_batched_tokens, 'token')} a step{target}",
            "speculation": speculation and speculation.describe(longest_draft(config, self.heads)),
            "draft model": draft and self._draft(draft),
            "stop tokens": ", ".join(f"{tokenizer.token_text(i)!r} ({i})" for i in stop) or "none",
        }
        return "\n".join(f"{name}: {fact}" for name, fact in facts.items() if fact)

    def _draft(self, draft: DraftModel) -> str:
        model, layout = draft.checkpoint.config, draft.layout
        longest = longest_length(
            min(self.max_model_len, model.context_length),
            lambda length: draft_model.needed_blocks(layout, length) <= self.draft_blocks,
        )
        return (
            f"{len(model.layers)} layers, weights {as_size(draft.weight_bytes)}; of the kv cache "
            f"{as_size(self.draft_blocks * layout.block_bytes)}, "
            f"{plural(self.draft_blocks, 'block')}; drafts up to {longest} tokens of context"
        )

    def _state(self) -> str | None:
        layout = self.engine.scheduler.kv.layout
        if layout.state is None:
            return None
        size = as_size(layout.state_blocks * layout.block_bytes)
        return f"{size} of each sequence, {plural(layout.state_blocks, 'block')}"

    def _offload(self) -> str | None:
        connectors = self.engine.scheduler.kv.connectors
        if connectors is None:
            return None
        memory, *others = connectors.stats().values()
        line = f"{as_size(memory.capacity_bytes)} of host memory"
        for stats in others:
            line += (
                f", {as_size(stats.capacity_bytes)} in {self.config.kv_offload_dir}, which holds "
                f"{stats.blocks} blocks of this model ({as_size(stats.used_bytes)} in all)"
            )
        return line


def load_engine(
    model: str | Path | Checkpoint,
    config: EngineConfig | None = None,
    *,
    keep_hidden: bool = False,
) -> LoadedEngine:
    """Build checkpoint → Program → layout → number of blocks → executor → Engine.

    A ``str`` is a known name, a path or a hub id (`octavo.loader.pull.resolve`).
    ``keep_hidden``: steps give `StepResult.hidden`. Raise `CheckpointError`, `SettingsError`, or
    `DoesNotFit` before anything large is allocated.
    """
    try:
        return _load(model, config or EngineConfig(), keep_hidden)
    except (CheckpointError, SettingsError):
        raise
    except ValueError as error:  # raised below
        raise SettingsError(str(error)) from error


def check_capabilities(config: EngineConfig, keep_hidden: bool = False) -> None:
    """Raise `SettingsError` for settings that the chosen executor cannot honour."""
    able = executor_class(config.executor).capabilities
    dtype = KvDtype.of(config.kv_cache_dtype)
    dtype.check_served()
    if dtype not in able.kv_dtypes:
        raise SettingsError(
            f"kv_cache_dtype {dtype}: the {able.name} executor's cache holds "
            f"{', '.join(able.kv_dtypes)}"
        )
    if config.kv_offload_bytes and not able.computes:
        raise SettingsError(f"kv_offload: blocks of the {able.name} executor hold nothing to keep")
    if keep_hidden and not able.hidden_rows:
        raise SettingsError(f"the {able.name} executor cannot give hidden rows")
    speculation = config.speculation
    if speculation is None or not speculation.computes:
        return
    rows = speculation.method != "mtp" or able.hidden_rows
    rows &= speculation.method != "medusa" or able.drafts_rows
    if not able.added_programs or not rows:
        raise SettingsError(
            f"speculative_config: the {able.name} executor cannot draft by {speculation.method}"
        )


def _load(model: str | Path | Checkpoint, config: EngineConfig, keep_hidden: bool) -> LoadedEngine:
    check_capabilities(config, keep_hidden)
    if config.kv_offload_dir is not None:
        check_disk(config.kv_offload_dir)  # before anything large is read
    if isinstance(model, str):
        model = pull.resolve(model)
    checkpoint = octavo.loader.load(model) if isinstance(model, Path) else model
    for note in checkpoint.notes:
        log.warning("%s: %s", checkpoint.path.name, note)
    speculation, threads = config.speculation, config.threads or usable_cpus()[0]
    drafter: Drafter | ModelDrafter | None = None
    if speculation is not None and not speculation.computes:
        drafter = speculation.drafter()  # raises, if at all, before anything large is read
    if config.quantization is not None:
        checkpoint = rounded(checkpoint, config.quantization, threads)
    heads: Heads | None = None
    weights = dict(checkpoint.weights)
    if speculation is not None and speculation.method == "medusa":
        heads = read_heads(heads_folder(speculation.model or ""), checkpoint)
        most = longest_draft(config, heads)
        if most is not None and (speculation.num_speculative_tokens or 0) > most:
            raise SettingsError(
                f"num_speculative_tokens is {speculation.num_speculative_tokens}, and "
                f"{heads.path} has {heads.num_heads} heads: each drafts one token"
            )
        weights |= medusa.head_weights(heads, checkpoint)
    module: mtp.MtpModule | None = None
    if speculation is not None and speculation.method == "mtp":
        module = mtp.read(checkpoint, speculation.model, config.quantization, threads)
        weights |= module.weights
    draft: DraftModel | None = None
    if speculation is not None and speculation.method == "draft_model":
        draft = draft_checkpoint.read(
            speculation.model or "",
            speculation.quantization,
            checkpoint,
            config.layout_of,
            threads=threads,
            executor=config.executor,
            isa=config.isa,
        )
    compute = program(checkpoint.config)
    if speculation is not None and speculation.layers is not None:
        layer_skip.subset(compute, speculation.layers)  # raises if they do not exist
    layout = config.layout_of(checkpoint.config)
    source = str(checkpoint.path)
    kind = executor_class(config.executor)
    held = kind.held_bytes(weights.values(), compute, source, config.isa)
    plan = plan_cache(config, compute, layout, held, available_memory(), draft, heads, module)
    compute = program(checkpoint.config, plan.max_model_len)
    limits = config.limits(plan.max_model_len, layout, longest_draft(config, heads))
    scheduler = Scheduler(limits, layout, plan.num_blocks)
    executor = kind.load(
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
        keep_hidden=keep_hidden or heads is not None or module is not None,
        all_hidden=module is not None and module.own,
        digest=config.kv_offload_dir is not None,
        state_log_rows=limits.state_log_rows,
        rates=guessed(threads),
    )
    step_times = StepTimePredictor()
    if config.itl_target is not None or config.kv_offload_bytes:
        step_times = StepTimePredictor(executor.costs, guessed(executor.threads), measured=False)
    sampler = executor.new_sampler(checkpoint.config.vocab_size)
    try:
        if config.kv_offload_bytes:
            connectors = make_connectors(
                config, executor, step_times, compute, checkpoint.tokenizer
            )
            scheduler.kv.attach(connectors)
        if speculation is not None and speculation.computes:
            target = Target(
                checkpoint, compute, executor, scheduler, sampler, speculation.rejection
            )
            if heads is not None:
                drafter = medusa.MedusaDrafter(heads, target)
            elif draft is not None:
                drafter = draft_model.DraftModelDrafter(target, draft, plan.draft_blocks)
            elif module is not None:
                by = mtp.MtpDrafter if module.own else mtp.AssistantDrafter
                drafter = by(target, module)
            else:
                drafter = layer_skip.LayerSkipDrafter(target, speculation.layers or ())
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
            longest=speculation.longest if heads is None else heads.num_heads,
            lookup=speculation.drafter() if speculation.looks_up else None,
        )
    checkpoint.release()  # the executor has its own packed copy
    tokenizer = checkpoint.tokenizer
    engine = Engine(
        executor,
        scheduler,
        sampler,
        Clock(),
        vocab_size=checkpoint.config.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        tokenizer=tokenizer,
        max_logprobs=config.max_logprobs,
        seed=config.seed,
        speculator=speculator,
        step_times=step_times,
    )
    # The collector need not walk over what was loaded. Garbage would stay, too: collect it first.
    gc.collect()
    gc.freeze()
    return LoadedEngine(
        engine,
        checkpoint,
        config,
        plan.max_model_len,
        plan.num_blocks,
        plan.kv_cache_bytes,
        held,
        plan.capacity_tokens,
        plan.capacity_sequences,
        draft,
        plan.draft_blocks,
        heads,
    )
