import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

from revit.actions import act_on_plane
from revit.exactness import EquivarianceError, Sampling, StrideGuard, Tiling, WindowGuard, moved_axes, tile_axis
from revit.groups import Group


def test_stride_rule_bruteforce():
    """The rule decides exactly: a symmetric filter's output commutes with all eight elements iff the rule holds."""
    checked, elements = 0, range(8)
    for size, k, s, p, d in itertools.product(range(5, 18), range(1, 8), range(1, 5), range(4), (1, 2)):
        sampling = Sampling(k, s, p, d)
        if size + 2 * p < sampling.extent:
            continue
        w = torch.randn(1, 1, k, k, dtype=torch.float64)
        w = sum(act_on_plane(w, "p4m", g) for g in elements)  # commutes with p4m
        x = torch.randn(1, size, size, dtype=torch.float64)
        turned = torch.stack([act_on_plane(x, "p4m", g) for g in elements])
        out = F.conv2d(turned, w, stride=s, padding=p, dilation=d)
        assert out.shape[-1] == sampling.output_size(size)
        expected = torch.stack([act_on_plane(out[0], "p4m", g) for g in elements])
        exact = torch.allclose(out, expected, rtol=0, atol=1e-9)
        assert exact == (sampling.leftover(size) == 0), (size, sampling)
        checked += 1
    assert checked > 2400


@pytest.mark.parametrize("pool", [F.avg_pool2d, F.max_pool2d])
def test_the_rule_decides_for_pooling_too(pool):
    for size in range(6, 12):
        x = torch.randn(1, 1, size, size, dtype=torch.float64)
        for k, s in ((2, 2), (3, 2), (3, 3), (2, 3)):
            same = torch.allclose(pool(torch.rot90(x, 1, (2, 3)), k, s), torch.rot90(pool(x, k, s), 1, (2, 3)), atol=1e-12)
            assert same == (Sampling(k, s).leftover(size) == 0)


def test_nearest_sizes_are_exact_and_nearest():
    for sampling in (Sampling(3, 2, 1), Sampling(4, 2, 1), Sampling(5, 4, 2), Sampling(7, 3), Sampling(3, 3, 0, 2)):
        for size in range(8, 40):
            if sampling.leftover(size) == 0:
                continue
            near = sampling.exact_sizes_near(size)
            exact = [s for s in range(sampling.extent, 60) if sampling.leftover(s) == 0]
            assert near[-1] == min(s for s in exact if s > size)
            if len(near) == 2:
                assert near[0] == max(s for s in exact if s < size)


def test_strict_raises():
    guard = StrideGuard(Group.parse("p4"), Sampling(3, 2, 1), strict=True)
    assert guard.output_size(29, 31) == (15, 16)
    message = r"kernel_size=3, stride=2, padding=1 is not p4 equivariant at height 28: .* nearest exact sizes: 27 and 29"
    with pytest.raises(EquivarianceError, match=message) as error:
        guard.output_size(28, 29)
    assert "kernel_size=4, padding=1 is exact" in str(error.value)
    with pytest.raises(EquivarianceError, match="at width 30"):
        guard.output_size(29, 30)
    assert issubclass(EquivarianceError, ValueError)


def test_without_strict_it_warns_once():
    guard = StrideGuard(Group.parse("p4"), Sampling(3, 2, 1), strict=False)
    with pytest.warns(UserWarning, match="nearest exact sizes: 27 and 29"):
        assert guard.output_size(28, 28) == (14, 14)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guard.output_size(28, 28)


def test_only_axes_that_the_group_moves_are_checked():
    assert [moved_axes(Group.parse(g)) for g in ("z2", "z2m")] == [(), ("width",)]
    assert moved_axes(Group.parse("p2")) == moved_axes(Group.parse("p8m")) == ("height", "width")
    assert StrideGuard(Group.parse("z2"), Sampling(3, 2, 1), strict=True).output_size(28, 28) == (14, 14)
    z2m = StrideGuard(Group.parse("z2m"), Sampling(3, 2, 1), strict=True)
    assert z2m.output_size(28, 29) == (14, 15)
    with pytest.raises(EquivarianceError, match="at width 28"):
        z2m.output_size(29, 28)


@pytest.mark.parametrize("options", [(0,), (3, 0), (3, 1, -1), (3, 1, 0, 0), (3.0,), (True,)])
def test_impossible_samplings_are_refused(options):
    with pytest.raises(ValueError, match="must be a whole number >="):
        Sampling(*options)


def test_maps_below_the_kernel_are_refused():
    with pytest.raises(ValueError, match="size 2 is below the minimum 5"):
        Sampling(5).output_size(2)


def test_windows_are_symmetric_wherever_they_can_be():
    for window, size, shifted in itertools.product(range(1, 10), range(1, 40), (False, True)):
        if shifted and window % 2:
            continue
        tiling = tile_axis(size, window, shifted=shifted)
        assert (size + tiling.before + tiling.after) % tiling.side == 0
        assert max(tiling.before, tiling.after) < window  # so that no window is all padding
        possible = window % 2 == 1 or size % 2 == 0 or (size <= window and not shifted)
        assert (tiling.before == tiling.after) == possible


def test_windows_that_cannot_be_symmetric():
    guard = WindowGuard(Group.parse("p4"), 6, shifted=False, strict=True)
    message = "even windows of 6 cannot tile an odd width 13 .* nearest exact: width 12 or 14, or windows of 5 or 7"
    with pytest.raises(EquivarianceError, match=message):
        guard.tilings(12, 13)
    assert WindowGuard(Group.parse("z2"), 6, shifted=False, strict=True).tilings(13, 13)[0] == Tiling(6, 2, 3)
    assert WindowGuard(Group.parse("z2m"), 6, shifted=False, strict=True).tilings(13, 12)[1] == Tiling(6, 0, 0)
    with pytest.raises(EquivarianceError, match="windows of 7 cannot be shifted by half a window; .* 6 or 8"):
        WindowGuard(Group.parse("p4"), 7, shifted=True, strict=False)
