"""Every native kernel against its scalar twin, to the bit, and against a float64 oracle."""
