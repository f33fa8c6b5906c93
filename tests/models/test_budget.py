"""Widths for a budget: the largest that fits, whole heads, all stages in proportion."""

import pytest

from revit import create_model
from revit.models.budget import count_parameters, match_parameters


def flat(dims):
    return create_model("revit_tiny", group="p4", in_chans=1, dims=dims, depths=1, num_heads=2)


@pytest.mark.parametrize("budget", [3_000, 20_000, 97_704])
def test_flat_models(budget):
    width, count = match_parameters(flat, 16, 2, budget)
    assert width % 2 == 0 and count == count_parameters(flat(width)) <= budget < count_parameters(flat(width + 2))


def test_stages_keep_their_proportion_and_their_heads():
    def build(dims):
        return create_model("revit_hier_tiny", group="z2", num_classes=10, dims=dims, num_heads=(1, 2, 4, 8))

    widths, count = match_parameters(build, (12, 24, 48, 96), (1, 2, 4, 8), 200_000)
    assert count == count_parameters(build(widths)) <= 200_000
    assert all(width % heads == 0 for width, heads in zip(widths, (1, 2, 4, 8), strict=True))
    assert widths[3] == 8 * widths[0]


def test_models_that_cannot_be_narrow():
    """The keys of G-SA have three parts: six fields are the least, in steps of two."""

    def build(dims):
        return create_model("gsa_rotmnist", group="p4", dims=dims, num_heads=1)

    assert match_parameters(build, 20, 2, 44_500)[0] % 2 == 0
    with pytest.raises(ValueError, match="no width fits 100 parameters: the narrowest, dims=6, has"):
        match_parameters(build, 20, 2, 100)


def test_a_budget_that_nothing_fits():
    with pytest.raises(ValueError, match=r"no width fits 100 parameters: the narrowest, dims=2, has [\d,]+"):
        match_parameters(flat, 16, 2, 100)
