"""Sampling as its definition reads, in numpy and double precision: slow and plain."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from octavo.sampling.params import SamplingParams

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
_WORD = 0xFFFFFFFF


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as in section 3 of Salmon et al., 2011."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return [c0, c1, c2, c3]


def noise(seed: int, choice: int, position: int, stream: int = 0) -> float:
    seed %= 1 << 64
    words = philox([position & _WORD, position >> 32, choice, stream], [seed & _WORD, seed >> 32])
    return ((words[0] << 32 | words[1]) >> 11) / 2.0**53


def adjust(
    logits: Float32,
    params: SamplingParams,
    prompt: list[int],
    generated: list[int],
    stop_token_ids: frozenset[int],
) -> Float32:
    """The logits after masks, bias, min_tokens and penalties, each in single precision."""
    out = logits.copy()
    if params.allowed_token_ids is not None:
        out[[i for i in range(len(out)) if i not in set(params.allowed_token_ids)]] = -np.inf
    for token_id in params.banned_token_ids:
        out[token_id] = -np.inf
    for token_id, bias in params.logit_bias.items():
        out[token_id] += np.float32(bias)
    if len(generated) < params.min_tokens:
        for token_id in stop_token_ids:
            out[token_id] = -np.inf
    repetition = np.float32(params.repetition_penalty)
    for token_id in set(prompt) | set(generated):
        out[token_id] = (
            out[token_id] / repetition if out[token_id] > 0 else out[token_id] * repetition
        )
    for token_id, count in Counter(generated).items():
        out[token_id] -= np.float32(params.frequency_penalty) * np.float32(count)
        out[token_id] -= np.float32(params.presence_penalty)
    return out


def sigma_limit(adjusted: Float32, n: float) -> float:
    """The least logit that top_n_sigma keeps."""
    there = adjusted[adjusted > -np.inf].astype(np.float64)
    return float(there.max() - n * there.std())


def probabilities(adjusted: Float32, params: SamplingParams) -> Float64:
    """The distribution the token is drawn from (temperature above 0)."""
    scaled = (adjusted.astype(np.float64) - adjusted.max()) / params.temperature
    weights = np.exp(scaled)
    if params.top_n_sigma > 0:
        weights[adjusted < sigma_limit(adjusted, params.top_n_sigma)] = 0
    if params.min_p > 0:
        weights[scaled < math.log(params.min_p)] = 0
    order = np.argsort(-adjusted, kind="stable")  # equal ones by id
    if 0 < params.top_k < len(adjusted):
        weights[order[params.top_k :]] = 0
    if params.top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= params.top_p * weights.sum()]] = 0
    return weights / weights.sum()


def near_a_limit(adjusted: Float32, params: SamplingParams, tolerance: float = 1e-5) -> bool:
    """Whether rounding may decide if some token is in or out."""
    scaled = (adjusted.astype(np.float64) - adjusted.max()) / params.temperature
    if params.min_p > 0 and np.abs(scaled - math.log(params.min_p)).min() < tolerance:
        return True
    if params.top_n_sigma > 0:
        # What equals the maximum is in whatever the limit is.
        below = adjusted[adjusted < adjusted.max()].astype(np.float64)
        if np.abs(below - sigma_limit(adjusted, params.top_n_sigma)).min(initial=1) < tolerance:
            return True
    if params.top_p < 1:
        weights = probabilities(adjusted, replace(params, top_p=1.0))
        order = np.argsort(-adjusted, kind="stable")
        return bool(np.abs(np.cumsum(weights[order]) - params.top_p).min() < tolerance)
    return False


def log_softmax(logits: Float32) -> Float64:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def rank(logits: Float32, token_id: int) -> int:
    return 1 + int(np.argsort(-logits, kind="stable").tolist().index(token_id))


def chi_square_limit(degrees: int) -> float:
    """The 0.999 quantile, by Wilson and Hilferty's approximation (1931)."""
    term = 2 / (9 * degrees)
    return float(degrees * (1 - term + 3.0902 * math.sqrt(term)) ** 3)
