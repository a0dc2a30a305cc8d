"""A pytest plugin that runs the tests over a native module built elsewhere: FIRSTLIGHT_NATIVE names its file.

`make sanitize` uses it: `FIRSTLIGHT_NATIVE=build/sanitize/_native.so pytest -p tests.kernel.native_build`.
"""

from __future__ import annotations

import importlib.util
import os
import sys

NAME = "firstlight.backend.cpu._native"

path = os.environ["FIRSTLIGHT_NATIVE"]
assert NAME not in sys.modules, "the installed native module was imported before this plugin"
spec = importlib.util.spec_from_file_location(NAME, path)
assert spec is not None, path
assert spec.loader is not None, path
module = importlib.util.module_from_spec(spec)
sys.modules[NAME] = module
spec.loader.exec_module(module)
importlib.import_module("firstlight.backend.cpu")  # a module that is found in sys.modules does not import its parents


def pytest_report_header() -> str:
    return f"native module: {path}"
