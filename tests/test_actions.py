import math

import pytest
import torch

from revit.actions import act_on_features, act_on_plane, kernel_bank, turn_index, turn_table
from revit.filters import FILTERS, kernel_grid, num_functions, plane_functions
from revit.groups import Group


def bank_of(group, weight, kernel_size, filters, lifting):
    table = turn_table(Group.parse(group), kernel_size, filters)
    return kernel_bank(weight, table.basis, turn_index(table, lifting=lifting))


def test_action_on_the_plane_is_rot90_and_flip():
    x = torch.arange(12).view(3, 4)
    for element in range(8):
        r, mirrored = element % 4, element >= 4
        expected = torch.rot90(x.flip(-1) if mirrored else x, r, (-2, -1))
        assert torch.equal(act_on_plane(x, "p4m", element), expected)


def test_action_moves_points_by_the_group_matrix():
    """A single bright pixel at x must move to g x: the definition (T_g f)(x) = f(g^-1 x), against the matrices."""
    group, size = Group.parse("p4m"), 5
    for element in range(group.order):
        image = torch.zeros(size, size)
        image[0, 3] = 1  # x = +1, y = +2
        moved = group.matrix[element] @ torch.tensor([1.0, 2.0], dtype=torch.float64)
        row, column = int((size - 1) / 2 - moved[1]), int((size - 1) / 2 + moved[0])
        assert act_on_plane(image, group, element)[row, column] == 1


def test_action_homomorphism(exact_group):
    group = Group.parse(exact_group)
    x = torch.randn(2, 3, group.order, 5, 6)
    for a in range(group.order):
        for b in range(group.order):
            ab = int(group.product[a, b])
            plane = act_on_plane(act_on_plane(x, group, b), group, a)
            assert torch.equal(plane, act_on_plane(x, group, ab))
            features = act_on_features(act_on_features(x, group, b), group, a)
            assert torch.equal(features, act_on_features(x, group, ab))


def test_action_on_features_is_equation_11(exact_group):
    """(T_g F)(x, h) = F(g^-1 x, g^-1 h), written as a loop over h."""
    group = Group.parse(exact_group)
    x = torch.randn(2, 3, group.order, 4, 4)
    for g in range(group.order):
        turned = act_on_features(x, group, g)
        for h in range(group.order):
            source = int(group.product[group.inverse[g], h])
            assert torch.equal(turned[:, :, h], act_on_plane(x[:, :, source], group, g))


@pytest.mark.parametrize("name", ["p8", "p8m", "p12", "p6", "p3m"])
def test_other_angles_interpolate_and_keep_the_quarter_turns_exact(name):
    group = Group.parse(name)
    x = torch.randn(1, 1, 9, 9, dtype=torch.float64)
    for element in range(group.order):
        turned = act_on_plane(x, group, element)
        assert turned.shape == x.shape
        if group.is_exact_element(element):
            assert torch.equal(turned.flatten().sort().values, x.flatten().sort().values)
        quarter = group.rotations // 4
        if group.rotations % 4 == 0:
            next_quarter = int(group.product[quarter, element])
            assert torch.equal(act_on_plane(x, group, next_quarter), torch.rot90(turned, 1, (-2, -1)))


def test_interpolation_turns_counter_clockwise_by_the_right_angle():
    """A smooth blob at angle 0 must turn to angle 45 degrees, radius kept."""
    grid = kernel_grid(81)

    def blob(x, y):
        return torch.exp(-((grid[..., 0] - x) ** 2 + (grid[..., 1] - y) ** 2) / 72)

    for mode in ("bilinear", "bicubic"):
        turned = act_on_plane(blob(8, 0), "p8", 1, interpolation=mode)
        expected = blob(8 * math.cos(math.pi / 4), 8 * math.sin(math.pi / 4))
        assert (turned - expected).abs().max() < 0.01  # the bound of bilinear interpolation, (f_xx + f_yy) / 8 = 0.007
    with pytest.raises(ValueError, match="unknown interpolation 'cubic'; choose bilinear"):
        act_on_plane(grid[..., 0], "p8", 1, interpolation="cubic")


def test_feature_maps_of_another_group_are_refused():
    with pytest.raises(ValueError, match=r"a feature map on p4 is \[..., 4, H, W\], got shape \[2, 3, 8, 5, 5\]"):
        act_on_features(torch.zeros(2, 3, 8, 5, 5), "p4", 1)


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("filters", FILTERS)
def test_kernel_constraint(exact_group, filters, kernel_size):
    """E[:, ug, :, uh] = T_u E[:, g, :, h] for all u, g, h, to the bit: what makes the convolution equivariant."""
    group = Group.parse(exact_group)
    weight = torch.randn(3, 2, group.order, num_functions(filters, kernel_size), dtype=torch.float64)
    bank = bank_of(group, weight, kernel_size, filters, False).unflatten(-1, (kernel_size, kernel_size))
    lifting = bank_of(group, weight[:, :, 0], kernel_size, filters, True).unflatten(-1, (kernel_size, kernel_size))
    for u in range(group.order):
        moved = group.product[u]
        turned = act_on_plane(bank, group, u)
        assert torch.equal(bank[:, moved][:, :, :, moved], turned)
        assert torch.equal(lifting[:, moved], act_on_plane(lifting, group, u))


@pytest.mark.parametrize("name", ["p8", "p8m", "p12"])
@pytest.mark.parametrize("filters", ["steerable", "rbf", "interpolate"])
def test_the_quarter_turns_of_a_larger_group_are_exact(name, filters):
    group, size = Group.parse(name), 5
    weight = torch.randn(2, 2, group.order, num_functions(filters, size), dtype=torch.float64)
    bank = bank_of(group, weight, size, filters, False).unflatten(-1, (size, size))
    for u in group.elements_of("p4"):
        moved = group.product[u]
        assert torch.equal(bank[:, moved][:, :, :, moved], act_on_plane(bank, group, u))


@pytest.mark.parametrize("name", ["p4m", "p8", "p6", "p8m"])
@pytest.mark.parametrize("filters", ["steerable", "rbf"])
@pytest.mark.parametrize("kernel_size", [3, 4, 5])
def test_filters_are_evaluated_at_turned_coordinates(name, filters, kernel_size):
    """bank[o, g, i](x) = sum_p weight[p] psi_p(g^-1 x), with the group's own matrices."""
    group = Group.parse(name)
    weight = torch.randn(2, 3, num_functions(filters, kernel_size), dtype=torch.float64)
    bank = bank_of(group, weight, kernel_size, filters, True)
    functions = plane_functions(filters, kernel_size)
    for g in range(group.order):
        inverse = group.matrix[group.inverse[g]]
        points = kernel_grid(kernel_size) @ inverse.T
        expected = torch.einsum("yxp,oip->oiyx", functions(points), weight)
        torch.testing.assert_close(bank[:, g], expected.flatten(-2), rtol=0, atol=1e-12)


def test_free_filters_turn_like_images():
    weight = torch.randn(2, 3, 5, 5)
    bank = bank_of("p4m", weight.flatten(-2), 5, "free", True).unflatten(-1, (5, 5))
    for g in range(8):
        assert torch.equal(bank[:, g], act_on_plane(weight, "p4m", g))
