"""Text to token ids and back: tokenizer, chat template, detokenizer, stop strings, checks of sampling parameters."""
