"""What is refused before it runs, with the arithmetic."""

from __future__ import annotations

from octavo.kv_cache.cache import peak_blocks
from octavo.kv_cache.layout import KvLayout
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import AdmissionError, Request
from octavo.words import plural


def output_limit(
    request: Request, config: SchedulerConfig, layout: KvLayout, num_blocks: int
) -> int:
    """The output tokens this request may have; `AdmissionError` if it can never run.

    Of n sequences only one need fit the pool: the others can be preempted until it has finished.
    """
    prompt = len(request.prompt_token_ids)
    limit = config.max_model_len
    if prompt == 0:
        raise AdmissionError("the prompt has no tokens; at least 1 is needed", "prompt")
    if prompt >= limit:
        raise AdmissionError(
            f"the prompt has {prompt} tokens; the context of {limit} tokens leaves room for "
            f"{limit - 1} and at least 1 new token",
            "prompt",
        )
    wanted = request.params.max_tokens
    max_tokens = limit - prompt if wanted is None else wanted
    if prompt + max_tokens > limit:
        raise AdmissionError(
            f"{prompt} prompt tokens + {max_tokens} max_tokens = {prompt + max_tokens}, more "
            f"than the context of {limit} tokens",
            "max_tokens",
        )
    if request.params.n > config.max_num_seqs:
        raise AdmissionError(
            f"n is {request.params.n}, more than max_num_seqs {config.max_num_seqs}", "n"
        )
    if request.params.n > 1 and config.memory == "reserve":
        raise AdmissionError(f"n is {request.params.n}; memory is reserved for one sequence", "n")
    # The last token is never put through the model.
    blocks = needed_blocks(prompt + max_tokens - 1, config, layout)
    if blocks > num_blocks:
        raise AdmissionError(
            f"{prompt} prompt tokens + {max_tokens} max_tokens need {blocks} KV blocks of "
            f"{layout.block_size} tokens; there are {num_blocks}",
            "max_tokens",
        )
    return max_tokens


def needed_blocks(num_tokens: int, config: SchedulerConfig, layout: KvLayout) -> int:
    """Blocks that must be free for a sequence of ``num_tokens`` positions, at its peak. Where they
    are reserved at once, windows give nothing back in time.
    """
    if config.memory == "reserve":
        return -(-num_tokens // layout.block_size) * len(layout.groups)
    return peak_blocks(layout, num_tokens)


def check_queue(
    config: SchedulerConfig, queued: int, queued_tokens: int, num_prompt_tokens: int
) -> None:
    """Refuse for now (`AdmissionError`, retryable) what a full queue cannot take. An empty queue
    takes any request.
    """
    bound = config.max_num_queued_reqs
    if bound is not None and queued >= bound:
        raise AdmissionError(
            f"{plural(queued, 'request', 'wait')}, of at most {bound}", retryable=True
        )
    bound = config.max_num_queued_tokens
    if bound is not None and queued and queued_tokens + num_prompt_tokens > bound:
        raise AdmissionError(
            f"{plural(queued_tokens, 'prompt token', 'wait')}; with {num_prompt_tokens} more they "
            f"exceed {bound}",
            retryable=True,
        )
