"""What made a request slow, in one sentence, and what to change. Reads the JSON view, so a saved file will do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.measure.causes.timeline import CAUSES

__all__ = ["COLD_CACHE", "FAMILIES", "verdict"]

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

COLD_CACHE = "cold cache"
"""The family of `prefill.own` where what was computed had been in the prefix cache and had made room for others."""

IN_THE_WAY = 0.15
"""A family takes at least this share of a request's time to be what made it slow; below, it was its own work."""

REMEDIES: dict[str, str] = {
    COLD_CACHE: "raise `--kv-memory-mb`, pin the prompt's beginning, or keep evicted KV (`--host-cache-mb`)",
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
    totals = _until_taken(view)
    whole_ms = max(sum(totals.values()), 1e-9)
    weights = {family: sum(totals.get(cause, 0.0) for cause in causes) for family, causes in FAMILIES.items()}
    own = weights.pop("own work")
    if (view.get("cache_miss") or {}).get("reason") == "evicted":
        weights[COLD_CACHE] = _saved_by_a_hit(view, whole_ms)
    family = max(weights, key=lambda name: weights[name])
    if weights[family] < IN_THE_WAY * whole_ms:
        family, weights = "own work", {"own work": own}
    cause = max(FAMILIES.get(family, ("prefill.own",)), key=lambda name: totals.get(name, 0.0))
    if family == "own work" and _was_for_the_prompt(view):
        cause = "prefill.own"
    return {
        "family": family,
        "cause": cause,
        "ms": round(weights[family], 3),
        "share": round(weights[family] / whole_ms, 4),
        "sentence": _sentence(view, family, cause, weights[family]),
        "change": REMEDIES.get(COLD_CACHE if family == COLD_CACHE else cause, _TEXT_REMEDY),
    }


def _saved_by_a_hit(view: Mapping[str, Any], whole_ms: float) -> float:
    """What the cache would have saved: its prompt's steps, with what the machine took from them if they are long."""
    until_first = view["ttft_totals_ms"]
    own_ms: float = until_first.get("prefill.own", 0.0)
    return own_ms + (until_first.get("machine", 0.0) if own_ms >= IN_THE_WAY * whole_ms else 0.0)


def _until_taken(view: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds per cause until the client had the answer: after its end there is only the client to wait for."""
    totals = dict(view["totals_ms"])
    if after_ms := view.get("delivery_ms", 0.0):
        totals["client_slow"] = totals.get("client_slow", 0.0) + after_ms
    return totals


def _was_for_the_prompt(view: Mapping[str, Any]) -> bool:
    """The wait for the first token was its own prompt, and a good part of the whole."""
    own_ms = view["ttft_totals_ms"].get("prefill.own", 0.0)
    is_most = bool(own_ms > 0.5 * (view["ttft_ms"] or view["e2e_ms"]))
    return is_most and bool(own_ms > IN_THE_WAY * view["e2e_ms"])


def _sentence(view: Mapping[str, Any], family: str, cause: str, weight_ms: float) -> str:
    totals = _until_taken(view)
    named_ms = totals.get(cause, 0.0)
    text = f"{named_ms:.0f} of {view['e2e_ms'] + view.get('delivery_ms', 0.0):.0f} ms: {CAUSES[cause]}"
    if cause == "client_slow" and (after_ms := view.get("delivery_ms", 0.0)):
        text += f", {after_ms:.0f} ms of it after the answer had ended here"
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
