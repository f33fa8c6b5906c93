"""The import direction is the explanation of the design: each part knows only those before it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import revit

ROOT = Path(revit.__file__).parent
ALLOWED = {
    "groups": set(),
    "weight_files": set(),
    "exactness": {"groups"},
    "filters": {"groups"},
    "actions": {"groups", "filters"},
    "equivariance": {"groups", "actions"},
    "nn": {"groups", "exactness", "filters", "actions"},
    "deployment": {"groups", "exactness", "actions", "nn"},
    "models": {"groups", "exactness", "nn", "deployment", "weight_files"},
    "data": set(),
    "evaluation": {"groups", "actions", "equivariance", "data"},
    "training": {"data", "evaluation", "weight_files"},
    "conversion": {"groups", "filters", "actions", "models", "data"},
    "recipes": set(),
    "reproduce": {"groups", "actions", "nn", "models", "data", "evaluation"},
    "cli": {"groups", "conversion", "models", "data", "evaluation", "training", "reproduce", "export", "weight_files"},
    "__main__": {"cli"},
    "int8": set(),
    "slimming": set(),
    "timm": {"models"},
    "export": {"deployment", "evaluation", "int8", "slimming"},
    "": {"groups", "exactness", "actions", "deployment", "equivariance", "nn", "models"},
}


def part_of(path):
    relative = path.relative_to(ROOT)
    return "" if relative.name == "__init__.py" and len(relative.parts) == 1 else relative.parts[0].removesuffix(".py")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "revit")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_import_direction(path):
    part = part_of(path)
    assert part in ALLOWED, f"{part} is not in the design: say what it may import"
    for name in imports_of(path):
        foreign = ("escnn", "torchvision") if part == "timm" else ("escnn", "torchvision", "timm")
        assert not name.startswith(foreign), f"{path.name} imports {name}"
        match = re.match(r"revit\.(\w+)", name)
        if match and match[1] != part:
            assert match[1] in ALLOWED[part], f"{path.name} ({part or 'revit'}) imports {name}"


def test_import_needs_the_core_only():
    """No extra, no heavy module at import: torch and the standard library."""
    code = "import sys, revit; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    extras = {
        "accelerate",
        "torchmetrics",
        "kornia",
        "matplotlib",
        "mlxtend",
        "h5py",
        "PIL",
        "tensorboard",
        "tifffile",
        "yaml",
        "jsonargparse",
        "rich",
        "gradio",
        "onnx",
        "escnn",
        "timm",
        "huggingface_hub",
    }
    assert not extras & set(loaded)


def test_files_read_in_one_sitting():
    for path in ROOT.rglob("*.py"):
        lines = len(path.read_text().splitlines())
        assert lines <= (300 if "models" in path.parts else 400), f"{path.name} has {lines} lines"
        assert path.stem not in ("utils", "common", "misc", "helpers")


def test_public_names_exist():
    for module in (revit, revit.nn, revit.models):
        for name in module.__all__:
            assert getattr(module, name) is not None


def test_importing_the_package_loads_no_compiler():
    """Which takes a second: `import revit` should take a few tenths of one at most, beyond torch."""
    code = "import sys, torch; before = set(sys.modules); import revit; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor", "sympy", "torch.onnx"))]
