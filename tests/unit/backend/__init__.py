"""The CPU backend's Python half: lowering."""
