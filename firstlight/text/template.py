"""Renders chat messages into a prompt with the Jinja template that came with a model.

Knows messages and text, not ids. The template is not trusted (see `firstlight.text.sandbox`) and neither are the
messages: the rendered prompt remembers which special tokens the template wrote itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import meta
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from firstlight.errors import ModelError, RequestError
from firstlight.text.messages import checked_messages
from firstlight.text.meter import Meter, metered
from firstlight.text.rendered import RenderedPrompt
from firstlight.text.sandbox import TemplateEnvironment
from firstlight.text.tokenizer import Tokenizer
from firstlight.text.vocabulary import trie_regex

__all__ = ["CHATML", "ChatTemplate"]

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of a model that has `<|im_start|>` in its vocabulary and brings no template."""

_PARAM = "tokenizer.chat_template"
_MAX_SOURCE = 512 * 1024
_MIN_LITERAL = 3
_PRIVATE_USE = range(0xE000, 0xF8FF)
_CONTINUE_HERE = "\ue0ffcontinue\ue0ff"
_OWN_NAMES = frozenset({"bos_token", "eos_token"})
_NAMES_OF_ROLES = frozenset({"role", "type"})


class ChatTemplate:
    """A compiled chat template and the special tokens that only it may write. Threads may share one.

    Args:
        source: Jinja source, rendered with the settings of the `transformers` library.
        bos_token: text the template sees under that name; eos_token likewise.
        control_tokens: spellings that become special ids; a message that spells one stays text.
        now: the clock for templates that name the date.
        max_steps: loop rounds, calls and operations of one rendering.
        max_characters: length of the prompt, and of every value on the way.
        max_seconds: time one rendering may take.

    Raises:
        ModelError: the source is not valid Jinja, or asks for what the sandbox does not have.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        control_tokens: Iterable[str] = (),
        now: Callable[[], datetime] = datetime.now,
        max_steps: int = 1_000_000,
        max_characters: int = 8_000_000,
        max_seconds: float = 5.0,
    ) -> None:
        self.source = source
        self._special = {"bos_token": bos_token, "eos_token": eos_token}
        self._limits = (max_steps, max_characters, max_seconds)
        self._guard = _Guard(control_tokens, source)
        environment = TemplateEnvironment(lambda form: now().strftime(form))
        try:
            if len(source) > _MAX_SOURCE:
                raise TemplateSyntaxError(f"{len(source)} characters, the limit is {_MAX_SOURCE}", 1)
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            """Names that the template expects from outside; `tools` is among them where it can describe tools."""
        except (TemplateError, RecursionError, OverflowError, MemoryError, SyntaxError) as error:
            raise ModelError(f"the model's chat template cannot be used: {error}", param=_PARAM) from error

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None, **options: Any) -> ChatTemplate:
        """The template of a tokenizer's model: `source` where given, else the model's own, else ChatML if it knows
        ChatML.

        Raises:
            ModelError: there is none.
        """
        if source is None:
            source = tokenizer.chat_template
        if source is None:
            if tokenizer.token_to_id("<|im_start|>") is None:
                raise ModelError(
                    "the model has no chat template, and no `<|im_start|>` in its vocabulary that would allow ChatML",
                    param=_PARAM,
                    hint="use /v1/completions, or a model made for chat",
                )
            source = CHATML
        bos, eos = (("" if i is None else tokenizer.id_to_piece(i)) for i in (tokenizer.bos_id, tokenizer.eos_id))
        return cls(source, bos_token=bos, eos_token=eos, control_tokens=tokenizer.special_tokens, **options)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> RenderedPrompt:
        """The prompt for `messages` (OpenAI form; text parts of a list are joined with line feeds).

        Args:
            tools: function definitions the model may call.
            add_generation_prompt: end with the beginning of an assistant turn.
            continue_final_message: leave the last message, an assistant's, open so that the model goes on with it;
                `add_generation_prompt` is then off.
            variables: what else the template sees (`enable_thinking`, `documents` ...).

        Raises:
            RequestError: a message is not valid, the template refuses the messages, or a limit was met.
        """
        taken = sorted(_OWN_NAMES & variables.keys())
        if taken:
            raise RequestError(f"`{taken[0]}` is set by the server and cannot be a template variable", param=taken[0])
        checked = checked_messages(messages)
        if continue_final_message:
            _mark_end(checked)
            add_generation_prompt = False
        context = {
            "messages": checked,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        text = self._run(context)
        prompt = self._guard.apply(text, context, self._run)
        return _cut_at_mark(prompt) if continue_final_message else prompt

    def _run(self, context: Mapping[str, Any]) -> str:
        meter = Meter(*self._limits)
        try:
            return metered(meter, lambda: self._template.render({**self._special, **context}))
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            message = getattr(error, "message", None) or str(error) or type(error).__name__
            refusal = f"the model's chat template refuses these messages: {message}"
            raise RequestError(refusal, param="messages") from error
        except (RecursionError, MemoryError) as error:
            raise RequestError("the model's chat template calls itself without end", param="messages") from error


class _Guard:
    """Tells special tokens that the template wrote from those that came with the messages.

    Every character of a client's strings that gives a control token its shape (its punctuation, its first and last
    character) is replaced by a stand-in of the private-use area, and the template is rendered a second time. A control
    token in that second rendering was written by the template. What the template itself looks for in messages
    (`</think>`, say) is left as it is, so that it is found.

    Role names are not replaced: they come from a fixed list. A template that puts the signs of a token around a
    client's word itself (`'<|' + word + '|>'`) is taken at its word.
    """

    def __init__(self, control_tokens: Iterable[str], source: str) -> None:
        tokens = [token for token in control_tokens if token]
        self._tokens = trie_regex(tokens)
        signs = {c for token in tokens for c in token if not c.isalnum() and not c.isspace()}
        ends = {c for token in tokens for c in (token[0], token[-1])}
        self._characters = sorted(signs | ends)
        literals = {match[1] or match[2] or "" for match in _LITERAL.finditer(source)}
        self._literals = trie_regex(text for text in literals if self._is_looked_for(text))

    def apply(self, text: str, context: Mapping[str, Any], run: Callable[[Mapping[str, Any]], str]) -> RenderedPrompt:
        """`text`, which is `run(context)`, with the client's characters marked."""
        client = list(_strings(list(context.values())))
        used = set("".join(client))
        if self._tokens is None or used.isdisjoint(self._characters):
            return RenderedPrompt(text, text)
        stand_ins = self._stand_ins(used, set(text))
        masked = {key: _mapped(value, lambda s: self._mask(s, stand_ins)) for key, value in context.items()}
        is_spelled = any(self._tokens.search(string) for string in client)
        try:
            guarded = run(masked)
        except RequestError:  # the template wants something of the content that the stand-ins hide
            if is_spelled:
                raise RequestError(
                    "a message holds the text of a special token in a place where this model's chat template reads it",
                    param="messages",
                ) from None
            return RenderedPrompt(text, text)
        shown = guarded
        for character, stand_in in stand_ins.items():
            shown = shown.replace(stand_in, character)
        if shown == text:
            return RenderedPrompt(text, guarded)
        if not is_spelled and self._tokens.findall(text) == self._tokens.findall(guarded):
            return RenderedPrompt(text, text)
        return RenderedPrompt(shown, guarded)

    def _is_looked_for(self, literal: str) -> bool:
        """Whether a string of the template's source may stay as it is in messages."""
        has_signs = not set(literal).isdisjoint(self._characters)
        return len(literal) >= _MIN_LITERAL and has_signs and not (self._tokens and self._tokens.search(literal))

    def _stand_ins(self, used: set[str], rendered: set[str]) -> dict[str, str]:
        """A private-use character for each character to replace, none of them in the messages or the prompt."""
        replaced = [character for character in self._characters if character in used]
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used and chr(code) not in rendered)
        stand_ins = dict(zip(replaced, free, strict=False))
        if len(stand_ins) < len(replaced):
            raise RequestError("the messages use up all private-use characters of Unicode", param="messages")
        return stand_ins

    def _mask(self, string: str, stand_ins: Mapping[str, str]) -> str:
        """`string` with stand-ins, but for what the template looks for, unless a control token would be left."""
        assert self._tokens is not None
        if self._literals is not None and self._literals.search(string):
            pieces, start = [], 0
            for match in self._literals.finditer(string):
                pieces += [_replaced(string[start : match.start()], stand_ins), match.group()]
                start = match.end()
            masked = "".join([*pieces, _replaced(string[start:], stand_ins)])
            if not self._tokens.search(masked):
                return masked
        return _replaced(string, stand_ins)


def _replaced(string: str, stand_ins: Mapping[str, str]) -> str:
    for character, stand_in in stand_ins.items():  # much faster than str.translate
        string = string.replace(character, stand_in)
    return string


_LITERAL = re.compile(r"'([^'\\\n]*)'|\"([^\"\\\n]*)\"")


def _strings(value: Any) -> Iterable[str]:
    """Every string a client wrote inside `value`; names of roles and types are checked elsewhere."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            if key not in _NAMES_OF_ROLES or not isinstance(item, str) or not item.isidentifier():
                yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of `value` with every string `change`d, but for names of roles, types and fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            (key if isinstance(key, str) and key.isidentifier() else change(str(key))): (
                item
                if key in _NAMES_OF_ROLES and isinstance(item, str) and item.isidentifier()
                else _mapped(item, change)
            )
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Puts a mark behind the last message's content. Mutates: that message."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        raise RequestError(
            "`continue_final_message` needs an assistant message with text at the end, "
            f"the last is from {last['role']!r}",
            param="continue_final_message",
        )
    last["content"] = last["content"] + _CONTINUE_HERE


def _cut_at_mark(prompt: RenderedPrompt) -> RenderedPrompt:
    place = prompt.text.rfind(_CONTINUE_HERE)
    if place < 0:
        raise RequestError(
            "this model's chat template drops the last message's text, so it cannot be continued",
            param="continue_final_message",
        )
    return RenderedPrompt(prompt.text[:place], prompt.guarded[:place])
