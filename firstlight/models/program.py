"""The traced program: a flat list of ops over named buffers that every backend runs.

A buffer is `[num_rows, width] float32`, where num_rows is the step's token count, or, after GatherRows, the number of
sampled positions. Weights and constants are named; a backend finds them in the tables it was loaded with.
Knows shapes and order, not layouts, threads or devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "Add",
    "Attention",
    "Embed",
    "GatedAct",
    "GatherRows",
    "Linear",
    "Norm",
    "Op",
    "Program",
    "RopeKV",
    "SoftCap",
]


@dataclass(frozen=True, slots=True)
class Embed:
    """out = weight[token_ids] * scale."""

    out: str
    weight: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Norm:
    """out = x / rms(x) * weight, over groups of `group` columns (the whole row, or one head for qk-norm)."""

    x: str
    out: str
    weight: str
    eps: float
    group: int


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x @ weight.T (+ bias). weight is `[out_width, in_width]` in any layout; bias is a float32 constant."""

    x: str
    out: str
    weight: str
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class RopeKV:
    """Rotates q and k in place by each token's position, then writes k and v into the layer's KV blocks.

    `inv_freq` names a `[rotary_dim / 2] float32` constant; `style` is "half" (pairs i, i + rotary_dim/2) or
    "interleaved" (pairs 2i, 2i + 1); `attn_factor` multiplies cos and sin.
    """

    q: str
    k: str
    v: str
    layer: int
    inv_freq: str
    rotary_dim: int
    style: str
    attn_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention over the layer's KV blocks. window 0 = whole context; softcap 0 = none."""

    q: str
    out: str
    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class GatedAct:
    """out = act(gate) * up; kind is "silu", "gelu_tanh" or "gelu"."""

    gate: str
    up: str
    out: str
    kind: str


@dataclass(frozen=True, slots=True)
class Add:
    """out = x + y, element by element; out may be x."""

    x: str
    y: str
    out: str


@dataclass(frozen=True, slots=True)
class SoftCap:
    """x = cap * tanh(x / cap), in place."""

    x: str
    cap: float


@dataclass(frozen=True, slots=True)
class GatherRows:
    """out = the rows of x at the step's sampled positions, in plan order."""

    x: str
    out: str


Op = Embed | Norm | Linear | RopeKV | Attention | GatedAct | Add | SoftCap | GatherRows


@dataclass(frozen=True, slots=True)
class Program:
    """One decoder, traced. The last op leaves `[num_sampled, vocab] float32` in buffer "logits"."""

    ops: tuple[Op, ...]
    buffers: dict[str, int] = field(default_factory=dict)
    """Name -> width."""
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    max_position: int = 0
