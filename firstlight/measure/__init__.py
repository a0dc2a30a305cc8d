"""Measure: what happened and how long it took: metrics, events, load. Knows durations and counts, not how work is done."""
