"""Mutation testing: does a test fail when an operator, a number or a condition in the mathematics is another one?

python -m tests.mutants [--only actions] [--sample 40] [--seed 0] [--out results/mutants.json]

Each mutant differs from a file in one place and runs in a process of its own, forked where torch is imported already. One
that makes a test fail, or takes ten times as long as all tests, is killed; the others are listed. Texts, messages of errors
and annotations are left as they are.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.machinery
import importlib.util
import json
import os
import platform
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
TARGETS = {
    "revit/groups.py": ("tests/test_groups.py", "tests/test_actions.py"),
    "revit/actions.py": ("tests/test_actions.py", "tests/nn/test_convolution.py"),
    "revit/nn/convolution.py": ("tests/nn/test_convolution.py", "tests/nn/test_algorithm.py", "tests/nn/test_fourier.py"),
}
"""Files, and the tests that are to notice."""
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.BitXor: ast.BitAnd, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Mutated(importlib.machinery.SourceFileLoader):
    """Loads a module from code that is not in its file."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self.code = code

    def get_code(self, fullname: str) -> CodeType:
        return self.code


class Finder:
    """Gives one module its mutated code; all others come from where they always do."""

    def __init__(self, name: str, path: str, code: CodeType) -> None:
        self.name, self.loader = name, Mutated(name, path, code)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self.loader) if name == self.name else None


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """What can be changed: a node, its attribute, and the position where that is a list."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OPERATORS:
            yield node, "op", None
        elif isinstance(node, ast.Compare):
            yield from ((node, "ops", i) for i in range(len(node.ops)))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield node, "operand", None
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node, "test", None
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield node, "value", None


def change(node: Any, attribute: str, position: int | None) -> None:
    """Makes one of them another one, in place."""
    if attribute == "op":
        node.op = OPERATORS[type(node.op)]()
    elif attribute == "ops":
        node.ops[position] = OPERATORS[type(node.ops[position])]()
    elif attribute == "operand":
        node.op = ast.UAdd() if isinstance(node.op, ast.USub) else ast.Not()
        if isinstance(node.op, ast.Not):
            node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif attribute == "test":
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:
        node.value = (not node.value) if isinstance(node.value, bool) else node.value + 1


def hide(tree: ast.AST) -> None:
    """Takes away what is not to be changed: annotations and the messages of errors. The code is made from another tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            node.exc = None
        elif isinstance(node, ast.JoinedStr):
            node.values = []
        elif isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant("")
        elif isinstance(node, ast.FunctionDef):
            node.returns = None


def mutants(source: str) -> list[tuple[str, ast.Module]]:
    """Every mutant of a file: its place and new text, and its tree."""
    tree = ast.parse(source)
    hidden = copy.deepcopy(tree)
    twin = dict(zip(map(id, ast.walk(hidden)), ast.walk(tree), strict=True))  # before anything is taken away
    hide(hidden)
    made = []
    for node, attribute, position in places(hidden):
        original: Any = twin[id(node)]
        before = copy.copy(original.ops) if attribute == "ops" else copy.copy(original.__dict__)
        was = _shown(original, attribute)
        change(original, attribute, position)
        now = _shown(original, attribute)
        made.append((f"line {original.lineno}: {was[:80]} -> {now[:80]}", copy.deepcopy(tree)))
        if attribute == "ops":
            original.ops = before
        else:
            original.__dict__.update(before)
    return made


def _shown(node: Any, attribute: str) -> str:
    """The code of a node in one line; of a condition without what depends on it."""
    return " ".join(ast.unparse(node.test if attribute == "test" else node).split())


def survives(path: str, tree: ast.Module, tests: tuple[str, ...], seconds: int) -> bool:
    """Runs the tests with a mutated file in a child process, for so many seconds of the processor at most."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        code = compile(ast.fix_missing_locations(tree), path, "exec")
        sys.meta_path.insert(0, Finder(path.removesuffix(".py").replace("/", "."), str(ROOT / path), code))  # type: ignore[arg-type]
        os._exit(int(pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", *tests])))
    return os.waitpid(child, 0)[1] == 0


def _commit() -> str:
    """Asked in another process: what is imported here cannot be mutated any more."""
    ask = "from revit.training.run_folder import commit; print(commit())"
    return subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", default="", help="files with this word in their path")
    parser.add_argument("--sample", type=int, default=10**6, help="mutants of a file, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="", help="result file (JSON); rows of other files in it stay")
    options = parser.parse_args(words)
    os.chdir(ROOT)
    torch.set_num_threads(1)  # processes are forked
    rows, now = {}, _commit()
    for path, tests in TARGETS.items():
        if options.only not in path:
            continue
        source = Path(path).read_text()
        begin = time.process_time() + sum(os.times()[2:4])
        if not survives(path, ast.parse(source), tests, 600):
            raise SystemExit(f"{path}: its tests fail without any change")
        limit = 10 + 10 * int(time.process_time() + sum(os.times()[2:4]) - begin)
        found = mutants(source)
        chosen = random.Random(options.seed).sample(found, min(options.sample, len(found)))
        survivors = []
        for number, (text, tree) in enumerate(chosen):
            if survives(path, tree, tests, limit):
                survivors.append(text)
                print(f"{path}, {number + 1} of {len(chosen)}, survived: {text}", flush=True)
        killed = len(chosen) - len(survivors)
        rows[path] = {
            "mutants": len(found),
            "tried": len(chosen),
            "killed": killed,
            "survivors": survivors,
            "seed": options.seed,
            "commit": now,
        }
        print(f"{path}: {killed} of {len(chosen)} killed, {killed / len(chosen):.0%} ({len(found)} possible)", flush=True)
    if options.out:
        out = Path(options.out)
        before = json.loads(out.read_text())["rows"] if out.is_file() else {}
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        report = {"command": "python -m tests.mutants", "versions": versions, "rows": {**before, **rows}}
        out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
