"""The native runner by itself: arrays and programs that Python may get wrong are refused, and nothing is harmed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from firstlight.backend.cpu import _native
from firstlight.models.pack import pack

VOCAB, WIDTH, HEADS, DIM, BLOCKS, TOKENS, SAMPLES, CONTEXT = 40, 32, 2, 16, 6, 32, 4, 64


def runner(**changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "num_threads": 2,
        "max_tokens": TOKENS,
        "max_samples": SAMPLES,
        "block_size": 16,
        "num_blocks": BLOCKS,
        "num_layers": 1,
        "num_heads": HEADS,
        "num_kv_heads": 1,
        "head_dim": DIM,
        "max_position": CONTEXT,
        "vocab_size": VOCAB,
        "kernels": "auto",
    }
    return _native.Runner(**sizes | changes)


def weight(native: Any, rows: int, cols: int, seed: int) -> int:
    w = pack(np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32) / 8)
    index: int = native.add_weight(w.kind, w.rows, w.cols, w.group, w.has_min, w.scale_f32, w.data)
    return index


def decoder() -> Any:
    """embed, q k v, rope, attention, gather, head: one layer, no norm."""
    native = runner()
    x, q, k, v, a = (native.add_buffer(w, False) for w in (WIDTH, HEADS * DIM, DIM, DIM, HEADS * DIM))
    s, logits = native.add_buffer(HEADS * DIM, True), native.add_buffer(VOCAB, True)
    table = weight(native, VOCAB, WIDTH, 0)
    native.add_embed(x, table, 1.0)
    outputs = [
        (weight(native, w, WIDTH, i), out, -1, False)
        for i, (out, w) in enumerate(((q, HEADS * DIM), (k, DIM), (v, DIM)), 1)
    ]
    native.add_linear(x, "plain", -1, 0.0, "silu", outputs)
    frequencies = native.add_constant(np.ones(DIM // 2, np.float32))
    native.add_rope_kv(q, k, v, 0, frequencies, DIM, False, 1.0)
    native.add_attention(q, a, 0, 0.25, 0, 0.0)
    native.add_gather(a, s)
    native.add_linear(s, "plain", -1, 0.0, "silu", [(weight(native, VOCAB, HEADS * DIM, 9), logits, -1, False)])
    native.finish(logits)
    return native


def inputs(lengths: tuple[int, ...] = (3, 2)) -> dict[str, Any]:
    """A good step: rows of these lengths from position 0, each sampled after its last token."""
    num, rows = sum(lengths), len(lengths)
    first = np.cumsum([0, *lengths[:-1]])
    floats = np.tile(np.array([0, 1, 0, 0, 0, 1], np.float32), (rows, 1))
    ints = np.zeros((rows, 9), np.int32)
    ints[:, 0] = first + np.array(lengths) - 1
    ints[:, 3] = -1
    return {
        "tokens": np.arange(num, dtype=np.int32),
        "positions": np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        "rows": np.array([[f, n, 0, i] for i, (f, n) in enumerate(zip(first, lengths, strict=True))], np.int32),
        "tables": np.arange(rows, dtype=np.int32),
        "sample_floats": floats,
        "sample_ints": ints,
        "seeds": np.zeros(rows, np.uint64),
        "bias_ids": np.zeros(0, np.int32),
        "bias_values": np.zeros(0, np.float32),
        "histories": np.zeros(0, np.int32),
        "out_tokens": np.zeros(rows, np.int32),
        "out_logprobs": np.zeros(rows, np.float32),
        "top_ids": np.zeros((rows, 0), np.int32),
        "top_logprobs": np.zeros((rows, 0), np.float32),
        "logits": np.zeros((rows, VOCAB), np.float32),
    }


@pytest.fixture(scope="module")
def native() -> Any:
    return decoder()


def edited(name: str, *index_and_value: Any) -> dict[str, Any]:
    """The named array with one entry changed."""
    *index, value = index_and_value
    array = inputs()[name].copy()
    array[tuple(index)] = value
    return {name: array}


BROKEN: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "rows overlap": (ValueError, edited("rows", 1, 0, 2)),
    "rows leave a gap": (ValueError, edited("rows", 1, 0, 4)),
    "row past the tokens": (ValueError, edited("rows", 1, 1, 3)),
    "row of no tokens": (ValueError, edited("rows", 1, 1, 0)),
    "row of negative tokens": (ValueError, edited("rows", 1, 1, -2)),
    "rows short of the tokens": (ValueError, {"rows": inputs()["rows"][:1].copy()}),
    "no rows": (ValueError, {"rows": np.zeros((0, 4), np.int32)}),
    "start past the context": (ValueError, edited("rows", 0, 2, CONTEXT)),
    "start near overflow": (ValueError, edited("rows", 0, 2, 2**31 - 1)),
    "start negative": (ValueError, edited("rows", 0, 2, -1)),
    "position not of its row": (ValueError, edited("positions", 1, 0)),
    "position negative": (ValueError, edited("positions", 0, -1)),
    "table offset past the tables": (ValueError, edited("rows", 1, 3, 2)),
    "table offset negative": (ValueError, edited("rows", 1, 3, -1)),
    "no tables": (ValueError, {"tables": np.zeros(0, np.int32)}),
    "block id past the pool": (ValueError, edited("tables", 1, BLOCKS)),
    "block id negative": (ValueError, edited("tables", 0, -1)),
    "token id past the vocabulary": (ValueError, edited("tokens", 4, VOCAB)),
    "token id negative": (ValueError, edited("tokens", 0, -1)),
    "sample past the tokens": (ValueError, edited("sample_ints", 1, 0, 5)),
    "samples out of order": (ValueError, edited("sample_ints", 1, 0, 1)),
    "sample negative": (ValueError, edited("sample_ints", 0, 0, -1)),
    "more logprobs than room": (ValueError, edited("sample_ints", 0, 3, 1)),
    "bias past the biases": (ValueError, edited("sample_ints", 0, 6, 1)),
    "bias offset negative": (ValueError, edited("sample_ints", 0, 5, -1)),
    "history past the histories": (ValueError, edited("sample_ints", 0, 8, 1)),
    "history offset negative": (ValueError, edited("sample_ints", 0, 7, -(2**31))),
    "too many tokens": (ValueError, inputs((TOKENS + 1,))),
    "too many samples": (ValueError, inputs((1,) * (SAMPLES + 1))),
    "tokens and positions differ": (ValueError, {"positions": np.zeros(4, np.int32)}),
    "rows too wide": (ValueError, {"rows": np.zeros((2, 5), np.int32)}),
    "logits too narrow": (ValueError, {"logits": np.zeros((2, VOCAB - 1), np.float32)}),
    "outputs too few": (ValueError, {"out_tokens": np.zeros(1, np.int32)}),
    "rows of another rank": (TypeError, {"rows": np.zeros(8, np.int32)}),
}


@pytest.mark.parametrize(("error", "broken"), BROKEN.values(), ids=list(BROKEN))
def test_run_broken_arrays_are_refused_and_change_nothing(
    native: Any, error: type[Exception], broken: dict[str, Any]
) -> None:
    fine = inputs()
    native.run(**fine)
    before = blocks(native)
    with pytest.raises(error):
        native.run(**inputs() | broken)
    assert blocks(native) == before
    again = inputs()
    native.run(**again)
    np.testing.assert_array_equal(again["logits"], fine["logits"])
    np.testing.assert_array_equal(again["out_tokens"], fine["logits"].argmax(axis=1))


@pytest.mark.parametrize(
    "broken",
    [
        {"logits": np.zeros((VOCAB, 2), np.float32).T},
        {"logits": np.zeros((2, VOCAB), np.float64)},
        {"out_tokens": np.zeros(2, np.int64)},
        {"out_logprobs": np.zeros((2, 2), np.float32)[:, 0]},
    ],
    ids=["logits-transposed", "logits-float64", "tokens-int64", "logprobs-strided"],
)
def test_run_output_of_another_type_or_order_is_refused(native: Any, broken: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        native.run(**inputs() | broken)


def blocks(native: Any) -> bytes:
    out = np.zeros((BLOCKS, native.kv_bytes_per_block), np.uint8)
    for block in range(BLOCKS):
        native.read_block(block, out[block])
    return out.tobytes()


def test_run_without_samples_writes_kv_and_samples_nothing(native: Any) -> None:
    step = inputs((7,)) | {
        "sample_floats": np.zeros((0, 6), np.float32),
        "sample_ints": np.zeros((0, 9), np.int32),
        "seeds": np.zeros(0, np.uint64),
        "out_tokens": np.zeros(0, np.int32),
        "out_logprobs": np.zeros(0, np.float32),
        "top_ids": np.zeros((0, 0), np.int32),
        "top_logprobs": np.zeros((0, 0), np.float32),
        "logits": None,
    }
    native.write_block(0, np.zeros(native.kv_bytes_per_block, np.uint8))
    native.run(**step)
    assert any(blocks(native)[: native.kv_bytes_per_block])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_threads": 0},
        {"num_threads": 257},
        {"max_tokens": 0},
        {"max_samples": 0},
        {"max_samples": TOKENS + 1},
        {"block_size": 8},
        {"block_size": 20},
        {"num_blocks": 0},
        {"head_dim": 24},
        {"head_dim": 0},
        {"num_heads": 3, "num_kv_heads": 2},
        {"num_heads": 1, "num_kv_heads": 2},
        {"vocab_size": 0},
        {"max_position": 0},
        {"kernels": "avx9"},
    ],
    ids=str,
)
def test_runner_sizes_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|unknown"):
        runner(**changes)


def test_build_wrong_widths_and_indices_are_refused() -> None:
    native = runner()
    x, narrow, sampled = native.add_buffer(WIDTH, False), native.add_buffer(16, False), native.add_buffer(WIDTH, True)
    w, eight = weight(native, WIDTH, WIDTH, 0), native.add_constant(np.ones(8, np.float32))
    calls = [
        lambda: native.add_embed(x, w, 1.0),  # fewer rows than the vocabulary
        lambda: native.add_embed(9, w, 1.0),
        lambda: native.add_embed(x, -1, 1.0),
        lambda: native.add_norm(x, narrow, eight, 1e-5, 8),
        lambda: native.add_norm(x, x, eight, 1e-5, 16),
        lambda: native.add_norm(x, x, eight, 1e-5, 5),
        lambda: native.add_norm(x, x, eight, 1e-5, 0),
        lambda: native.add_linear(x, "plain", -1, 0.0, "silu", []),
        lambda: native.add_linear(x, "plain", -1, 0.0, "silu", [(w, x, -1, False)]),
        lambda: native.add_linear(x, "plain", -1, 0.0, "silu", [(w, narrow, -1, False)]),
        lambda: native.add_linear(narrow, "plain", -1, 0.0, "silu", [(w, x, -1, False)]),
        lambda: native.add_linear(x, "norm", eight, 0.0, "silu", [(w, sampled, -1, False)]),
        lambda: native.add_linear(x, "gated", narrow, 0.0, "silu", [(w, sampled, -1, False)]),
        lambda: native.add_linear(x, "other", -1, 0.0, "silu", [(w, sampled, -1, False)]),
        lambda: native.add_linear(x, "plain", -1, 0.0, "silu", [(w, sampled, eight, False)]),
        lambda: native.add_rope_kv(x, narrow, narrow, 1, eight, DIM, False, 1.0),
        lambda: native.add_rope_kv(x, narrow, narrow, 0, eight, DIM - 1, False, 1.0),
        lambda: native.add_rope_kv(x, narrow, narrow, 0, eight, DIM - 2, False, 1.0),
        lambda: native.add_rope_kv(narrow, narrow, narrow, 0, eight, DIM, False, 1.0),
        lambda: native.add_attention(x, narrow, 0, 1.0, 0, 0.0),
        lambda: native.add_attention(x, x, 0, 1.0, -1, 0.0),
        lambda: native.add_gated("relu", x, x, x),
        lambda: native.add_gated("silu", x, narrow, x),
        lambda: native.add_add(x, narrow, x),
        lambda: native.add_gather(x, x),
        lambda: native.finish(x),
        lambda: native.add_buffer(0, False),
        lambda: native.add_weight("nibble", 8, 32, 32, True, False, np.zeros(159, np.uint8)),
        lambda: native.add_weight("nibble", 8, 33, 32, True, False, np.zeros(160, np.uint8)),
        lambda: native.add_weight("byte", 8, 32, 8, True, False, np.zeros(160, np.uint8)),
        lambda: native.add_weight("ternary", 8, 32, 32, True, False, np.zeros(160, np.uint8)),
    ]
    accepted = [number for number, call in enumerate(calls) if not is_refused(call)]
    assert not accepted


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("op", ["norm", "linear", "add", "gated", "rope", "attention", "gather"])
def test_build_mixing_sampled_and_token_buffers_is_refused(op: str) -> None:
    """A sampled buffer has max_samples rows, an op on a token buffer runs up to max_tokens."""
    native = runner()
    x, y, k = native.add_buffer(WIDTH, False), native.add_buffer(WIDTH, False), native.add_buffer(DIM, False)
    s = native.add_buffer(WIDTH, True)
    w, ones = weight(native, WIDTH, WIDTH, 0), native.add_constant(np.ones(WIDTH, np.float32))
    half = native.add_constant(np.ones(DIM // 2, np.float32))
    calls = {
        "norm": lambda: native.add_norm(x, s, ones, 1e-5, WIDTH),
        "linear": lambda: native.add_linear(x, "plain", -1, 0.0, "silu", [(w, s, -1, False)]),
        "add": lambda: native.add_add(x, s, y),
        "gated": lambda: native.add_gated("silu", x, s, y),
        "rope": lambda: native.add_rope_kv(s, k, k, 0, half, DIM, False, 1.0),
        "attention": lambda: native.add_attention(x, s, 0, 1.0, 0, 0.0),
        "gather": lambda: native.add_gather(s, native.add_buffer(WIDTH, True)),
    }
    with pytest.raises(ValueError, match="sampled"):
        calls[op]()


def test_run_before_finish_and_build_after_it_are_refused(native: Any) -> None:
    with pytest.raises(ValueError, match="finish"):
        runner().run(**inputs())
    with pytest.raises(ValueError, match="finished"):
        native.add_buffer(8, False)
    with pytest.raises(ValueError, match="finished"):
        native.finish(0)


@pytest.mark.parametrize("block", [-1, BLOCKS, 2**31 - 1])
def test_blocks_past_the_pool_and_wrong_sizes_are_refused(native: Any, block: int) -> None:
    one = np.zeros(native.kv_bytes_per_block, np.uint8)
    for call in (
        lambda: native.copy_block(block, 0),
        lambda: native.copy_block(0, block),
        lambda: native.read_block(block, one),
        lambda: native.write_block(block, one),
        lambda: native.read_block(0, one[1:].copy()),
        lambda: native.write_block(0, one[1:].copy()),
    ):
        with pytest.raises(ValueError, match="block"):
            call()


def test_tracing_names_ops_and_changes_no_bit(native: Any) -> None:
    plain, traced = inputs(), inputs()
    native.run(**plain)
    native.set_tracing(True)
    native.run(**traced)
    native.set_tracing(False)
    times = dict(native.op_times())
    assert times["linear"] > 0
    assert times["attention"] > 0
    assert times["norm"] == 0
    np.testing.assert_array_equal(plain["logits"], traced["logits"])
