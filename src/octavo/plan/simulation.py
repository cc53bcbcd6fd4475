"""The engine without its arithmetic: real scheduler, cache and limits, a cost model and a clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.engine.clock import VirtualClock
from octavo.engine.engine import Engine
from octavo.engine.load import CachePlan, DoesNotFit, EngineConfig, plan_cache
from octavo.execute.cost import Arithmetic, CostExecutor
from octavo.kv.layout import KvLayout
from octavo.model.families import program
from octavo.plan.hardware import Device
from octavo.plan.quantization import Stored, arithmetic
from octavo.plan.subject import Subject
from octavo.sample.scripted import ScriptedSampler
from octavo.schedule.config import SchedulerConfig
from octavo.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Setup:
    """What is to be simulated: a model in some format on a device, with an engine's settings."""

    subject: Subject
    stored: Stored  # the weights' formats and bytes
    device: Device
    config: EngineConfig = field(default_factory=EngineConfig)
    quantized: Arithmetic = Arithmetic.INT8  # what multiplies quantized weights

    def plan(self) -> tuple[CachePlan, KvLayout]:
        """How the device's memory is divided. Raises `DoesNotFit` with the arithmetic."""
        layout = self.config.layout_of(self.subject.program.config)
        memory = self.device.memory_bytes
        if memory is None:
            raise DoesNotFit(f"the memory of {self.device.name} is not known")
        compute = self.subject.program
        return plan_cache(self.config, compute, layout, self.stored.bytes, memory), layout


def simulated_engine(setup: Setup) -> Engine:
    """The engine that `load_engine` would build there, on a cost executor and a virtual clock.

    Raises `DoesNotFit`.
    """
    plan, layout = setup.plan()
    config = setup.config
    limits = SchedulerConfig(
        max_model_len=plan.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
    )
    compute = program(setup.subject.program.config, plan.max_model_len)
    executor = CostExecutor(
        compute,
        layout,
        num_blocks=plan.num_blocks,
        rates=setup.device.rates(plan.weight_bytes),
        max_tokens=limits.max_num_batched_tokens,
        max_logits_rows=limits.logits_rows,
        weight_bytes=setup.stored.sizes,
        arithmetic=arithmetic(setup.stored, setup.quantized),
        attention=Arithmetic.BF16,
    )
    vocab_size = compute.config.vocab_size
    return Engine(
        executor,
        Scheduler(limits, layout, plan.num_blocks),
        ScriptedSampler(vocab_size),
        VirtualClock(),
        vocab_size=vocab_size,
        seed=config.seed,
    )
