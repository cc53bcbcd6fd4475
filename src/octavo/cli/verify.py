"""octavo verify: a certificate of same bits and same output, on one's own model and machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.console import json_text, on_stderr
from octavo.cli.fold import show_report
from octavo.cli.options import ENGINE_OPTIONS, Model, engine_config, json_object, takes

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.tools.verify.certificate import Certificate

EXAMPLES = (
    "octavo verify smollm2",
    "octavo verify smollm2 --kv-cache-dtype int8 --json",
    """octavo verify smollm2 --speculative-config '{"method": "mymodule:MyDrafter"}'""",
    "octavo verify smollm2 --plant-fault",
)

_OWN = ("speculative_config", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes",
        "memory_utilization", "enable_prefix_caching", "max_num_batched_tokens")  # fmt: skip
_ENGINE_OPTIONS = [option for option in ENGINE_OPTIONS if option.name not in _OWN]


@takes(engine=(_ENGINE_OPTIONS, engine_config))
def command(
    model: Model,
    engine: EngineConfig,
    speculative_config: Annotated[
        list[str] | None,
        typer.Option(
            parser=json_object,
            metavar="JSON",
            help="Try this drafter too, or with these settings (repeatable).",
            show_default=False,
        ),
    ] = None,
    draws: Annotated[
        int,
        typer.Option(
            min=1000,
            max=1_000_000,
            metavar="N",
            help="Draws at each position where rejection's output distribution is tested.",
        ),
    ] = 4000,
    plant_fault: Annotated[
        bool,
        typer.Option(
            "--plant-fault",
            help="Plant a fault of each kind: exit code 1 if they are all found, else 2.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify that output does not depend on what happens around it.

    Requests of every kind run alone, and again crowded, in pieces, from cached prefixes, preempted,
    on two threads or more, and with every drafter: each bit of their logits is compared. For the
    rule rejection, whose output may differ and its distribution may not, that is tested
    (chi-square). Exit code 1 if anything differs, or if something did not come about. A built-in
    drafter for which memory is too small is left out, and the verdict names it.
    """
    from octavo.loader import load
    from octavo.loader.pull import resolve
    from octavo.spec_decode.config import SpeculativeConfig
    from octavo.tools.verify.certificate import certify

    try:
        given: list[Any] = [SpeculativeConfig.of(each) for each in speculative_config or ()]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with on_stderr() as progress:
        certificate = certify(
            load(resolve(model)),
            engine,
            given,
            draws=draws,
            plant_faults=plant_fault,
            progress=progress,
        )
    show_report(
        json_text(certificate.as_dict()) if as_json else as_text(certificate), as_json=as_json
    )
    if certificate.overlooked:
        typer.echo(f"octavo: not found: {'; '.join(certificate.overlooked)}", err=True)
        raise typer.Exit(2)
    if not certificate.ok:
        raise typer.Exit(1)


def as_text(certificate: Certificate) -> str:
    """Tables for people, and the verdict."""
    lines = [
        f"{certificate.model}, {certificate.kv_cache_dtype} KV cache, {certificate.isa}, "
        f"{certificate.threads} threads",
        "",
        f"{'the same requests':<20}{'answers':>8}{'rows':>8}{'bits that differ':>18}  how",
    ]
    for each in certificate.conditions:
        lines.append(
            f"{each.name:<20}{each.cases:>8}{each.rows:>8,}{each.differing_bits:>18}  {each.what}"
        )
    lines += [
        "",
        f"{'with drafts by':<20}{'answers':>8}{'rows':>8}{'bits that differ':>18}"
        f"{'greedy':>9}{'drawn':>9}{'accepted':>16}",
    ]
    for name, drafted in certificate.drafters.items():
        found = drafted.guessing
        lines.append(
            f"{name:<20}{found.cases:>8}{found.rows:>8,}{found.differing_bits:>18}"
            f"{_same(found.greedy_equal):>9}{_same(found.replay_equal):>9}"
            f"{f'{found.accepted_tokens:,} of {found.draft_tokens:,}':>16}"
        )
    lines += [
        "",
        f"{'by rejection':<20}{'draws by the rule':>18}{'in the engine':>15}{'tests':>7}{'p':>9}"
        f"{'p of a wrong rule':>19}",
    ]
    for name, drafted in certificate.drafters.items():
        tests = drafted.distribution
        lines.append(
            f"{name:<20}{tests.rule_draws:>18,}{tests.counted:>15,}{tests.tests:>7}"
            f"{tests.chi_square_p:>9.2g}{tests.wrong_rule_p:>19.1e}"
        )
    lines += ["", *(f"not tried: {name}: {why}" for name, why in certificate.left_out.items())]
    for fault, found_ in certificate.planted.items():
        lines.append(f"planted: {fault}: {'found' if found_ else 'NOT FOUND'}")
    lines += [f"✗ {problem}" for problem in certificate.problems]
    if certificate.planted:
        lines.append("This was a test of the test: no certificate.")
    elif certificate.ok:
        kept = "every drafter keeps the distribution."
        if certificate.left_out:
            missing = ", ".join(certificate.left_out)
            kept = f"every drafter that was tried keeps the distribution; not tried: {missing}."
        lines.append(
            f"✓ {certificate.cases} answers are the same to the bit: "
            f"{certificate.rows:,} rows of logits compared, 0 bits differ. By rejection, {kept}"
        )
    lines.append(f"({certificate.seconds:.0f} s)")
    return "\n".join(lines)


def _same(equal: bool) -> str:
    return "same" if equal else "DIFFER"
