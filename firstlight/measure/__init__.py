"""Measure: what happened and how long it took: metrics, events, load. Knows durations and counts, not the work."""
