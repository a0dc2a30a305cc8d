"""What may be set, and to what: a few values per knob, in an order in which neighbours are alike."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from firstlight.config import EngineConfig
from firstlight.errors import ConfigError
from firstlight.measure.objectives import Objective

__all__ = ["Knob", "Settings", "default_space", "key_of", "read_space"]

Settings = Mapping[str, int | float | str]
"""A value per knob, by the name of the engine's option."""

_STEP_ROWS = (8, 16, 32, 64)
_STEP_TOKENS = (128, 256, 512, 1024)
_GAP_SHARES = (0.5, 0.75, 1.0, 1.5)
"""Of the objective for gaps: predictions err, so a step may be planned shorter; few steps are full, so longer."""
_KV_SHARES = (0.25, 0.5, 1.0, 2.0)
_POLICIES = ("lru", "lfu", "s3fifo", "gdsf", "conversation")
_KNOBS = (
    "itl_slo_ms",
    "max_step_tokens",
    "max_step_rows",
    "num_blocks",
    "eviction",
    "threads",
    "mode",
    "batch_size",
)
"""What the simulator knows the effect of."""


@dataclass(frozen=True, slots=True)
class Knob:
    """An engine option and the values to try."""

    name: str
    values: tuple[int | float | str, ...]

    def neighbours(self, value: int | float | str) -> list[int | float | str]:
        """The values on either side of one."""
        at = self.values.index(value)
        return [*self.values[max(0, at - 1) : at], *self.values[at + 1 : at + 2]]


def key_of(settings: Settings) -> str:
    """One name for settings, whatever the order of their knobs."""
    return msgspec.json.encode(dict(sorted(settings.items()))).decode()


def default_space(
    objectives: Sequence[Objective], num_blocks: int, threads: Sequence[int], has_prefixes: bool
) -> tuple[Knob, ...]:
    """The knobs worth trying: `num_blocks` is what the engine chooses itself, `threads` those with a hardware file."""
    gaps_ms = [1e3 * o.bound_s for o in objectives if o.name in ("itl", "tpot")]
    bounds_ms = sorted({round(min(gaps_ms) * share, 3) for share in _GAP_SHARES}) if gaps_ms else [20.0, 50.0, 100.0]
    own = EngineConfig()
    knobs = [
        Knob("itl_slo_ms", (own.itl_slo_ms, *bounds_ms)),
        Knob("max_step_tokens", _STEP_TOKENS),
        Knob("max_step_rows", _STEP_ROWS),
        Knob("num_blocks", tuple(max(1, int(num_blocks * share)) for share in _KV_SHARES)),
    ]
    if has_prefixes:
        knobs.append(Knob("eviction", _POLICIES))
    if len(threads) > 1:
        knobs.append(Knob("threads", tuple(sorted(threads))))
    return tuple(knobs)


def read_space(text: str) -> tuple[Knob, ...]:
    """The knobs in `max-step-rows=8,64;itl-slo-ms=0,25`. Raises ConfigError."""
    hints = typing.get_type_hints(EngineConfig)
    choices = {field.name: field.metadata["choices"] for field in dataclasses.fields(EngineConfig)}
    knobs: list[Knob] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, _, listed = part.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        words = [word.strip() for word in listed.split(",") if word.strip()]
        if name not in _KNOBS or name in [knob.name for knob in knobs]:
            wrong = "appears twice" if name in _KNOBS else "is not a setting that can be tuned"
            known = ", ".join(knob.replace("_", "-") for knob in _KNOBS)
            raise ConfigError(f"`--space`: `{part}` {wrong}", hint=f"write NAME=VALUE,VALUE;... with {known}")
        kind = hints[name]
        try:
            values = tuple(dict.fromkeys(kind(word) for word in words))
        except ValueError:
            raise ConfigError(f"`--space`: `{part}` has a value that is not a number") from None
        least = 0 if name == "itl_slo_ms" else 1
        wrong_values = [
            value
            for value in values
            if (choices[name] and value not in choices[name]) or (kind is not str and not least <= value < 1e9)
        ]
        if wrong_values or not values:
            shown = ", ".join(choices[name]) or f"numbers from {least} up"
            raise ConfigError(f"`--space`: `{part}` needs values out of: {shown}", param="space")
        knobs.append(Knob(name, values))
    return tuple(knobs)
