"""Lowering: which ops are fused, which must not be, and that the phases compute what the ops do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import BackendError
from firstlight.models.decoder import trace
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
from firstlight.models.rope import RopeSpec
from firstlight.models.spec import ModelSpec

lowering = pytest.importorskip("firstlight.backend.cpu.lower", reason="the native module is not built")
LinearPhase, Phase, lower = lowering.LinearPhase, lowering.Phase, lowering.lower

WIDTH = 8
NAMES = ("x", "h", "a", "b", "c")
BUFFERS = dict.fromkeys((*NAMES, "logits"), WIDTH)

NORM = Norm("x", "h", "norm", 1e-5, WIDTH)
GATED = GatedAct("a", "b", "a", "silu")


def program(*ops: Op) -> Program:
    return Program(ops=ops, buffers=BUFFERS)


def linear(x: str, out: str, weight: str = "w") -> Linear:
    return Linear(x, out, weight)


def phase(
    x: str, *outputs: tuple[Linear, str, bool], norm: Norm | None = None, gated: GatedAct | None = None
) -> object:
    return LinearPhase(x=x, norm=norm, gated=gated, outputs=outputs)


def plain(op: Linear) -> tuple[Linear, str, bool]:
    return op, op.out, False


# What is fused


def test_lower_norm_that_feeds_linears_alone_is_folded_into_them() -> None:
    q, k = linear("h", "a"), linear("h", "b")
    assert lower(program(NORM, q, k)) == [phase("x", plain(q), plain(k), norm=NORM)]


def test_lower_gated_act_that_feeds_a_linear_alone_is_folded_into_it() -> None:
    down = linear("a", "h")
    assert lower(program(GATED, down)) == [phase("a", plain(down), gated=GATED)]


def test_lower_linears_of_one_input_become_one_phase_and_others_do_not() -> None:
    ops = linear("x", "a"), linear("x", "b"), linear("h", "c")
    assert lower(program(*ops)) == [phase("x", plain(ops[0]), plain(ops[1])), phase("h", plain(ops[2]))]


def test_lower_linears_that_write_the_same_buffer_stay_in_order() -> None:
    ops = linear("x", "a", "w0"), linear("x", "a", "w1")
    assert lower(program(*ops)) == [phase("x", plain(ops[0])), phase("x", plain(ops[1]))]


def test_lower_residual_add_becomes_accumulation() -> None:
    down = linear("h", "a")
    assert lower(program(down, Add("x", "a", "x"))) == [phase("h", (down, "x", True))]


def test_lower_gated_linear_and_residual_become_one_phase() -> None:
    down = linear("a", "h")
    assert lower(program(GATED, down, Add("x", "h", "x"))) == [phase("a", (down, "x", True), gated=GATED)]


def test_lower_buffer_written_again_before_it_is_read_does_not_stop_a_fusion() -> None:
    q, later = linear("h", "a"), Norm("a", "h", "norm2", 1e-5, WIDTH)
    assert lower(program(NORM, q, later))[0] == phase("x", plain(q), norm=NORM)


# What must not be


@pytest.mark.parametrize(
    "reader",
    [
        Add("h", "b", "c"),
        Add("b", "h", "c"),
        linear("h", "c"),
        Norm("h", "c", "norm", 1e-5, WIDTH),
        GatedAct("h", "b", "c", "silu"),
        GatedAct("b", "h", "c", "silu"),
        GatherRows("h", "c"),
        SoftCap("h", 5.0),
        Attention("h", "c", 0, 1.0),
        RopeKV("h", "b", "c", 0, "f", 2, "half"),
        RopeKV("b", "c", "h", 0, "f", 2, "half"),
    ],
    ids=lambda op: f"{type(op).__name__}",
)
def test_lower_norm_that_something_reads_later_stays(reader: Op) -> None:
    first, between = linear("h", "a"), Add("x", "x", "x")
    assert lower(program(NORM, first, between, reader))[0] == NORM


def test_lower_norm_of_heads_stays() -> None:
    heads = replace(NORM, group=WIDTH // 2)
    q = linear("h", "a")
    assert lower(program(heads, q)) == [heads, phase("h", plain(q))]


def test_lower_norm_in_place_after_a_linear_stays() -> None:
    """A norm after the linear (post-norm) hides the linear's output from the residual add."""
    post = Norm("h", "h", "norm", 1e-5, WIDTH)
    down, add = linear("a", "h"), Add("x", "h", "x")
    assert lower(program(down, post, add)) == [phase("a", plain(down)), post, add]


def test_lower_norm_into_logits_stays() -> None:
    """The last buffer is read after the program."""
    last = replace(NORM, out="logits")
    q = linear("logits", "a")
    assert lower(program(last, q))[0] == last


def test_lower_gated_act_that_something_reads_later_stays() -> None:
    assert lower(program(GATED, linear("a", "h"), Add("x", "a", "x")))[0] == GATED


def test_lower_gated_act_that_feeds_no_linear_stays() -> None:
    add = Add("x", "a", "x")
    assert lower(program(GATED, add)) == [GATED, add]


@pytest.mark.parametrize(
    "after",
    [
        [Add("x", "a", "x"), Add("b", "a", "b")],  # the linear's own output is read again
        [Add("x", "a", "b")],  # not in place
        [Add("a", "x", "a")],  # in place, but over the linear's output
        [Add("h", "a", "h")],  # the sum is the phase's input, which other threads still read
        [SoftCap("a", 5.0), Add("x", "a", "x")],  # something between
        [Add("x", "b", "x")],  # another buffer
    ],
)
def test_lower_add_that_is_no_residual_stays(after: Sequence[Op]) -> None:
    down = linear("h", "a")
    assert lower(program(down, *after)) == [phase("h", plain(down)), *after]


def test_lower_add_after_two_linears_stays() -> None:
    ops = linear("h", "a"), linear("h", "b")
    add = Add("x", "b", "x")
    assert lower(program(*ops, add)) == [phase("h", plain(ops[0]), plain(ops[1])), add]


@pytest.mark.parametrize("target", ["a", "b"])
def test_lower_add_into_a_gated_input_stays(target: str) -> None:
    gated = replace(GATED, out="c")
    down, add = linear("c", "h"), Add(target, "h", target)
    assert lower(program(gated, down, add)) == [phase("a", plain(down), gated=gated), add]


@pytest.mark.parametrize(
    "ops",
    [
        (NORM, linear("h", "x")),
        (NORM, linear("h", "a"), linear("h", "x")),
        (replace(GATED, out="c"), linear("c", "a")),
        (replace(GATED, out="c"), linear("c", "b")),
    ],
)
def test_lower_phase_never_writes_what_it_reads(ops: tuple[Op, ...]) -> None:
    check_inputs_are_whole(lower(program(*ops)))


@pytest.mark.parametrize("ops", [(linear("x", "x"),), (linear("x", "a"), linear("x", "x"))])
def test_lower_linear_in_place_is_refused_by_name(ops: tuple[Op, ...]) -> None:
    with pytest.raises(BackendError, match="writes its own input `x`"):
        lower(program(*ops))


def check_inputs_are_whole(phases: Sequence[object]) -> None:
    for one in phases:
        if isinstance(one, LinearPhase):
            inputs = {one.x} | ({one.gated.up} if one.gated else set())
            assert not inputs & {buffer for _, buffer, _ in one.outputs}


# The same numbers


def compute(op: object, buffers: dict[str, np.ndarray]) -> None:
    """One op of the kinds that lowering touches."""
    match op:
        case Norm():
            x = buffers[op.x].reshape(-1, op.group)
            buffers[op.out] = (x / np.sqrt((x * x).mean(axis=1, keepdims=True) + op.eps)).reshape(-1)
        case GatedAct():
            buffers[op.out] = np.tanh(buffers[op.gate]) * buffers[op.up]
        case Linear():
            buffers[op.out] = matrix(op.weight) @ buffers[op.x]
        case Add():
            buffers[op.out] = buffers[op.x] + buffers[op.y]
        case SoftCap():
            buffers[op.x] = np.tanh(buffers[op.x] / op.cap)


def matrix(name: str) -> np.ndarray:
    return np.random.default_rng(list(name.encode())).standard_normal((WIDTH, WIDTH)) / 3


def compute_phase(one: object, buffers: dict[str, np.ndarray]) -> None:
    if not isinstance(one, LinearPhase):
        compute(one, buffers)
        return
    inner = dict(buffers)  # what a fused op writes is never seen outside
    source = one.x
    if one.norm is not None or one.gated is not None:
        fused = one.norm or one.gated
        compute(fused, inner)
        source = fused.out
    for op, buffer, accumulate in one.outputs:
        y = matrix(op.weight) @ inner[source]
        buffers[buffer] = buffers[buffer] + y if accumulate else y


@st.composite
def programs(draw: st.DrawFn) -> tuple[Op, ...]:
    """Random ops over few buffers, so that every kind of overlap comes up. Linears write what they do not read."""
    name = st.sampled_from(NAMES)
    ops: list[Op] = []
    for i in range(draw(st.integers(2, 9))):
        x, y, out = draw(name), draw(name), draw(name)
        match draw(st.sampled_from(["norm", "gated", "linear", "linear", "linear", "add", "residual", "cap"])):
            case "norm":
                ops.append(Norm(x, out, "n", 1e-5, draw(st.sampled_from([WIDTH, WIDTH // 2]))))
            case "gated":
                ops.append(GatedAct(x, y, out, "silu"))
            case "linear":
                if ops and isinstance(ops[-1], Norm | GatedAct | Linear) and draw(st.booleans()):
                    x = ops[-1].x if isinstance(ops[-1], Linear) else ops[-1].out
                ops.append(Linear(x, out if out != x else NAMES[(NAMES.index(x) + 1) % len(NAMES)], f"w{i}"))
            case "add":
                ops.append(Add(x, y, out))
            case "residual":
                if ops and isinstance(ops[-1], Linear):
                    y = ops[-1].out
                ops.append(Add(x, y, x))
            case "cap":
                ops.append(SoftCap(x, 5.0))
    return (*ops, Linear(draw(name), "logits", "head"))


@given(ops=programs())
@settings(max_examples=400, deadline=None)
def test_lower_any_program_computes_what_its_ops_do(ops: tuple[Op, ...]) -> None:
    rng = np.random.default_rng(0)
    start = {name: rng.standard_normal(WIDTH) for name in BUFFERS}
    by_ops, by_phases = dict(start), dict(start)
    for op in ops:
        compute(op, by_ops)
    for one in lower(program(*ops)):
        compute_phase(one, by_phases)
    np.testing.assert_array_equal(by_phases["logits"], by_ops["logits"])


# Whole decoders


def spec(**changes: object) -> ModelSpec:
    base = ModelSpec(
        architecture="llama",
        vocab_size=96,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=96,
        max_position=128,
        norm_eps=1e-5,
        rope=RopeSpec(theta=1e4, dim=16, style="half"),
        windows=(0, 0),
        attn_scale=0.25,
    )
    return replace(base, **changes)


def kinds(phases: Sequence[object]) -> list[str]:
    out = []
    for one in phases:
        if not isinstance(one, LinearPhase):
            out.append(type(one).__name__)
            continue
        fused = "norm+" if one.norm else "gated+" if one.gated else ""
        out.append(f"{fused}linear{len(one.outputs)}" + ("+add" if one.outputs[0][2] else ""))
    return out


LAYER = ["norm+linear3", "RopeKV", "Attention", "linear1+add", "norm+linear2", "gated+linear1+add"]


def test_lower_llama_layer_becomes_six_phases() -> None:
    phases = lower(trace(spec()))
    assert kinds(phases) == ["Embed", *LAYER, *LAYER[:4], "GatherRows", *LAYER[4:], "norm+linear1"]


def test_trace_computes_nothing_for_unsampled_rows_after_the_last_attention() -> None:
    ops = trace(spec()).ops
    at = next(i for i, op in enumerate(ops) if type(op).__name__ == "GatherRows")
    last = max(i for i, op in enumerate(ops) if type(op).__name__ == "Attention")
    assert [type(op).__name__ for op in ops[last + 1 : at]] == ["Linear", "Add"]
    written = {op.out for op in ops[at:] if type(op).__name__ != "SoftCap"}
    assert written == {"x_sampled", "h_sampled", "gate_sampled", "up_sampled", "logits"}


def test_lower_qk_norms_stay_between_linears_and_rope() -> None:
    phases = kinds(lower(trace(spec(qk_norm=True))))
    assert phases[1:5] == ["norm+linear3", "Norm", "Norm", "RopeKV"]


def test_lower_post_norms_keep_norm_and_add() -> None:
    phases = kinds(lower(trace(spec(post_norms=True))))
    assert phases[4:7] == ["linear1", "Norm", "Add"]
    assert phases[7:11] == ["norm+linear2", "gated+linear1", "Norm", "Add"]


def test_lower_logit_softcap_stays_last() -> None:
    assert kinds(lower(trace(spec(logit_softcap=30.0))))[-2:] == ["norm+linear1", "SoftCap"]


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"post_norms": True}, {"tied_embeddings": True}])
def test_lower_decoder_phases_read_whole_inputs_and_keep_every_weight(changes: dict[str, object]) -> None:
    traced = trace(spec(**changes))
    phases = lower(traced)
    check_inputs_are_whole(phases)
    linears = [op for one in phases if isinstance(one, LinearPhase) for op, _, _ in one.outputs]
    assert linears == [op for op in traced.ops if isinstance(op, Linear)]
    assert isinstance(phases[0], Embed)
