"""State dicts as the released code saves them, made from a model of ours: the same filters in other functions."""

import torch

from revit.actions import kernel_bank, turn_index, turn_table
from revit.models import create_model

BLOCK = {
    "attn.to_out": "attn.proj",
    "mlp.net.0": "mlp.fc1",
    "mlp.net.4": "mlp.fc2",
}
NORMS = {"norm1": "norm1", "norm2": "norm2", "mlp.net.1": "mlp.norm1", "mlp.net.5": "mlp.norm2"}
FLAT = {"dims": 4, "depths": 2, "num_heads": 2, "stride": 2, "kernel_size": 3, "in_chans": 2, "num_classes": 5}
WINDOWED = {
    "dims": (4, 6), "depths": (1, 2), "num_heads": (1, 2), "kernel_size": 3, "window_size": 3, "in_chans": 3, "num_classes": 5,
}  # fmt: skip


def make_model(group, *, windowed=False, dtype=torch.float64, **options):
    """A `_paper` model with statistics away from 0 and 1, in eval mode."""
    name, sizes = ("revit_hier_small_paper", WINDOWED) if windowed else ("revit_small_paper", FLAT)
    torch.manual_seed(0)
    model = create_model(name, group=group, strict=False, **{**sizes, **options}).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.4 * torch.rand(tensor.shape, generator=generator, dtype=dtype) - 0.2)
    return model.eval()


def released_state(model, *, evaluated=False, names="module."):
    """What the released model with the same function would save, in train or in eval mode, under DataParallel."""
    state, windowed, order = {}, len(model.stem) > 3, model.group.order

    def conv(theirs, weight, size, pair="('regular', 'regular')", lifting=False):
        coefficients, functions = _in_other_functions(weight, model.group, size, lifting)
        state[f"{theirs}.weights"] = coefficients.flatten()
        state[f"{theirs}._basisexpansion.block_expansion_{pair}.sampled_basis"] = functions
        if evaluated:
            bank = torch.einsum("oib,bghk->ogihk", coefficients, functions)
            state[f"{theirs}.filter"] = bank.reshape(len(weight) * order, -1, size, size)

    def norm(theirs, ours):
        state[f"{theirs}.indices_{order}"] = torch.tensor([0, order * len(ours.weight)])
        for name, value in ours.state_dict().items():
            state[f"{theirs}.batch_norm_[{order}].{name}"] = value

    stem = [f"stem.net.{i}" for i in (0, 1, 3, 4)] if windowed else ["lift.conv", "lift.bn"]
    image = "('irrep_0,0', 'regular')" if model.group.reflections and model.group.rotations > 1 else "('irrep_0', 'regular')"
    conv(stem[0], model.stem[0].conv.weight, 5, image, lifting=True)
    norm(stem[1], model.stem[1])
    if windowed:
        conv(stem[2], model.stem[3].conv.weight, 3)
        norm(stem[3], model.stem[4])
    for i, stage in enumerate(model.stages):
        for j, block in enumerate(stage.blocks):
            theirs = f"stages.{i}.blocks.{j}" if windowed else f"blocks.{j}"
            for name, weight in zip("qkv", block.attn.qkv.mix.weight.chunk(3), strict=True):
                conv(f"{theirs}.attn.to_{name}", weight, block.attn.qkv.mix.filters.kernel_size)
            for name, ours in BLOCK.items():
                conv(f"{theirs}.{name}", block.get_submodule(ours).weight, 1)
            for name, ours in NORMS.items():
                norm(f"{theirs}.{name}", block.get_submodule(ours))
            state[f"{theirs}.alpha1"], state[f"{theirs}.alpha2"] = block.scale1, block.scale2
        if i > 0:
            conv(f"stages.{i - 1}.downsample.conv", stage.down[0].conv.weight, 3)
            norm(f"stages.{i - 1}.downsample.bn", stage.down[1])
    state[f"head.pool.in_indices_{order}"] = state[f"head.pool.out_indices_{order}"] = torch.tensor([0, 1])
    parts = {"fc1": model.head.hidden[0], "bn1" if windowed else "bn": model.head.hidden[1], "fc2": model.head.fc}
    for name, part in parts.items():
        state |= {f"head.{name}.{key}": value for key, value in part.state_dict().items()}
    return {f"{names}{key}": value.detach().clone() for key, value in state.items()}


def _in_other_functions(weight, group, size, lifting):
    """Coefficients [O, I, B] and functions [B, G, G or 1, K*K]: the single filters of ours, mixed by a random rotation."""
    fields = weight.detach().double().flatten(2 if lifting else 3)  # [O, I, (G,) P]
    count = fields.shape[2:].numel()
    family = "steerable" if size > 1 else "free"
    table = turn_table(group, size, family)
    single = torch.eye(count, dtype=torch.float64).view(count, 1, *fields.shape[2:])
    bank = kernel_bank(single, table.basis, turn_index(table, lifting=lifting))  # [B, G, 1, (G,) K*K]
    functions = bank if lifting else bank.squeeze(2)
    rotation, _ = torch.linalg.qr(torch.randn(count, count, dtype=torch.float64))
    mixed = torch.tensordot(rotation, functions, dims=1)
    coefficients = fields.flatten(2) @ rotation.T
    return coefficients.to(weight.dtype), mixed.to(weight.dtype)
