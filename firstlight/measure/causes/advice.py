"""What made a request slow, in one sentence, and what to change. Reads the JSON view, so a saved file will do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.measure.causes.timeline import CAUSES

__all__ = ["FAMILIES", "verdict"]

FAMILIES: dict[str, tuple[str, ...]] = {
    "own work": ("prefill.own", "decode.own", "flush"),
    "others' prompts": ("queue.order", "queue.step", "prefill.others", "decode.chunks"),
    "other streams": ("queue.capacity", "queue.rows", "decode.shared"),
    "KV memory": ("queue.kv", "preempted"),
    "client": ("client_slow",),
    "upload": ("receive",),
    "machine": ("machine",),
    "text": ("parse", "template", "tokenise", "grammar", "submit", "detokenise"),
    "an equal prefix": ("queue.prefix",),
    "batch mode": ("queue.batch",),
    "rate limit": ("queue.rate_limit",),
    "KV tier": ("load_kv",),
}
"""Causes that have one remedy. A family's weight is the sum of its causes."""

IN_THE_WAY = 0.15
"""A family takes at least this share of a request's time to be what made it slow; below, it was its own work."""

REMEDIES: dict[str, str] = {
    "prefill.own": "send what repeats first and unchanged, so that the prefix cache finds it, or a shorter prompt",
    "decode.own": "nothing stood in the way: a smaller model, fewer output tokens or a faster machine",
    "flush": "nothing stood in the way",
    "queue.step": "shorter steps: lower `--itl-slo-ms`; longer prompts beside it fill the step that it waited for",
    "queue.order": 'send it with "priority": "interactive", or the long prompts beside it as "batch"',
    "prefill.others": 'send it with "priority": "interactive", or the long prompts beside it as "batch"',
    "decode.chunks": 'lower `--itl-slo-ms` (others wait longer for their first token), or send long prompts as "batch"',
    "queue.capacity": "raise `--itl-slo-ms`, or run fewer streams at a time",
    "queue.rows": "raise `--max-step-rows`",
    "decode.shared": "run fewer streams at a time (`--max-step-rows`)",
    "queue.kv": "raise `--kv-memory-mb`, or ask for fewer `max_tokens`",
    "preempted": "raise `--kv-memory-mb`, or keep `--reserve-output` on",
    "client_slow": "the server was done in time: read faster, or look at the network and proxies between",
    "receive": "the body came in slowly: look at the network between, or send less",
    "machine": "something else ran on this machine's cores (see `firstlight doctor`): stop it or lower `--threads`",
    "grammar": "keep the schema unchanged: a compiled grammar is used again (`--grammar-cache`)",
    "queue.prefix": "nothing: computing the same prefix twice would have taken longer",
    "queue.batch": "`--mode continuous`, or a shorter `--batch-wait-ms`",
    "queue.rate_limit": "raise the key's limits",
    "load_kv": "keep more KV in memory: raise `--kv-memory-mb`",
}
_MISSES: dict[str | None, str] = {
    None: "the rest was cached",
    "diverged": "the most similar cached prompt differs from token {} on",
    "evicted": "what begins at token {} was cached once and has made room for others",
    "not_cached": "nothing that was cached goes on from token {}",
}
_TEXT_REMEDY = "the process that serves HTTP is short of CPU, or the text is very long"


def verdict(view: Mapping[str, Any]) -> dict[str, Any]:
    """The family that stood in the way most, its largest cause, a sentence, and what to change."""
    totals: Mapping[str, float] = view["totals_ms"]
    e2e_ms = max(sum(totals.values()), 1e-9)
    weights = {family: sum(totals.get(cause, 0.0) for cause in causes) for family, causes in FAMILIES.items()}
    own = weights.pop("own work")
    family = max(weights, key=lambda name: weights[name])
    if weights[family] < IN_THE_WAY * e2e_ms:
        family, weights = "own work", {"own work": own}
    cause = max(FAMILIES[family], key=lambda name: totals.get(name, 0.0))
    if family == "own work" and _was_for_the_prompt(view):
        cause = "prefill.own"
    return {
        "family": family,
        "cause": cause,
        "ms": round(weights[family], 3),
        "share": round(weights[family] / e2e_ms, 4),
        "sentence": _sentence(view, family, cause, weights[family]),
        "change": REMEDIES.get(cause, _TEXT_REMEDY),
    }


def _was_for_the_prompt(view: Mapping[str, Any]) -> bool:
    """The wait for the first token was its own prompt, and a good part of the whole."""
    own_ms = view["ttft_totals_ms"].get("prefill.own", 0.0)
    is_most = bool(own_ms > 0.5 * (view["ttft_ms"] or view["e2e_ms"]))
    return is_most and bool(own_ms > IN_THE_WAY * view["e2e_ms"])


def _sentence(view: Mapping[str, Any], family: str, cause: str, weight_ms: float) -> str:
    e2e_ms = view["e2e_ms"]
    named_ms = view["totals_ms"].get(cause, 0.0)
    text = f"{named_ms:.0f} of {e2e_ms:.0f} ms: {CAUSES[cause]}"
    if family != "own work" and weight_ms - named_ms > 0.1 * weight_ms:
        text += f" ({weight_ms:.0f} ms with all of {family})"
    if cause == "prefill.own":
        computed = view["prompt_tokens"] - view["cached_tokens"]
        miss = view.get("cache_miss") or {"reason": None, "first_token": 0}
        rest = _MISSES[miss["reason"]].format(miss["first_token"])
        text += f"; {computed} of {view['prompt_tokens']} prompt tokens were computed, {rest}"
    if family == "others' prompts" and view["beside"]:
        most = max(view["beside"], key=lambda other: other["prefill_tokens"])
        if most["prefill_tokens"]:
            text += f"; {most['id']} computed {most['prefill_tokens']} prompt tokens in {most['steps']} of its steps"
    return text
