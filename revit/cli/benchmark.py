"""`revit benchmark data`, `complexity` and `plan`: what training waits for, what a group costs, what GPUs a run needs."""

from __future__ import annotations

import importlib

from revit.cli.parser import Parser

ABOUT = """Measures on this machine. `data`: does training wait for its images? `complexity`: what do models cost on each
group, in multiply-adds, memory and time? `plan`: does a recipe fit on GPUs that are not here, and how long would it take?
`revit benchmark data --help` and so on explain the options."""
MODULES = {"data": "loading", "complexity": "complexity", "plan": "plan"}


def run(words: list[str]) -> int:
    if words and words[0] in MODULES:
        return int(importlib.import_module(f"revit.cli.{MODULES[words[0]]}").run(words[1:]))
    parser = Parser("benchmark", "complexity|data|plan [--option value ...]", ABOUT)
    parser.add_argument("what", metavar="complexity|data|plan", type=str, choices=list(MODULES), help="what to measure")
    parser.parse_args(words)
    return 0
