"""Grammars compiled beside the event loop: a few threads, a bounded queue, a time limit. Knows no requests."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from firstlight.config import EngineConfig
from firstlight.errors import OverloadedError, RequestError
from firstlight.text.grammar import CompiledGrammar, GrammarCompiler, GrammarLimits
from firstlight.text.tokenizer import Tokenizer
from firstlight.types import GrammarSpec

__all__ = ["Grammars"]

_NUM_THREADS = 2
_MAX_WAITING = 64
"""Grammars that may wait for a thread; each takes milliseconds."""
_RETRY_S = 1.0


class Grammars:
    """The grammar compiler of one engine. `prepare` is called on the loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, config: EngineConfig) -> None:
        limits = GrammarLimits(
            max_bytes=config.max_grammar_kb * 1024, max_depth=config.max_grammar_depth, max_cached=config.grammar_cache
        )
        self.compiler = GrammarCompiler(tokenizer, vocab_size, limits)
        self._compile_s = config.grammar_compile_s
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="firstlight-grammar")
        self._num_waiting = 0
        self._threads.submit(self.compiler.warm_up)

    async def prepare(self, spec: GrammarSpec) -> None:
        """Compiles on a thread, unless it is compiled already.

        Raises:
            RequestError: the grammar cannot be used, or takes longer than `grammar_compile_s`.
            OverloadedError: too many wait.
        """
        if self.compiler.cached(spec) is not None:
            return
        if self._num_waiting >= _MAX_WAITING:
            raise OverloadedError(f"{self._num_waiting} grammars wait for compilation", retry_after_s=_RETRY_S)
        self._num_waiting += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self.compiler.compile, spec)
        work.add_done_callback(self._ended)
        done, _ = await asyncio.wait([work], timeout=self._compile_s)
        if not done:
            raise RequestError(
                f"`{spec.field}` takes longer than {self._compile_s:g} s to compile, the limit of `grammar_compile_s`: "
                "simplify it",
                param=spec.field,
            )
        work.result()

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(self, work: asyncio.Future[CompiledGrammar]) -> None:
        self._num_waiting -= 1
        if not work.cancelled():
            work.exception()  # whoever waited may have given up: it is looked at here, so that nothing is logged
