"""Memory that the C library keeps between the steps of a training on a CPU.

By default glibc fetches every block beyond 32 MiB from the system and gives it back when it is freed, and it trims what is free
at the end of its heap. A training frees all maps of a step and asks for the same ones in the next: what was given back comes
page by page, filled with zeros, and takes longer than the sums that are written there.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # <malloc.h>
NEVER = -1


def keep_memory() -> bool:
    """Freed memory stays with this process from now on. Where the C library is another one, nothing happens: False."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER))
