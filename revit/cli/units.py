"""Amounts as people write them: 24GB, 256MB, 1.5TB."""

from __future__ import annotations

import re

from revit.cli.parser import UsageError

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(text: str, option: str) -> int:
    """The bytes that "24GB" or "256 MiB" stands for. The option is named in the error.

    >>> parse_bytes("1.5kB", "--size")
    1500
    """
    units = {unit.lower(): size for unit, size in UNITS.items()}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text.lower())
    if match is None or match[2] not in units:
        raise UsageError(f"{option}: {text!r} is no amount of memory; write a number and {', '.join(UNITS)}, such as 24GB")
    count = int(float(match[1]) * units[match[2]])
    if count < 1:
        raise UsageError(f"{option}: must be more than nothing, got {text!r}")
    return count


def show_bytes(count: float) -> str:
    """Bytes as people read them, with three digits.

    >>> show_bytes(1_536_000)
    '1.54 MB'
    """
    unit = next((unit for unit in ("TB", "GB", "MB", "kB") if count >= UNITS[unit]), "B")
    return f"{count / UNITS[unit]:.3g} {unit}"
