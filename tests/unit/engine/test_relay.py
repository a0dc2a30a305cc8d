"""What the core puts arrives on the loop, all of it, in order; the end included."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

from firstlight.engine.relay import LoopRelay
from firstlight.types import TokenEvent


def event(number: int) -> TokenEvent:
    return TokenEvent(request_id=str(number), token_ids=[number])


def test_relay_brings_every_batch_of_another_thread_in_order() -> None:
    async def story() -> None:
        got: list[int] = []
        threads: set[int] = set()
        done = asyncio.Event()

        def deliver(events: list[TokenEvent]) -> None:
            threads.add(threading.get_ident())
            got.extend(int(event.request_id) for event in events)
            if len(got) == 2000:
                done.set()

        relay = LoopRelay(asyncio.get_running_loop(), deliver)
        batches = [[event(2 * i), event(2 * i + 1)] for i in range(1000)]
        core = threading.Thread(target=lambda: [relay.put(batch) for batch in batches])
        core.start()
        await done.wait()
        core.join()
        assert got == list(range(2000))
        assert threads == {threading.get_ident()}
        relay.close()

    asyncio.run(story())


def test_relay_that_closes_delivers_what_was_put_before_and_nothing_later() -> None:
    async def story() -> None:
        got: list[str] = []
        relay = LoopRelay(asyncio.get_running_loop(), lambda events: got.extend(event.request_id for event in events))
        relay.put([event(1)])
        relay.close()
        relay.close()
        assert got == ["1"]
        relay.put([event(2)])
        await asyncio.sleep(0)
        assert got == ["1"]

    asyncio.run(story())


def test_relay_can_be_read_until_the_program_is_gone() -> None:
    """A loop in a thread may run its last callbacks after everything registered for the end of the program has run."""
    lines = [
        "import asyncio, atexit",
        "relay = None",
        "atexit.register(lambda: (relay.put([]), relay._take(), print('read')))  # first in, last out",
        "from firstlight.engine.relay import LoopRelay",
        "relay = LoopRelay(asyncio.new_event_loop(), lambda events: None)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("read\n", 0), done.stderr
