"""`firstlight chat`: a conversation in the terminal, with what each answer cost in time.

Answers go to stdout, everything else to stderr, so that `echo question | firstlight chat > answer` does what it says.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

from firstlight.cli.answers import AnswerPiece, AnswerSource, Message, open_source
from firstlight.cli.arguments import Invocation, flag_of
from firstlight.cli.commands import ChatConfig
from firstlight.cli.console import dim, exit_code_of, note, print_error
from firstlight.config import EngineConfig
from firstlight.errors import ConfigError, FirstlightError
from firstlight.types import Usage

__all__ = ["Conversation", "render_timing", "run"]

_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def run(invocation: Invocation) -> int:
    """Runs the command; 0, or the code of the last answer's error when the questions came through a pipe."""
    chat, engine_config = invocation.config(ChatConfig), invocation.config(EngineConfig)
    local_only = invocation.given_from(EngineConfig)
    if chat.url and local_only:
        name = next(iter(local_only))
        raise ConfigError(
            f"`{flag_of(name)}` is for a model in this process, and `--url` names a server: the two do not go together",
            hint="leave one of them out",
        )
    with asyncio.Runner() as runner:
        opened = open_source(chat, engine_config)
        source = runner.run(opened.__aenter__())
        try:
            return Conversation(source, runner, chat.system).talk()
        finally:
            runner.run(opened.__aexit__(None, None, None))


@dataclass(slots=True)
class Conversation:
    """Questions in, answers out, history kept. One thread; `runner` drives the source between two questions."""

    source: AnswerSource
    runner: asyncio.Runner
    system: str = ""
    history: list[Message] = field(default_factory=list)

    def talk(self) -> int:
        """Answers until the input ends or /exit. Returns the exit code."""
        code = 0
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            note(dim(f"{self.source.model}: {_HELP}"))
        for question in _questions(is_terminal):
            match question:
                case "":
                    continue
                case "/exit":
                    break
                case "/reset":
                    self.history.clear()
                    note(dim("the conversation is empty"))
                case "/help":
                    note(dim(_HELP))
                case _ if question.startswith("/"):
                    note(dim(f"{question.split()[0]} is not known: {_HELP}"))
                case _:
                    code = self.ask(question)
        return code

    def ask(self, question: str) -> int:
        """Prints one answer as it comes and remembers both. A failed question is forgotten. Returns its exit code."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        self.history.append({"role": "user", "content": question})
        clock = _AnswerClock(time.perf_counter())
        pieces: list[str] = []
        try:
            self.runner.run(_print_answer(self.source.answer(opening + self.history), clock, pieces))
        except (KeyboardInterrupt, asyncio.CancelledError):
            note(dim(" (stopped)"))
        except FirstlightError as error:
            print_error(error)
            self.history.pop()
            return exit_code_of(error)
        print(flush=True)
        self.history.append({"role": "assistant", "content": "".join(pieces)})
        note(dim(render_timing(clock)))
        return 0


async def _print_answer(stream: AsyncGenerator[AnswerPiece], clock: _AnswerClock, pieces: list[str]) -> None:
    """Prints an answer as it comes and adds its text to `pieces`. Ctrl-C cancels it, and closes the stream."""
    with _cancelled_by_ctrl_c():
        async with contextlib.aclosing(stream):
            async for piece in stream:
                clock.note(piece.text, piece.usage)
                pieces.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()


@contextlib.contextmanager
def _cancelled_by_ctrl_c() -> Iterator[None]:
    """While the block runs, Ctrl-C cancels its task.

    The runner does that too, but does not wake a loop that is just going to sleep: the answer would then stop only when
    its next piece comes.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    try:
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread: the runner's has to do
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@dataclass(slots=True)
class _AnswerClock:
    """When an answer's text came."""

    asked_s: float
    first_s: float | None = None
    last_s: float = 0.0
    num_pieces: int = 0
    usage: Usage | None = None

    def note(self, text: str, usage: Usage | None) -> None:
        self.usage = usage or self.usage
        if text:
            self.last_s = time.perf_counter()
            self.first_s = self.first_s or self.last_s
            self.num_pieces += 1


def render_timing(clock: _AnswerClock) -> str:
    """One line: TTFT, tokens per second after the first, tokens, and the prompt's cached share."""
    if clock.first_s is None:
        return "[no text]"
    num_tokens = clock.usage.completion_tokens if clock.usage else clock.num_pieces
    parts = [f"TTFT {1e3 * (clock.first_s - clock.asked_s):.0f} ms"]
    span_s = clock.last_s - clock.first_s
    if num_tokens > 1 and span_s > 0:
        parts.append(f"{(num_tokens - 1) / span_s:.1f} tokens/s")
    parts.append(f"{num_tokens} tokens" if clock.usage else f"{num_tokens} pieces")
    if clock.usage:
        parts.append(f"prompt {clock.usage.prompt_tokens}, {clock.usage.cached_tokens} cached")
    return f"[{' | '.join(parts)}]"


def _questions(is_terminal: bool) -> Iterator[str]:
    """Lines of the terminal (with editing and history), or of a pipe, stripped."""
    if not is_terminal:
        for line in sys.stdin:
            yield line.strip()
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() a line editor
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            note("")
            return
        except KeyboardInterrupt:
            note(dim(f"\n{_HELP}"))
