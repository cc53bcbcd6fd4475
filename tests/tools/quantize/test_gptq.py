"""GPTQ against the procedure that it is a fast form of: one column after another, each time with
the inverse Hessian of the columns that are left (Frantar & Alistarh, 2022, "Optimal Brain
Compression")."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.tools.quantize.gptq_rounding import Order, gptq, inverse_factor, relative_loss
from octavo.tools.quantize.grid import CodeKind, Quantized, Scheme, fit, round_to_nearest

Float64 = npt.NDArray[np.float64]


def problem(seed: int, out: int = 6, inputs: int = 96) -> tuple[npt.NDArray[np.float32], Float64]:
    """Weights, and the second moments of inputs that hang together."""
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(inputs, inputs)) * np.exp(rng.normal(size=inputs))
    x = rng.normal(size=(400, inputs)) @ mix / np.sqrt(inputs)
    return rng.normal(size=(out, inputs)).astype(np.float32), x.T @ x


def slowly(
    scheme: Scheme, weights: npt.NDArray[np.float32], moments: Float64, order: Order, search: bool
) -> Float64:
    """The rounded weights, in float64 and without factor or blocks."""
    w = weights.astype(np.float64)
    inputs = w.shape[1]
    size = scheme.size(inputs)
    h = moments + 0.01 * np.diag(moments).mean() * np.eye(inputs)
    columns = list(range(inputs))
    if order is not Order.NONE:
        columns = np.argsort(-np.diag(moments), kind="stable").tolist()

    def grids(members: list[int], values: Float64) -> object:
        part = values[:, members].astype(np.float32)[:, None, :]
        weight = np.diag(moments)[members][None] if search else None
        return fit(scheme, part, weight).part((slice(None), 0))

    known = {}
    if order is Order.STATIC:
        for group in range(inputs // size):
            known[group] = grids(list(range(group * size, (group + 1) * size)), w)
    result = np.zeros_like(w)
    left = columns.copy()
    for place, column in enumerate(columns):
        group = column // size if order is Order.STATIC else place // size
        if group not in known:
            known[group] = grids(columns[place : place + size], w)
        grid = known[group]
        codes = grid.codes(w[:, column].astype(np.float32), scheme)  # type: ignore[attr-defined]
        result[:, column] = grid.values(codes)  # type: ignore[attr-defined]
        inverse = np.linalg.inv(h[np.ix_(left, left)])  # the first of them is this column
        error = (w[:, column] - result[:, column]) / inverse[0, 0]
        w[:, left] -= np.outer(error, inverse[0])
        left.pop(0)
    return result


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize(
    ("kind", "group", "inputs"),
    [
        (CodeKind.SYMMETRIC, 32, 96),
        (CodeKind.ASYMMETRIC, 64, 192),  # more columns than a block
        (CodeKind.ASYMMETRIC, None, 160),  # a group larger than one
        (CodeKind.Q4_0, 32, 64),
        (CodeKind.Q4_1, 32, 64),
    ],
)
def test_the_slow_procedure(kind: CodeKind, group: int | None, inputs: int, order: Order) -> None:
    scheme = Scheme(4, group, kind)
    for search in (False, True):
        weights, moments = problem(inputs + search, inputs=inputs)
        expected = slowly(scheme, weights, moments, order, search)
        found = gptq(scheme, weights, moments, order=order, search=search).values()
        # A number between two codes may go either way in fp32, and takes others with it.
        same = np.isclose(found, expected, rtol=1e-5, atol=1e-6)
        assert same.mean() > 0.98
        ours, theirs = (relative_loss(weights, w.astype(np.float32), moments)
                        for w in (found, expected))  # fmt: skip
        assert abs(ours - theirs) < 0.02 * theirs


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from(Order), st.sampled_from((4, 8)))
def test_outputs_lose_less_than_by_rounding(seed: int, order: Order, bits: int) -> None:
    scheme = Scheme(bits, 32, CodeKind.ASYMMETRIC)
    weights, moments = problem(seed)
    plain = relative_loss(weights, round_to_nearest(scheme, weights).values(), moments)
    found = relative_loss(weights, gptq(scheme, weights, moments, order=order).values(), moments)
    assert found < plain


@given(st.integers(0, 10**6))
@settings(max_examples=20)
def test_rows_do_not_depend_on_each_other(seed: int) -> None:
    """So matrices of one input can be quantized as one."""
    scheme = Scheme(4, 32, CodeKind.ASYMMETRIC)
    weights, moments = problem(seed)
    whole = gptq(scheme, weights, moments)
    part = gptq(scheme, weights[2:4], moments)
    assert (whole.rows(slice(2, 4)).codes == part.codes).mean() > 0.99
    assert np.array_equal(whole.step[2:4], part.step)


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    weights, _ = problem(1)
    scheme = Scheme(4, 32, CodeKind.SYMMETRIC)
    found = gptq(scheme, weights, np.diag(np.arange(1.0, 97.0)), search=False)
    assert np.array_equal(found.codes, round_to_nearest(scheme, weights).codes)


def groups(found: Quantized) -> list[int]:
    return np.bincount(found.group_of).tolist()


def test_groups_lie_as_the_order_says() -> None:
    weights, moments = problem(2)
    scheme = Scheme(4, 32, CodeKind.ASYMMETRIC)
    for order in (Order.NONE, Order.STATIC):
        assert gptq(scheme, weights, moments, order=order).ordered
    found = gptq(scheme, weights, moments, order=Order.GROUP)
    assert not found.ordered
    assert groups(found) == [32, 32, 32]
    largest = np.argsort(-np.diag(moments), kind="stable")
    assert (found.group_of[largest[:32]] == 0).all()


def test_inputs_that_are_always_zero() -> None:
    weights, moments = problem(3)
    moments[[5, 40]] = 0.0
    moments[:, [5, 40]] = 0.0
    values = gptq(Scheme(4, 32, CodeKind.ASYMMETRIC), weights, moments).values()
    assert not values[:, [5, 40]].any()
    assert np.isfinite(values).all()


def test_the_factor_is_the_inverse_factor() -> None:
    _, moments = problem(4, inputs=200)
    upper = inverse_factor(moments, 0.01).astype(np.float64)
    damped = moments + 0.01 * np.diag(moments).mean() * np.eye(200)
    assert np.allclose(upper.T @ upper, np.linalg.inv(damped), rtol=1e-3, atol=1e-9)
    assert not np.tril(upper, -1).any()


def test_damping_grows_where_rounding_has_made_moments_indefinite() -> None:
    _, moments = problem(5)
    values, vectors = np.linalg.eigh(moments)
    values[0] = -0.02 * np.diag(moments).mean()
    bent = (vectors * values) @ vectors.T
    assert np.isfinite(inverse_factor(bent, 0.01)).all()
    values[0] = -2.0 * np.diag(moments).mean()
    with pytest.raises(ValueError, match="cannot be inverted"):
        inverse_factor((vectors * values) @ vectors.T, 0.01)
