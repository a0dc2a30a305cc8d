"""Server: OpenAI-compatible HTTP over one engine. Knows routes, bytes and clients, not steps or blocks."""
