"""8. Supply chain: no source runs what it reads, every package has a hash, and a file with another one is not installed."""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.faults.tally import Tally
from tests.test_sources import DANGEROUS, ROOT, SOURCES, faults

LINTED = (
    "import pickle\npickle.load(f)", "eval(t)", "import subprocess\nsubprocess.run(t, shell=True)", "import os\nos.system(t)",
    "import yaml\nyaml.load(t)", "import marshal\nmarshal.loads(b)",
)  # fmt: skip
"""What ruff has to refuse by the rules of the project."""


def sources(folder: Path, count: int, seed: int) -> Tally:
    """Every source is looked at for unpickling, evaluating and shells, and so are lines that do it, which must be found."""
    tally = Tally()
    for path in SOURCES:
        with tally.trial(str(path.relative_to(ROOT))):
            assert faults(path.read_text()) == []
    for line in DANGEROUS:
        with tally.trial(f"a source with {line}"):
            assert faults(line), "not found"
    for text in LINTED:
        with tally.trial(f"ruff, {text!r}"):
            command = [sys.executable, "-m", "ruff", "check", "--select", "S", "--stdin-filename", "revit/some.py", "-"]
            found = subprocess.run(command, input=text + "\n", capture_output=True, text=True, cwd=ROOT)
            rules = set(re.findall(r"\bS\d{3}\b", found.stdout)) & set(
                re.findall(r"S\d{3}", (ROOT / "pyproject.toml").read_text())
            )
            assert found.returncode == 1 and rules, found.stdout + found.stderr
    return tally


def packages(folder: Path, count: int, seed: int) -> Tally:
    """Every package of the lock has its SHA-256; a package with one byte changed is refused by such a lock, and no other."""
    tally, generator = Tally(), random.Random(seed)
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        with tally.trial(line.split()[0]):
            assert re.fullmatch(r"[a-z0-9._-]+==[\w.+]+ --hash=sha256:[0-9a-f]{64}", line), line
    wheel = folder / "harmless-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("harmless.py", "VALUE = 1\n" + "#" * 500)
        archive.writestr("harmless-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: harmless\nVersion: 1\n")
        archive.writestr("harmless-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("harmless-1.dist-info/RECORD", "")
    whole = wheel.read_bytes()
    lock = folder / "lock.txt"
    lock.write_text(f"harmless==1 --hash=sha256:{hashlib.sha256(whole).hexdigest()}\n")
    with tally.trial("the package itself"):
        assert _install(folder, lock, "whole") == "", "refused"
    for trial in range(count):
        at = generator.randrange(len(whole))
        with tally.trial(f"byte {at} changed"):
            wheel.write_bytes(whole[:at] + bytes((whole[at] ^ 1 << generator.randrange(8),)) + whole[at + 1 :])
            assert "DO NOT MATCH THE HASHES" in _install(folder, lock, f"changed{trial}"), "not refused"
            assert not (folder / f"changed{trial}").exists()
    return tally


def _install(folder: Path, lock: Path, target: str) -> str:
    """What pip says against installing what is locked, from this folder alone, into `target`."""
    options = ["--quiet", "--no-index", "--find-links", str(folder), "--require-hashes", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder / target), "-r", str(lock)]
    done = subprocess.run([*command, "--disable-pip-version-check"], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr
