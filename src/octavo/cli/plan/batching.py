"""octavo plan batching: continuous batching's throughput, from step time, arrivals and lengths."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text, on_stderr, wrapped
from octavo.cli.fold import show_report
from octavo.cli.options import MOST_SEQUENCES, length, naming_flags
from octavo.cli.planned import (
    DEVICE_HELP,
    KV_DTYPE_HELP,
    NAMES,
    BandwidthShare,
    ComputeShare,
    LayersFormat,
    MemoryUtilization,
    chosen_scheme,
)
from octavo.tools.plan.defaults import engine_defaults
from octavo.words import number, plural

if TYPE_CHECKING:
    from octavo.tools.plan.band import Doubt
    from octavo.tools.plan.continuous_batching import (
        Batching,
        EngineLimits,
        LinearStep,
        Load,
        ModelStep,
    )
    from octavo.tools.plan.lengths import Lengths

EXAMPLES = (
    "octavo plan batching --step-ms 20 --per-sequence-ms 0.1 --max-num-seqs 32 --request-rate 5",
    "octavo plan batching llama-3-8b --device h100 --input-len lognormal:1000,1 --request-rate 8",
    "octavo plan batching llama-3-8b --device h100 --trace azure.csv",
)

_DIST = "A number, uniform:LOW-HIGH, geometric:MEAN, exponential:MEAN or lognormal:MEAN,CV."


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A preset, a config.json, a model's folder or file, or a name that octavo pull "
            "knows: step times are predicted.",
            show_default="none: step times are given",
        ),
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="A step: this, whatever runs, and …")
    ] = None,
    per_sequence_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="… for each sequence that decodes.", show_default="0"),
    ] = None,
    per_prompt_token_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="… for each token of a prompt.", show_default="0"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help=DEVICE_HELP, show_default="machine")
    ] = None,
    format: LayersFormat = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help=KV_DTYPE_HELP,
            show_default="auto",
        ),
    ] = None,
    compute_share: ComputeShare = None,
    bandwidth_share: BandwidthShare = None,
    input_len: Annotated[
        str | None,
        typer.Option(metavar="LENGTHS", help=f"Of prompts. {_DIST}", show_default="512"),
    ] = None,
    output_len: Annotated[
        str | None,
        typer.Option(metavar="LENGTHS", help="Of answers, the same.", show_default="geometric:128"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Lengths and rate of recorded requests."),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Requests a second, as a Poisson process.",
            show_default="the trace's; else only saturation is computed",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=MOST_SEQUENCES, help="Most sequences in a step."),
    ] = 256,
    max_num_batched_tokens: Annotated[
        str | None,
        typer.Option(
            parser=length,
            metavar="TOKENS",
            help="Most tokens in a step.",
            show_default="512; of a GPU 2048",
        ),
    ] = None,
    memory_utilization: MemoryUtilization = None,
    static_batch: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=MOST_SEQUENCES, help="Sequences of a static batch.",
            show_default="as many as run continuously",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print it as one JSON object, in tokens and seconds.")
    ] = False,
) -> None:  # fmt: skip
    """Work out what continuous batching makes of a load.

    From the time of a step, the most sequences that run together, the rate of arrivals and the
    lengths of prompts and answers: what saturates, what runs and waits below that, and static
    batching beside it. Sums, not a simulation: octavo simulate runs the engine itself.
    """
    from octavo.tools.plan.continuous_batching import batching, slowed

    given_step = {"--step-ms": step_ms, "--per-sequence-ms": per_sequence_ms,
                  "--per-prompt-token-ms": per_prompt_token_ms}  # fmt: skip
    of_model = {"--device": device, "--format": format, "--kv-cache-dtype": kv_cache_dtype,
                "--compute-share": compute_share, "--bandwidth-share": bandwidth_share,
                "--memory-utilization": memory_utilization}  # fmt: skip
    if (model is None) is (step_ms is None):
        raise typer.BadParameter("give either MODEL or --step-ms: the time of a step is of one")
    for flag, value in (given_step if model else of_model).items():
        if value is not None:
            raise typer.BadParameter(f"{flag} does not go with {'MODEL' if model else '--step-ms'}")
    load, notices = _load(trace, input_len, output_len, request_rate)
    tokens = None if max_num_batched_tokens is None else int(max_num_batched_tokens)
    step: LinearStep | ModelStep
    if model is None:
        step, how = _linear(given_step)
        limits = _limits(
            max_num_seqs, tokens or engine_defaults(True).max_num_batched_tokens, math.inf
        )
    else:
        step, limits, how = _model(
            model, device or "machine", compute_share, bandwidth_share, format,
            kv_cache_dtype or "auto", memory_utilization,
            load, max_num_seqs, tokens,
        )  # fmt: skip
    try:
        found = batching(step, load, limits, static_batch)
        unsure: Doubt = how.pop("doubt")
        ends = [
            batching(slowed(step, times), load, limits, static_batch)
            for times in (1 / unsure.faster, unsure.slower)
        ]
    except ValueError as error:
        raise _refused(str(error)) from None
    if as_json:
        typer.echo(json_text(as_dict(found, ends, unsure, how, notices), indent=2))
    else:
        show_report("\n".join([*notices, *as_lines(found, ends, unsure, how)]))


def _refused(message: str) -> Exception:
    from octavo.engine.config import SettingsError

    return SettingsError(message)


def _load(
    trace: Path | None, input_len: str | None, output_len: str | None, rate: float | None
) -> tuple[Load, list[str]]:
    from octavo.tools.plan import lengths
    from octavo.tools.plan.continuous_batching import Load

    if rate is not None and not 0 < rate < 1e9:  # nan neither
        raise typer.BadParameter(f"--request-rate must be above 0 and below 10⁹, not {rate:g}")
    if trace is None:
        found = []
        for flag, text in (
            ("--input-len", input_len or "512"),
            ("--output-len", output_len or "geometric:128"),
        ):
            try:
                found.append(lengths.parse(text))
            except ValueError as error:
                raise typer.BadParameter(f"{flag} {error}") from None
        return Load(found[0], found[1], rate or 0.0), []
    for flag, given in (("--input-len", input_len), ("--output-len", output_len)):
        if given is not None:
            raise typer.BadParameter(f"{flag} does not go with --trace, which has lengths")
    return _of_trace(trace, rate)


def _of_trace(path: Path, rate: float | None) -> tuple[Load, list[str]]:
    """Lengths as they occur together; the rate is of the time between the first and the last."""
    from octavo.tools.plan.continuous_batching import Load
    from octavo.tools.plan.lengths import LONGEST, Lengths
    from octavo.tools.workload import traces
    from octavo.tools.workload.datasets import DatasetError

    try:
        samples, notices = traces.load(path, None, traces.Window(), strict=True)
    except DatasetError as error:
        raise _refused(str(error)) from None
    prompts = [sample.prompt_len for sample in samples]
    outputs = [sample.output_len for sample in samples]
    if max(*prompts, *outputs) > LONGEST:
        raise _refused(f"{path}: a request has more than {LONGEST:,} tokens")
    span = (samples[-1].arrival or 0.0) - (samples[0].arrival or 0.0)
    if rate is None and span <= 0:
        raise _refused(f"{path}: all requests come at once, which is no rate: give --request-rate")
    pairs = zip(prompts, outputs, strict=True)
    return Load(
        Lengths.observed(prompts, "as in the trace"),
        Lengths.observed(outputs, "as in the trace"),
        (len(samples) - 1) / span if rate is None else rate,
        sum(prompt * output for prompt, output in pairs) / len(samples),
    ), notices


def _linear(given: dict[str, float | None]) -> tuple[LinearStep, dict[str, Any]]:
    from octavo.tools.plan.band import OF_GIVEN
    from octavo.tools.plan.continuous_batching import LinearStep

    values = {flag: value or 0.0 for flag, value in given.items()}
    for flag, value in values.items():
        least = flag == "--step-ms"
        if not (1e-6 if least else 0.0) <= value < 1e9:  # nan neither
            word = "at least 10⁻⁶" if least else "0 or more"
            raise typer.BadParameter(f"{flag} must be {word} and below 10⁹ ms, not {value:g}")
    constant, sequence, token = values.values()
    words = [f"{constant:g} ms"]
    if sequence:
        words.append(f"{sequence:g} ms × sequences that decode")
    if token:
        words.append(f"{token:g} ms × tokens of prompts")
    return LinearStep(constant / 1e3, sequence / 1e3, token / 1e3), {
        "step": " + ".join(words),
        "cache": None,
        "doubt": OF_GIVEN,
    }


def _limits(max_num_seqs: int, tokens: int, cached: float) -> EngineLimits:
    from octavo.tools.plan.continuous_batching import EngineLimits

    with naming_flags():
        return EngineLimits(max_num_seqs, tokens, cached)


def _model(
    model: str, device: str, compute_share: float | None, bandwidth_share: float | None,
    format: str | None, kv_cache_dtype: str,
    memory_utilization: float | None, load: Load, max_num_seqs: int, tokens: int | None,
) -> tuple[ModelStep, EngineLimits, dict[str, Any]]:  # fmt: skip
    """Step times of the cost model, and the cache that the engine would have there."""
    from octavo.engine.config import EngineConfig
    from octavo.kv_cache.cache import peak_blocks
    from octavo.tools.plan import hardware
    from octavo.tools.plan import quantization as formats
    from octavo.tools.plan.band import doubt
    from octavo.tools.plan.continuous_batching import ModelStep, held_tokens
    from octavo.tools.plan.simulation import Setup, weights_on
    from octavo.tools.plan.subject import Subject

    with naming_flags(*NAMES):
        hardware.check(device)
        chosen = chosen_scheme(format, None, None, False)
        usual = engine_defaults(device == "machine", hardware.is_gpu(device))
        if tokens is None:
            tokens = usual.max_num_batched_tokens
        if memory_utilization is None:
            memory_utilization = usual.memory_utilization
        limits = _limits(max_num_seqs, tokens, math.inf)
        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=tokens,
            memory_utilization=memory_utilization,
            kv_cache_dtype=kv_cache_dtype,
        )
    subject = Subject.find(model)
    # Late, for this machine may have to be measured.
    with naming_flags():
        on = hardware.device(device, on_stderr).assuming(compute_share, bandwidth_share)
    stored = weights_on(on, subject, chosen)
    setup = Setup(subject, stored, on, config)
    most = subject.program.config.context_length
    if load.prompts.mean + load.outputs.mean > most:
        raise _refused(
            f"a prompt of {load.prompts.mean:,.0f} and an answer of {load.outputs.mean:,.0f} "
            f"tokens, the means, are more than the model's context of {most:,}"
        )
    layout = config.layout_of(subject.program.config)
    cache, where = None, "the cache is taken to hold all that run: the device's memory is not known"
    if on.memory_bytes is not None:
        plan, _ = setup.plan()
        held = held_tokens(load)
        # Half a block of each sequence is not filled yet, in the mean.
        blocks = peak_blocks(layout, math.ceil(held + layout.block_size / 2))
        limits = _limits(max_num_seqs, tokens, plan.num_blocks / blocks)
        cache = plan.num_blocks
        where = (
            f"{plan.num_blocks:,} blocks of cache ÷ {blocks:,} of a sequence of {held:,.0f} tokens "
            f"= {limits.cached_seqs:,.1f} sequences"
        )
    costs = formats.cost_model(subject, stored, layout, on)
    return (
        ModelStep(costs, setup.rates()),
        limits,
        {
            "model": subject.name,
            "format": stored.name,
            "device": on.name,
            "measured": on.measured,
            "step": f"of {subject.name} ({stored.name}) on {on.name}",
            "standing": on.standing,
            "basis": on.assumption or setup.basis(),
            "cache": where,
            "num_blocks": cache,
            "doubt": doubt(setup),
        },
    )


# --- JSON ----------------------------------------------------------------------------------------


def as_dict(
    found: Batching,
    ends: list[Batching],
    unsure: Doubt,
    how: dict[str, Any],
    notices: list[str],
) -> dict[str, Any]:
    """``ends``: the same with the shortest and the longest steps that ``unsure`` leaves."""
    load, saturation, static, spread = found.load, found.saturation, found.static, found.spread
    fixed = found.fixed_point

    def lengths(of: Lengths) -> dict[str, Any]:
        return {"text": of.text, "mean": of.mean, "cv": of.cv}

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "step_time": how,
        "notices": notices,
        "prompts": lengths(load.prompts),
        "outputs": lengths(load.outputs),
        "context": load.context,
        "saturation": {
            "running": saturation.running,
            "limited_by": saturation.limit,
            "steps_per_request": saturation.mix.steps,
            "step_seconds": saturation.step_seconds,
            "request_throughput": saturation.requests_per_second,
            "output_throughput": saturation.tokens_per_second,
        },
        "request_rate": load.rate,
        "utilisation": found.utilisation,
        "saturated": found.saturated,
        "headroom": found.headroom,
        "error_band": {
            **unsure._asdict(),
            "headroom": [end.headroom for end in reversed(ends)] if load.rate else None,
            "ttft_seconds": [finite(end.ttft_seconds) for end in ends],
            "tpot_seconds": [end.tpot_seconds for end in ends],
            "output_throughput": [end.tokens_per_second for end in reversed(ends)],
        },
        "fixed_point": None if fixed is None else fixed.running,
        "step_seconds": found.step_seconds,
        "running": spread.running,
        "waiting": finite(spread.waiting),
        "idle": spread.idle,
        "full": spread.full,
        "tokens_in_flight": found.tokens_in_flight,
        "request_throughput": found.requests_per_second,
        "output_throughput": found.tokens_per_second,
        "ttft_seconds": finite(found.ttft_seconds),
        "tpot_seconds": found.tpot_seconds,
        "static": {
            "batch": static.size,
            "longest_output": static.longest,
            "batch_seconds": static.seconds,
            "request_throughput": static.requests_per_second,
            "output_throughput": static.tokens_per_second,
        },
        "continuous_over_static": found.ratio,
    }


# --- for people ----------------------------------------------------------------------------------


def as_lines(
    found: Batching, ends: list[Batching], unsure: Doubt, how: dict[str, Any]
) -> list[str]:
    load, mix = found.load, found.saturation.mix
    lines = [f"a step: {how['step']}"]
    for key in ("standing", "basis"):
        lines += wrapped(how.get(key) or "", "  ")
    lines += [
        "",
        "a request",
        f"  prompt    {_mean(load.prompts)}",
        f"  answer    {_mean(load.outputs)}",
        f"  steps     {_g(mix.reads)} to read the prompt, the last of which gives a token, and "
        f"{_g(load.decodes)} for the others",
        f"  context   {plural(load.context, 'token')} in its cache while it decodes, in the mean",
        "",
        *_saturation_lines(found, how),
    ]
    if load.rate:
        lines += ["", *(_saturated_lines(found) if found.saturated else _below_lines(found))]
        lines += _band_lines(ends, unsure)
    return [*lines, "", *_static_lines(found)]


def _saturation_lines(found: Batching, how: dict[str, Any]) -> list[str]:
    saturation, limits = found.saturation, found.limits
    mix = saturation.mix
    why = {
        "sequences": f"--max-num-seqs {limits.max_num_seqs}",
        "cache": how["cache"],
        "tokens": f"a step of {limits.max_num_batched_tokens:,} tokens is full: prompts bring "
        f"{_g(mix.load.prompts.mean)} for {_g(mix.load.decodes)} of decode",
    }[saturation.limit]
    stays = mix.steps * saturation.step_seconds
    return [
        "when saturated",
        f"  running   {plural(saturation.running, 'sequence')}: {why}",
        f"  a step    {_ms(saturation.step_seconds)}",
        f"  a request {plural(mix.steps, 'step')} × {_ms(saturation.step_seconds)} = {_g(stays)} s",
        f"  at most   {_g(saturation.running)} ÷ {_g(stays)} s = "
        f"{_g(saturation.requests_per_second)} requests/s × "
        f"{plural(mix.load.outputs.mean, 'token')} = {_g(saturation.tokens_per_second)} tokens/s",
    ]


def _below_lines(found: Batching) -> list[str]:
    load, spread, fixed = found.load, found.spread, found.fixed_point
    lines = [
        f"at {_g(load.rate)} requests/s: {number(100 * found.utilisation, 3)} % of what saturates, "
        f"headroom {number(found.headroom or 0, 3)} ×",
    ]
    if fixed is not None:
        seen = fixed.running + 1
        lines += [
            "  Little    running = rate × steps × time of a step, where a request sees the others "
            "and itself:",
            f"            {_g(fixed.running)} = {_g(load.rate)}/s × {_g(fixed.steps)} × "
            f"{_ms(fixed.running / load.rate / fixed.steps)}, a step of {_g(seen)}",
        ]
    lines += [
        f"  running   {_g(spread.running)} in the mean as arrivals are random, with "
        f"{plural(found.tokens_in_flight, 'token')} in their caches",
        f"            no request {_percent(spread.idle)} of the time, all places taken "
        f"{_percent(spread.full)}; {_g(spread.waiting)} wait",
        f"  gives     {_g(found.requests_per_second)} requests/s, {_g(found.tokens_per_second)} "
        f"tokens/s; TPOT {_ms(found.tpot_seconds)}, TTFT about {_ms(found.ttft_seconds)}",
    ]
    return lines


def _saturated_lines(found: Batching) -> list[str]:
    load, most = found.load, found.saturation.requests_per_second
    grows = load.rate - most
    return [
        f"SATURATED at {_g(load.rate)} requests/s: {number(100 * found.utilisation)} % of what "
        f"can be served, headroom {number(found.headroom or 0, 3)} ×",
        f"  the queue grows by {_g(load.rate)} - {_g(most)} = {_g(grows)} requests a second as "
        "long as this lasts;",
        f"  who comes after an hour waits {plural(60 * grows / most, 'minute')}. TPOT "
        f"{_ms(found.tpot_seconds)} once it runs",
    ]


def _band_lines(ends: list[Batching], unsure: Doubt) -> list[str]:
    fast, slow = ends
    lines = [
        f"  error     steps may take {1 / unsure.faster:.2f} to {unsure.slower:.2f} times as long "
        f"({unsure.basis}):",
        f"            headroom {number(slow.headroom or 0, 3)} to "
        f"{number(fast.headroom or 0, 3)} ×, TPOT {_ms(fast.tpot_seconds)} to "
        f"{_ms(slow.tpot_seconds)}",
    ]
    if not fast.saturated:
        most = "no end" if slow.saturated else _ms(slow.ttft_seconds)
        lines.append(f"            TTFT {_ms(fast.ttft_seconds)} to {most}")
    if slow.saturated and not fast.saturated:
        lines.append(
            "  !         so near to saturation waits are uncertain: it may lie on either side"
        )
    return lines


def _static_lines(found: Batching) -> list[str]:
    static, load = found.static, found.load
    return [
        f"static batching, {static.size:,} at a time",
        f"  the longest answer of {static.size:,}: {plural(static.longest, 'token')} expected, "
        f"{number(static.longest / load.outputs.mean, 3)} × the mean",
        f"  a batch   {_g(static.seconds)} s for {static.size:,} × "
        f"{plural(load.outputs.mean, 'token')} = {_g(static.requests_per_second)} requests/s, "
        f"{_g(static.tokens_per_second)} tokens/s",
        f"continuous ÷ static, both saturated: {number(found.ratio, 3)} ×",
    ]


def _mean(lengths: Lengths) -> str:
    if lengths.cv < 1e-9:
        return plural(round(lengths.mean), "token")
    return f"{plural(lengths.mean, 'token')} in the mean, cv {lengths.cv:.3g} ({lengths.text})"


def _g(value: float) -> str:
    return "0" if abs(value) < 1e-6 else number(value)


def _ms(seconds: float) -> str:
    return f"{_g(1e3 * seconds)} ms"


def _percent(share: float) -> str:
    return f"{number(100 * share, 2)} %" if share >= 5e-5 else "0 %"
