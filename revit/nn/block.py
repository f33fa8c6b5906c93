"""The transformer block: attention and a 1x1 group MLP, each behind a norm and on a learnable residual branch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from revit.groups import Group
from revit.nn import fourier_mlp
from revit.nn.algorithm import Chain
from revit.nn.attention import GroupConvAttention
from revit.nn.convolution import GroupLinear, check_features
from revit.nn.dropout import DropPath, make_dropout
from revit.nn.normalization import FieldBatchNorm, FieldLayerNorm, KeptStatistics, make_norm


class GroupMLP(nn.Module):
    """Two 1x1 group convolutions, C -> ratio*C -> C, each with a norm, ReLU between: [B, C, G, H, W] -> same shape.

    The hidden map is the largest of a block. Training keeps it once, before its norm; what the second convolution has seen is
    computed again in the backward pass, which takes a few percent of a step and saves a fifth of its memory.
    """

    def __init__(
        self, group: Group | str, channels: int, *, ratio: float = 4, norm: str = "batch", dropout: float = 0.0,
        elementwise_dropout: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = int(channels * ratio)
        if hidden < 1:
            raise ValueError(f"mlp_ratio={ratio!r} leaves no hidden field of {channels}; choose at least {1 / channels:g}")
        self.fc1 = GroupLinear(group, channels, hidden, bias=False)
        self.norm1 = make_norm(norm, hidden)
        self.act = nn.ReLU(inplace=True)
        self.drop1 = make_dropout(dropout, elementwise=elementwise_dropout, inplace=True)
        self.fc2 = GroupLinear(group, hidden, channels, bias=False)
        self.norm2 = make_norm(norm, channels)
        self.drop2 = make_dropout(dropout, elementwise=elementwise_dropout, inplace=True)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """`scale`, a number, multiplies the result: the last norm takes it."""
        norm, scaled = self.norm1, () if scale is None else (scale,)
        if isinstance(norm, FieldBatchNorm) and self._goes_in_parts(x, norm):
            return self.drop2(self.norm2(self._run_in_parts(x, norm), *scaled))
        x = self.fc1(x)
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            weights = self.fc2.expand(x)  # here, for it would be done twice below
            x = run_checkpointed(lambda hidden: self.fc2.apply_expanded(self._activate(hidden), weights), x, [self.norm1])
        else:
            x = self.fc2(self._activate(x))
        return self.drop2(self.norm2(x, *scaled))

    def _goes_in_parts(self, x: Tensor, norm: FieldBatchNorm) -> bool:
        """Whether both maps are in the Fourier basis, in training, with nothing between them but what `fourier_mlp` does."""
        plain = isinstance(self.drop1, nn.Identity | nn.Dropout3d) and norm.is_plain_for(x)
        if not plain or not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        check_features(x, self.fc1.in_channels, self.fc1.group)
        return self.chain.is_fourier_for(x)

    @property
    def chain(self) -> Chain:
        return Chain(self.fc1, self.fc2)

    @property
    def takes_scale(self) -> bool:
        """Not if the last norm was folded into the layer before it."""
        return isinstance(self.norm2, FieldBatchNorm | FieldLayerNorm)

    def extra_repr(self) -> str:
        return str(self.chain)

    def _run_in_parts(self, x: Tensor, norm: FieldBatchNorm) -> Tensor:
        keep = self.drop1(x.new_ones(len(x), norm.num_features, 1, 1, 1)).flatten(1)  # [B, C]
        first, second = self.fc1.filters.blocks(), self.fc2.filters.blocks()
        out, mean, variance = fourier_mlp.mlp(x, first, second, norm.weight, norm.bias, keep, norm.eps, self.fc1.group)
        norm.remember(mean, variance, x.numel() // x.shape[1])
        return out

    def _activate(self, x: Tensor) -> Tensor:
        """ReLU and dropout commute: in this order both are done in place."""
        out: Tensor = self.act(self.drop1(self.norm1(x)))
        return out


class TransformerBlock(nn.Module):
    """`x = x + a1 attn(norm(x))`, then `x = x + a2 mlp(norm(x))`; the scales a1 and a2 are learnt and start at 1."""

    def __init__(self, channels: int, attn: nn.Module, mlp: nn.Module, *, norm: str = "batch", drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attn = make_norm(norm, channels), attn
        self.norm2, self.mlp = make_norm(norm, channels), mlp
        self.scale1 = nn.Parameter(torch.ones(1))
        self.scale2 = nn.Parameter(torch.ones(1))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(_scaled(self.attn, self.norm1(x), self.scale1))
        return x + self.drop_path(_scaled(self.mlp, self.norm2(x), self.scale2))


def _scaled(branch: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    """`scale * branch(x)`. In training its last layer takes the scale: no map is multiplied, and none is kept for the gradient
    of one number."""
    if branch.training and isinstance(branch, GroupConvAttention | GroupMLP) and branch.takes_scale:
        out: Tensor = branch(x, scale)
        return out
    return scale * branch(x)


def run_checkpointed(run: Callable[[Tensor], Tensor], x: Tensor, modules: Iterable[nn.Module]) -> Tensor:
    """Runs something and keeps only its input for the backward pass, which computes again what it needs of the rest.

    `modules` are those that are run: the second pass must not count the batch twice in the statistics of batch norms.
    """
    norms = [module for part in modules for module in part.modules() if isinstance(module, _BatchNorm)]
    kept = {norm: KeptStatistics() for norm in norms if isinstance(norm, FieldBatchNorm)}

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return _keep_statistics(kept, again=False), _compute_again(norms, kept)

    out: Tensor = checkpoint(run, x, use_reentrant=False, context_fn=contexts)
    return out


@contextmanager
def _compute_again(norms: list[_BatchNorm], kept: dict[FieldBatchNorm, KeptStatistics]) -> Iterator[None]:
    with _frozen_statistics(norms), _keep_statistics(kept, again=True):
        yield


@contextmanager
def _keep_statistics(kept: dict[FieldBatchNorm, KeptStatistics], *, again: bool) -> Iterator[None]:
    """Norms write down what they find, or read it `again`. A part of what is run may keep its own."""
    before = {norm: norm.kept for norm in kept}
    for norm, statistics in kept.items():
        statistics.again, norm.kept = again, statistics
    try:
        yield
    finally:
        for norm in kept:
            norm.kept = before[norm]


@contextmanager
def _frozen_statistics(norms: list[_BatchNorm]) -> Iterator[None]:
    counts = [None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone() for norm in norms]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in zip(norms, momenta, counts, strict=True):
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)  # not one less: parts that were computed again set it back themselves
