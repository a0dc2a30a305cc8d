"""firstlight: an LLM server built around the first token and the gap before the next one."""
