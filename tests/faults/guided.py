"""Fuzzing guided by coverage, where atheris is installed: python -m tests.faults.guided NAME [-runs=N]

NAME is a parser of `tests.faults.fuzzing`. No part of `make faults`, whose mutations are the same on every machine.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["revit.groups", "revit.data", "revit.training", "revit.cli", "yaml", "zipfile"]):
    from tests.faults import fuzzing


def main(words: list[str]) -> None:
    target = getattr(fuzzing, words[1])(Path(tempfile.mkdtemp(prefix="faults-")))
    corpus = Path(tempfile.mkdtemp(prefix="corpus-"))
    for number, sample in enumerate(target.samples):
        (corpus / str(number)).write_bytes(sample)

    def parse(data: bytes) -> None:
        with contextlib.suppress(target.errors):
            target.parse(data)

    warnings.simplefilter("ignore")
    atheris.Setup([words[0], *words[2:], str(corpus)], parse)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv)
