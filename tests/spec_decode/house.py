"""An engine in the midst of decoding whose drafter is at hand."""

from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.engine.clock import Clock
from octavo.engine.engine import Engine
from octavo.executor.native.executor import NativeExecutor
from octavo.kv_cache.layout import KvDtype, KvLayout
from octavo.loader.base import Checkpoint
from octavo.models.families import program
from octavo.sampling.params import SamplingParams
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.request import Request
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence
from octavo.spec_decode.drafter import ModelDrafter, Target
from octavo.spec_decode.speculator import Speculator

TEXT = [int(token) for token in np.random.default_rng(7).integers(0, 70, 200)]


class House:
    def __init__(
        self,
        checkpoint: Checkpoint,
        drafter: Callable[[Target], ModelDrafter] | None,
        *,
        probabilities: bool = False,
        num_blocks: int = 200,
        num_drafts: int = 4,
        kv_dtype: KvDtype = KvDtype.BF16,
        logits_slice: int | None = None,
        keep_hidden: bool = False,
        mtp: bool = False,
    ) -> None:
        """``mtp``: all hidden rows are kept, and keys and values of the layer that takes them."""
        config = checkpoint.config
        compute, layout = program(config), KvLayout.of(config, 16, kv_dtype, mtp=mtp)
        log_rows = 0 if layout.state is None else 96
        limits = SchedulerConfig(
            max_model_len=400,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_logits_rows=64,
            state_log_rows=log_rows,
        )
        self.scheduler = Scheduler(limits, layout, num_blocks)
        self.kv = self.scheduler.kv
        self.executor = NativeExecutor(
            checkpoint,
            compute,
            layout,
            num_blocks=num_blocks,
            max_tokens=64,
            max_logits_rows=64,
            max_seqs=self.kv.tables.shape[1],
            max_blocks_per_seq=self.kv.tables.shape[2],
            logits_slice=logits_slice,
            threads=1,
            keep_hidden=keep_hidden,
            all_hidden=mtp,
            state_log_rows=log_rows,
        )
        sampler = self.executor.new_sampler(config.vocab_size)
        speculator = None
        if drafter is not None:
            target = Target(
                checkpoint, compute, self.executor, self.scheduler, sampler, probabilities
            )
            self.drafter = drafter(target)
            speculator = Speculator(self.drafter, config.vocab_size, num_drafts)
        self.engine = Engine(
            self.executor,
            self.scheduler,
            sampler,
            Clock(),
            vocab_size=config.vocab_size,
            speculator=speculator,
        )

    def add(self, length: int, **params: Any) -> None:
        settings = SamplingParams(seed=length, ignore_eos=True, **params)
        request = Request(request_id=str(length), prompt_token_ids=TEXT[:length], params=settings)
        self.engine.add_request(request)

    def decode(self, *lengths: int, steps: int = 3, **params: Any) -> list[Sequence]:
        """Sequences in the midst of decoding."""
        for length in lengths:
            self.add(length, **params)
        while self.scheduler.waiting or self.scheduler.prefilling:
            self.engine.step()
        for _ in range(steps):
            self.engine.step()
        return self.scheduler.decoding

    def drain(self) -> dict[tuple[str, int], list[int]]:
        tokens: dict[tuple[str, int], list[int]] = {}
        while self.engine.has_work():
            for delta in self.engine.step():
                tokens.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)
            self.engine.check_integrity()
        return tokens
