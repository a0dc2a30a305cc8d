"""The terminal: arguments in, one command run, one screen out.

Knows what a person types and reads; knows nothing of scheduling, KV or HTTP framing.
"""

from __future__ import annotations

__all__: list[str] = []
