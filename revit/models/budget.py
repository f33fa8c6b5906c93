"""The width that fits a budget of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def match_parameters(
    build: Callable[[int | list[int]], nn.Module], dims: int | Sequence[int], num_heads: int | Sequence[int], budget: int
) -> tuple[int | list[int], int]:
    """The largest `dims` whose model has at most `budget` parameters, and its count.

    All stages are scaled by one factor, and each width is a whole number of heads. `build` makes a model of given `dims`.
    """
    stages = [dims] if isinstance(dims, int) else list(dims)
    heads = [num_heads] * len(stages) if isinstance(num_heads, int) else list(num_heads)

    def widths(multiple: int) -> int | list[int]:
        """Widths with `multiple` fields for each head of the first stage, the others in proportion."""
        scale = multiple * heads[0] / stages[0]
        scaled = [max(head, round(stage * scale / head) * head) for stage, head in zip(stages, heads, strict=True)]
        return scaled[0] if isinstance(dims, int) else scaled

    def count(multiple: int) -> int:
        return count_parameters(build(widths(multiple)))

    low, least = _narrowest(count, stages[0] // heads[0])
    if least > budget:
        raise ValueError(f"no width fits {budget:,} parameters: the narrowest, dims={widths(low)}, has {least:,}")
    high = 2 * low
    while count(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= budget else (low, middle)
    return widths(low), count(low)


def _narrowest(count: Callable[[int], int], known: int) -> tuple[int, int]:
    """The smallest multiple that a model can be built with, at most one that is `known` to work, and its count."""
    for multiple in range(1, known):
        try:
            return multiple, count(multiple)
        except ValueError:  # too narrow for what the model has to put into a field
            continue
    return max(1, known), count(max(1, known))
