"""The architecture of the released code, built with escnn: what the benchmarks and the parity tests compare with.

Same shapes and same function as `revit_small_paper`: lifting convolution, blocks of spatial attention with K x K
projections and a 1x1 MLP, group max pooling, two-layer classifier. escnn is only ever imported here and in parity tests.
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
    def __init__(self, fields: escnn.nn.FieldType, num_heads: int, kernel_size: int, dropout: float) -> None:
        super().__init__()
        same = {"kernel_size": kernel_size, "padding": kernel_size // 2, "bias": False}
        self.q, self.k, self.v = (escnn.nn.R2Conv(fields, fields, **same) for _ in range(3))
        self.out = escnn.nn.R2Conv(fields, fields, 1, bias=False)
        self.drop = escnn.nn.PointwiseDropout(fields, dropout)
        self.num_heads, self.attn_dropout = num_heads, dropout

    def forward(self, x: escnn.nn.GeometricTensor) -> escnn.nn.GeometricTensor:
        shape = x.tensor.shape

        def tokens(t: escnn.nn.GeometricTensor) -> Tensor:
            return t.tensor.view(shape[0], self.num_heads, -1, shape[2] * shape[3]).transpose(-2, -1).contiguous()

        rate = self.attn_dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(tokens(self.q(x)), tokens(self.k(x)), tokens(self.v(x)), dropout_p=rate)
        out = out.transpose(-2, -1).reshape(shape)
        return self.drop(self.out(escnn.nn.GeometricTensor(out, x.type)))


class Block(nn.Module):
    def __init__(self, fields: escnn.nn.FieldType, num_heads: int, kernel_size: int, dropout: float) -> None:
        super().__init__()
        hidden = escnn.nn.FieldType(fields.gspace, 4 * fields.representations)
        self.norm1, self.norm2 = escnn.nn.InnerBatchNorm(fields), escnn.nn.InnerBatchNorm(fields)
        self.attn = Attention(fields, num_heads, kernel_size, dropout)
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
        for module in self.modules():
            if isinstance(module, escnn.nn.R2Conv):
                escnn.nn.init.deltaorthonormal_init(module.weights.data, module.basisexpansion)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.lift(escnn.nn.GeometricTensor(x, self.image)))
        return self.head(self.pool(x).tensor.mean(dim=(2, 3)))
