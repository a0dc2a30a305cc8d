"""The dashboard: its files over HTTP, and the page in a real browser where this machine has one."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from firstlight.backend.fake import StepCost
from firstlight.config import EngineConfig, ServerConfig
from firstlight.engine.fake import fake_parts
from firstlight.engine.frontend import AsyncEngine
from firstlight.server.run import ServerThread
from tests.server.conftest import StartServer
from tests.server.raw import wait_until

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
FILES = ["", "/", "/dashboard.css", "/dashboard.js", "/uplot/uplot.js", "/uplot/LICENSE"]


@pytest.mark.parametrize("name", FILES)
def test_dashboard_serves_its_files_without_a_key(start_server: StartServer, name: str) -> None:
    server = start_server(api_key=("secret",))
    answer = httpx.get(f"{server.url}/dashboard{name}")
    assert answer.status_code == 200
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("name", ["/nothing", "/../app.py", "/%2e%2e/app.py", "//etc/passwd"])
def test_dashboard_serves_nothing_else(server: ServerThread, name: str) -> None:
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as sock:
        sock.sendall(f"GET /dashboard{name} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert b" 404 " in sock.recv(64)


def test_dashboard_asks_no_other_host() -> None:
    folder = Path(__file__).parents[2] / "firstlight/server/dashboard"
    for path in folder.glob("*.*"):
        assert "//" not in path.read_text().replace("// ", "").replace("http://www.w3.org", ""), path.name


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, headless."""
    if not CHROMIUM.exists() or find_spec("playwright") is None:
        pytest.skip("needs /usr/bin/chromium and playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page that fails the test when a script on it fails."""
    opened, errors = browser.new_page(), []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    opened.close()
    assert errors == []


def started(port: int = 0) -> ServerThread:
    config = EngineConfig(backend="fake", num_blocks=64)
    cost = StepCost(step_s=0.004)
    build = lambda: AsyncEngine(config, load=lambda config: fake_parts(config, cost=cost))  # noqa: E731
    return ServerThread(build, ServerConfig(port=port, drain_s=0.0))


def text_of(page: Any, name: str) -> str:
    return str(page.text_content(f"#{name}"))


def test_dashboard_streams_and_shows_what_the_api_reports(page: Any) -> None:
    with started() as server:
        page.goto(server.url + "/dashboard")
        page.fill("#play-tokens", "24")
        page.focus("#prompt")
        page.keyboard.press("Enter")
        page.wait_for_selector("#stop:enabled")
        page.wait_for_selector("#send:enabled")
        assert int(text_of(page, "play-count")) > 4
        page.wait_for_selector("#list tbody tr")
        page.wait_for_selector("#requests:text-is('1')")
        page.wait_for_selector("#running:text-is('0')")
        live = httpx.get(server.url + "/debug/live").json()
        view = httpx.get(server.url + "/debug/requests").json()["requests"][0]
        assert text_of(page, "model") == live["model"]
        assert text_of(page, "output-tokens") == str(view["output_tokens"]) == str(live["output_tokens"])
        assert text_of(page, "ttft-p50").split()[0] == f"{view['ttft_ms']:.{1 if view['ttft_ms'] < 10 else 0}f}"
        assert [text_of(page, f"kv-{owner}") for owner in ("running", "cached", "free")] == [
            str(live["kv"][owner]) for owner in ("running", "cached", "free")
        ]
        page.focus("#list tbody tr")
        page.keyboard.press("Enter")
        page.wait_for_selector("#detail[open]")
        assert view["verdict"]["cause"] in text_of(page, "detail-verdict")
        assert page.locator("#detail-rows tr").count() == len(view["totals_ms"])
        page.keyboard.press("Escape")
        assert not page.is_visible("#detail")


def test_dashboard_keeps_its_layout_and_its_size_at_50_updates_a_second(page: Any) -> None:
    with started() as server:
        page.goto(server.url + "/dashboard")
        page.wait_for_selector("#state[data-state=live]")
        before = page.evaluate("[document.body.scrollHeight, document.querySelectorAll('*').length]")
        page.select_option("#rate", "20")
        steps = int(httpx.get(server.url + "/debug/live").json()["steps_run"])
        body = {"prompt": "x", "max_tokens": 64, "ignore_eos": True}
        httpx.post(server.url + "/v1/completions", json=body)
        wait_until(lambda: httpx.get(server.url + "/debug/live").json()["steps_run"] >= steps + 64, "its steps")
        page.wait_for_selector("#list tbody tr")
        page.click("#theme")
        num_rows = page.evaluate("document.querySelectorAll('#list tbody *').length")
        after = page.evaluate("[document.body.scrollHeight, document.querySelectorAll('*').length]")
        assert after[0] == before[0]
        assert after[1] - num_rows == before[1]


AN_HOUR = """async (frames) => {
  const { keep, list } = await import("./dashboard/dashboard.js");
  const percentiles = (i) => ({ num: 9, p50: 9 + i % 7, p95: 20 + i % 11, p99: i % 13 ? 30 + i % 17 : null });
  const step = (i, at) => [i + at, 64 - at, 5 + at % 9, 6, at % 5, at % 3, 0.5];
  for (let frame = 0; frame < frames; frame += 1) {
    for (let at = 0; at < 1000; at += 1) {
      const i = window.updates = (window.updates ?? 0) + 1;
      keep({
        model: "m", now_unix_s: 1.7e9 + i / 50, running: i % 9, waiting: i % 5, requests: i, output_tokens: 8 * i,
        output_tokens_per_s: 100 + i % 50, ttft_ms: percentiles(i), itl_ms: percentiles(i + 3),
        kv: { blocks: 64, free: 60, cached: 2, running: 1, pinned: 1, map: "frcp".repeat(16), blocks_per_cell: 1 },
        steps: Array.from({ length: 64 }, (_, at) => step(i, at)),
      });
    }
    if (frame % 3 === 0) await list.refresh();
    await new Promise(requestAnimationFrame);
  }
}"""


def test_dashboard_does_not_grow_in_an_hour_at_50_updates_a_second(page: Any) -> None:
    """180,000 updates through the page's own path, fast: heap and nodes after a tenth of them and after all."""
    names = itertools.count()

    def listed(route: Any) -> None:
        template = views[0]
        route.fulfill(json={"requests": [template | {"id": f"r{next(names)}"} for _ in range(40)]})

    with started() as server:
        httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 4})
        wait_until(lambda: httpx.get(server.url + "/debug/live").json()["requests"] == 1, "the request to be kept")
        views = httpx.get(server.url + "/debug/requests").json()["requests"]
        page.route("**/debug/live", lambda route: route.abort())
        page.route("**/debug/requests*", listed)
        page.goto(server.url + "/dashboard")
        tools = page.context.new_cdp_session(page)

        def size(frames: int) -> tuple[int, int]:
            page.evaluate(AN_HOUR, frames)
            tools.send("HeapProfiler.collectGarbage")
            nodes = tools.send("Memory.getDOMCounters")["nodes"]
            return tools.send("Runtime.getHeapUsage")["usedSize"], nodes

        early_bytes, early_nodes = size(18)
        late_bytes, late_nodes = size(162)
        assert page.evaluate("window.updates") == 180_000
        assert late_bytes - early_bytes < 400_000, "less than 2.5 bytes an update"
        assert late_nodes - early_nodes < 100


def test_dashboard_survives_a_restart_of_the_server(page: Any) -> None:
    with started() as first:
        page.goto(first.url + "/dashboard")
        page.wait_for_selector("#state[data-state=live]")
        port = int(first.url.rsplit(":", 1)[1])
    page.wait_for_selector("#state[data-state=gone]")
    with started(port):
        page.wait_for_selector("#state[data-state=live]")


def test_dashboard_asks_for_the_key_and_uses_it(page: Any, start_server: StartServer) -> None:
    server = start_server(api_key=("secret",))
    page.goto(server.url + "/dashboard")
    page.wait_for_selector("#key-form:not([hidden])")
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    page.wait_for_selector("#state[data-state=live]")
    assert page.is_hidden("#key-form")
