"""What processes share. Fully sharded training (FSDP): each keeps its part of the weights, of their gradients and of the
optimiser's state.

Whatever leaves a step is whole: checkpoints, the averaged weights, and the copy of the model that is evaluated. So a run can go
on with another number of processes, or without sharding. Functions with "whole" in their names are called by all processes.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def sharded_parts(model: nn.Module) -> list[nn.Module]:
    """The parts whose weights are gathered one after another: the blocks of the model, if it has some."""
    lists = (getattr(module, "blocks", None) for module in model.modules())
    return [block for blocks in lists if isinstance(blocks, nn.ModuleList | nn.Sequential) for block in blocks]


def shard(model: nn.Module, device: torch.device, processes: int) -> None:
    """Leaves each process its part of every weight. What lies outside of the blocks is gathered at once."""
    mesh = init_device_mesh(device.type, (processes,))
    for part in sharded_parts(model):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each process may have a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in tensors.items()}


def shared_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor on the device and in the type of a parameter, shared among the processes as that is."""
    moved = tensor.to(parameter.device, parameter.dtype)
    if not isinstance(parameter, DTensor):
        return moved
    return distribute_tensor(moved, parameter.device_mesh, parameter.placements, src_data_rank=None)  # all have it: none sends


def load_whole(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """`load_state_dict` of whole tensors, for a model that may be sharded."""
    places = model.state_dict()
    model.load_state_dict({name: shared_like(t, places[name]) if name in places else t for name, t in tensors.items()})


def take_first(buffers: list[Tensor]) -> None:
    """Gives all processes the first one's values, such as statistics of batch norms, of which each saw other images."""
    for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
        chosen = [buffer for buffer in buffers if buffer.dtype == dtype]
        together = torch.cat([buffer.flatten() for buffer in chosen])  # one message for all
        distributed.broadcast(together, 0)
        for buffer, values in zip(chosen, together.split([buffer.numel() for buffer in chosen]), strict=True):
            buffer.copy_(values.view_as(buffer))
