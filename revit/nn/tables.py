"""Tables that are computed once for each set of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T", bound=Callable[..., Any])


def table(function: T) -> T:
    """Keeps what a function gives for hashable arguments. `torch.compile` leaves it to Python, cache and all."""
    return cast(T, torch.compiler.disable(lru_cache(function)))
