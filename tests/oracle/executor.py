"""The correctness oracle: runs a traced program in float32 numpy over dequantised weights, a whole sequence at once.

Slow and plain on purpose. It shares the readers with the product, and nothing that computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from firstlight.models.layouts import PackedWeight
from firstlight.models.pack import unpack
from firstlight.models.program import (
    Add,
    Attention,
    Embed,
    GatedAct,
    GatherRows,
    Linear,
    Norm,
    Op,
    Program,
    RopeKV,
    SoftCap,
)
from firstlight.models.quants import dequantise

F32 = npt.NDArray[np.float32]


class Oracle:
    """Runs a program. `dtype` float64 gives a reference for float32's own error; `kv_f16` rounds K and V to float16.

    Cost: weights are held dequantised, 4 or 8 bytes a value; attention holds [heads, tokens, tokens].
    """

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, PackedWeight],
        constants: Mapping[str, F32],
        *,
        kv_f16: bool = True,
        dtype: type = np.float32,
    ) -> None:
        self.program, self.kv_f16, self.dtype = program, kv_f16, dtype
        self.weights = {name: dequantise(unpack(weight)).astype(dtype) for name, weight in weights.items()}
        self.constants = {name: value.astype(dtype) for name, value in constants.items()}

    def logits(self, token_ids: Sequence[int], sampled: Sequence[int] | None = None) -> npt.NDArray[np.floating]:
        """`[len(sampled), vocab]` logits after the given positions; None means all."""
        state = _State(self, np.asarray(token_ids, dtype=np.int64), sampled)
        for op in self.program.ops:
            state.run(op)
        return state.buffers["logits"]

    def greedy(self, token_ids: Sequence[int], num_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
        """The greedy continuation, recomputed from the start for every token."""
        known = list(token_ids)
        for _ in range(num_tokens):
            known.append(int(np.argmax(self.logits(known, [len(known) - 1])[0])))
            if known[-1] in stop_ids:
                break
        return known[len(token_ids) :]


class _State:
    """The buffers of one pass."""

    def __init__(self, oracle: Oracle, token_ids: npt.NDArray[np.int64], sampled: Sequence[int] | None) -> None:
        self.oracle, self.token_ids = oracle, token_ids
        self.sampled = np.arange(len(token_ids)) if sampled is None else np.asarray(sampled)
        self.buffers: dict[str, npt.NDArray] = {}
        self.cache: dict[int, tuple[npt.NDArray, npt.NDArray]] = {}

    def run(self, op: Op) -> None:
        weights, constants, buffers = self.oracle.weights, self.oracle.constants, self.buffers
        match op:
            case Embed():
                buffers[op.out] = weights[op.weight][self.token_ids] * self.oracle.dtype(op.scale)
            case Norm():
                x = buffers[op.x].reshape(len(buffers[op.x]), -1, op.group)
                mean = np.mean(x * x, axis=2, keepdims=True)
                normed = x / np.sqrt(mean + self.oracle.dtype(op.eps)) * constants[op.weight]
                buffers[op.out] = normed.reshape(buffers[op.x].shape)
            case Linear():
                out = buffers[op.x] @ weights[op.weight].T
                buffers[op.out] = out if op.bias is None else out + constants[op.bias]
            case RopeKV():
                self.rope(op)
            case Attention():
                self.attention(op)
            case GatedAct():
                buffers[op.out] = _activate(buffers[op.gate], op.kind) * buffers[op.up]
            case Add():
                buffers[op.out] = buffers[op.x] + buffers[op.y]
            case SoftCap():
                buffers[op.x] = self.oracle.dtype(op.cap) * np.tanh(buffers[op.x] / self.oracle.dtype(op.cap))
            case GatherRows():
                buffers[op.out] = buffers[op.x][self.sampled]

    def heads(self, name: str) -> npt.NDArray:
        """`[tokens, heads, head_dim]` view of a buffer."""
        return self.buffers[name].reshape(len(self.token_ids), -1, self.oracle.program.head_dim)

    def rope(self, op: RopeKV) -> None:
        positions = np.arange(len(self.token_ids), dtype=np.float64)
        angles = positions[:, None] * self.oracle.constants[op.inv_freq].astype(np.float64)
        cos = (np.cos(angles) * op.attn_factor).astype(self.oracle.dtype)[:, None, :]
        sin = (np.sin(angles) * op.attn_factor).astype(self.oracle.dtype)[:, None, :]
        half = op.rotary_dim // 2
        first = slice(0, half) if op.style == "half" else slice(0, op.rotary_dim, 2)
        second = slice(half, op.rotary_dim) if op.style == "half" else slice(1, op.rotary_dim, 2)
        for name in (op.q, op.k):
            x = self.heads(name).copy()
            a, b = x[:, :, first].copy(), x[:, :, second].copy()
            x[:, :, first] = a * cos - b * sin
            x[:, :, second] = b * cos + a * sin
            self.buffers[name] = x.reshape(len(x), -1)
        k, v = self.heads(op.k), self.heads(op.v)
        if self.oracle.kv_f16:
            k, v = (part.astype(np.float16).astype(self.oracle.dtype) for part in (k, v))
        self.cache[op.layer] = k, v

    def attention(self, op: Attention) -> None:
        program, num_tokens = self.oracle.program, len(self.token_ids)
        repeats = program.num_heads // program.num_kv_heads
        k, v = (np.repeat(part, repeats, axis=1).transpose(1, 0, 2) for part in self.cache[op.layer])
        scores = self.heads(op.q).transpose(1, 0, 2) @ k.transpose(0, 2, 1) * self.oracle.dtype(op.scale)
        if op.softcap:
            scores = op.softcap * np.tanh(scores / op.softcap)
        ago = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None, :]
        seen = (ago >= 0) & ((ago < op.window) | (op.window == 0))
        scores = np.where(seen, scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=2, keepdims=True))
        scores /= scores.sum(axis=2, keepdims=True)
        self.buffers[op.out] = (scores @ v).transpose(1, 0, 2).reshape(num_tokens, -1).astype(self.oracle.dtype)


def _activate(x: npt.NDArray, kind: str) -> npt.NDArray:
    if kind == "silu":
        with np.errstate(over="ignore"):
            return x / (1 + np.exp(-x))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + x.dtype.type(0.044715) * x**3)))
    assert kind == "gelu", kind
    from math import erf

    return (0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2.0)))).astype(x.dtype)
