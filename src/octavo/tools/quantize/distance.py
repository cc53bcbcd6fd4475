"""How far one distribution of the next token is from another, from both their logits.

With p the reference's and q the model's, over the whole vocabulary and in float64:

    KL(p ‖ q) = Σ p (ln p − ln q)           nats; 0 where both say the same
    perplexity = exp(mean of −ln q(next))    over positions whose next token is known

and top-1 agreement: whether both rank the same token first (of equal ones, that with the lowest
id). Needs nothing but numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class Distances(NamedTuple):
    """At every position of a text: [positions], and [positions with a next token]."""

    kl: Float64  # nats
    agree: Bools
    nll: Float64  # of the model: −ln q(next), nats
    reference_nll: Float64


@dataclass(frozen=True, slots=True)
class Fidelity:
    """`Distances` in a few numbers. KL in nats, agreement as a fraction."""

    positions: int
    perplexity: float
    reference_perplexity: float
    kl_mean: float
    kl_standard_error: float  # of the mean
    kl_median: float
    kl_p99: float
    kl_max: float
    top1_agreement: float

    @classmethod
    def of(cls, found: Distances) -> Fidelity:
        kl = found.kl
        return cls(
            len(kl),
            math.exp(found.nll.mean()),
            math.exp(found.reference_nll.mean()),
            float(kl.mean()),
            float(kl.std(ddof=1) / math.sqrt(len(kl))),
            float(np.median(kl)),
            float(np.quantile(kl, 0.99)),
            float(kl.max()),
            float(found.agree.mean()),
        )


def distances(p: Float32, q: Float32, following: Int32) -> Distances:
    """Compare the reference's logits p and the model's q, both [rows, vocab]. ``following``:
    the token after each row, of the last row perhaps none.
    """
    rows, vocab = p.shape
    kl, agree = np.empty(rows), np.empty(rows, np.bool_)
    nll, reference_nll = np.empty(len(following)), np.empty(len(following))
    x, y, power = (np.empty(vocab) for _ in range(3))
    # A row at a time, which stays in a processor's cache.
    for row in range(rows):
        np.subtract(p[row], p[row].max(), out=x, dtype=np.float64)
        np.subtract(q[row], q[row].max(), out=y, dtype=np.float64)
        if row < len(following):
            next_x, next_y = x[following[row]], y[following[row]]
        log_q = math.log(np.exp(y, out=power).sum())
        total = np.exp(x, out=power).sum()
        log_p = math.log(total)
        if row < len(following):
            reference_nll[row], nll[row] = log_p - next_x, log_q - next_y
        x -= y
        x *= power
        # Never below 0, but for rounding. (A NaN stays one.)
        kl[row] = max(x.sum() / total - log_p + log_q, 0.0)
        agree[row] = p[row].argmax() == q[row].argmax()
    return Distances(kl, agree, nll, reference_nll)
