"""What a step costs on some hardware: a file with seconds, limits and the assumptions they rest on.

Knows loads, not requests. Shipped files are roofline arithmetic.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from firstlight.errors import ConfigError
from firstlight.scheduler import StepLoad

__all__ = ["Hardware", "hardware_names", "read_hardware", "roofline"]


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step takes step_s + max(weights_s, token_s * tokens) + row_s * rows + context_s * context + pair_s * pairs.

    `weights_s`: reading the weights once, which hides as much arithmetic. `context`: KV tokens read; `pairs`: query-key
    pairs. A request costs `request_s` outside of steps (HTTP, text) before its first token.
    """

    name: str
    assumptions: dict[str, str | float | int]
    step_s: float
    weights_s: float = 0.0
    row_s: float = 0.0
    token_s: float
    context_s: float
    pair_s: float
    request_s: float = 0.0
    kv_tokens: int
    """Tokens of KV that fit beside the weights."""
    block_size: int = 16
    max_step_rows: int = 256
    max_step_tokens: int = 8192
    max_model_len: int = 131_072

    def run_s(self, load: StepLoad) -> float:
        """Seconds of one step."""
        work_s = max(self.weights_s, self.token_s * load.tokens)
        return (
            self.step_s + work_s + self.row_s * load.rows + self.context_s * load.context + self.pair_s * load.attended
        )


def hardware_names() -> list[str]:
    """The files that come with firstlight."""
    folder = resources.files("firstlight.simulate") / "hardware"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_hardware(name: str) -> Hardware:
    """The hardware in a file, or one of `hardware_names`. Raises ConfigError."""
    try:
        if name in hardware_names():
            text = (resources.files("firstlight.simulate") / "hardware" / f"{name}.json").read_bytes()
        else:
            text = Path(name).read_bytes()
        return msgspec.json.decode(text, type=Hardware)
    except OSError as error:
        hint = f"a file like the shipped ones, or one of {', '.join(hardware_names())}"
        raise ConfigError(f"`--hardware {name}` cannot be read: {error.strerror or error}", hint=hint) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"`--hardware {name}` is not a hardware file: {error}") from None


class Chip(msgspec.Struct, frozen=True):
    """A device as its maker states it: dense bfloat16 arithmetic, memory."""

    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float


class Shape(msgspec.Struct, frozen=True):
    """A decoder's sizes."""

    params: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


CHIPS = {"h100": Chip(989e12, 3.35e12, 80e9), "h200": Chip(989e12, 4.8e12, 141e9)}
SHAPES = {"8b": Shape(8.03e9, 32, 32, 8, 128), "70b": Shape(70.6e9, 80, 64, 8, 128)}
NUM_CHIPS = {("h100", "8b"): 1, ("h200", "8b"): 1, ("h100", "70b"): 4, ("h200", "70b"): 2}
FLOPS_SHARE = 0.5
ATTENTION_FLOPS_SHARE = 0.35
BYTES_SHARE = 0.7
PARALLEL_SHARE = 0.85
KV_SHARE = 0.9
LAYER_OVERHEAD_S = 20e-6


def roofline(chip_name: str, shape_name: str) -> Hardware:
    """Hardware from arithmetic: what the shipped files hold, their assumptions included."""
    chip, shape, num = CHIPS[chip_name], SHAPES[shape_name], NUM_CHIPS[chip_name, shape_name]
    parallel = num * (PARALLEL_SHARE if num > 1 else 1.0)
    flops, speed = chip.flops_per_s * parallel, chip.bytes_per_s * parallel * BYTES_SHARE
    weight_bytes = 2 * shape.params
    kv_bytes = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
    return Hardware(
        name=f"{chip_name}-{shape_name}",
        assumptions={
            "what": "arithmetic, not a measurement: bfloat16 weights and KV, Llama 3 shapes, tensor parallel",
            "chips": num,
            "chip_flops_per_s": chip.flops_per_s,
            "chip_bytes_per_s": chip.bytes_per_s,
            "chip_memory_bytes": chip.memory_bytes,
            "params": shape.params,
            "kv_bytes_per_token": kv_bytes,
            "share_of_flops_reached": FLOPS_SHARE,
            "share_of_flops_reached_in_attention": ATTENTION_FLOPS_SHARE,
            "share_of_bytes_reached": BYTES_SHARE,
            "share_left_by_tensor_parallelism": PARALLEL_SHARE if num > 1 else 1.0,
            "share_of_free_memory_for_kv": KV_SHARE,
            "overhead_s_per_layer_and_step": LAYER_OVERHEAD_S,
        },
        step_s=LAYER_OVERHEAD_S * shape.layers,
        weights_s=weight_bytes / speed,
        token_s=2 * shape.params / (flops * FLOPS_SHARE),
        context_s=kv_bytes / speed,
        pair_s=4 * shape.heads * shape.head_dim * shape.layers / (flops * ATTENTION_FLOPS_SHARE),
        kv_tokens=int((num * chip.memory_bytes - weight_bytes) * KV_SHARE / kv_bytes),
    )
