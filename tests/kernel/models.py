"""Tiny decoders for runner tests: every feature of the program, in any mix of weight layouts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.models.decoder import trace
from firstlight.models.layouts import QuantCodes
from firstlight.models.pack import pack, unpack
from firstlight.models.quants import dequantise
from firstlight.models.weights import LoadedModel, load_model
from tests.kernel.layouts import F32, QUANTISED, VARIANTS, Variant
from tests.oracle.tiny_model import TinyShape, write_gguf

CONTEXT = 320
FLOATS = [variant for variant in VARIANTS if not variant.group]
BYTES = [variant for variant in QUANTISED if variant.kind == "byte"]
NIBBLES = [variant for variant in QUANTISED if variant.kind == "nibble"]


@dataclass(frozen=True)
class Recipe:
    """A tiny model: its shape, what its spec says otherwise, and the layouts its matrices take in turn."""

    shape: TinyShape
    variants: Sequence[Variant]
    spec: dict[str, Any] = field(default_factory=dict)


def shape(architecture: str = "llama", **sizes: Any) -> TinyShape:
    return TinyShape(architecture=architecture, context=CONTEXT, **sizes)


RECIPES = {
    "llama": Recipe(shape(), FLOATS[2:]),
    "llama-untied-half": Recipe(shape(tied=False, heads=6, kv_heads=1, head_dim=48), FLOATS[:1]),
    "qwen2-biases": Recipe(shape("qwen2", qkv_bias=True), FLOATS[1:2]),
    "llama-all-biases": Recipe(shape(qkv_bias=True, other_bias=True, kv_heads=4), FLOATS),
    "qwen3-qk-norm": Recipe(shape("qwen3", head_dim=32, vocab=101), FLOATS),
    "gemma3-post-norms": Recipe(shape("gemma3", window=20, layers=7), FLOATS),
    "soft-caps-gelu": Recipe(
        shape(head_dim=32),
        FLOATS,
        {"attn_softcap": 5.0, "logit_softcap": 3.0, "activation": "gelu", "windows": (150, 0), "embed_scale": 2.5},
    ),
    "llama-nibble": Recipe(shape(tied=False), NIBBLES),
    "qwen3-byte": Recipe(shape("qwen3", head_dim=32), BYTES),
    "llama-mixed": Recipe(shape(qkv_bias=True, other_bias=True, layers=3, ffn=160), VARIANTS),
    "gemma3-mixed": Recipe(shape("gemma3", window=33, layers=7, heads=8, kv_heads=1), VARIANTS[::-1]),
}


def build(recipe: Recipe, folder: Path) -> LoadedModel:
    """The model, its matrices packed into the recipe's layouts in turn."""
    model = load_model(write_gguf(folder / "tiny.gguf", recipe.shape))
    variants = itertools.cycle(recipe.variants)
    weights = {
        name: pack(in_layout(next(variants), dequantise(unpack(weight)))) for name, weight in model.weights.items()
    }
    spec = replace(model.spec, **recipe.spec)
    return replace(model, weights=weights, spec=spec, program=trace(spec))


def in_layout(variant: Variant, matrix: F32) -> Any:
    """The matrix rounded into a layout's codes."""
    if variant.kind == "float":
        return matrix
    if variant.kind == "half":
        return matrix.astype(np.float16)
    if variant.kind == "bf16":
        return (matrix.view(np.uint32) >> 16).astype(np.uint16)
    rows, cols = matrix.shape
    groups = matrix.reshape(rows, -1, variant.group)
    low, top = (0, 15) if variant.kind == "nibble" else (-127, 127)
    if variant.has_min:
        scales = numbers(variant, (groups.max(axis=2) - groups.min(axis=2)) / (top - low))
        mins = numbers(variant, groups.min(axis=2) - low * scales)
    else:
        scales, mins = numbers(variant, np.abs(groups).max(axis=2) / top), None
    wide = groups if mins is None else groups - mins[..., None]
    codes = np.clip(np.rint(wide / scales[..., None]), low, top).reshape(rows, cols)
    return QuantCodes(
        variant.kind, variant.group, codes.astype(np.uint8 if variant.kind == "nibble" else np.int8), scales, mins
    )


def numbers(variant: Variant, values: F32) -> F32:
    """Scales or mins that are exact in float16, or not, as the variant says."""
    half = values.astype(np.float16).astype(np.float32)
    return np.nextafter(half, np.float32(1)) if variant.scale_f32 else half
