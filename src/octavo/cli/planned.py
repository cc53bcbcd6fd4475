"""Options that plans and simulations share: in which numbers a model is, and on which device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from octavo.executor.cost import Arithmetic
    from octavo.tools.plan.schemes import StorageScheme

# --- numbers -------------------------------------------------------------------------------------

LayersFormat = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Of the layers: a GGUF one (q4_0, q4_k, …), gptq, awq, compressed-tensors, w8a8, fp8, "
        "bf16, f32.",
        show_default="as the file has them, else bf16",
    ),
]
Bits = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Of gptq (3, 4, 8), awq (4), compressed-tensors (4, 8); without a format of gptq.",
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Inputs that share a scale; -1: a whole row. Without a format of gptq.",
        show_default="128",
    ),
]
Asymmetric = Annotated[
    bool,
    typer.Option("--asymmetric", help="compressed-tensors, also without a format, with zeros."),
]
EmbeddingFormat = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Of embedding and head, which are apart.",
        show_default="bf16",
    ),
]

KV_DTYPE_HELP = "Numbers in the KV cache: auto (bf16), bf16, fp16, int8, int4; of GPUs fp8, too."
KvCacheDtype = Annotated[str, typer.Option(metavar="DTYPE", help=KV_DTYPE_HELP)]


def _unit(name: str) -> str:
    if name not in ("auto", "int8", "bf16"):
        raise typer.BadParameter(f"arithmetic {name!r} is none of auto, int8, bf16")
    return name


Unit = Annotated[
    str,
    typer.Option(
        metavar="UNIT",
        help="What multiplies quantized weights: int8 (activations are rounded to 8 bits, as "
        "Octavo does), bf16 (weights are widened, as GPUs' kernels do), or auto, by the device.",
        callback=_unit,
    ),
]


def unit(name: str) -> Arithmetic | None:
    """The arithmetic of a name that `Unit` has let pass; None: the device decides."""
    from octavo.executor.cost import Arithmetic

    return None if name == "auto" else Arithmetic(name)


NAMES = ("device", "format", "embedding_format")  # as messages about them begin


def embedding_scheme(name: str) -> StorageScheme:
    """Raises `ValueError`."""
    from octavo.tools.plan import schemes

    try:
        return schemes.scheme(name)
    except ValueError as error:
        raise ValueError(f"embedding_{error}") from None


def chosen_scheme(
    name: str | None, bits: int | None, group: int | None, asymmetric: bool
) -> StorageScheme | None:
    """What the options say; None where they say nothing. Raises `ValueError`."""
    from octavo.tools.plan import schemes

    if name is None and bits is None and group is None and not asymmetric:
        return None
    if name is None:
        name = "compressed-tensors" if asymmetric else "gptq"
    if asymmetric and name != "compressed-tensors":
        raise ValueError("--asymmetric is for compressed-tensors; the others are as they are")
    return schemes.scheme(name, bits, group, symmetric=not asymmetric)


# --- device --------------------------------------------------------------------------------------

DEVICE_HELP = (
    "machine: this one's limits, as octavo bench machine stores them. A GPU by its name, such as "
    "h100. Or figures: memory in GB/s, then peaks in Gop/s (a multiply-add is two) of int4, int8, "
    "fp8, fp16, bf16 or fp32, as memory=48,int8=940,bf16=470,fp32=235; for what has to fit, "
    "capacity in GiB; kind=gpu where they are a GPU's."
)
OnDevice = Annotated[str, typer.Option(metavar="DEVICE", help=DEVICE_HELP)]

ComputeShare = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Of the device's peaks, that predictions assume.",
        show_default="of a GPU what is fitted to published runs, else 1",
    ),
]
BandwidthShare = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Of its bandwidth, the same.", show_default="of a GPU fitted, else 1"
    ),
]


MemoryUtilization = Annotated[
    float | None,
    typer.Option(
        "--memory-utilization",
        "--gpu-memory-utilization",
        metavar="X",
        help="Of a GPU the share of its memory for weights, activations, runtime and cache, as in "
        "vLLM; else the cache's share of what weights leave free. 0 to 1.",
        show_default="0.5; of a GPU 0.92",
    ),
]


def _price(an_hour: float | None) -> float | None:
    if an_hour is not None and not 1e-6 <= an_hour <= 1e9:  # nan neither
        raise typer.BadParameter(f"{an_hour:g} is not from 10⁻⁶ to 10⁹ an hour")
    return an_hour


Price = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Of the device an hour: adds what a million tokens cost.",
        callback=_price,
    ),
]
