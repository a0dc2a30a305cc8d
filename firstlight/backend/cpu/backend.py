"""A loaded model on the CPU: builds the native program once, then turns each StepPlan into one native call.

Knows plans, arrays and KV blocks; not requests, text or scheduling.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from firstlight.backend.base import BackendInfo
from firstlight.backend.cpu import _native
from firstlight.backend.cpu.build import ProgramBuilder
from firstlight.backend.cpu.step_arrays import StepArrays, num_unseen
from firstlight.config import EngineConfig
from firstlight.errors import BackendError, ConfigError
from firstlight.models.layouts import PackedWeight, QuantCodes
from firstlight.models.program import Program
from firstlight.models.weights import LoadedModel
from firstlight.types import RowResult, StepMasks, StepPlan, StepResult, StepRow, TokenLogprob

__all__ = ["CpuBackend", "native_pack", "num_cores"]

DEFAULT_CONTEXTS = 4
"""Full contexts that the default KV memory holds."""
MAX_MEMORY_SHARE = 0.25
"""Of the memory free at start, what the default KV memory may take at most."""
SAMPLES_PER_ROW = 2
"""Sampled positions set aside per row of a step: drafts need more than one."""


_Floats = npt.NDArray[np.float32]


def num_cores() -> int:
    """Physical cores this process may run on: siblings of one core count once. Source: /sys/devices/system/cpu."""
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(path.read_text().strip())
        except OSError:
            return len(allowed)
    return max(1, len(cores))


def native_pack(matrix: QuantCodes | npt.NDArray[np.generic], out: PackedWeight) -> None:
    """Fills the zeroed `out.data` from a matrix: the fast twin of the packer in models/pack.py, byte for byte."""
    if isinstance(matrix, QuantCodes):
        codes = np.ascontiguousarray(matrix.codes).view(np.uint8)
        scales = np.ascontiguousarray(matrix.scales, np.float32)
        mins = None if matrix.mins is None else np.ascontiguousarray(matrix.mins, np.float32)
        _native.pack(
            kind=out.kind,
            group=out.group,
            has_min=out.has_min,
            scale_f32=out.scale_f32,
            codes=codes,
            scales=scales,
            mins=mins,
            out=out.data,
        )
        return
    values = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1)
    _native.pack_floats(kind=out.kind, rows=out.rows, cols=out.cols, values=values, out=out.data)


class CpuBackend:
    """One model on the CPU. Not safe for several threads at once; `run` releases the GIL while it computes.

    Args:
        model: its weights are copied into the runner's own memory. `release` drops each from the model while copying,
            so that the process never holds them twice.
        kernels: "auto", "amx", "vnni", "avx2" or "scalar".

    Raises:
        ConfigError: the options do not fit this machine or this model.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig, *, kernels: str = "auto", release: bool = False
    ) -> None:
        program = model.program
        max_model_len = config.max_model_len or program.max_position
        if max_model_len > program.max_position:
            raise ConfigError(
                f"`max_model_len` is {max_model_len} tokens, the model was trained for {program.max_position}",
                param="max_model_len",
                hint=f"use --max-model-len {program.max_position} or less",
            )
        self._check(program, config)
        block_bytes = 2 * 2 * program.num_layers * program.num_kv_heads * program.head_dim * config.block_size
        num_blocks = _num_blocks(config, max_model_len, block_bytes)
        num_threads = config.threads or num_cores()
        self._max_samples = min(config.max_step_tokens, SAMPLES_PER_ROW * config.max_step_rows)
        self._runner = _native.Runner(
            num_threads=num_threads,
            max_tokens=config.max_step_tokens,
            max_samples=self._max_samples,
            block_size=config.block_size,
            num_blocks=num_blocks,
            num_layers=program.num_layers,
            num_heads=program.num_heads,
            num_kv_heads=program.num_kv_heads,
            head_dim=program.head_dim,
            max_position=max_model_len,
            vocab_size=program.vocab_size,
            kernels=kernels,
        )
        layouts: dict[str, int] = {}
        for weight in model.weights.values():
            layouts[weight.kind] = layouts.get(weight.kind, 0) + weight.data.nbytes
        builder = ProgramBuilder(self._runner, model, release)
        builder.build()
        self._head = builder.head()
        self.info = BackendInfo(
            name=f"cpu ({self._runner.kernels})",
            vocab_size=program.vocab_size,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_step_tokens=config.max_step_tokens,
            max_step_rows=config.max_step_rows,
            max_step_samples=self._max_samples,
            kv_bytes_per_block=self._runner.kv_bytes_per_block,
            weight_bytes=self._runner.weight_bytes,
            num_threads=num_threads,
            fingerprint=model.fingerprint,
            hidden_size=len(self._head.weight),
            layouts=layouts,
        )
        self._is_tracing = False

    @staticmethod
    def _check(program: Program, config: EngineConfig) -> None:
        if config.block_size < 16 or config.block_size % 16:
            raise ConfigError(
                f"`block_size` is {config.block_size} tokens, the CPU kernels need a multiple of 16", param="block_size"
            )
        if program.head_dim % 16:
            raise ConfigError(
                f"the model's heads have {program.head_dim} dimensions, the CPU kernels need a multiple of 16"
            )

    def trace_ops(self, on: bool) -> None:
        """Turns per-op times in StepResult on or off. Cost while on: a clock read per op of the program."""
        self._is_tracing = on
        self._runner.set_tracing(on)

    @property
    def solo_steps(self) -> int:
        """Steps that ran on one thread because another process kept a core busy."""
        return int(self._runner.solo_runs)

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step. Raises BackendError when the plan breaks a limit of `info`."""
        started, solo_steps = time.perf_counter(), self.solo_steps
        try:
            for source, destination in plan.copy_blocks:
                self._runner.copy_block(source, destination)
            rows = self._run_rows(plan.rows, plan.masks) if plan.rows else []
        except (ValueError, TypeError, OverflowError) as error:
            raise BackendError(f"the step plan breaks a limit of the backend: {error}") from error
        except RuntimeError as error:
            raise BackendError(f"the native runner failed: {error}") from error
        return StepResult(
            step_id=plan.step_id,
            rows=rows,
            run_s=time.perf_counter() - started,
            op_times_s=dict(self._runner.op_times()) if self._is_tracing else None,
            ran_alone=self.solo_steps > solo_steps,
        )

    def _run_rows(self, rows: list[StepRow], masks: StepMasks | None) -> list[RowResult]:
        arrays = StepArrays(rows)
        num_samples = len(arrays.samples)
        if num_samples > self._max_samples:
            raise BackendError(
                f"the step samples {num_samples} positions, the backend has room for {self._max_samples}"
            )
        out_tokens = np.empty(num_samples, np.int32)
        out_logprobs = np.empty(num_samples, np.float32)
        top_ids = np.empty((num_samples, arrays.num_top), np.int32)
        top_logprobs = np.empty((num_samples, arrays.num_top), np.float32)
        wants_logits = any(row.return_logits for row in rows)
        logits = np.empty((num_samples, self.info.vocab_size), np.float32) if wants_logits else None
        self._runner.run(
            *arrays.native(), out_tokens, out_logprobs, top_ids, top_logprobs, logits, *arrays.masks(masks)
        )
        results = []
        at = 0
        tokens = out_tokens.tolist()
        for row in rows:
            first = at
            at += num_unseen(row)
            end = at + len(row.sample_at)

            def logprob(i: int, num_top: int) -> TokenLogprob:
                top = zip(top_ids[i, :num_top].tolist(), top_logprobs[i, :num_top].tolist(), strict=True)
                return TokenLogprob(tokens[i], float(out_logprobs[i]), list(top))

            wanted = row.sampling.logprobs if row.sampling is not None else None
            logprobs = None if wanted is None else [logprob(i, wanted) for i in range(at, end)]
            scored = [logprob(first + j, row.num_rivals) for j in range(len(row.targets))]
            results.append(
                RowResult(
                    request_id=row.request_id,
                    token_ids=tokens[at:end],
                    logprobs=logprobs,
                    target_logprobs=[_of_target(got, wanted) for got, wanted in zip(scored, row.targets, strict=True)],
                    logits=logits[at:end] if logits is not None and row.return_logits else None,
                    hidden=self._hidden(first, end) if row.hidden_from >= 0 else None,
                )
            )
            at = end
        return results

    def _hidden(self, at: int, end: int) -> _Floats:
        """What the head read at sampled positions `at` to `end`: the residual stream after the last norm."""
        head = self._head
        stream = np.empty((end, len(head.weight)), np.float32)
        self._runner.read_rows(head.buffer, stream)
        hidden = np.empty_like(stream[at:])
        for x, out in zip(stream[at:], hidden, strict=True):
            _native.kernel_rms_norm(self._runner.kernels, x, head.weight, head.eps, out)
        return hidden

    def read_blocks(self, block_ids: list[int]) -> bytes:
        """The KV bytes of the blocks, in order."""
        size = self.info.kv_bytes_per_block
        out = np.empty(size * len(block_ids), np.uint8)
        for i, block in enumerate(block_ids):
            self._runner.read_block(block, out[i * size : (i + 1) * size])
        return out.tobytes()

    def write_blocks(self, block_ids: list[int], data: bytes) -> None:
        """Puts bytes from `read_blocks` into blocks. Raises BackendError on a wrong size."""
        size = self.info.kv_bytes_per_block
        if len(data) != size * len(block_ids):
            raise BackendError(f"{len(block_ids)} blocks need {size * len(block_ids)} bytes, got {len(data)}")
        view = np.frombuffer(data, np.uint8)
        for i, block in enumerate(block_ids):
            self._runner.write_block(block, view[i * size : (i + 1) * size])

    def close(self) -> None:
        """Frees threads and memory. Idempotent; the backend cannot be used afterwards."""
        self.__dict__.pop("_runner", None)


def _of_target(got: TokenLogprob, target: int) -> TokenLogprob:
    """What the head said of the target; a token it gave minus infinity cannot be taken, so another one was."""
    return got if got.token_id == target else TokenLogprob(target, -math.inf, got.top)


def _num_blocks(config: EngineConfig, max_model_len: int, block_bytes: int) -> int:
    if config.num_blocks:
        return config.num_blocks
    if config.kv_memory_mb:
        return max(1, config.kv_memory_mb * 1_000_000 // block_bytes)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = DEFAULT_CONTEXTS * -(-max_model_len // config.block_size)
    return max(1, min(wanted, int(MAX_MEMORY_SHARE * free) // block_bytes))
