"""Loading a model: a GGUF file or a Hugging Face folder becomes packed weights, constants and a traced program.

What must be in the file follows from the program alone: each op names its weights and fixes their shapes. Knows files
and layouts, not how anything runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from firstlight.errors import ModelError
from firstlight.models.decoder import INV_FREQ, LOCAL_INV_FREQ, trace
from firstlight.models.gguf import GGUFFile, TensorEntry
from firstlight.models.layouts import PackedWeight, QuantCodes
from firstlight.models.pack import LAYOUT_VERSION, NativePacker, pack
from firstlight.models.program import Embed, Linear, Norm, Program
from firstlight.models.quants import FLOAT_TYPES, dequantise, unpack_blocks
from firstlight.models.rope import inverse_frequencies
from firstlight.models.safetensors import SafetensorsFolder, read_json
from firstlight.models.spec import ModelSpec, spec_from_config, spec_from_gguf

__all__ = ["LoadedModel", "TokenizerSource", "load_model", "required_tensors"]

MAX_LOAD_THREADS = 4
HINT = "the file does not hold the whole model, or was converted wrongly: download or convert it again"
ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """Where the tokenizer's data is.

    `kind` "gguf": `metadata` holds the file's `tokenizer.*` keys. `kind` "folder": `path` is a folder with
    tokenizer.json, and `metadata` holds what tokenizer_config.json, generation_config.json and config.json say, the
    first winning.
    """

    kind: str
    path: Path
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Everything a backend and the text room need from a model file.

    `weights` are the matrices of Embed and Linear ops; `constants` are float32 vectors: norm weights, biases,
    frequencies. `fingerprint` is a SHA-256 over the tensors' bytes, the spec and the layout version.
    """

    name: str
    path: Path
    spec: ModelSpec
    program: Program
    weights: dict[str, PackedWeight]
    constants: dict[str, npt.NDArray[np.float32]]
    tokenizer: TokenizerSource
    chat_template: str | None
    fingerprint: bytes
    file_bytes: int
    types: dict[str, int] = field(default_factory=dict)
    """File bytes per tensor type, for the start-up screen."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all packed weights and constants."""
        arrays = [weight.data for weight in self.weights.values()], self.constants.values()
        return sum(array.nbytes for group in arrays for array in group)


def load_model(path: str | os.PathLike[str], *, native: NativePacker | None = None) -> LoadedModel:
    """Reads, checks and packs the model at `path`: a .gguf file or a Hugging Face folder.

    Raises:
        ModelError: the model is missing, damaged, incomplete or of a kind that is not supported.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path, native)
    with GGUFFile(path) as file:
        if file.metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(f"`{path.name}` is one piece of a split model", hint="join the pieces into one file first")
        shapes = {name: entry.shape for name, entry in file.tensors.items()}
        spec = spec_from_gguf(file.metadata, shapes, f"`{path.name}`")
        loader = _Loader(file, spec, native, {})
        tokenizer = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
        template = tokenizer.get("tokenizer.chat_template")
        return loader.load(
            name=path.stem,
            tokenizer=TokenizerSource(kind="gguf", path=path, metadata=tokenizer),
            chat_template=template if isinstance(template, str) else None,
        )


def required_tensors(program: Program) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """What a program needs from a file: matrices as name -> (rows, cols), vectors as name -> length."""
    matrices: dict[str, tuple[int, int]] = {}
    vectors: dict[str, int] = {}
    for op in program.ops:
        if isinstance(op, Embed):
            matrices[op.weight] = (program.vocab_size, program.buffers[op.out])
        elif isinstance(op, Linear):
            matrices[op.weight] = (program.buffers[op.out], program.buffers[op.x])
            if op.bias is not None:
                vectors[op.bias] = program.buffers[op.out]
        elif isinstance(op, Norm):
            vectors[op.weight] = op.group
    return matrices, vectors


class _TensorFile(Protocol):
    """GGUFFile or SafetensorsFolder."""

    path: Path
    tensors: dict[str, TensorEntry]
    file_bytes: int

    def read(self, name: str) -> npt.NDArray[np.uint8]: ...


class _Loader:
    """One load. `names` maps the program's names to the file's where they differ."""

    def __init__(
        self, file: _TensorFile, spec: ModelSpec, native: NativePacker | None, names: Mapping[str, str]
    ) -> None:
        self.file, self.spec, self.native, self.names = file, spec, native, names
        self.program = trace(spec)

    def load(self, name: str, tokenizer: TokenizerSource, chat_template: str | None) -> LoadedModel:
        matrices, vectors = required_tensors(self.program)
        entries = {key: self._entry(key, shape) for key, shape in matrices.items()}
        entries |= {key: self._entry(key, (length,)) for key, length in vectors.items()}
        largest_first = sorted(entries, key=lambda key: -entries[key].num_bytes)
        with ThreadPoolExecutor(_num_threads(), thread_name_prefix="load") as pool:
            loaded = dict(zip(largest_first, pool.map(self._read, largest_first), strict=True))
        digest = hashlib.sha256(f"firstlight layout {LAYOUT_VERSION}\n{self.spec!r}\n".encode())
        types: dict[str, int] = {}
        for key in sorted(entries):
            entry = entries[key]
            digest.update(f"{key} {entry.type} {entry.shape}\n".encode() + loaded[key][1])
            types[entry.type] = types.get(entry.type, 0) + entry.num_bytes
        divisors = self._divisors()
        digest.update(b"" if divisors is None else divisors.tobytes())
        return LoadedModel(
            name=name,
            path=self.file.path,
            spec=self.spec,
            program=self.program,
            weights={key: value for key, (value, _) in loaded.items() if isinstance(value, PackedWeight)},
            constants=self._frequencies(divisors)
            | {key: value for key, (value, _) in loaded.items() if not isinstance(value, PackedWeight)},
            tokenizer=tokenizer,
            chat_template=chat_template,
            fingerprint=digest.digest(),
            file_bytes=self.file.file_bytes,
            types=types,
        )

    def _entry(self, key: str, shape: tuple[int, ...]) -> TensorEntry:
        name = self.names.get(key, key)
        entry = self.file.tensors.get(name)
        if entry is None:
            raise ModelError(f"`{self.file.path.name}` has no tensor `{name}`", hint=HINT)
        if entry.shape != shape:
            raise ModelError(f"tensor `{name}` has shape {entry.shape}, the model needs {shape}", hint=HINT)
        if len(shape) == 1 and entry.type not in FLOAT_TYPES:
            raise ModelError(f"tensor `{name}` has type {entry.type}, the model needs F32, F16 or BF16", hint=HINT)
        return entry

    def _read(self, key: str) -> tuple[PackedWeight | npt.NDArray[np.float32], bytes]:
        """One tensor, packed (matrix) or as float32 (vector), and the digest of its bytes."""
        name = self.names.get(key, key)
        entry = self.file.tensors[name]
        raw = self.file.read(name)
        digest = hashlib.sha256(raw.data).digest()
        rows, cols = entry.shape if len(entry.shape) == 2 else (1, entry.shape[0])
        try:
            matrix = unpack_blocks(raw, entry.type, rows, cols)
            if len(entry.shape) == 2:
                if isinstance(matrix, QuantCodes):
                    _check_finite(name, matrix.scales)
                    _check_finite(name, matrix.mins)
                return pack(matrix, native=self.native), digest
        except ModelError as error:
            raise ModelError(f"tensor `{name}`: {error.message}", hint=error.hint or HINT) from error
        values = dequantise(matrix).reshape(-1)
        _check_finite(name, values)
        if self.spec.unit_offset_norms and key.endswith("norm.weight"):
            values = values + np.float32(1.0)
        return values, digest

    def _divisors(self) -> npt.NDArray[np.float32] | None:
        if ROPE_DIVISORS not in self.file.tensors:
            return None
        self._entry(ROPE_DIVISORS, (self.spec.rope.dim // 2,))
        values = self._read(ROPE_DIVISORS)[0]
        assert isinstance(values, np.ndarray)
        if not (values > 0.0).all():
            raise ModelError(f"tensor `{ROPE_DIVISORS}` holds factors that are not above 0", hint=HINT)
        return values

    def _frequencies(self, divisors: npt.NDArray[np.float32] | None) -> dict[str, npt.NDArray[np.float32]]:
        constants = {INV_FREQ: inverse_frequencies(self.spec.rope, divisors)}
        if self.spec.local_rope is not None:
            constants[LOCAL_INV_FREQ] = inverse_frequencies(self.spec.local_rope)
        return constants


def _check_finite(name: str, values: npt.NDArray[np.float32] | None) -> None:
    if values is not None and not np.isfinite(values).all():
        raise ModelError(f"tensor `{name}` holds values that are not finite", hint=HINT)


def _num_threads() -> int:
    return max(1, min(MAX_LOAD_THREADS, len(os.sched_getaffinity(0))))


# --- Hugging Face folders ---

FOLDER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
FOLDER_PARTS = {
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


def _folder_names(spec: ModelSpec, program: Program) -> dict[str, str]:
    """The program's weight names as a Hugging Face checkpoint spells them."""
    parts = dict(FOLDER_PARTS)
    if spec.post_norms:
        parts["ffn_norm"] = "pre_feedforward_layernorm"
    names = dict(FOLDER_NAMES)
    for group in required_tensors(program):
        for key in group:
            if key not in names:
                _, layer, part, leaf = key.split(".")
                names[key] = f"model.layers.{layer}.{parts[part]}.{leaf}"
    return names


def _load_folder(folder: Path, native: NativePacker | None) -> LoadedModel:
    config = read_json(folder / "config.json")
    spec = spec_from_config(config, f"`{folder / 'config.json'}`")
    loader = _Loader(SafetensorsFolder(folder), spec, native, {})
    loader.names = _folder_names(spec, loader.program)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"`{folder}` has no tokenizer.json", hint="download the tokenizer's files too")
    own: dict[str, Any] = {}
    for name in ("generation_config.json", "tokenizer_config.json"):
        own |= read_json(folder / name) if (folder / name).is_file() else {}
    return loader.load(
        name=_folder_title(folder),
        tokenizer=TokenizerSource(kind="folder", path=folder, metadata=config | own),
        chat_template=_folder_template(folder, own.get("chat_template")),
    )


def _folder_title(folder: Path) -> str:
    """The folder's name; for a snapshot in a hub's cache (models--org--name/snapshots/commit), the repository's."""
    absolute = folder.absolute()
    if absolute.parent.name == "snapshots":
        return absolute.parent.parent.name.rpartition("--")[2]
    return absolute.name


def _folder_template(folder: Path, inline: Any) -> str | None:
    """The chat template: its own file, or the tokenizer config's text, or the one named "default" among several."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read `{path}`: {error}") from error
    if isinstance(inline, list):
        named = {item.get("name"): item.get("template") for item in inline if isinstance(item, dict)}
        inline = named.get("default")
    return inline if isinstance(inline, str) else None
