"""Rotary position embedding: from a model's parameters to the frequencies a kernel multiplies positions with.

Knows frequencies, not how pairs are laid out in a head (`RopeSpec.style` is passed through to the program).

Source: RoPE (Su et al. 2021); linear position interpolation (Chen et al. 2023); YaRN (Peng et al. 2023); the Llama 3.1
frequency scaling as its model card's reference code defines it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RopeSpec", "attention_factor", "inverse_frequencies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Parameters of one rotary embedding.

    `scaling` is "none", "linear", "llama3" or "yarn"; the fields below `factor` matter to the last two only.
    `attn_factor` None means: what the scaling's definition gives.
    """

    theta: float
    dim: int
    style: str
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attn_factor: float | None = None


def inverse_frequencies(rope: RopeSpec, divisors: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
    """`[dim / 2] float32` radians per position; `divisors` are a file's own per-frequency factors."""
    freqs = 1.0 / rope.theta ** (np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
    if rope.scaling == "linear":
        freqs = freqs / rope.factor
    elif rope.scaling == "llama3":
        freqs = _llama3(freqs, rope)
    elif rope.scaling == "yarn":
        freqs = _yarn(freqs, rope)
    if divisors is not None:
        freqs = freqs / divisors
    return freqs.astype(np.float32)


def attention_factor(rope: RopeSpec) -> float:
    """What cos and sin are multiplied with."""
    if rope.attn_factor is not None:
        return rope.attn_factor
    if rope.scaling == "yarn" and rope.factor > 1.0:
        return 0.1 * math.log(rope.factor) + 1.0
    return 1.0


def _llama3(freqs: npt.NDArray[np.float64], rope: RopeSpec) -> npt.NDArray[np.float64]:
    """High frequencies stay, low ones are interpolated, those between are blended."""
    turns = rope.original_context * freqs / (2.0 * math.pi)  # full turns within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return freqs * blend + freqs / rope.factor * (1.0 - blend)


def _yarn(freqs: npt.NDArray[np.float64], rope: RopeSpec) -> npt.NDArray[np.float64]:
    """The same idea, with the blend linear in the dimension index."""

    def dimension(turns: float) -> float:
        return rope.dim * math.log(rope.original_context / (turns * 2.0 * math.pi)) / (2.0 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return freqs / rope.factor * ramp + freqs * (1.0 - ramp)
