"""The plan of memory: how much goes to weights, work space and blocks. If it is not enough, the
error has the arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from octavo.engine.config import DoesNotFit, EngineConfig
from octavo.executor.base import slice_rows
from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvLayout
from octavo.machine.memory import as_size
from octavo.models.program import Program
from octavo.spec_decode import draft_model, medusa, mtp
from octavo.spec_decode.draft_checkpoint import DraftModel
from octavo.spec_decode.heads import Heads
from octavo.spec_decode.partial_draft import max_distributions

_TABLES_ALWAYS = 64 << 20  # bytes of block tables that are allowed whatever is left


class CachePlan(NamedTuple):
    """How the memory is divided. Sizes are in bytes unless they say otherwise."""

    num_blocks: int
    max_model_len: int  # tokens
    kv_cache_bytes: int  # the draft model's included, as in the next two
    weight_bytes: int
    work_bytes: int  # activations and logits of the largest step, and memory of drafters
    capacity_tokens: int
    capacity_sequences: float
    draft_blocks: int = 0  # of the draft model's cache
    state_bytes: int = 0  # of the states of a sequence's recurrent layers, in whole blocks


def plan_cache(
    config: EngineConfig,
    compute: Program,
    layout: KvLayout,
    weight_bytes: int,
    available: int,
    draft: DraftModel | None = None,
    heads: Heads | None = None,
    module: mtp.MtpModule | None = None,
) -> CachePlan:
    """Divide ``available`` bytes between weights, work space and blocks. The cache of a ``draft``
    model holds as many of the longest sequences as the model's, up to its own context length.
    ``weight_bytes``: of the model, ``heads`` and ``module``.

    Raise `DoesNotFit` with the arithmetic.
    """
    model = compute.config
    draft_program = None if draft is None else draft.program
    work = all_work_bytes(config, compute, draft_program, heads, module)
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
        f"{as_size(available)} available - {as_size(weight_bytes)} weights - {as_size(work)} work "
        f"space {f'- {as_size(host)} kv offload ' if host else ''}= {as_size(left)}"
    )
    if left + host <= 0:
        raise DoesNotFit(f"the model itself leaves nothing for a KV cache: {division}")
    if left < 0:
        raise DoesNotFit(f"kv_offload_memory asks for {as_size(host)} of host memory; {division}")
    if budget > left or left <= 0:
        raise DoesNotFit(f"{asked} asks for {as_size(max(budget, 0))} of KV cache; {division}")
    wanted = config.max_model_len or model.default_length
    if config.max_model_len is not None and config.max_model_len > model.context_length:
        raise DoesNotFit(
            f"max_model_len {config.max_model_len} is more than the model's context of "
            f"{model.context_length} tokens"
        )
    # A model with windows only needs few blocks for any context, but tables for all of it.
    table_rows = config.max_num_seqs + config.max_branches
    table_bytes = 4 * len(layout.groups) * table_rows  # a block of each
    table_room = max(left // 8, _TABLES_ALWAYS)
    longest_table = table_room // table_bytes * layout.block_size
    if wanted > longest_table and (config.max_model_len is not None or not longest_table):
        raise DoesNotFit(
            f"block tables of {config.max_num_seqs} sequences of {wanted} tokens take "
            f"{as_size(-(-wanted // layout.block_size) * table_bytes)}, more than "
            f"{as_size(table_room)}: lower max_num_seqs or max_model_len"
        )
    wanted = min(wanted, longest_table)

    draft_bytes = 0 if draft is None else draft.layout.block_bytes

    def blocks_of(length: int) -> tuple[int, int, int]:
        """Return the blocks of a sequence, those that it takes in the draft model's cache, and
        those that must be free there in addition.
        """
        blocks = peak_blocks(layout, length)
        if draft is None:
            return blocks, 0, 0
        read = min(length, draft.checkpoint.config.context_length)
        theirs = peak_blocks(draft.layout, read)
        return blocks, theirs, draft_model.needed_blocks(draft.layout, read) - theirs

    def needed(length: int) -> int:
        blocks, theirs, spare = blocks_of(length)
        return blocks * layout.block_bytes + (theirs + spare) * draft_bytes

    fits = longest_length(wanted, lambda length: needed(length) <= budget)
    least = max(wanted if config.max_model_len else 2, 2)
    if fits < least and (fits < 2 or config.max_model_len is not None):
        raise DoesNotFit(
            f"a sequence of {least} tokens needs {peak_blocks(layout, least)} KV blocks of "
            f"{as_size(layout.block_bytes)}{' and the draft model its own' if draft else ''} = "
            f"{as_size(needed(least))}; {as_size(budget)} of KV cache hold "
            f"{f'{fits} tokens' if draft else budget // layout.block_bytes} ({division})"
        )
    blocks, theirs, spare = blocks_of(fits)
    both = blocks * layout.block_bytes + theirs * draft_bytes
    shared = budget - spare * draft_bytes
    num_blocks, draft_blocks = shared * blocks // both, shared * theirs // both + spare
    return CachePlan(
        num_blocks,
        fits,
        num_blocks * layout.block_bytes + draft_blocks * draft_bytes,
        weight_bytes,
        work,
        (num_blocks - layout.state_blocks) // groups * layout.block_size,
        num_blocks / blocks,
        draft_blocks,
        layout.state_blocks * layout.block_bytes,
    )


def all_work_bytes(
    config: EngineConfig,
    compute: Program,
    draft: Program | None = None,
    heads: Heads | None = None,
    module: mtp.MtpModule | None = None,
) -> int:
    """Return the bytes that steps work in, and that drafting with a ``draft`` model, ``heads`` or a
    ``module`` for multi-token prediction needs in addition.
    """
    vocab_size = compute.config.vocab_size
    rows = config.max_logits_rows(longest_draft(config, heads))
    work = work_bytes(compute, config.max_num_batched_tokens, rows)
    layout = config.layout_of(compute.config)
    if layout.state is not None:
        log_rows = config.state_log_rows(layout, longest_draft(config, heads))
        work += log_rows * layout.state.row_bytes
    speculation = config.speculation
    if speculation is not None and speculation.computes and speculation.rejection:
        work += 4 * vocab_size * min(max_distributions(vocab_size), rows)
    if heads is not None:
        work += medusa.work_bytes(
            heads, compute, config.max_num_batched_tokens, config.max_num_seqs, rows
        )
    if module is not None:
        work += mtp.work_bytes(
            module, compute, config.max_num_batched_tokens, config.max_num_seqs, rows
        )
    if draft is not None:
        work += work_bytes(draft, config.max_num_batched_tokens, config.max_num_seqs)
    return work


def work_bytes(compute: Program, max_tokens: int, max_logits_rows: int) -> int:
    """Return the bytes of the largest step's activations and held logits, in 32-bit floats."""
    widths = compute.widths
    activations = max_tokens * sum(widths.values())
    if (experts := compute.config.experts) is not None:
        # Each expert's rows start a panel of 8, so up to 7 rows stay empty (kernels/experts.h).
        empty = 7 * min(experts.count, max_tokens * experts.chosen)
        row = widths["expert_gate"] + widths["expert_up"] + widths["expert_out"]
        activations += empty * row // experts.chosen
    vocab_size = compute.config.vocab_size
    return 4 * (activations + slice_rows(max_logits_rows, vocab_size) * vocab_size)


def longest_draft(config: EngineConfig, heads: Heads | None) -> int | None:
    """Return the tokens of a draft; None: as many as the settings allow."""
    speculation = config.speculation
    if heads is None or speculation is None or speculation.looks_up:
        return None
    return heads.num_heads


def longest_length(wanted: int, fits: Callable[[int], bool]) -> int:
    """Return the longest length, up to ``wanted`` tokens, for which ``fits`` is true."""
    return bisect_left(range(1, wanted + 1), True, key=lambda length: not fits(length))
