"""Text to token ids and back: tokenizer, chat template, detokenizer, stop strings, checks of sampling parameters."""

from firstlight.text.detokenizer import IncrementalDetokenizer
from firstlight.text.messages import checked_messages
from firstlight.text.pipeline import TextPipeline, TextStep
from firstlight.text.rendered import RenderedPrompt
from firstlight.text.stops import StopMatcher
from firstlight.text.template import ChatTemplate
from firstlight.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "RenderedPrompt",
    "StopMatcher",
    "TextPipeline",
    "TextStep",
    "Tokenizer",
    "checked_messages",
]
