"""Lowering: a traced program becomes the fused phases that the native runner executes.

A normalisation or a gated activation that only feeds linear ops is folded into how they read their input; linear ops
with the same input become one phase; a residual add that only consumes a linear's output becomes accumulation. Each
fusion does the same arithmetic in the same order as the ops it replaces. Knows ops, not kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.errors import BackendError
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

__all__ = ["LinearPhase", "Phase", "lower"]


@dataclass(frozen=True, slots=True)
class LinearPhase:
    """Linear ops that read one input, after `norm` or as `gated` when set.

    `outputs` holds (linear, buffer to write, accumulate).
    """

    x: str
    norm: Norm | None
    gated: GatedAct | None
    outputs: tuple[tuple[Linear, str, bool], ...]


Phase = LinearPhase | Embed | Norm | RopeKV | Attention | GatedAct | Add | SoftCap | GatherRows


def lower(program: Program) -> list[Phase]:
    """The phases, in order.

    Raises:
        BackendError: a linear op writes the buffer it reads, which no kernel can do.
    """
    ops = program.ops
    phases: list[Phase] = []
    i = 0
    while i < len(ops):
        op = ops[i]
        first = i + 1 if isinstance(op, Norm | GatedAct) else i
        linears = _linears_from(ops, first)
        if isinstance(op, Norm) and not (
            linears and _is_whole(program, op) and _feeds_only(ops, op.out, first, linears)
        ):
            linears = []
        if isinstance(op, GatedAct) and not _feeds_only(ops, op.out, first, linears):
            linears = []
        inputs = _reads(op)  # of the phase that would begin here, `x` first
        if any(linear.out in inputs for linear in linears):
            if isinstance(op, Linear):
                raise BackendError(f"linear op `{op.weight}` or one beside it writes its own input `{op.x}`")
            linears = []  # outputs are written while other threads still read the inputs
        if not linears:
            phases.append(_single(op))
            i += 1
            continue
        x = inputs[0]
        after = first + len(linears)
        outputs = tuple((linear, linear.out, False) for linear in linears)
        target = _residual_target(ops, after, linears, inputs)
        if target is not None:
            outputs = ((linears[0], target, True),)
            after += 1
        phases.append(
            LinearPhase(
                x=x,
                norm=op if isinstance(op, Norm) else None,
                gated=op if isinstance(op, GatedAct) else None,
                outputs=outputs,
            )
        )
        i = after
    return phases


def _single(op: Op) -> Phase:
    assert not isinstance(op, Linear)
    return op


def _linears_from(ops: tuple[Op, ...], start: int) -> list[Linear]:
    """The run of linear ops at `start` that read the same buffer and write different ones."""
    run: list[Linear] = []
    for op in ops[start:]:
        if not isinstance(op, Linear) or (run and (op.x != run[0].x or op.out in {r.out for r in run})):
            break
        run.append(op)
    return run


def _is_whole(program: Program, norm: Norm) -> bool:
    return norm.group == program.buffers[norm.x]


def _feeds_only(ops: tuple[Op, ...], name: str, start: int, linears: list[Linear]) -> bool:
    """Whether only these linears, which stand at `start`, read `name` before it is written again."""
    if not linears or linears[0].x != name:
        return False
    return _is_dead(ops, name, start + len(linears)) or any(linear.out == name for linear in linears)


def _is_dead(ops: tuple[Op, ...], name: str, start: int) -> bool:
    for op in ops[start:]:
        if name in _reads(op):
            return False
        if name in _writes(op):
            return True
    return name != "logits"


def _residual_target(ops: tuple[Op, ...], at: int, linears: list[Linear], inputs: tuple[str, ...]) -> str | None:
    """The buffer that a single linear's output is added to right after it, when nothing else needs that output."""
    add = ops[at] if at < len(ops) else None
    if len(linears) != 1 or not isinstance(add, Add) or add.out in inputs:
        return None
    out = linears[0].out
    if add.x == add.out and add.y == out and out != add.out and _is_dead(ops, out, at + 1):
        return add.out
    return None


def _reads(op: Op) -> tuple[str, ...]:
    match op:
        case Norm() | Linear() | GatherRows() | SoftCap():
            return (op.x,)
        case RopeKV():
            return (op.q, op.k, op.v)
        case Attention():
            return (op.q,)
        case GatedAct():
            return (op.gate, op.up)
        case Add():
            return (op.x, op.y)
        case Embed():
            return ()


def _writes(op: Op) -> tuple[str, ...]:
    match op:
        case RopeKV():
            return (op.q, op.k)
        case SoftCap():
            return (op.x,)
        case _:
            return (op.out,)
