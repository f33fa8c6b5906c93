import pytest
import torch

from revit.filters import centre_function, check_filters, kernel_grid, num_functions, plane_functions, ring_profile
from revit.groups import Group
from revit.nn import LiftingConv


@pytest.mark.parametrize(("kernel_size", "count"), [(1, 1), (3, 6), (5, 11), (7, 18), (9, 31), (11, 46)])
def test_steerable_has_the_released_number_of_functions(kernel_size, count):
    assert num_functions("steerable", kernel_size) == count
    assert sum(1 + 2 * highest for _, _, highest in ring_profile(kernel_size)) == count


def test_steerable_rings_are_the_released_ones():
    assert ring_profile(1) == [(0.0, 0.005, 0)]
    assert ring_profile(3) == [(0.0, 0.005, 0), (1.0, 0.4, 2)]
    assert ring_profile(7) == [(0.0, 0.005, 0), (1.0, 0.6, 2), (2.0, 0.6, 3), (3.0, 0.4, 2)]


@pytest.mark.parametrize("kernel_size", range(1, 12))
@pytest.mark.parametrize("filters", ["steerable", "rbf"])
def test_functions_are_normalised_and_independent(filters, kernel_size):
    """Dead or repeated functions would be parameters that do nothing."""
    values = plane_functions(filters, kernel_size)(kernel_grid(kernel_size)).flatten(0, 1)  # [K*K, P]
    torch.testing.assert_close(values.norm(dim=0), torch.ones(values.shape[1], dtype=torch.float64))
    assert values.shape[1] == num_functions(filters, kernel_size) <= kernel_size**2
    assert torch.linalg.matrix_rank(values, rtol=1e-6) == values.shape[1]


def test_steerable_is_closed_under_turning():
    """Turning a circular harmonic gives a combination of the same harmonics, for every angle."""
    functions, grid = plane_functions("steerable", 7), kernel_grid(7)
    upright = functions(grid).flatten(0, 1)
    for angle in (0.1, 0.7853, 2.0):
        rotation = torch.tensor(
            [[torch.cos(torch.tensor(angle)), -torch.sin(torch.tensor(angle))],
             [torch.sin(torch.tensor(angle)), torch.cos(torch.tensor(angle))]], dtype=torch.float64)  # fmt: skip
        turned = functions(grid @ rotation).flatten(0, 1)
        solution = torch.linalg.lstsq(upright, turned).solution
        torch.testing.assert_close(upright @ solution, turned, rtol=0, atol=1e-6)


def test_grid_is_centred_with_y_up():
    assert kernel_grid(3)[0, 2].tolist() == [1.0, 1.0]
    assert kernel_grid(4)[0, 0].tolist() == [-1.5, 1.5]


@pytest.mark.parametrize("filters", ["free", "steerable", "rbf", "interpolate"])
def test_centre_function_is_largest_at_the_centre(filters):
    layer = LiftingConv("p4", 1, 1, 5, padding=2, filters=filters)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight.view(-1)[centre_function(filters, 5)] = 1
    bank = layer.filters().abs()
    assert bank[0, 0].argmax() == 12
    with pytest.raises(ValueError, match="size 4 has no centre pixel"):
        centre_function(filters, 4)


def test_choice_of_filters():
    p4, p8 = Group.parse("p4"), Group.parse("p8")
    assert check_filters("auto", p4, 3) == "free"
    assert check_filters("auto", p8, 3) == "rbf"
    assert check_filters("auto", p8, 1) == "free"
    with pytest.raises(ValueError, match="unknown filters 'bessel'; choose auto, free, steerable"):
        check_filters("bessel", p4, 3)
    with pytest.raises(ValueError, match=r"p8 has 45 degree steps; use filters='rbf'"):
        check_filters("free", p8, 3)
