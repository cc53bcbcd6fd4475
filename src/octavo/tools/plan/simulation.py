"""The engine without its arithmetic: real scheduler, cache and limits, a cost model and a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from octavo.engine.cache_plan import CachePlan, plan_cache
from octavo.engine.calibration import Calibration, CalibrationKey
from octavo.engine.clock import VirtualClock
from octavo.engine.config import DoesNotFit, EngineConfig, SettingsError
from octavo.engine.engine import Engine, Observer
from octavo.engine.step_time import StepTimePredictor
from octavo.executor.cost import Arithmetic, CostModel, Rates
from octavo.executor.simulated.simulated import SimulatedExecutor
from octavo.kv_cache.layout import KvLayout
from octavo.loader.base import WeightFormat
from octavo.machine.memory import as_size
from octavo.sampling.scripted import ScriptedSampler
from octavo.scheduler.request import LatencyTarget
from octavo.scheduler.scheduler import Scheduler
from octavo.spec_decode.config import SpeculativeConfig
from octavo.spec_decode.scripted_drafter import ScriptedDrafter
from octavo.spec_decode.speculator import Speculator
from octavo.tools.plan.calibrating import misfit
from octavo.tools.plan.gpu import RUNTIME_BYTES
from octavo.tools.plan.hardware import Device
from octavo.tools.plan.load_replay import Replay, replay
from octavo.tools.plan.quantization import (
    StoredWeights,
    arithmetic,
    as_asked,
    as_rounded,
    for_gpus,
    held,
)
from octavo.tools.plan.schemes import StorageScheme
from octavo.tools.plan.series import Series
from octavo.tools.plan.subject import Subject
from octavo.tools.workload.datasets import Sample

MOST_BLOCKS = 1 << 26  # of a simulated cache: each takes 8 bytes here
LOOKED_UP = ("ngram", "suffix")  # methods of speculation that guess without computing


@dataclass(frozen=True, slots=True)
class Setup:
    """What is to be simulated: a model in some format on a device, with an engine's settings."""

    subject: Subject
    stored: StoredWeights  # the weights' formats and bytes
    device: Device
    config: EngineConfig = field(default_factory=EngineConfig)
    quantized: Arithmetic | None = None  # what multiplies quantized weights; None: as usual there
    # As of SchedulerConfig; reserved memory has no prefix caching.
    batching: Literal["continuous", "static"] = "continuous"
    memory: Literal["paged", "reserve"] = "paged"
    chunked_prefill: bool = True
    # How often a guess is right, if the configuration speculates: the drafter is a scripted one.
    acceptance: float | None = None
    # What is taken on this machine where nobody has calibrated; None: the machine's limits.
    uncalibrated: Rates | None = None
    slowness: float = 1.0  # times as long as predicted that everything takes

    def __post_init__(self) -> None:
        if (self.acceptance is None) is not (self.config.speculation is None):
            raise ValueError("to simulate speculation takes an acceptance rate, and the other way")
        check_simulated(self.config.speculation)

    def plan(self) -> tuple[CachePlan, KvLayout]:
        """How the device's memory is divided. Raises `DoesNotFit` with the arithmetic."""
        layout = self.config.layout_of(self.subject.program.config)
        device, config = self.device, self.config
        # As in vLLM, a size of the cache wins over a share of the memory.
        share = 1.0 if config.kv_cache_memory_bytes is not None else config.memory_utilization
        memory = device.usable_bytes(share)
        if memory is None or device.memory_bytes is None:
            raise DoesNotFit(f"the memory of {device.name} is not known")
        if not device.gpu:
            plan = plan_cache(config, self.subject.program, layout, self.stored.bytes, memory)
            return plan, layout
        config = replace(config, memory_utilization=1.0)  # of what is left of that share
        try:
            return plan_cache(
                config, self.subject.program, layout, self.stored.bytes, memory
            ), layout
        except DoesNotFit as error:
            raise DoesNotFit(
                f"{error}. Available is {'all' if share == 1 else f'{share:g}'} of "
                f"{as_size(device.memory_bytes)} "
                f"(--gpu-memory-utilization) without {as_size(RUNTIME_BYTES)} of the GPU's runtime"
            ) from None

    def calibration(self) -> Calibration | None:
        """What `octavo calibrate` has stored for this model, these settings and this machine."""
        if not self.device.measured:
            return None
        layout = self.config.layout_of(self.subject.program.config)
        formats = {
            role: format
            for role, format in self.stored.formats.items()
            if isinstance(format, WeightFormat)  # no other is held here
        }
        groups = self.stored.groups
        return Calibration.load(
            CalibrationKey.of(self.subject.program, formats, groups, layout, self.config)
        )

    def rates(self) -> Rates:
        """The calibrated ones where there are any, else the device's."""
        stored = self.calibration()
        if stored is not None:
            found = stored.current
        else:
            launches = len(self.subject.program.ops)
            predicted = self.device.predicted(self.stored.bytes, launches)
            found = self.uncalibrated or predicted
        return found if self.slowness == 1 else found.slowed(self.slowness)

    def basis(self) -> str:
        """What the predictions rest on."""
        if not self.device.measured:
            assumption = self.device.assumption or "predictions take all of the roof"
            taken = f" ({self.device.taken})" if self.device.taken else ""
            return f"figures of {self.device.name}, not measured{taken}; {assumption}"
        stored = self.calibration()
        if stored is None and self.uncalibrated is not None:
            return "calibrated with other settings, whose rates are taken for these"
        if stored is None:
            return "not calibrated: the machine's limits only; run octavo calibrate MODEL"
        unfit = misfit(stored, self.device.rates(self.stored.bytes))
        return f"{stored.standing}; {unfit}" if unfit else stored.standing


def check_simulated(speculation: SpeculativeConfig | None) -> None:
    """Raises `SettingsError` for a drafter that takes time or memory: a simulated one takes none,
    which is next to true of look-ups only.
    """
    if speculation is not None and speculation.method not in LOOKED_UP:
        raise SettingsError(
            f"speculative_config: method {speculation.method!r} is not simulated: what its drafter "
            f"takes is not counted; {' and '.join(LOOKED_UP)} are"
        )


def weights_on(
    device: Device,
    subject: Subject,
    scheme: StorageScheme | None = None,
    edges: StorageScheme | None = None,
    quantization: str | None = None,
) -> StoredWeights:
    """The weights, `as_asked` or `as_rounded` by ``quantization``, as the device would hold them:
    on this machine it is the engine's own packed copies that are counted. Raises `SettingsError`.
    """
    try:
        if quantization is None:
            stored = as_asked(subject, scheme, edges)
        else:
            stored = as_rounded(subject, quantization)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    if not subject.served and not device.gpu:
        raise SettingsError(
            f"{subject.name} is for plans of GPUs: no kernel here computes latent attention"
        )
    if for_gpus(stored) and not device.gpu:
        raise SettingsError(
            "--format fp8 is for plans of GPUs: CPUs have no fp8 units; w8a8 and q8_0 take about "
            "as many bytes"
        )
    if not device.measured:
        return stored
    sizes = held(subject, stored)
    if sizes is None:
        raise SettingsError(f"the engine cannot hold weights in {stored.name} on this machine")
    return stored._replace(sizes=sizes)


def simulated_engine(setup: Setup) -> Engine:
    """The engine that `load_engine` would build there, on a simulated executor and a virtual clock.

    Raises `DoesNotFit`.
    """
    plan, layout = setup.plan()
    config = setup.config
    if config.kv_offload_bytes:
        raise SettingsError("kv_offload_memory and kv_offload_dir are not simulated")
    if plan.num_blocks > MOST_BLOCKS:
        raise SettingsError(
            f"{plan.num_blocks:,} blocks of KV cache: at most {MOST_BLOCKS:,} are simulated; give "
            "--device less capacity, or less of it with --kv-cache-memory-bytes"
        )
    limits = config.limits(
        plan.max_model_len,
        layout,
        enable_prefix_caching=config.enable_prefix_caching and setup.memory == "paged",
        batching=setup.batching,
        memory=setup.memory,
        chunked_prefill=setup.chunked_prefill,
    )
    compute = setup.subject.program_for(plan.max_model_len)
    executor = SimulatedExecutor(
        compute,
        layout,
        num_blocks=plan.num_blocks,
        rates=setup.rates(),
        max_tokens=limits.max_num_batched_tokens,
        max_logits_rows=limits.logits_rows,
        costs=CostModel(
            compute,
            layout,
            weight_bytes=setup.stored.sizes,
            arithmetic=arithmetic(setup.stored, setup.device, setup.quantized),
            attention=setup.device.attention(layout.dtype, setup.quantized),
        ),
    )
    pace: StepTimePredictor | None = None
    if config.itl_target is not None:  # steps take what is predicted: there is nothing to learn
        stored = setup.calibration()
        noise = None if stored is None else stored.noise
        pace = StepTimePredictor(executor.costs, executor.rates, noise=noise, learns=False)
    vocab_size = compute.config.vocab_size
    sampler, clock = ScriptedSampler(vocab_size, stop_rate=1.0), VirtualClock()
    speculator, speculation = None, config.speculation
    if speculation is not None and setup.acceptance is not None:
        speculator = Speculator(
            ScriptedDrafter(sampler, setup.acceptance),
            vocab_size,
            speculation.num_speculative_tokens,
            rejection=speculation.rejection,
            longest=speculation.longest,
            now=clock.now,
        )
    return Engine(
        executor,
        Scheduler(limits, layout, plan.num_blocks),
        sampler,
        clock,
        vocab_size=vocab_size,
        seed=config.seed or 0,
        speculator=speculator,
        step_times=pace,
    )


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came of a load on a setup."""

    setup: Setup
    engine: Engine  # at the end
    samples: Sequence[Sample]
    replay: Replay
    series: Series
    seed: int = 0
    max_concurrency: int | None = None
    target: LatencyTarget | None = None


def simulate(
    setup: Setup,
    samples: Sequence[Sample],
    *,
    seed: int = 0,
    max_tokens: int | None = None,
    max_concurrency: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
    observers: Sequence[Observer] = (),
    leaps: bool = True,
    target: LatencyTarget | None = None,
) -> Simulation:
    """The samples, in order of arrival, put through the engine. ``seed`` makes their tokens.

    ``max_tokens`` is what each request allows for its answer, at which longer ones are cut; None:
    what the context leaves. It matters where memory is reserved, and no more than an answer is
    ever written. ``target`` is what each request is promised. Raises `DoesNotFit`.
    """
    engine = simulated_engine(setup)
    if max_tokens is not None:
        samples = [replace(s, output_len=min(s.output_len, max_tokens)) for s in samples]
    if setup.memory == "reserve":
        context = engine.scheduler.config.max_model_len
        samples = [
            replace(s, max_tokens=min(max_tokens or context, context - s.prompt_len))
            for s in samples
        ]
    engine.observers += observers
    series = Series(max((sample.arrival or 0.0 for sample in samples), default=0.0))
    done = replay(
        engine,
        samples,
        seed=seed,
        max_concurrency=max_concurrency,
        progress=progress,
        watch=series,
        leaps=leaps,
        target=target,
    )
    series.finish(engine)
    return Simulation(setup, engine, samples, done, series, seed, max_concurrency, target)
