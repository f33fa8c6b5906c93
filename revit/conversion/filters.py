r"""Filters of escnn as filters of ours.

An escnn convolution between fields keeps coefficients `c[o, i, b]` and the functions that they weigh, sampled at the pixels,
`B_b[g, h]` of [K, K] (or `B_b[g]` for lifting). Its elements come in our order, its pixels row by row from the top left:

    E[o, g, i, h] = sum_b c[o, i, b] B_b[g, h].

Ours weigh circular harmonics, `E[o, g, i, h] = T_g sum_p W[o, i, g^-1 h, p] psi_p` (`revit.actions.kernel_bank`). Both span the
same filters, so each `B_b` has one expansion `W_b[r, p]`, which least squares over all g finds,

    minimise sum_g | B_b[g, g r] - sum_p W_b[r, p] T_g psi_p |^2,

and `W[o, i, r, p] = sum_b c[o, i, b] W_b[r, p]`. What is left over says whether the functions are those of the group at all.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from revit.actions import kernel_bank, turn_index, turn_table
from revit.filters import num_functions
from revit.groups import Group

FAMILY = "steerable"
LARGEST_LEFTOVER = 1e-4
"""Relative error of an expansion that counts as rounding: escnn samples in float32, which leaves about 1e-7."""


def fit_banks(banks: Tensor, group: Group) -> tuple[Tensor, float]:
    """Banks of any filters, [F, G, K, K] (lifting) or [F, G, G, K, K] -> weights [F, P] or [F, G, P] in float64, and the
    largest error that is left, relative to the largest value."""
    size = banks.shape[-1]
    banks = banks.double().flatten(-2)  # [F, G, (G,) K*K]
    matrix, inverse = _turned_functions(group, size)
    if banks.ndim == 4:
        elements = torch.arange(group.order)
        banks = banks[:, elements.unsqueeze(1), group.product].transpose(1, 2)  # [F, r, g, K*K], the column h = g r
    targets = banks.flatten(-2)  # [F, (G,) G*K*K]
    weights = targets @ inverse.T  # [F, (G,) P]
    scale = targets.abs().max().item()
    return weights, (targets - weights @ matrix.T).abs().max().item() / scale if scale else 0.0


def expand_coefficients(coefficients: Tensor, functions: Tensor) -> Tensor:
    """Coefficients [O, I, B] and sampled functions [B, G, (G,) K, K] -> the bank [O, G, I, (G,) K, K]."""
    bank = torch.tensordot(coefficients, functions.to(coefficients.dtype), dims=1)  # [O, I, G, (G,) K, K]
    return bank.transpose(1, 2)


@lru_cache
def _turned_functions(group: Group, kernel_size: int) -> tuple[Tensor, Tensor]:
    """`T_g psi_p` at the pixels, [G*K*K, P], which is the bank of the filters of one function each; and its pseudo-inverse."""
    count = num_functions(FAMILY, kernel_size)
    table = turn_table(group, kernel_size, FAMILY)
    single = torch.eye(count, dtype=torch.float64).unsqueeze(1)  # [P, 1, P]
    bank = kernel_bank(single, table.basis, turn_index(table, lifting=True))  # [P, G, 1, K*K]
    matrix = bank.flatten(1).T  # [G*K*K, P]
    return matrix, torch.linalg.pinv(matrix)
