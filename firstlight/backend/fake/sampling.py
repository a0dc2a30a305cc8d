"""The sampling rules in numpy, plain enough to check another implementation against. Knows one row of logits at a time.

Order: penalties, logit bias, mask, temperature, top-k, top-p, min-p, then the largest of logit + Gumbel noise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from firstlight.types import RowSampling, TokenLogprob

__all__ = ["hash64", "sample", "token_logprob", "uniforms"]

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def hash64(words: Words) -> Words:
    """A well mixed 64-bit word for each word. Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = words + _STEP
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


def uniforms(seed: int, output_index: int, num: int) -> npt.NDArray[np.float64]:
    """`num` numbers inside (0, 1): a function of (seed, output index, position) and nothing else."""
    word = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    key = hash64(hash64(word) ^ np.uint64(output_index))
    bits = hash64(key ^ np.arange(num, dtype=np.uint64)) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) / 2.0**53


def sample(
    logits: Floats,
    sampling: RowSampling,
    nth: int,
    history: list[int],
    allowed: npt.NDArray[np.bool_] | None = None,
) -> int:
    """The token of the row's `nth` sampled position.

    Args:
        logits: `[vocab]`.
        history: ids known before the position.
        allowed: `[vocab]`; the others read as minus infinity.
    """
    scores = _penalised(logits, sampling, history)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    if allowed is not None:
        scores[~allowed] = -np.inf
    if sampling.temperature == 0:
        return int(np.argmax(scores))
    scores /= np.float32(sampling.temperature)
    scores[~_kept(scores, sampling)] = -np.inf
    noise = -np.log(-np.log(uniforms(sampling.seed, sampling.output_index + nth, len(scores))))
    return int(np.argmax(scores + noise))


def token_logprob(logits: Floats, token: int, num_top: int) -> TokenLogprob:
    """Natural-log probability of `token` before any penalty or temperature, and of the `num_top` likeliest."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logprobs = shifted - np.log(np.exp(shifted).sum())
    order = np.argsort(-logprobs, kind="stable")[:num_top]
    return TokenLogprob(token, float(logprobs[token]), [(int(i), float(logprobs[i])) for i in order])


def _penalised(logits: Floats, sampling: RowSampling, history: list[int]) -> Floats:
    """A copy of the logits, with repetition (prompt and output), presence and frequency (output) penalties applied."""
    scores = logits.astype(np.float32, copy=True)
    if sampling.repetition_penalty != 1 and history:
        seen = np.unique(np.array(history))
        factor = np.float32(sampling.repetition_penalty)
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
    output = history[sampling.num_prompt :]
    if output and (sampling.presence_penalty != 0 or sampling.frequency_penalty != 0):
        counts = np.bincount(np.array(output), minlength=len(scores))
        scores -= np.float32(sampling.presence_penalty) * (counts > 0)
        scores -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    return scores


def _kept(scores: Floats, sampling: RowSampling) -> npt.NDArray[np.bool_]:
    """Which tokens top-k, then top-p, then min-p leave; never none. Ties at the edge go to the smaller id."""
    order = np.argsort(-scores, kind="stable")
    num = min(sampling.top_k, len(order)) if sampling.top_k > 0 else len(order)
    probs = np.exp(scores[order[:num]].astype(np.float64) - float(scores[order[0]]))
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    inside = (before < sampling.top_p) & (probs >= sampling.min_p * probs[0])
    inside[0] = True
    kept = np.zeros(len(scores), dtype=np.bool_)
    kept[order[:num][inside]] = True
    return kept
