"""What the sources may not do: unpickle, evaluate, start shells. Ruff has rules for most; these calls need a look inside."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("revit", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES += [path for path in (ROOT / "hubconf.py",) if path.exists()]


def calls(text):
    """Every call with its dotted name: ("torch.load", node)."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def faults(text):
    """What is wrong with the calls of a source, as "line: why"."""
    found = []
    for name, call in calls(text):
        options = {word.arg: word.value for word in call.keywords}
        safe = options.get("weights_only")
        if name.endswith("torch.load") and not (isinstance(safe, ast.Constant) and safe.value is True):
            found.append(f"{call.lineno}: torch.load without weights_only=True")
        if name.split(".")[-1] in ("load", "loads", "Unpickler") and name.split(".")[0] in (
            "pickle",
            "dill",
            "joblib",
            "marshal",
        ):
            found.append(f"{call.lineno}: {name}")
        if name in ("np.load", "numpy.load") and "allow_pickle" in options:
            found.append(f"{call.lineno}: numpy.load with allow_pickle")
        if name in ("eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"):
            found.append(f"{call.lineno}: {name}")
        if name.startswith("subprocess.") and "shell" in options:
            found.append(f"{call.lineno}: a shell")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_runs_what_it_reads(path):
    assert faults(path.read_text()) == []


DANGEROUS = (
    "torch.load(p)", "torch.load(p, weights_only=False)", "torch.load(p, weights_only=flag)", "pickle.load(f)",
    "pickle.loads(b)", "pickle.Unpickler(f)", "np.load(p, allow_pickle=True)", "eval(t)", "exec(t)",
    "os.system(t)", "yaml.load(t)", "subprocess.run(t, shell=True)",
)  # fmt: skip


@pytest.mark.parametrize("line", DANGEROUS)
def test_the_look_finds_it(line):
    assert len(faults(line)) == 1


def test_what_is_allowed():
    assert (
        faults("torch.load(p, weights_only=True)\nnp.load(p)\nyaml.safe_load(t)\nsubprocess.run([a], check=True)\njson.load(f)")
        == []
    )


def test_the_lock_has_a_hash_for_every_package():
    """`make lock` writes it; a dependency that was added since is missing in it."""
    locked = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        name, version = re.fullmatch(r"([a-z0-9._-]+)==([\w.+]+) --hash=sha256:[0-9a-f]{64}", line).groups()
        locked[re.sub(r"[._]", "-", name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for wanted in (*project["dependencies"], *extras["train"], *extras["export"], *extras["dev"]):
        assert re.split(r"[\[<>=~! ]", wanted)[0].lower().replace("_", "-") in locked, wanted
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" in line and not line.startswith("#"):
            name, version = line.split("==")
            assert locked[name].split("+")[0] == version, line
