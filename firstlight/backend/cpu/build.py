"""Hands a model's lowered program to the native runner, once. Knows phases, buffers and weights; not plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from firstlight.backend.cpu import _native
from firstlight.backend.cpu.lower import LinearPhase, Phase, lower
from firstlight.models.program import (
    Add,
    Attention,
    Embed,
    GatedAct,
    GatherRows,
    Norm,
    Program,
    RopeKV,
    SoftCap,
)
from firstlight.models.weights import LoadedModel

__all__ = ["Head", "ProgramBuilder"]


@dataclass(frozen=True, slots=True)
class Head:
    """Where the residual stream lies after the last layer, and the norm between it and the head."""

    buffer: int
    weight: npt.NDArray[np.float32]
    eps: float


class ProgramBuilder:
    """Hands a lowered program with its weights to the native runner."""

    def __init__(self, runner: _native.Runner, model: LoadedModel, release: bool) -> None:
        self._runner = runner
        self._model = model
        self._release = release
        self._buffers: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        self._constants: dict[str, int] = {}

    def build(self) -> None:
        program = self._model.program
        phases = lower(program)
        sampled = _sampled_buffers(program)
        for name in _used_buffers(phases):
            self._buffers[name] = self._runner.add_buffer(program.buffers[name], name in sampled)
        for phase in phases:
            self._add(phase)
        self._runner.finish(self._buffers["logits"])

    def head(self) -> Head:
        """After `build`. No op behind the last norm writes the buffer that it reads."""
        norm = next(op for op in reversed(self._model.program.ops) if isinstance(op, Norm))
        return Head(self._buffers[norm.x], np.array(self._model.constants[norm.weight], np.float32), norm.eps)

    def _weight(self, name: str) -> int:
        if name not in self._weights:
            w = self._model.weights.pop(name) if self._release else self._model.weights[name]
            self._weights[name] = self._runner.add_weight(
                w.kind, w.rows, w.cols, w.group, w.has_min, w.scale_f32, w.data
            )
        return self._weights[name]

    def _constant(self, name: str) -> int:
        if name not in self._constants:
            self._constants[name] = self._runner.add_constant(self._model.constants[name])
        return self._constants[name]

    def _add(self, phase: Phase) -> None:
        runner, at = self._runner, self._buffers
        match phase:
            case LinearPhase():
                self._add_linear(phase)
            case Embed():
                runner.add_embed(at[phase.out], self._weight(phase.weight), phase.scale)
            case Norm():
                runner.add_norm(at[phase.x], at[phase.out], self._constant(phase.weight), phase.eps, phase.group)
            case RopeKV():
                runner.add_rope_kv(
                    at[phase.q],
                    at[phase.k],
                    at[phase.v],
                    phase.layer,
                    self._constant(phase.inv_freq),
                    phase.rotary_dim,
                    phase.style == "interleaved",
                    phase.attn_factor,
                )
            case Attention():
                runner.add_attention(at[phase.q], at[phase.out], phase.layer, phase.scale, phase.window, phase.softcap)
            case GatedAct():
                runner.add_gated(phase.kind, at[phase.gate], at[phase.up], at[phase.out])
            case Add():
                runner.add_add(at[phase.x], at[phase.y], at[phase.out])
            case SoftCap():
                runner.add_soft_cap(at[phase.x], phase.cap)
            case GatherRows():
                runner.add_gather(at[phase.x], at[phase.out])

    def _add_linear(self, phase: LinearPhase) -> None:
        outputs = [
            (
                self._weight(linear.weight),
                self._buffers[buffer],
                -1 if linear.bias is None else self._constant(linear.bias),
                accumulate,
            )
            for linear, buffer, accumulate in phase.outputs
        ]
        kind, second, eps, gated = "plain", -1, 0.0, "silu"
        if phase.norm is not None:
            kind, second, eps = "norm", self._constant(phase.norm.weight), phase.norm.eps
        elif phase.gated is not None:
            kind, second, gated = "gated", self._buffers[phase.gated.up], phase.gated.kind
        self._runner.add_linear(self._buffers[phase.x], kind, second, eps, gated, outputs)


def _sampled_buffers(program: Program) -> set[str]:
    """Buffers that hold one row per sampled position: all that are written after GatherRows."""
    ops = program.ops
    gather = next(i for i, op in enumerate(ops) if isinstance(op, GatherRows))
    return {op.out for op in ops[gather:] if not isinstance(op, RopeKV | SoftCap)}


def _used_buffers(phases: list[Phase]) -> list[str]:
    """Buffers that survive lowering, in order of first use."""
    names: dict[str, None] = {}
    for phase in phases:
        match phase:
            case LinearPhase():
                used = [phase.x, *(buffer for _, buffer, _ in phase.outputs)]
                if phase.gated is not None:
                    used.append(phase.gated.up)
            case RopeKV():
                used = [phase.q, phase.k, phase.v]
            case Attention():
                used = [phase.q, phase.out]
            case GatedAct():
                used = [phase.gate, phase.up, phase.out]
            case Add():
                used = [phase.x, phase.y, phase.out]
            case SoftCap():
                used = [phase.x]
            case Embed():
                used = [phase.out]
            case _:
                used = [phase.x, phase.out]
        names.update(dict.fromkeys(used))
    return list(names)
