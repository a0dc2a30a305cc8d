"""What a decoder is made of: one frozen `ModelSpec`, checked, from GGUF metadata or a Hugging Face config.

Each architecture is one function that states how it departs from the llama shape. Knows numbers, not tensors or ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from firstlight.errors import ModelError
from firstlight.models.keys import Keys
from firstlight.models.rope import RopeSpec

__all__ = ["ModelSpec", "known_architectures", "spec_from_config", "spec_from_gguf"]

MAX_WIDTH = 1 << 18
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 22
MAX_CONTEXT = 1 << 26
MAX_THETA = 1e12
LOCAL_THETA = 10_000.0
"""Gemma 3's rotary base on sliding-window layers; its files do not carry it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A dense decoder. `windows` has one entry per layer: the sliding window in tokens, 0 for the whole context.

    `local_rope` rotates the layers that have a window; None means `rope` does. `unit_offset_norms` says that the files'
    norm weights are stored less 1.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_position: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int, ...]
    attn_scale: float
    local_rope: RopeSpec | None = None
    activation: str = "silu"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    unit_offset_norms: bool = False
    embed_scale: float = 1.0
    attn_softcap: float = 0.0
    logit_softcap: float = 0.0


Refine = Callable[[ModelSpec, Keys], ModelSpec]


def known_architectures() -> tuple[str, ...]:
    """Names that a GGUF file or a config may carry."""
    return tuple(sorted({*GGUF_REFINE, *CONFIG_REFINE}))


def spec_from_gguf(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], source: str) -> ModelSpec:
    """The spec of a GGUF file. `shapes` maps tensor names to row-major shapes; `source` names the file in messages.

    Raises:
        ModelError: the architecture is not known, or a value is missing or out of range.
    """
    architecture = Keys(metadata, source).text("general.architecture")
    refine = _refine(GGUF_REFINE, architecture, source)
    keys = Keys(metadata, source, prefix=f"{architecture}.")
    if keys.integer("expert_count", 0, MAX_WIDTH, 0):
        raise ModelError(f"{source} is a mixture of experts, which is not supported", hint="use a dense model")
    hidden = keys.integer("embedding_length", 1, MAX_WIDTH)
    num_heads = keys.integer("attention.head_count", 1, MAX_HEADS)
    head_dim = _head_dim(keys, "attention.key_length", hidden, num_heads)
    if keys.integer("attention.value_length", 1, MAX_HEAD_DIM, head_dim) != head_dim:
        raise keys.error("attention.value_length", f"differs from the key length {head_dim}: not supported")
    num_layers = keys.integer("block_count", 1, MAX_LAYERS)
    embedding = shapes.get("token_embd.weight", ())
    max_position = keys.integer("context_length", 1, MAX_CONTEXT)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=embedding[0] if len(embedding) == 2 else keys.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", 1, num_heads, num_heads),
        head_dim=head_dim,
        ffn_size=keys.integer("feed_forward_length", 1, MAX_WIDTH * 4),
        max_position=max_position,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
        rope=_gguf_rope(keys, head_dim, max_position, "interleaved" if architecture == "llama" else "half"),
        windows=(keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0),) * num_layers,
        attn_scale=keys.number("attention.scale", 1e-6, 1e3, head_dim**-0.5),
        tied_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
    )
    return _check(refine(spec, keys), source)


def spec_from_config(config: Mapping[str, Any], source: str) -> ModelSpec:
    """The spec of a Hugging Face folder's config.json. Raises ModelError as `spec_from_gguf` does."""
    keys = Keys(config, source)
    architecture = keys.text("model_type")
    refine = _refine(CONFIG_REFINE, architecture, source)
    if config.get("quantization_config"):
        raise ModelError(f"{source} has a `quantization_config`, which is not supported", hint="use the plain weights")
    hidden = keys.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = keys.integer("num_attention_heads", 1, MAX_HEADS)
    head_dim = _head_dim(keys, "head_dim", hidden, num_heads)
    num_layers = keys.integer("num_hidden_layers", 1, MAX_LAYERS)
    max_position = keys.integer("max_position_embeddings", 1, MAX_CONTEXT, 2048)
    biased = keys.flag("attention_bias", False)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=keys.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", 1, num_heads, num_heads),
        head_dim=head_dim,
        ffn_size=keys.integer("intermediate_size", 1, MAX_WIDTH * 4),
        max_position=max_position,
        norm_eps=keys.number("rms_norm_eps", 1e-12, 0.1, 1e-6),
        rope=_config_rope(keys, head_dim, max_position),
        windows=(0,) * num_layers,
        attn_scale=head_dim**-0.5,
        activation=_activation(keys),
        tied_embeddings=keys.flag("tie_word_embeddings", architecture.startswith("gemma")),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=keys.flag("mlp_bias", False),
    )
    return _check(refine(spec, keys), source)


def _refine(table: Mapping[str, Refine], architecture: str, source: str) -> Refine:
    refine = table.get(architecture)
    if refine is None:
        known = ", ".join(sorted(table))
        raise ModelError(f"{source} has architecture {architecture!r}, which is not supported", hint=f"known: {known}")
    return refine


def _head_dim(keys: Keys, key: str, hidden: int, num_heads: int) -> int:
    if keys.get(key, None) is None and hidden % num_heads:
        raise keys.error(key, f"is missing, and {num_heads} heads do not divide the width {hidden}")
    return keys.integer(key, 2, MAX_HEAD_DIM, hidden // num_heads)


def _check(spec: ModelSpec, source: str) -> ModelSpec:
    """Rules that hold between fields."""
    problems: list[str] = []
    if spec.num_heads % spec.num_kv_heads:
        problems.append(f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads evenly")
    if spec.head_dim % 2:
        problems.append(f"head dimension {spec.head_dim} is odd")
    for rope in (spec.rope, spec.local_rope):
        if rope and (rope.dim % 2 or not 2 <= rope.dim <= spec.head_dim):
            problems.append(f"rotary dimension {rope.dim} must be even and at most the head dimension {spec.head_dim}")
        if rope and rope.scaling == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
            problems.append(f"RoPE factors {rope.low_freq_factor} and {rope.high_freq_factor} are not ascending")
    if problems:
        raise ModelError(f"{source}: {problems[0]}", hint="convert or download the model again")
    return spec


# --- RoPE ---


def _gguf_rope(keys: Keys, head_dim: int, max_position: int, style: str) -> RopeSpec:
    scaling = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", 0.0, 1e6, keys.number("rope.scale_linear", 0.0, 1e6, 1.0))
    if scaling == "none" and keys.get("rope.scale_linear", None) is not None:
        scaling = "linear"
    if scaling not in ("none", "linear", "yarn"):
        raise keys.error("rope.scaling.type", f"is {scaling!r}, known are none, linear, yarn")
    if scaling == "none" or factor == 0.0:  # converters write 0 for "not scaled"
        scaling, factor = "none", 1.0
    own = keys.get("rope.scaling.attn_factor", None)
    rope = RopeSpec(
        theta=keys.number("rope.freq_base", 1.0, MAX_THETA, 10_000.0),
        dim=keys.integer("rope.dimension_count", 2, MAX_HEAD_DIM, head_dim),
        style=style,
        scaling=scaling,
        factor=factor,
        original_context=keys.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT, max_position),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
    )
    if own is None:
        return rope
    scale = keys.number("rope.scaling.attn_factor", 1e-3, 1e3)
    if scaling == "yarn" and factor > 1.0:  # the file's factor multiplies what YaRN defines
        scale *= 0.1 * math.log(factor) + 1.0
    return replace(rope, attn_factor=scale)


def _config_rope(keys: Keys, head_dim: int, max_position: int) -> RopeSpec:
    section = keys.section("rope_parameters")
    if not section.table:
        section = keys.section("rope_scaling")
    if "full_attention" in section.table:
        section = section.section("full_attention")
    theta = keys.number("rope_theta", 1.0, MAX_THETA, 10_000.0)
    rotated = section.number("partial_rotary_factor", 0.0, 1.0, keys.number("partial_rotary_factor", 0.0, 1.0, 1.0))
    return _rope_section(
        section, section.number("rope_theta", 1.0, MAX_THETA, theta), int(head_dim * rotated), max_position
    )


def _rope_section(section: Keys, theta: float, dim: int, max_position: int) -> RopeSpec:
    """A `rope_scaling` or `rope_parameters` table; empty means no scaling."""
    scaling = section.text("rope_type", section.text("type", "default"))
    if scaling == "default":
        return RopeSpec(theta=theta, dim=dim, style="half")
    if scaling not in ("linear", "llama3", "yarn"):
        raise section.error("rope_type", f"is {scaling!r}, known are default, linear, llama3, yarn")
    for key in ("mscale", "mscale_all_dim"):
        if section.get(key, None) is not None:
            raise section.error(key, "is not supported")
    rope = RopeSpec(
        theta=theta,
        dim=dim,
        style="half",
        scaling=scaling,
        factor=section.number("factor", 1e-3, 1e6),
        original_context=section.integer("original_max_position_embeddings", 1, MAX_CONTEXT, max_position),
        low_freq_factor=section.number("low_freq_factor", 1e-6, 1e6, 1.0),
        high_freq_factor=section.number("high_freq_factor", 1e-6, 1e6, 4.0),
        beta_fast=section.number("beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=section.number("beta_slow", 1e-3, 1e6, 1.0),
    )
    if section.get("attention_factor", None) is None:
        return rope
    return replace(rope, attn_factor=section.number("attention_factor", 1e-3, 1e3))


# --- what each architecture changes ---


def _activation(keys: Keys) -> str:
    name = keys.text("hidden_activation", keys.text("hidden_act", "silu"))
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
    if name not in known:
        raise keys.error("hidden_act", f"is {name!r}, known are {', '.join(known)}")
    return known[name]


def _plain(spec: ModelSpec, keys: Keys) -> ModelSpec:
    return spec


def _qk_norm(spec: ModelSpec, keys: Keys) -> ModelSpec:
    return replace(spec, qk_norm=True)


def _config_mistral(spec: ModelSpec, keys: Keys) -> ModelSpec:
    return replace(spec, windows=(keys.integer("sliding_window", 0, MAX_CONTEXT, 0),) * spec.num_layers)


def _config_qwen2(spec: ModelSpec, keys: Keys) -> ModelSpec:
    spec = replace(spec, qkv_bias=True, output_bias=False)
    return _config_late_windows(spec, keys)


def _config_qwen3(spec: ModelSpec, keys: Keys) -> ModelSpec:
    return _config_late_windows(replace(spec, qk_norm=True), keys)


def _config_late_windows(spec: ModelSpec, keys: Keys) -> ModelSpec:
    """Qwen's option: layers from `max_window_layers` on have a window."""
    if not keys.flag("use_sliding_window", False):
        return spec
    window = keys.integer("sliding_window", 1, MAX_CONTEXT)
    first = keys.integer("max_window_layers", 0, MAX_LAYERS, spec.num_layers)
    return replace(spec, windows=tuple(window if layer >= first else 0 for layer in range(spec.num_layers)))


def _gemma(spec: ModelSpec, window: int, period: int) -> ModelSpec:
    """Gemma 2 and 3: every `period`-th layer sees the whole context, the others a window."""
    return replace(
        spec,
        activation="gelu_tanh",
        post_norms=True,
        embed_scale=math.sqrt(spec.hidden_size),
        windows=tuple(window if (layer + 1) % period else 0 for layer in range(spec.num_layers)),
    )


def _gguf_gemma3(spec: ModelSpec, keys: Keys) -> ModelSpec:
    window = keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0)
    period = keys.integer("attention.sliding_window_pattern", 1, MAX_LAYERS, 6)
    spec = replace(_gemma(spec, window, period), qk_norm=True)
    local = keys.number("rope.freq_base_swa", 1.0, MAX_THETA, LOCAL_THETA)
    spec = replace(spec, local_rope=RopeSpec(theta=local, dim=spec.rope.dim, style="half"))
    if spec.num_layers == 62:  # 27B alone scales by width / heads, and its files do not say so
        spec = replace(spec, attn_scale=(spec.hidden_size / spec.num_heads) ** -0.5)
    return spec


def _config_gemma3(spec: ModelSpec, keys: Keys) -> ModelSpec:
    window = keys.integer("sliding_window", 0, MAX_CONTEXT, 0)
    spec = _gemma(spec, window, keys.integer("sliding_window_pattern", 1, MAX_LAYERS, 6))
    kinds = keys.get("layer_types", None)
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != spec.num_layers:
            raise keys.error("layer_types", f"must list {spec.num_layers} layers")
        spec = replace(spec, windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds))
    local = keys.section("rope_parameters").section("sliding_attention")
    theta = local.number("rope_theta", 1.0, MAX_THETA, keys.number("rope_local_base_freq", 1.0, MAX_THETA, LOCAL_THETA))
    return replace(
        spec,
        qk_norm=True,
        unit_offset_norms=True,
        attn_scale=keys.number("query_pre_attn_scalar", 1e-3, 1e6, float(spec.head_dim)) ** -0.5,
        local_rope=_rope_section(local, theta, spec.rope.dim, spec.max_position),
        logit_softcap=keys.number("final_logit_softcapping", 0.0, 1e6, 0.0),
        attn_softcap=keys.number("attn_logit_softcapping", 0.0, 1e6, 0.0),
    )


GGUF_REFINE: dict[str, Refine] = {
    "llama": _plain,
    "qwen2": _plain,
    "qwen3": _qk_norm,
    "gemma3": _gguf_gemma3,
}
CONFIG_REFINE: dict[str, Refine] = {
    "llama": _plain,
    "mistral": _config_mistral,
    "qwen2": _config_qwen2,
    "qwen3": _config_qwen3,
    "gemma3_text": _config_gemma3,
}
