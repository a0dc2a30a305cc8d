"""The one decoder, traced: a spec becomes the flat list of ops that every backend runs.

Weights carry the names GGUF files use (`blk.3.attn_q.weight`); `weights.py` maps other formats to them. Knows shapes
and order, not values.
"""

from __future__ import annotations

from firstlight.models.program import (
    Add,
    Attention,
    Embed,
    GatedAct,
    GatherRows,
    Linear,
    Norm,
    Op,
    Program,
    RopeKV,
    SoftCap,
)
from firstlight.models.rope import attention_factor
from firstlight.models.spec import ModelSpec

__all__ = ["INV_FREQ", "LOCAL_INV_FREQ", "trace"]

INV_FREQ = "rope.inv_freq"
LOCAL_INV_FREQ = "rope.local_inv_freq"
"""Names of the constants with rotary frequencies: of every layer, or of the layers with a window."""


def trace(spec: ModelSpec) -> Program:
    """The program of a decoder. Buffers are shared by all layers; the residual stream is `x`."""
    tracer = _Tracer(spec)
    ops = tracer.ops
    ops.append(Embed("x", "token_embd.weight", spec.embed_scale))
    for layer in range(spec.num_layers):
        tracer.attention(layer)
        if layer == spec.num_layers - 1:  # nobody attends to what comes after: only sampled rows go on
            ops.append(GatherRows("x", "x_sampled"))
            tracer.mlp(layer, "_sampled")
        else:
            tracer.mlp(layer)
    tracer.norm("x_sampled", "h_sampled", "output_norm.weight")
    head = "token_embd.weight" if spec.tied_embeddings else "output.weight"
    ops.append(Linear("h_sampled", "logits", head))
    if spec.logit_softcap:
        ops.append(SoftCap("logits", spec.logit_softcap))
    return Program(
        ops=tuple(ops),
        buffers=tracer.buffers,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
    )


class _Tracer:
    """Collects ops, layer by layer."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.ops: list[Op] = []
        self.q_width = spec.num_heads * spec.head_dim
        self.kv_width = spec.num_kv_heads * spec.head_dim
        self.buffers = {
            "x": spec.hidden_size,
            "h": spec.hidden_size,
            "q": self.q_width,
            "k": self.kv_width,
            "v": self.kv_width,
            "attn": self.q_width,
            "gate": spec.ffn_size,
            "up": spec.ffn_size,
            "x_sampled": spec.hidden_size,
            "h_sampled": spec.hidden_size,
            "gate_sampled": spec.ffn_size,
            "up_sampled": spec.ffn_size,
            "logits": spec.vocab_size,
        }

    def norm(self, x: str, out: str, weight: str, group: int = 0) -> None:
        self.ops.append(Norm(x, out, weight, self.spec.norm_eps, group or self.buffers[x]))

    def linear(self, x: str, out: str, name: str, has_bias: bool) -> None:
        self.ops.append(Linear(x, out, f"{name}.weight", f"{name}.bias" if has_bias else None))

    def attention(self, layer: int) -> None:
        """x += attention(norm(x))."""
        spec, name, window = self.spec, f"blk.{layer}.", self.spec.windows[layer]
        self.norm("x", "h", f"{name}attn_norm.weight")
        for part in ("q", "k", "v"):
            self.linear("h", part, f"{name}attn_{part}", spec.qkv_bias)
        if spec.qk_norm:
            for part in ("q", "k"):
                self.norm(part, part, f"{name}attn_{part}_norm.weight", spec.head_dim)
        is_local = window > 0 and spec.local_rope is not None
        rope = spec.local_rope if is_local and spec.local_rope else spec.rope
        inv_freq = LOCAL_INV_FREQ if is_local else INV_FREQ
        factor = attention_factor(rope)
        self.ops.append(RopeKV("q", "k", "v", layer, inv_freq, rope.dim, rope.style, factor))
        self.ops.append(Attention("q", "attn", layer, spec.attn_scale, window, spec.attn_softcap))
        self.linear("attn", "h", f"{name}attn_output", spec.output_bias)
        if spec.post_norms:
            self.norm("h", "h", f"{name}post_attention_norm.weight")
        self.ops.append(Add("x", "h", "x"))

    def mlp(self, layer: int, rows: str = "") -> None:
        """x += down(act(gate(norm(x))) * up(norm(x))), over the buffers whose names end in `rows`."""
        spec, name = self.spec, f"blk.{layer}."
        x, h, gate, up = f"x{rows}", f"h{rows}", f"gate{rows}", f"up{rows}"
        self.norm(x, h, f"{name}ffn_norm.weight")
        self.linear(h, gate, f"{name}ffn_gate", spec.mlp_bias)
        self.linear(h, up, f"{name}ffn_up", spec.mlp_bias)
        self.ops.append(GatedAct(gate, up, gate, spec.activation))
        self.linear(gate, h, f"{name}ffn_down", spec.mlp_bias)
        if spec.post_norms:
            self.norm(h, h, f"{name}post_ffw_norm.weight")
        self.ops.append(Add(x, h, x))
