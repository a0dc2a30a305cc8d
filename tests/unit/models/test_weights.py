"""Loading models: two formats of one model agree, and what is missing or misshapen is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from firstlight.errors import ModelError
from firstlight.models.decoder import INV_FREQ
from firstlight.models.pack import unpack
from firstlight.models.program import Embed, Linear
from firstlight.models.quants import dequantise
from firstlight.models.weights import LoadedModel, load_model, required_tensors
from tests.oracle import gguf_writer as gw
from tests.oracle.executor import Oracle
from tests.oracle.tiny_model import TinyShape, random_arrays, write_folder, write_gguf

IDS = [3, 17, 94, 0, 5, 5, 61, 20, 33, 2, 9, 41]
SHAPES = {
    "llama": TinyShape(),
    "llama untied, all biases": TinyShape(tied=False, qkv_bias=True, other_bias=True),
    "llama with wide heads": TinyShape(heads=2, kv_heads=1, head_dim=64),
    "qwen2": TinyShape("qwen2", qkv_bias=True, tied=False),
    "qwen3": TinyShape("qwen3"),
    "gemma3": TinyShape("gemma3", window=4, layers=7),
}


def logits(model: LoadedModel) -> np.ndarray:
    return Oracle(model.program, model.weights, model.constants).logits(IDS)


@pytest.mark.parametrize("name", SHAPES)
def test_folder_and_gguf_of_one_model_give_the_same_logits(tmp_path: Path, name: str) -> None:
    from_gguf = load_model(write_gguf(tmp_path / "m.gguf", SHAPES[name]))
    from_folder = load_model(write_folder(tmp_path / "m", SHAPES[name]))
    np.testing.assert_allclose(logits(from_gguf), logits(from_folder), rtol=2e-3, atol=2e-3)
    assert from_gguf.fingerprint != from_folder.fingerprint  # q and k are ordered differently


def test_window_changes_the_logits_of_positions_beyond_it_only(tmp_path: Path) -> None:
    wide = logits(load_model(write_gguf(tmp_path / "wide.gguf", TinyShape(layers=1))))
    narrow = logits(load_model(write_gguf(tmp_path / "narrow.gguf", TinyShape(layers=1, window=4))))
    np.testing.assert_array_equal(wide[:4], narrow[:4])
    assert (np.abs(wide[4:] - narrow[4:]).max(axis=1) > 1e-4).all()


@pytest.mark.parametrize(("dtype", "kind"), [("F32", "float"), ("F16", "half"), ("BF16", "bf16")])
def test_folder_types_keep_their_width(tmp_path: Path, dtype: str, kind: str) -> None:
    model = load_model(write_folder(tmp_path / "m", dtype=dtype))
    assert {weight.kind for weight in model.weights.values()} == {kind}
    assert all(value.dtype == np.float32 for value in model.constants.values())
    assert set(model.types) == {dtype}


def test_sharded_folder_equals_the_whole_one(tmp_path: Path) -> None:
    whole, sharded = (load_model(write_folder(tmp_path / str(n) / "m", num_shards=n)) for n in (1, 3))
    assert whole.fingerprint == sharded.fingerprint
    np.testing.assert_array_equal(logits(whole), logits(sharded))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
def test_quantised_gguf_loses_nothing_more(tmp_path: Path, type_name: str) -> None:
    shape = TinyShape("qwen2")  # q and k in the order of `random_arrays`
    model = load_model(write_gguf(tmp_path / "m.gguf", shape, types=type_name))
    kind = gguf.GGMLQuantizationType[type_name]
    arrays = random_arrays(shape, 0)
    for name, weight in model.weights.items():
        expected = gguf.quants.dequantize(gguf.quants.quantize(arrays[name], kind), kind)
        np.testing.assert_array_equal(dequantise(unpack(weight)), expected.reshape(arrays[name].shape))


def test_tied_embedding_is_one_weight_under_both_uses(tmp_path: Path) -> None:
    model = load_model(write_gguf(tmp_path / "m.gguf"))
    embed, head = model.program.ops[0], model.program.ops[-1]
    assert isinstance(embed, Embed)
    assert isinstance(head, Linear)
    assert embed.weight == head.weight
    assert "output.weight" not in model.weights


def test_loaded_model_holds_what_the_program_names(tmp_path: Path) -> None:
    model = load_model(write_gguf(tmp_path / "m.gguf", TinyShape(qkv_bias=True)))
    matrices, vectors = required_tensors(model.program)
    assert {name: (weight.rows, weight.cols) for name, weight in model.weights.items()} == matrices
    assert {name: value.size for name, value in model.constants.items() if name != INV_FREQ} == vectors
    assert model.constants[INV_FREQ].shape == (8,)
    assert model.name == "m"
    assert model.file_bytes == (tmp_path / "m.gguf").stat().st_size
    assert model.weight_bytes >= sum(weight.data.nbytes for weight in model.weights.values())
    assert model.chat_template == "{{ messages }}"
    assert model.tokenizer.metadata["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]


def test_fingerprint_changes_with_one_weight_and_with_the_spec(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    first = load_model(path).fingerprint
    assert load_model(path).fingerprint == first
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert load_model(path).fingerprint != first
    assert load_model(write_gguf(path, TinyShape(theta=20_000.0))).fingerprint != first


def test_rope_factors_in_the_file_divide_the_frequencies(tmp_path: Path) -> None:
    plain = load_model(write_gguf(tmp_path / "a.gguf")).constants[INV_FREQ]
    factors = gw.f32([1, 1, 2, 2, 4, 4, 8, 8])
    model = load_model(write_gguf(tmp_path / "b.gguf", extra={"rope_freqs.weight": factors}))
    np.testing.assert_allclose(model.constants[INV_FREQ], plain / np.array([1, 1, 2, 2, 4, 4, 8, 8]), rtol=1e-6)


@pytest.mark.parametrize("inline", [True, False])
def test_folder_template_and_ids_come_from_their_files(tmp_path: Path, inline: bool) -> None:
    folder = write_folder(tmp_path / "m", config={"eos_token_id": 1, "bos_token_id": 4})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named if inline else "no"}))
    if not inline:
        (folder / "chat_template.jinja").write_text("yes")
    model = load_model(folder)
    assert model.chat_template == "yes"
    assert model.tokenizer.metadata["eos_token_id"] == [2, 3]
    assert model.tokenizer.metadata["bos_token_id"] == 4


def q8(rows: int, cols: int) -> gw.Tensor:
    return gw.Tensor("Q8_0", (rows, cols), bytes(rows * cols // 32 * 34))


BAD_TENSORS = {
    "missing": ({}, ("blk.1.ffn_up.weight",), "no tensor `blk.1.ffn_up.weight`"),
    "wrong shape": ({"blk.0.attn_k.weight": q8(64, 64)}, (), r"`blk.0.attn_k.weight` has shape \(64, 64\)"),
    "vector as matrix": ({"output_norm.weight": gw.f32(np.ones((1, 64)))}, (), r"has shape \(1, 64\)"),
    "quantised norm": ({"output_norm.weight": gw.Tensor("Q8_0", (64,), bytes(68))}, (), "has type Q8_0"),
    "unsupported type": ({"blk.0.attn_k.weight": gw.Tensor("I8", (32, 64), bytes(2048))}, (), "I8 is not supported"),
    "infinite scale": (
        {"blk.0.attn_k.weight": gw.Tensor("Q8_0", (32, 64), b"\x00\x7c" + bytes(64 * 34 - 2))},
        (),
        "`blk.0.attn_k.weight` holds values that are not finite",
    ),
    "nan norm": ({"output_norm.weight": gw.f32([np.nan] * 64)}, (), "not finite"),
    "rope factor 0": ({"rope_freqs.weight": gw.f32([0.0] * 8)}, (), "not above 0"),
    "rope factors short": ({"rope_freqs.weight": gw.f32([1.0] * 4)}, (), r"`rope_freqs.weight` has shape \(4,\)"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensor_is_named(tmp_path: Path, case: str) -> None:
    extra, without, message = BAD_TENSORS[case]
    path = write_gguf(tmp_path / "m.gguf", extra=extra, without=without)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert caught.value.hint


def test_piece_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata={"split.count": 3})
    with pytest.raises(ModelError, match="one piece of a split model"):
        load_model(path)


def test_folder_is_named_after_itself_or_its_repository(tmp_path: Path) -> None:
    assert load_model(write_folder(tmp_path / "mine")).name == "mine"
    snapshot = tmp_path / "models--org--tiny-1b" / "snapshots" / ("a" * 40)
    assert load_model(write_folder(snapshot)).name == "tiny-1b"


def test_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = write_folder(tmp_path / name)
        (folder / name).unlink()
        with pytest.raises(ModelError, match=name):
            load_model(folder)


def test_folder_with_quantised_weights_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config={"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(ModelError, match="quantization_config"):
        load_model(folder)


def test_vocabulary_that_differs_from_the_config_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config={"vocab_size": 97})
    with pytest.raises(ModelError, match=r"embed_tokens.weight` has shape \(96, 64\), the model needs \(97, 64\)"):
        load_model(folder)


def test_head_dim_that_differs_from_the_weights_is_refused(tmp_path: Path) -> None:
    shape = replace(TinyShape(), head_dim=32)
    path = write_gguf(tmp_path / "m.gguf", shape, metadata={"llama.attention.key_length": 16})
    with pytest.raises(ModelError, match="value_length"):
        load_model(path)
