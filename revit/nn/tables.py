"""Tables that are computed once for each set of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T", bound=Callable[..., Any])


def table(function: T) -> T:
    """Keeps what a function gives for hashable arguments. `torch.compile` leaves it to Python, cache and all."""
    kept = lru_cache(function)

    @wraps(function)
    def look_up(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(kept)(*arguments)  # here, not around: to ask for it loads the compiler, for a second
        return kept(*arguments)

    return cast(T, look_up)
