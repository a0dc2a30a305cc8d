"""Types of the native module (csrc/bindings*.cpp). Arrays are C-contiguous; wrong shapes raise ValueError."""

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

class Runner:
    def __init__(
        self,
        *,
        num_threads: int,
        max_tokens: int,
        max_samples: int,
        block_size: int,
        num_blocks: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_position: int,
        vocab_size: int,
        kernels: str,
    ) -> None: ...
    def add_weight(
        self, kind: str, rows: int, cols: int, group: int, has_min: bool, scale_f32: bool, data: Bytes, /
    ) -> int: ...
    def add_constant(self, data: Floats, /) -> int: ...
    def add_buffer(self, width: int, is_sampled: bool, /) -> int: ...
    def add_embed(self, out: int, weight: int, scale: float, /) -> None: ...
    def add_norm(self, x: int, out: int, weight: int, eps: float, group: int, /) -> None: ...
    def add_linear(
        self,
        x: int,
        input: str,
        second: int,
        eps: float,
        gated: str,
        outputs: list[tuple[int, int, int, bool]],
        /,
    ) -> None: ...
    def add_rope_kv(
        self,
        q: int,
        k: int,
        v: int,
        layer: int,
        inv_freq: int,
        rotary_dim: int,
        interleaved: bool,
        attn_factor: float,
        /,
    ) -> None: ...
    def add_attention(self, q: int, out: int, layer: int, scale: float, window: int, soft_cap: float, /) -> None: ...
    def add_gated(self, kind: str, gate: int, up: int, out: int, /) -> None: ...
    def add_add(self, x: int, y: int, out: int, /) -> None: ...
    def add_soft_cap(self, x: int, cap: float, /) -> None: ...
    def add_gather(self, x: int, out: int, /) -> None: ...
    def finish(self, logits: int, /) -> None: ...
    def run(
        self,
        tokens: Ints,
        positions: Ints,
        rows: Ints,
        tables: Ints,
        sample_floats: Floats,
        sample_ints: Ints,
        seeds: npt.NDArray[np.uint64],
        bias_ids: Ints,
        bias_values: Floats,
        histories: Ints,
        out_tokens: Ints,
        out_logprobs: Floats,
        top_ids: Ints,
        top_logprobs: Floats,
        logits: Floats | None,
        masks: npt.NDArray[np.uint32] | None = None,
        sample_masks: Ints | None = None,
        mask_ready: Ints | None = None,
    ) -> None: ...
    def read_rows(self, buffer: int, out: Floats) -> None: ...
    def copy_block(self, source: int, destination: int, /) -> None: ...
    def read_block(self, block: int, out: Bytes, /) -> None: ...
    def write_block(self, block: int, data: Bytes, /) -> None: ...
    def set_tracing(self, on: bool, /) -> None: ...
    def op_times(self) -> list[tuple[str, float]]: ...
    @property
    def kernels(self) -> str: ...
    @property
    def kv_bytes_per_block(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    @property
    def solo_runs(self) -> int: ...

def pack(
    *,
    kind: str,
    group: int,
    has_min: bool,
    scale_f32: bool,
    codes: Bytes,
    scales: Floats,
    mins: Floats | None,
    out: Bytes,
) -> None: ...
def pack_floats(*, kind: str, rows: int, cols: int, values: Bytes, out: Bytes) -> None: ...

# Single kernels for tests, by kernel set ("scalar", "avx2", "vnni" or "amx"); csrc/gemm.h, ops.h and attention.h say
# what each does.
# `cache` is [num_blocks, elements of a block of KvView] float16 bits.

KEYS_PER_SPLIT: int

def kernel_activation_bytes(act: str, num_rows: int, cols: int) -> int: ...
def kernel_quantise(kernels: str, act: str, x: Floats, out: Bytes) -> None: ...
def kernel_gemm(
    kernels: str,
    kind: str,
    rows: int,
    cols: int,
    group: int,
    has_min: bool,
    scale_f32: bool,
    data: Bytes,
    x: Floats,
    *,
    bias: Floats | None,
    accumulate: bool,
    y: Floats,
    begin: int,
    end: int,
) -> None: ...
def kernel_dequantise_row(
    kind: str, rows: int, cols: int, group: int, has_min: bool, scale_f32: bool, data: Bytes, row: int, out: Floats
) -> None: ...
def kernel_rms_norm(kernels: str, x: Floats, weight: Floats, eps: float, out: Floats) -> None: ...
def kernel_gated(kernels: str, kind: str, gate: Floats, up: Floats, out: Floats) -> None: ...
def kernel_rope(kernels: str, x: Floats, rotary_dim: int, interleaved: bool, cos: Floats, sin: Floats) -> None: ...
def kernel_soft_cap(kernels: str, x: Floats, cap: float) -> None: ...
def kernel_write_kv(
    kernels: str, cache: npt.NDArray[np.uint16], block_size: int, block: int, slot: int, k: Floats, v: Floats
) -> None: ...
def kernel_attend(
    kernels: str,
    cache: npt.NDArray[np.uint16],
    num_kv_heads: int,
    block_size: int,
    q: Floats,
    first: Ints,
    limit: Ints,
    table: Ints,
    kv_head: int,
    split: int,
    soft_cap: float,
    result: Floats,
) -> None: ...
def kernel_merge(kernels: str, running: Floats, part: Floats) -> None: ...
def kernel_finish(running: Floats, out: Floats) -> None: ...
def __getattr__(name: str) -> Any: ...
