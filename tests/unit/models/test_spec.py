"""Specs from metadata and configs: every departure of an architecture, and a named error for every impossible value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.errors import ModelError
from firstlight.models.rope import RopeSpec, attention_factor, inverse_frequencies
from firstlight.models.spec import ModelSpec, known_architectures, spec_from_config, spec_from_gguf
from tests.oracle.tiny_model import TinyShape, config_of, metadata_of

SHAPES = {"token_embd.weight": (96, 64)}


def metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    table = metadata_of(TinyShape(architecture)) | {f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5}
    table |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return {key: value for key, value in table.items() if value is not None}


def from_gguf(table: dict[str, Any], shapes: dict[str, tuple[int, ...]] = SHAPES) -> ModelSpec:
    return spec_from_gguf(table, shapes, "`m.gguf`")


def from_config(architecture: str = "llama", **changes: Any) -> ModelSpec:
    return spec_from_config(config_of(TinyShape(architecture)) | changes, "`config.json`")


def test_known_architectures_include_llama() -> None:
    assert {"llama", "qwen2", "qwen3", "gemma3", "mistral"} <= set(known_architectures())


def test_llama_gguf_gives_the_sizes_of_the_file() -> None:
    spec = from_gguf(metadata())
    assert (spec.hidden_size, spec.num_layers, spec.num_heads, spec.num_kv_heads) == (64, 2, 4, 2)
    assert (spec.head_dim, spec.ffn_size, spec.vocab_size, spec.max_position) == (16, 96, 96, 256)
    assert spec.rope == RopeSpec(theta=10_000.0, dim=16, style="interleaved", original_context=256)
    assert spec.attn_scale == 0.25
    assert spec.tied_embeddings
    assert not spec.qkv_bias


def test_tensors_present_decide_head_and_biases() -> None:
    names = ["output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"]
    spec = from_gguf(metadata(), SHAPES | dict.fromkeys(names, (64,)))
    assert (spec.tied_embeddings, spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (False, True, True, True)


def test_absent_optional_keys_take_their_defaults() -> None:
    table = metadata(attention__head_count_kv=None, attention__key_length=None, attention__value_length=None)
    spec = from_gguf(table)
    assert (spec.num_kv_heads, spec.head_dim) == (4, 16)


@pytest.mark.parametrize(
    "key",
    [
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
@pytest.mark.parametrize("value", [None, 0, -1, 2**62, "x", [4, 4], True, math.nan])
def test_missing_or_absurd_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"`llama\.{key}` in `m.gguf`"):
        from_gguf(metadata(**{key.replace(".", "__"): value}))


BAD_GGUF: dict[str, tuple[dict[str, Any], str]] = {
    "kv heads do not divide": ({"attention__head_count_kv": 3}, "4 attention heads cannot share 3"),
    "more kv heads than heads": ({"attention__head_count_kv": 8}, "allowed are 1 to 4"),
    "heads do not divide": ({"attention__head_count": 5, "attention__key_length": None}, "5 heads do not divide"),
    "odd head": ({"attention__key_length": 15, "attention__value_length": 15}, "head dimension 15 is odd"),
    "odd rotary": ({"rope__dimension_count": 7}, "rotary dimension 7"),
    "rotary too wide": ({"rope__dimension_count": 32}, "rotary dimension 32"),
    "value heads differ": ({"attention__value_length": 8}, "value_length"),
    "theta 0": ({"rope__freq_base": 0.0}, "freq_base"),
    "scaling unknown": ({"rope__scaling__type": "longrope"}, "longrope"),
    "experts": ({"expert_count": 8}, "mixture of experts"),
}


@pytest.mark.parametrize("case", BAD_GGUF)
def test_impossible_gguf_is_refused(case: str) -> None:
    changes, message = BAD_GGUF[case]
    with pytest.raises(ModelError, match=message):
        from_gguf(metadata(**changes))


@pytest.mark.parametrize("table", [{}, {"general.architecture": 3}])
def test_gguf_without_architecture_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"general\.architecture"):
        from_gguf(table)


def test_unknown_architecture_is_refused_with_the_known_ones() -> None:
    for call in (lambda: from_gguf({"general.architecture": "mamba"}), lambda: from_config(model_type="mamba")):
        with pytest.raises(ModelError, match="'mamba'") as caught:
            call()
        assert "llama" in (caught.value.hint or "")


def test_qwen3_has_qk_norm_and_half_rotation() -> None:
    for spec in (from_gguf(metadata("qwen3")), from_config("qwen3")):
        assert spec.qk_norm
        assert spec.rope.style == "half"


def test_qwen2_config_has_qkv_bias_only() -> None:
    spec = from_config("qwen2")
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, False, False)


def test_qwen_window_starts_at_its_first_layer() -> None:
    spec = from_config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert spec.windows == (0, 8)


def test_mistral_window_is_on_every_layer() -> None:
    assert from_config("llama", model_type="mistral", sliding_window=8).windows == (8, 8)
    assert from_config("llama", model_type="mistral", sliding_window=None).windows == (0, 0)


def test_gemma3_departures() -> None:
    shape = TinyShape("gemma3", layers=7, window=32)
    table = metadata_of(shape) | {"gemma3.attention.layer_norm_rms_epsilon": 1e-6}
    gguf_spec = from_gguf(table)
    config_spec = spec_from_config(config_of(shape), "`config.json`")
    for spec in (gguf_spec, config_spec):
        assert spec.windows == (32, 32, 32, 32, 32, 0, 32)
        assert (spec.qk_norm, spec.post_norms, spec.activation) == (True, True, "gelu_tanh")
        assert spec.embed_scale == 8.0
        assert spec.attn_scale == 0.25
        assert spec.local_rope == RopeSpec(theta=10_000.0, dim=16, style="half")
        assert spec.tied_embeddings
    assert not gguf_spec.unit_offset_norms
    assert config_spec.unit_offset_norms


def test_gemma3_config_layer_types_override_the_pattern() -> None:
    kinds = ["full_attention", "sliding_attention"]
    assert from_config("gemma3", sliding_window=16, layer_types=kinds).windows == (0, 16)
    with pytest.raises(ModelError, match="layer_types"):
        from_config("gemma3", layer_types=kinds[:1])


def test_rope_parameters_of_new_configs_are_read() -> None:
    spec = from_config(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}, rope_theta=None)
    assert (spec.rope.theta, spec.rope.scaling, spec.rope.factor) == (500.0, "linear", 4.0)
    both = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
    }
    spec = from_config("gemma3", rope_parameters=both)
    assert (spec.rope.theta, spec.rope.factor) == (1e6, 8.0)
    assert spec.local_rope == RopeSpec(theta=777.0, dim=16, style="half")


BAD_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "relu2"}, "relu2"),
    "scaling": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "scaling is text": ({"rope_scaling": "linear"}, "must be a table"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "`factor` in `rope_scaling`"),
    "factor 0": ({"rope_scaling": {"type": "linear", "factor": 0}}, "`factor`"),
    "llama3 not ascending": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        "not ascending",
    ),
    "mscale": ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale"),
    "tie is text": ({"tie_word_embeddings": "yes"}, "true or false"),
    "rotary 0": ({"partial_rotary_factor": 0.0}, "rotary dimension 0"),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_impossible_config_is_refused(case: str) -> None:
    changes, message = BAD_CONFIG[case]
    with pytest.raises(ModelError, match=message):
        from_config(**changes)


def test_partial_rotation_halves_the_rotary_dimension() -> None:
    assert from_config(partial_rotary_factor=0.5).rope.dim == 8


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())


@settings(max_examples=200, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(sorted(metadata("gemma3"))), VALUES, max_size=4))
def test_random_metadata_gives_a_spec_or_a_model_error(changes: dict[str, Any]) -> None:
    try:
        spec = from_gguf(metadata("gemma3") | {key: value for key, value in changes.items() if "arch" not in key})
    except ModelError:
        return
    assert len(spec.windows) == spec.num_layers


# --- rotary frequencies ---


def rope(**changes: Any) -> RopeSpec:
    return RopeSpec(**({"theta": 500_000.0, "dim": 128, "style": "half", "original_context": 8192} | changes))


def test_plain_frequencies_fall_from_one_to_near_one_over_theta() -> None:
    freqs = inverse_frequencies(rope(dim=4, theta=100.0))
    np.testing.assert_allclose(freqs, [1.0, 0.1], rtol=1e-7)


def test_linear_scaling_divides_every_frequency() -> None:
    plain, scaled = inverse_frequencies(rope()), inverse_frequencies(rope(scaling="linear", factor=4.0))
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-6)


def test_llama3_scaling_keeps_high_divides_low_and_blends_between() -> None:
    plain = inverse_frequencies(rope()).astype(np.float64)
    scaled = inverse_frequencies(rope(scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0))
    for before, after in zip(plain, scaled, strict=True):  # the definition, wavelength by wavelength
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            expected = before
        elif wavelength > 8192:
            expected = before / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected = (1 - smooth) * before / 8 + smooth * before
        assert after == pytest.approx(expected, rel=1e-5)


def test_yarn_keeps_the_fastest_divides_the_slowest_and_raises_attention() -> None:
    spec = rope(scaling="yarn", factor=4.0, theta=10_000.0, original_context=4096)
    ratio = inverse_frequencies(rope(theta=10_000.0)) / inverse_frequencies(spec)
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(4.0)
    assert (np.diff(ratio) >= -1e-6).all()
    assert attention_factor(spec) == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_attention_factor_given_wins() -> None:
    assert attention_factor(rope(scaling="yarn", factor=4.0, attn_factor=1.5)) == 1.5
    assert attention_factor(rope()) == 1.0


def test_gguf_yarn_factor_multiplies_what_yarn_defines() -> None:
    spec = from_gguf(metadata(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__attn_factor=2.0))
    assert attention_factor(spec.rope) == pytest.approx(2.0 * (0.1 * math.log(4.0) + 1.0))


def test_gguf_old_linear_scale_is_read() -> None:
    assert from_gguf(metadata(rope__scale_linear=2.0)).rope.scaling == "linear"
