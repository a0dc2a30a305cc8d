"""A conversation: pieces to stdout, history kept, Ctrl-C stops one answer, errors do not end it."""

from __future__ import annotations

import asyncio
import io
import signal
import threading
import time
from collections.abc import AsyncGenerator, Iterator

import pytest

from firstlight.cli.answers import AnswerPiece, Message, open_source
from firstlight.cli.chat import Conversation
from firstlight.cli.commands import ChatConfig
from firstlight.config import EngineConfig
from firstlight.errors import RequestError
from firstlight.types import Usage
from tests.unit.measure.canned_server import canned, response, sse_body


class EchoSource:
    """Answers with the last message's words, one piece each; "stall" never ends, "refuse" is refused."""

    model = "echo"

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.num_closed = 0

    async def answer(self, messages: list[Message]) -> AsyncGenerator[AnswerPiece, None]:
        self.asked.append([dict(message) for message in messages])
        words = messages[-1]["content"].split()
        try:
            for word in words:
                if word == "refuse":
                    raise RequestError("`prompt` is too long", hint="/reset")
                yield AnswerPiece(word + " ")
                if word == "stall":
                    await asyncio.sleep(600)
            yield AnswerPiece("", "stop", Usage(prompt_tokens=5, completion_tokens=len(words), cached_tokens=2))
        finally:
            self.num_closed += 1


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


def talk(source: EchoSource, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, *lines: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return Conversation(source, runner, "be brief").talk()


def test_piped_questions_are_answered_in_order_with_history(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = EchoSource()
    assert talk(source, runner, monkeypatch, "one two", "", "three") == 0
    out, err = capsys.readouterr()
    assert out == "one two \nthree \n"
    assert [message["content"] for message in source.asked[1]] == ["be brief", "one two", "one two ", "three"]
    assert [message["role"] for message in source.asked[1]] == ["system", "user", "assistant", "user"]
    assert "TTFT" in err
    assert "2 tokens" in err
    assert "prompt 5, 2 cached" in err


def test_reset_empties_the_history_and_exit_ends(runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    source = EchoSource()
    talk(source, runner, monkeypatch, "one", "/reset", "two", "/nonsense", "/help", "/exit", "three")
    assert [len(messages) for messages in source.asked] == [2, 2]


def test_refused_question_is_printed_forgotten_and_gives_its_code(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = EchoSource()
    assert talk(source, runner, monkeypatch, "refuse") == 2
    assert "error: `prompt` is too long\nhint: /reset" in capsys.readouterr().err
    assert talk(source, runner, monkeypatch, "refuse", "fine") == 0
    assert [message["content"] for message in source.asked[-1]] == ["be brief", "fine"]


def test_ctrl_c_stops_the_answer_and_not_the_conversation(
    runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = EchoSource()

    def press() -> None:
        while not source.asked:
            time.sleep(0.005)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    assert talk(source, runner, monkeypatch, "well stall never", "next") == 0
    presser.join()
    out, err = capsys.readouterr()
    assert out == "well stall \nnext \n"
    assert "(stopped)" in err
    assert source.asked[1][2] == {"role": "assistant", "content": "well stall "}
    assert source.num_closed == 2


def test_remote_source_sends_the_options_and_gives_text_and_usage() -> None:
    async def ask() -> tuple[list[AnswerPiece], str, bytes]:
        events = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "Hi"}}]},
            {"choices": [{"delta": {}, "finish_reason": "length"}]},
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}},
        ]
        listing = response(b'{"data":[{"id":"served"}]}')
        async with canned(listing, response(sse_body(events))) as (server, endpoint):
            chat = ChatConfig(url=endpoint.url, api_key="secret", max_tokens=9)
            async with open_source(chat, EngineConfig()) as source:
                pieces = [piece async for piece in source.answer([{"role": "user", "content": "q"}])]
                return pieces, source.model, server.requests[1]

    pieces, model, request = asyncio.run(ask())
    assert [piece.text for piece in pieces] == ["Hi", ""]
    assert (pieces[-1].finish, pieces[-1].usage) == ("length", Usage(prompt_tokens=3, completion_tokens=1))
    assert model == "served"
    assert b"Bearer secret" in request
    assert b'"max_tokens":9' in request
    assert b"top_k" not in request
