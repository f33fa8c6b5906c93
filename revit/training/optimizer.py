"""AdamW, and its state by the names of the parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from revit.training.recipe import TrainOptions
from revit.training.sharding import shared_like, whole

PREFIX = "optimizer/"


def make_optimizer(model: nn.Module, options: TrainOptions) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and filters; norms, biases and scales are left alone."""
    spared = getattr(model, "no_weight_decay", set[str])()
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (others if parameter.ndim <= 1 or name in spared else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=options.lr)


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
