"""Row kernels: scalar twin to the bit, a float64 oracle within a stated error, and inputs no model should give."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.backend.cpu import _native
from tests.kernel.layouts import EVERY_SET, EVERY_VECTOR_SET, F32, F64, bits

SEEDS = st.integers(0, 2**32 - 1)
BOTH = pytest.mark.parametrize("kernels", ["scalar", "avx2"])
BOUNDS = [1, 87.3, 87.4, 88, 89, 104, 1e10, 3e38, np.inf, 1e-38, 1e-45, 0]
ODD = np.array([*BOUNDS, *(-bound for bound in BOUNDS), -0.0, np.nan], np.float32)


def rms_norm(kernels: str, x: F32, weight: F32, eps: float) -> F32:
    out = np.full_like(x, 7)
    _native.kernel_rms_norm(kernels, x, weight, eps, out)
    return out


def gated(kernels: str, kind: str, gate: F32, up: F32) -> F32:
    out = np.full_like(gate, 7)
    _native.kernel_gated(kernels, kind, gate, up, out)
    return out


def soft_cap(kernels: str, x: F32, cap: float) -> F32:
    out = x.copy()
    _native.kernel_soft_cap(kernels, out, cap)
    return out


def rope(kernels: str, x: F32, rotary_dim: int, style: str, cos: F32, sin: F32) -> F32:
    out = x.copy()
    _native.kernel_rope(kernels, out, rotary_dim, style == "interleaved", cos, sin)
    return out


def same(a: F32, b: F32) -> bool:
    """Equal to the bit, NaN for NaN: its sign and payload are no number."""
    return bits(np.where(np.isnan(a), np.float32(np.nan), a)) == bits(np.where(np.isnan(b), np.float32(np.nan), b))


def normal(rng: np.random.Generator, *shape: int, spread: int = 4) -> F32:
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-spread, spread + 1, shape))).astype(np.float32)


# Both kernel sets, to the bit


@given(seed=SEEDS, size=st.integers(1, 200), eps=st.sampled_from([0.0, 1e-6, 1e-5]))
@settings(max_examples=60, deadline=None)
def test_rms_norm_any_size_gives_the_scalar_bits(seed: int, size: int, eps: float) -> None:
    rng = np.random.default_rng(seed)
    x, weight = normal(rng, size), normal(rng, size)
    assert bits(rms_norm("avx2", x, weight, eps)) == bits(rms_norm("scalar", x, weight, eps))


@EVERY_VECTOR_SET
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
@given(seed=SEEDS, size=st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_gated_any_size_gives_the_scalar_bits(kernels: str, kind: str, seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    gate, up = normal(rng, size), normal(rng, size)
    assert bits(gated(kernels, kind, gate, up)) == bits(gated("scalar", kind, gate, up))


@given(seed=SEEDS, size=st.integers(1, 70), cap=st.sampled_from([0.5, 30.0, 50.0]))
@settings(max_examples=40, deadline=None)
def test_soft_cap_any_size_gives_the_scalar_bits(seed: int, size: int, cap: float) -> None:
    x = normal(np.random.default_rng(seed), size, spread=8)
    assert bits(soft_cap("avx2", x, cap)) == bits(soft_cap("scalar", x, cap))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@given(seed=SEEDS, heads=st.integers(1, 5), dim=st.sampled_from([16, 48, 64, 80, 128, 256]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_rope_any_part_of_a_head_gives_the_scalar_bits(
    style: str, seed: int, heads: int, dim: int, data: st.DataObject
) -> None:
    rotary = 2 * data.draw(st.one_of(st.integers(1, dim // 2), st.sampled_from([8, dim // 2])))
    rng = np.random.default_rng(seed)
    angle = rng.uniform(0, 1e4, rotary // 2)
    x, cos, sin = normal(rng, heads, dim), np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    scalar, vector = (rope(kernels, x, rotary, style, cos, sin) for kernels in ("scalar", "avx2"))
    assert bits(scalar) == bits(vector)
    assert bits(vector[:, rotary:]) == bits(x[:, rotary:])


@EVERY_VECTOR_SET
@pytest.mark.parametrize("shift", range(9))
def test_every_op_odd_values_give_the_scalar_numbers_and_do_not_crash(kernels: str, shift: int) -> None:
    """Every odd value passes through a vector lane and through the tail."""
    x = np.roll(ODD, shift)
    up = np.full_like(x, 0.5)
    for kind in ("silu", "gelu_tanh", "gelu"):
        assert same(gated(kernels, kind, x, up), gated("scalar", kind, x, up)), kind
        assert same(gated(kernels, kind, up, x), gated("scalar", kind, up, x)), kind
    assert same(soft_cap(kernels, x, 30.0), soft_cap("scalar", x, 30.0))
    for value in ODD:
        y = np.full(19, 0.25, np.float32)
        y[shift] = value
        assert same(rms_norm(kernels, y, y, 1e-6), rms_norm("scalar", y, y, 1e-6)), value
        cos = np.array([value, 0.5] * 4, np.float32)
        heads = np.stack([y[:16], x[:16]])
        for style in ("half", "interleaved"):
            assert same(rope(kernels, heads, 16, style, cos, cos), rope("scalar", heads, 16, style, cos, cos)), value


# In place


@EVERY_SET
def test_gated_and_rms_norm_in_place_give_the_same_bits(kernels: str) -> None:
    rng = np.random.default_rng(3)
    gate, up = normal(rng, 43), normal(rng, 43)
    for kind in ("silu", "gelu_tanh", "gelu"):
        wanted = gated(kernels, kind, gate, up)
        over_gate, over_up = gate.copy(), up.copy()
        _native.kernel_gated(kernels, kind, over_gate, up, over_gate)
        _native.kernel_gated(kernels, kind, gate, over_up, over_up)
        assert bits(over_gate) == bits(over_up) == bits(wanted)
    over = gate.copy()
    _native.kernel_rms_norm(kernels, over, up, 1e-5, over)
    assert bits(over) == bits(rms_norm(kernels, gate, up, 1e-5))


# Against float64


def ulps(got: F32, wanted: F64) -> F64:
    """Distance in units of the wanted value's last place; below the smallest normal, of that one's."""
    size = np.maximum(np.abs(wanted), np.finfo(np.float32).tiny)
    return np.abs(got - wanted) / np.exp2(np.floor(np.log2(size)) - 23)


@BOTH
@pytest.mark.parametrize("size", [1, 7, 64, 576, 1536])
def test_rms_norm_is_within_3_ulp(kernels: str, size: int) -> None:
    """One rounding each of mean, root, inverse and two products; the sum's own errors average out below one."""
    rng = np.random.default_rng(size)
    x, weight = normal(rng, size), normal(rng, size)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt(np.mean(wide**2) + np.float64(np.float32(1e-5))) * weight
    assert ulps(rms_norm(kernels, x, weight, 1e-5), wanted).max() <= 3.5


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


def gelu_tanh(x: F64) -> F64:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: F64) -> F64:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


@BOTH
def test_silu_is_within_4_ulp(kernels: str) -> None:
    x = np.linspace(-87, 87, 40_001).astype(np.float32)
    assert ulps(gated(kernels, "silu", x, np.ones_like(x)), silu(x.astype(np.float64))).max() <= 4


@BOTH
@pytest.mark.parametrize(("kind", "oracle"), [("gelu_tanh", gelu_tanh), ("gelu", gelu)])
def test_gelu_is_within_2_ulp_of_the_gate(kernels: str, kind: str, oracle: Any) -> None:
    """1 + tanh cancels far to the left, so the error is counted in ulp of the gate."""
    x = np.linspace(-20, 20, 40_001).astype(np.float32)
    error = np.abs(gated(kernels, kind, x, np.ones_like(x)) - oracle(x.astype(np.float64)))
    assert np.all(error <= np.maximum(np.abs(x), 1e-6) * 2**-22)


@BOTH
def test_gated_multiplies_by_up(kernels: str) -> None:
    rng = np.random.default_rng(1)
    gate, up = normal(rng, 100), normal(rng, 100)
    for kind in ("silu", "gelu_tanh", "gelu"):
        assert bits(gated(kernels, kind, gate, up)) == bits(gated(kernels, kind, gate, np.ones_like(up)) * up)


@BOTH
@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
def test_soft_cap_is_within_2_ulp_of_the_cap(kernels: str, cap: float) -> None:
    x = np.linspace(-500, 500, 40_001).astype(np.float32)
    error = np.abs(soft_cap(kernels, x, cap) - cap * np.tanh(x.astype(np.float64) / cap))
    assert error.max() <= cap * 2**-22


@BOTH
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (64, 32), (80, 20), (16, 2)])
def test_rope_turns_each_pair_by_its_angle(kernels: str, style: str, dim: int, rotary: int) -> None:
    rng = np.random.default_rng(dim + rotary)
    x, angle = normal(rng, 3, dim), rng.uniform(0, 100, rotary // 2)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    got = rope(kernels, x, rotary, style, cos, sin)
    first = np.arange(rotary // 2) * (1 if style == "half" else 2)
    second = first + (rotary // 2 if style == "half" else 1)
    a, b = x[:, first].astype(np.float64), x[:, second].astype(np.float64)
    size = np.hypot(a, b) * 2**-22
    assert np.all(np.abs(got[:, first] - (a * cos - b * sin)) <= size)
    assert np.all(np.abs(got[:, second] - (b * cos + a * sin)) <= size)


@BOTH
def test_row_ops_zero_stays_zero(kernels: str) -> None:
    zero = np.zeros(21, np.float32)
    assert not rms_norm(kernels, zero, zero + 1, 1e-5).any()
    assert not soft_cap(kernels, zero, 30.0).any()
    for kind in ("silu", "gelu_tanh", "gelu"):
        assert not gated(kernels, kind, zero, zero + 1).any()
