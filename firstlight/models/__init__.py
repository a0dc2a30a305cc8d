"""What a model is, not how it runs: file readers, spec, traced decoder, packed weights, and where model files lie."""
