"""`revit benchmark data` and `revit benchmark complexity`: what training waits for, and what a group costs."""

from __future__ import annotations

import importlib

from revit.cli.parser import Parser

ABOUT = """Measures on this machine. `data`: does training wait for its images? `complexity`: what do models cost on each
group, in multiply-adds, memory and time? `revit benchmark data --help` and `revit benchmark complexity --help` explain the
options."""
MODULES = {"data": "loading", "complexity": "complexity"}


def run(words: list[str]) -> int:
    if words and words[0] in MODULES:
        return int(importlib.import_module(f"revit.cli.{MODULES[words[0]]}").run(words[1:]))
    parser = Parser("benchmark", "complexity|data [--option value ...]", ABOUT)
    parser.add_argument("what", metavar="complexity|data", type=str, choices=list(MODULES), help="what to measure")
    parser.parse_args(words)
    return 0
