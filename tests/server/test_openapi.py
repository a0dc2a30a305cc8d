"""The OpenAPI document: it names the routes and their fields, and fuzzing along it finds no 5xx."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from firstlight.server.fields import CHAT_FIELDS, COMPLETION_FIELDS
from firstlight.server.run import ServerThread

NAMES_WITH_BODIES = {"/v1/chat/completions": CHAT_FIELDS, "/v1/completions": COMPLETION_FIELDS}


def test_document_has_every_field_that_is_taken(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path, fields in NAMES_WITH_BODIES.items():
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = document["components"]["schemas"][reference.rsplit("/", 1)[1]]
        assert set(schema["properties"]) == set(fields)


def test_every_path_of_the_document_is_a_route(http: httpx.Client) -> None:
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        for method in methods:
            assert http.request(method, path).status_code not in (404, 405)


@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_schemathesis_finds_no_server_error(server: ServerThread, tmp_path: Path) -> None:
    program = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
    command = [sys.executable, "-c", program, "run", server.url + "/openapi.json", "--checks", "not_a_server_error"]
    command += ["--max-examples", "8", "--seed", "1", "--phases", "fuzzing", "--request-timeout", "30"]
    command += ["--exclude-path", "/ready", "--exclude-path", "/health"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
