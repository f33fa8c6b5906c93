"""The architectures of the released code, built with escnn: what the benchmarks and the parity tests compare with.

Same shapes and same function as `revit_small_paper` and `revit_hier_small_paper`: lifting convolutions, blocks of spatial
attention with K x K projections (over the whole map, or in windows) and a 1x1 MLP, group max pooling, two-layer classifier.
Attributes have the names of the released code, so a state dict has its keys. escnn is imported here and in parity tests alone.
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
        self.to_q, self.to_k, self.to_v = (escnn.nn.R2Conv(fields, fields, **same) for _ in range(3))
        self.to_out = escnn.nn.R2Conv(fields, fields, 1, bias=False)
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
        out = F.scaled_dot_product_attention(tokens(self.to_q(x)), tokens(self.to_k(x)), tokens(self.to_v(x)), dropout_p=rate)
        out = out.view(batch, cut[3], cut[5], self.num_heads, h, w, cut[2]).permute(0, 3, 6, 1, 4, 2, 5)
        out = out.reshape(x.tensor.shape)
        return self.drop(self.to_out(escnn.nn.GeometricTensor(out, x.type)))


class MLP(nn.Module):
    def __init__(self, fields: escnn.nn.FieldType, dropout: float) -> None:
        super().__init__()
        hidden = escnn.nn.FieldType(fields.gspace, 4 * fields.representations)
        self.net = nn.Sequential(
            escnn.nn.R2Conv(fields, hidden, 1, bias=False),
            escnn.nn.InnerBatchNorm(hidden),
            escnn.nn.ReLU(hidden),
            escnn.nn.PointwiseDropout(hidden, dropout),
            escnn.nn.R2Conv(hidden, fields, 1, bias=False),
            escnn.nn.InnerBatchNorm(fields),
            escnn.nn.PointwiseDropout(fields, dropout),
        )

    def forward(self, x: escnn.nn.GeometricTensor) -> escnn.nn.GeometricTensor:
        return self.net(x)


class Block(nn.Module):
    def __init__(
        self, fields: escnn.nn.FieldType, num_heads: int, kernel_size: int, dropout: float, window: int | None = None
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = escnn.nn.InnerBatchNorm(fields), escnn.nn.InnerBatchNorm(fields)
        self.attn, self.mlp = Attention(fields, num_heads, kernel_size, dropout, window), MLP(fields, dropout)
        self.alpha1, self.alpha2 = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: escnn.nn.GeometricTensor) -> escnn.nn.GeometricTensor:
        x = x + self.alpha1 * self.attn(self.norm1(x))
        return x + self.alpha2 * self.mlp(self.norm2(x))


class ConvNormReLU(nn.Module):
    """The lifting layer of the flat model, and what lies between the stages of the windowed one."""

    def __init__(self, before: escnn.nn.FieldType, after: escnn.nn.FieldType, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.conv = escnn.nn.R2Conv(before, after, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)
        self.bn, self.act = escnn.nn.InnerBatchNorm(after), escnn.nn.ReLU(after)

    def forward(self, x: escnn.nn.GeometricTensor) -> escnn.nn.GeometricTensor:
        return self.act(self.bn(self.conv(x)))


class Head(nn.Module):
    """Max over the group, mean over space, two layers. The released models differ in what they call the norm."""

    def __init__(self, fields: escnn.nn.FieldType, hidden: int, num_classes: int, dropout: float, norm: str) -> None:
        super().__init__()
        self.pool, self.norm = escnn.nn.GroupPooling(fields), norm
        self.fc1, self.fc2 = nn.Linear(len(fields), hidden), nn.Linear(hidden, num_classes)
        self.add_module(norm, nn.BatchNorm1d(hidden))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: escnn.nn.GeometricTensor) -> Tensor:
        x = self.fc1(self.pool(x).tensor.mean(dim=(2, 3)))
        return self.fc2(self.drop(F.relu(self.get_submodule(self.norm)(x))))


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
        self.lift = ConvNormReLU(self.image, fields, 2 * stride + 1, stride)
        self.blocks = nn.Sequential(*(Block(fields, num_heads, kernel_size, dropout) for _ in range(depths)))
        self.head = Head(fields, dims // 2, num_classes, dropout, "bn")
        _start_orthogonal(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.lift(escnn.nn.GeometricTensor(x, self.image))))


class Stem(nn.Module):
    """Two strided layers, the first of them with half the fields."""

    def __init__(self, image: escnn.nn.FieldType, fields: escnn.nn.FieldType) -> None:
        super().__init__()
        half = regular_fields(fields.gspace, len(fields) // 2)
        layers = [ConvNormReLU(image, half, 5, 2), ConvNormReLU(half, fields, 3, 2)]
        self.net = nn.Sequential(*(part for layer in layers for part in (layer.conv, layer.bn, layer.act)))

    def forward(self, x: escnn.nn.GeometricTensor) -> escnn.nn.GeometricTensor:
        return self.net(x)


class Stage(nn.Module):
    """Blocks, then down-sampling (not after the last stage)."""

    def __init__(self, blocks: list[Block], downsample: ConvNormReLU | None) -> None:
        super().__init__()
        self.blocks, self.downsample = nn.Sequential(*blocks), downsample

    def forward(self, x: escnn.nn.GeometricTensor) -> escnn.nn.GeometricTensor:
        x = self.blocks(x)
        return x if self.downsample is None else self.downsample(x)


class HierarchicalReference(nn.Module):
    """The windowed model of the released code, for ImageNet: a stem of two strided layers, stages of doubling width."""

    def __init__(
        self, group: Group | str, *, in_chans: int, dims: tuple[int, ...], depths: tuple[int, ...], num_heads: tuple[int, ...],
        kernel_size: int, window: int, num_classes: int = 1000,
    ) -> None:  # fmt: skip
        super().__init__()
        gspace = gspace_of(group)
        self.image = escnn.nn.FieldType(gspace, in_chans * [gspace.trivial_repr])
        fields = [regular_fields(gspace, dim) for dim in dims]
        self.stem = Stem(self.image, fields[0])
        self.stages = nn.Sequential()
        for i, (depth, heads) in enumerate(zip(depths, num_heads, strict=True)):
            blocks = [Block(fields[i], heads, kernel_size, 0.0, window) for _ in range(depth)]
            last = i == len(dims) - 1
            self.stages.append(Stage(blocks, None if last else ConvNormReLU(fields[i], fields[i + 1], 3, 2)))
        self.head = Head(fields[-1], max(256, dims[-1] // 2), num_classes, 0.0, "bn1")
        _start_orthogonal(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(escnn.nn.GeometricTensor(x, self.image))))


def _start_orthogonal(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, escnn.nn.R2Conv):
            escnn.nn.init.deltaorthonormal_init(module.weights.data, module.basisexpansion)
