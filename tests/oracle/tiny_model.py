"""Random decoders of a few thousand weights, written as GGUF files or Hugging Face folders.

The same `TinyShape` and seed give the same model in both formats, up to the rounding of the tensor types chosen.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tests.oracle import gguf_writer as gw

Arrays = dict[str, npt.NDArray[np.float32]]

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny decoder. Widths are multiples of 32, so that block formats fit."""

    architecture: str = "llama"
    vocab: int = 96
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    context: int = 256
    theta: float = 10_000.0
    eps: float = 1e-5
    tied: bool = True
    qkv_bias: bool = False
    other_bias: bool = False
    window: int = 0

    @property
    def has_qk_norm(self) -> bool:
        return self.architecture in ("qwen3", "gemma3")


def random_arrays(shape: TinyShape, seed: int) -> Arrays:
    """Weights under GGUF names without `blk.N.`'s permutation of q and k; norms as multipliers near 1."""
    rng = np.random.default_rng(seed)
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def matrix(rows: int, cols: int) -> npt.NDArray[np.float32]:
        return (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    def vector(length: int, center: float) -> npt.NDArray[np.float32]:
        return (center + 0.1 * rng.standard_normal(length)).astype(np.float32)

    arrays = {"token_embd.weight": matrix(shape.vocab, shape.hidden), "output_norm.weight": vector(shape.hidden, 1)}
    if not shape.tied:
        arrays["output.weight"] = matrix(shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        sizes = {"attn_q": (q, shape.hidden), "attn_k": (kv, shape.hidden), "attn_v": (kv, shape.hidden)}
        sizes |= {"attn_output": (shape.hidden, q), "ffn_gate": (shape.ffn, shape.hidden)}
        sizes |= {"ffn_up": (shape.ffn, shape.hidden), "ffn_down": (shape.hidden, shape.ffn)}
        for name, size in sizes.items():
            arrays[f"blk.{layer}.{name}.weight"] = matrix(*size)
            is_qkv = name in ("attn_q", "attn_k", "attn_v")
            if shape.qkv_bias if is_qkv else shape.other_bias:
                arrays[f"blk.{layer}.{name}.bias"] = vector(size[0], 0)
        norms = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden}
        if shape.has_qk_norm:
            norms |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
        if shape.architecture == "gemma3":
            norms |= {"post_attention_norm": shape.hidden, "post_ffw_norm": shape.hidden}
        for name, length in norms.items():
            arrays[f"blk.{layer}.{name}.weight"] = vector(length, 1)
    return arrays


def permuted(array: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k reordered from half pairs to interleaved pairs, as GGUF llama files hold them."""
    split = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)


def metadata_of(shape: TinyShape) -> dict[str, Any]:
    arch = shape.architecture
    table = {
        "general.architecture": arch,
        f"{arch}.context_length": shape.context,
        f"{arch}.embedding_length": shape.hidden,
        f"{arch}.block_count": shape.layers,
        f"{arch}.feed_forward_length": shape.ffn,
        f"{arch}.attention.head_count": shape.heads,
        f"{arch}.attention.head_count_kv": shape.kv_heads,
        f"{arch}.attention.key_length": shape.head_dim,
        f"{arch}.attention.value_length": shape.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": gw.scalar("f64", shape.eps),
        f"{arch}.rope.freq_base": shape.theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(shape.vocab)],
        "tokenizer.chat_template": "{{ messages }}",
    }
    if shape.window:
        table[f"{arch}.attention.sliding_window"] = shape.window
    return table


def write_gguf(
    path: Path,
    shape: TinyShape = TinyShape(),
    seed: int = 0,
    *,
    types: Mapping[str, str] | str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, gw.Tensor] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """Writes a tiny model. `types` is one GGUF type for all matrices, or a map from parts (`ffn_down`) to types."""
    tensors: dict[str, gw.Tensor] = {}
    for name, array in random_arrays(shape, seed).items():
        part = name.split(".")[-2]
        if shape.architecture == "llama" and part in ("attn_q", "attn_k"):
            array = permuted(array, shape.heads if part == "attn_q" else shape.kv_heads)
        wanted = types if isinstance(types, str) else types.get(part, "F32")
        kind = gguf.GGMLQuantizationType[wanted if array.ndim == 2 else "F32"]
        tensors[name] = gw.Tensor(kind.name, array.shape, gguf.quants.quantize(array, kind).tobytes())
    tensors |= extra or {}
    for name in without:
        del tensors[name]
    path.write_bytes(gw.build({**metadata_of(shape), **(metadata or {})}, tensors))
    return path


def config_of(shape: TinyShape) -> dict[str, Any]:
    config = {
        "model_type": {"gemma3": "gemma3_text"}.get(shape.architecture, shape.architecture),
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "tie_word_embeddings": shape.tied,
    }
    if shape.architecture == "llama":
        config |= {"attention_bias": shape.qkv_bias, "mlp_bias": shape.other_bias, "hidden_act": "silu"}
    if shape.architecture == "gemma3":
        config |= {"query_pre_attn_scalar": shape.head_dim, "hidden_activation": "gelu_pytorch_tanh"}
    if shape.window:
        config["sliding_window"] = shape.window
    return config


def folder_name(name: str, shape: TinyShape) -> str:
    """A GGUF tensor name as Hugging Face checkpoints spell it."""
    *_, part, leaf = name.split(".")
    if part in TOP_NAMES:
        return f"{TOP_NAMES[part]}.{leaf}"
    theirs = LAYER_NAMES[part]
    if part == "ffn_norm" and shape.architecture == "gemma3":
        theirs = "pre_feedforward_layernorm"
    return f"model.layers.{name.split('.')[1]}.{theirs}.{leaf}"


def safetensors_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A safetensors file from name -> (dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_folder(
    folder: Path,
    shape: TinyShape = TinyShape(),
    seed: int = 0,
    *,
    dtype: str = "F32",
    num_shards: int = 1,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the same model as `write_gguf` does, as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, array in random_arrays(shape, seed).items():
        if shape.architecture == "gemma3" and name.endswith("norm.weight"):
            array = array - np.float32(1)
        raw = {"F32": array, "F16": array.astype(np.float16), "BF16": (array.view(np.uint32) >> 16).astype(np.uint16)}
        entries[folder_name(name, shape)] = (dtype, array.shape, raw[dtype].tobytes())
    names = list(entries)
    shards = [names[index::num_shards] for index in range(num_shards)]
    if num_shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(entries))
    else:
        files = [f"model-{index + 1:05}-of-{num_shards:05}.safetensors" for index in range(num_shards)]
        for file, shard in zip(files, shards, strict=True):
            (folder / file).write_bytes(safetensors_bytes({name: entries[name] for name in shard}))
        index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({**config_of(shape), **(config or {})}))
    (folder / "tokenizer.json").write_text("{}")
    return folder
