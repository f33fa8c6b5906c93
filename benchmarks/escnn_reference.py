"""The architectures of the released code, built with escnn: what the benchmarks and the parity tests compare with.

Same shapes and same function as `revit_small_paper` and `revit_hier_small_paper`: lifting convolutions, blocks of spatial
attention with K x K projections (over the whole map, or in windows) and a 1x1 MLP, group max pooling, two-layer classifier.
escnn is only ever imported here and in parity tests.
"""

from __future__ import annotations

import escnn
import escnn.group._numerical
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revit.groups import Group

# Where scikit-learn is installed, its newer releases refuse the np.matrix that escnn 1.0.11 hands them: let escnn use numpy.
escnn.group._numerical.randomized_svd = None


def gspace_of(group: Group | str) -> escnn.gspaces.GSpace:
    """escnn's name for a group of ours."""
    group = Group.parse(group)
    if group.rotations == 1:
        return escnn.gspaces.flip2dOnR2() if group.reflections else escnn.gspaces.trivialOnR2()
    build = escnn.gspaces.flipRot2dOnR2 if group.reflections else escnn.gspaces.rot2dOnR2
    return build(N=group.rotations)


def regular_fields(gspace: escnn.gspaces.GSpace, channels: int) -> escnn.nn.FieldType:
    return escnn.nn.FieldType(gspace, channels * [gspace.regular_repr])


class Attention(nn.Module):
    """Over the whole map, or in windows that divide it."""

    def __init__(
        self, fields: escnn.nn.FieldType, num_heads: int, kernel_size: int, dropout: float, window: int | None = None
    ) -> None:
        super().__init__()
        same = {"kernel_size": kernel_size, "padding": kernel_size // 2, "bias": False}
        self.q, self.k, self.v = (escnn.nn.R2Conv(fields, fields, **same) for _ in range(3))
        self.out = escnn.nn.R2Conv(fields, fields, 1, bias=False)
        self.drop = escnn.nn.PointwiseDropout(fields, dropout)
        self.num_heads, self.attn_dropout, self.window = num_heads, dropout, window

    def forward(self, x: escnn.nn.GeometricTensor) -> escnn.nn.GeometricTensor:
        batch, channels, height, width = x.tensor.shape
        h, w = (height, width) if self.window is None else (self.window, self.window)
        cut = (batch, self.num_heads, channels // self.num_heads, height // h, h, width // w, w)

        def tokens(t: escnn.nn.GeometricTensor) -> Tensor:
            windows = t.tensor.view(cut).permute(0, 3, 5, 1, 4, 6, 2)  # [B, rows, columns, heads, h, w, vector]
            return windows.reshape(-1, self.num_heads, h * w, cut[2])

        rate = self.attn_dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(tokens(self.q(x)), tokens(self.k(x)), tokens(self.v(x)), dropout_p=rate)
        out = out.view(batch, cut[3], cut[5], self.num_heads, h, w, cut[2]).permute(0, 3, 6, 1, 4, 2, 5)
        out = out.reshape(x.tensor.shape)
        return self.drop(self.out(escnn.nn.GeometricTensor(out, x.type)))


class Block(nn.Module):
    def __init__(
        self, fields: escnn.nn.FieldType, num_heads: int, kernel_size: int, dropout: float, window: int | None = None
    ) -> None:
        super().__init__()
        hidden = escnn.nn.FieldType(fields.gspace, 4 * fields.representations)
        self.norm1, self.norm2 = escnn.nn.InnerBatchNorm(fields), escnn.nn.InnerBatchNorm(fields)
        self.attn = Attention(fields, num_heads, kernel_size, dropout, window)
        self.mlp = nn.Sequential(
            escnn.nn.R2Conv(fields, hidden, 1, bias=False),
            escnn.nn.InnerBatchNorm(hidden),
            escnn.nn.ReLU(hidden),
            escnn.nn.PointwiseDropout(hidden, dropout),
            escnn.nn.R2Conv(hidden, fields, 1, bias=False),
            escnn.nn.InnerBatchNorm(fields),
            escnn.nn.PointwiseDropout(fields, dropout),
        )
        self.scale1, self.scale2 = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: escnn.nn.GeometricTensor) -> escnn.nn.GeometricTensor:
        x = x + self.scale1 * self.attn(self.norm1(x))
        return x + self.scale2 * self.mlp(self.norm2(x))


class Reference(nn.Module):
    """The flat model of the released code, at its defaults (element-wise and attention dropout 0.1)."""

    def __init__(
        self, group: Group | str, *, in_chans: int, dims: int, depths: int, num_heads: int, kernel_size: int, stride: int,
        num_classes: int = 10, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        gspace = gspace_of(group)
        self.image = escnn.nn.FieldType(gspace, in_chans * [gspace.trivial_repr])
        fields = regular_fields(gspace, dims)
        lift = escnn.nn.R2Conv(self.image, fields, 2 * stride + 1, stride=stride, padding=stride, bias=False)
        self.lift = nn.Sequential(lift, escnn.nn.InnerBatchNorm(fields), escnn.nn.ReLU(fields))
        self.blocks = nn.Sequential(*(Block(fields, num_heads, kernel_size, dropout) for _ in range(depths)))
        self.pool = escnn.nn.GroupPooling(fields)
        hidden = dims // 2
        self.head = nn.Sequential(
            nn.Linear(dims, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, num_classes)
        )
        _start_orthogonal(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.lift(escnn.nn.GeometricTensor(x, self.image)))
        return self.head(self.pool(x).tensor.mean(dim=(2, 3)))


class HierarchicalReference(nn.Module):
    """The windowed model of the released code, for ImageNet: a stem of two strided layers, stages of doubling width."""

    def __init__(
        self, group: Group | str, *, in_chans: int, dims: tuple[int, ...], depths: tuple[int, ...], num_heads: tuple[int, ...],
        kernel_size: int, window: int, num_classes: int = 1000,
    ) -> None:  # fmt: skip
        super().__init__()
        gspace = gspace_of(group)
        self.image = escnn.nn.FieldType(gspace, in_chans * [gspace.trivial_repr])

        def shrink(before: escnn.nn.FieldType, channels: int, size: int) -> list[nn.Module]:
            fields = regular_fields(gspace, channels)
            conv = escnn.nn.R2Conv(before, fields, size, stride=2, padding=size // 2, bias=False)
            return [conv, escnn.nn.InnerBatchNorm(fields), escnn.nn.ReLU(fields)]

        layers = [*shrink(self.image, dims[0] // 2, 5), *shrink(regular_fields(gspace, dims[0] // 2), dims[0], 3)]
        for i, (dim, depth, heads) in enumerate(zip(dims, depths, num_heads, strict=True)):
            if i > 0:
                layers += shrink(regular_fields(gspace, dims[i - 1]), dim, 3)
            layers += [Block(regular_fields(gspace, dim), heads, kernel_size, 0.0, window) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.pool = escnn.nn.GroupPooling(regular_fields(gspace, dims[-1]))
        hidden = max(256, dims[-1] // 2)
        self.head = nn.Sequential(
            nn.Linear(dims[-1], hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        )
        _start_orthogonal(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(escnn.nn.GeometricTensor(x, self.image))
        return self.head(self.pool(x).tensor.mean(dim=(2, 3)))


def _start_orthogonal(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, escnn.nn.R2Conv):
            escnn.nn.init.deltaorthonormal_init(module.weights.data, module.basisexpansion)
