"""Text to ids and back: tokenizer, chat template, incremental detokenizer, stop strings, checks of sampling parameters."""
