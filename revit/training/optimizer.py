"""AdamW and Muon, and their state by the names of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from revit.training.recipe import TrainOptions
from revit.training.sharding import shared_like, whole

PREFIX = "optimizer/"
ADAM_STEP = 0.2
"""The root mean square of a usual step of AdamW, in learning rates (Liu et al. 2025)."""


def make_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """The optimiser of a recipe, with weight decay on matrices and filters; norms, biases and scales are left alone."""
    spared = getattr(model, "no_weight_decay", set[str])()
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (others if parameter.ndim <= 1 or name in spared else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if options.optimizer != "adamw":
        classifier = {id(parameter) for parameter in getattr(model, "get_classifier", nn.Identity)().parameters()}
        hidden = [parameter for parameter in decayed if id(parameter) not in classifier]
        groups[0]["params"] = [parameter for parameter in decayed if id(parameter) in classifier]
        groups.append({"params": hidden, "weight_decay": options.weight_decay, "orthogonal": True})
    groups = [group for group in groups if group["params"]]
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr)
    return Muon(groups, lr=options.lr, blocks=_blocks_of(model) if options.optimizer == "group_muon" else {})


ChangeBlocks = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor | None]
"""Changes the matrices that a weight is made of, and gives the weight that they make then; None if it has none."""


def _blocks_of(model: nn.Module) -> dict[Tensor, ChangeBlocks]:
    """The weights of group convolutions, which are block diagonal in the basis of their group (`TurnedFilters`)."""
    return {module.weight: module.change_blocks for module in model.modules() if hasattr(module, "change_blocks")}  # type: ignore[misc]


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal for the matrices of groups with `orthogonal` (Jordan et al. 2024), AdamW for the others.

    A weight [O, ...] is a matrix of O rows. Its step is the nearest (semi-)orthogonal matrix to the momentum: all directions
    move alike, not only those with large gradients. It is scaled to the size of a step of AdamW (Liu et al. 2025), so one
    learning rate and one weight decay serve for both.

    A group convolution is not the map that its weight is as a matrix: each number of it acts at every element. Weights with
    `blocks` take the nearest step that is orthogonal as a map on the group. That map is block diagonal in the Fourier basis of
    the group, so its blocks are made orthogonal one by one.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, blocks: Mapping[Tensor, ChangeBlocks] | None = None) -> None:
        self.blocks = blocks or {}
        defaults = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "orthogonal": False}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            update = self._orthogonal if group["orthogonal"] else self._adam
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    update(parameter, parameter.grad, group)

    def _orthogonal(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        momentum = self._state(parameter, "exp_avg")
        momentum.lerp_(grad, 1 - group["betas"][0])
        ahead = grad.lerp(momentum, group["betas"][0])  # Nesterov's
        change, rank = self.blocks.get(parameter), min(len(grad), grad[0].numel())
        step = None if change is None else change(ahead, orthogonalise)
        if step is None:
            step = orthogonalise(ahead.flatten(1)).view_as(parameter)
        else:
            rank = min(len(grad), grad[0].numel() // grad.shape[2])  # fields: elements are turned copies
        parameter.add_(step, alpha=-group["lr"] * ADAM_STEP * (grad.numel() / rank) ** 0.5)

    def _adam(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        (beta1, beta2), state = group["betas"], self.state[parameter]
        mean, square = self._state(parameter, "exp_avg"), self._state(parameter, "exp_avg_sq")
        step = state["step"] = state.get("step", torch.zeros(())) + 1
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        count = step.item()
        scale = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
        parameter.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**count))

    def _state(self, parameter: Tensor, key: str) -> Tensor:
        state = self.state[parameter]
        if key not in state:
            state[key] = torch.zeros_like(parameter)
        found: Tensor = state[key]
        return found


def orthogonalise(matrix: Tensor) -> Tensor:
    """About the nearest matrix [..., M, N] with orthonormal rows, or columns if these are fewer: singular values near 1.

    Five steps of a Newton-Schulz iteration with the coefficients of Jordan et al. 2024, which bring all singular values into
    [0.7, 1.2] and not to 1, which a step does not need.
    """
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix if wide else matrix.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * (gram @ gram) - 4.7750 * gram) @ x
    return x if wide else x.mT


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The state as whole tensors by name: "optimizer/head.fc.weight/exp_avg", ...

    Sorted, since all processes must gather the parts of the same tensor, and a state that was loaded has any order.
    """
    return {
        f"{PREFIX}{name}/{key}": whole(value)
        for name, parameter in model.named_parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
    }


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for name, key, value in _entries(tensors):
        parameter = parameters[name]
        if key != "step" and value.shape != parameter.shape:
            raise RuntimeError(f"optimiser state of {name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
        optimizer.state[parameter][key] = value.clone() if key == "step" else shared_like(value, parameter)


def _entries(tensors: dict[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    for path, value in tensors.items():
        if path.startswith(PREFIX):
            name, key = path.removeprefix(PREFIX).rsplit("/", 1)
            yield name, key, value
