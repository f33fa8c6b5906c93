"""How fast could a training step of the recommended models be at all? Beside what it takes, and what the reference takes.

python benchmarks/limits.py [--rounds 5] [--out FILE]

A lower bound, part by part: the fewest products that are known for the layers (dense or in the Fourier basis of the group),
all three times (forward, gradients of maps and of weights), at the rate of one large matrix product; fused attention as torch
does it, measured alone; norms, ReLU, dropout and residual sums, each map read and written once in each direction, at the rate
of a large sum. Nothing for copies, changes of layout, building filters, the optimizer. Two threads. Without escnn the reference
is left out. As in `run.py` each has a process of its own; ours keeps freed memory, as `revit train` does, and "reference, kept
memory" shows what the reference would gain from that.
"""

from __future__ import annotations

from statistics import median

import torch
import torch.nn.functional as F
from contestants import KEPT_REFERENCE, REFERENCE, SETTINGS, Setting
from measure import THREADS, Disturbance, Server, interleave, options_of, write_measured
from report import human_seconds, table
from run import why_no_reference
from torch import nn

from revit.nn import GroupConv, GroupConvAttention, GroupLinear, GroupMLP, LiftingConv, TransformerBlock
from revit.nn.normalization import FieldBatchNorm

GROUPS = ("p4", "p8", "p4m", "p16")
SIDE = 2048
NUMBERS = 2**23


def machine_rates(rounds: int) -> dict[str, float]:
    """Products a second of a large matrix product, and bytes a second of a large sum: two read, one written."""
    a, b = torch.randn(2, SIDE, SIDE)
    x, y = torch.randn(2, NUMBERS)
    out = torch.empty(NUMBERS)

    def multiply() -> None:
        torch.mm(a, b)

    def add() -> None:
        torch.add(x, y, out=out)

    seconds = interleave({"products": multiply, "bytes": add}, rounds=rounds)
    return {"products": SIDE**3 / min(seconds["products"]), "bytes": 12 * NUMBERS / min(seconds["bytes"])}


def fewest_products(layer: nn.Module, positions: int) -> int:
    """For one image, by the cheaper algorithm."""
    if isinstance(layer, LiftingConv):
        return layer.multiply_adds(1, positions)
    if isinstance(layer, GroupConv | GroupLinear):
        work, groups = layer.algorithm.work, getattr(layer, "groups", 1)
        return positions * min(work.dense_products // groups, work.fourier_products if groups == 1 else work.dense_products)
    return 0


def passes(layer: nn.Module, order: int) -> int:
    """Numbers at each position that operations on single numbers go through, in one direction."""
    if isinstance(layer, FieldBatchNorm):
        return layer.num_features * order
    if isinstance(layer, GroupMLP):  # ReLU and its dropout, the dropout at the end
        return (2 * layer.fc1.out_channels + layer.fc2.out_channels) * order
    if isinstance(layer, TransformerBlock):  # two sums, the dropout of attention
        return 3 * layer.attn.channels * order  # type: ignore[operator]
    return 0


def attention_seconds(setting: Setting, model: nn.Module, side: int, rounds: int) -> float:
    """Fused attention of all blocks, both directions."""
    (layer, *others) = [module for module in model.modules() if isinstance(module, GroupConvAttention)]
    width = layer.channels // layer.num_heads * layer.group.order
    q, k, v = torch.randn(3, setting.batch, layer.num_heads, side**2, width).unbind()
    for x in (q, k, v):
        x.requires_grad_()

    def attend() -> None:
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    return (1 + len(others)) * min(interleave({"attention": attend}, rounds=rounds)["attention"])


def bound(key: str, rates: dict[str, float], rounds: int) -> dict[str, float]:
    setting = SETTINGS[key]
    model = setting.builder("recommended")()
    side, order = setting.image_size // 2, model.group.order  # type: ignore[union-attr]
    products = setting.batch * sum(fewest_products(layer, side**2) for layer in model.modules())
    numbers = setting.batch * side**2 * sum(passes(layer, order) for layer in model.modules())  # type: ignore[arg-type]
    return {
        "products": 3 * products / rates["products"],
        "attention": attention_seconds(setting, model, side, rounds),
        "single numbers": 2 * 2 * 4 * numbers / rates["bytes"],
    }


def main() -> None:
    options = options_of(__doc__, "limits.json", rounds=5)
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    disturbance, rates, rows, cells = Disturbance(), machine_rates(options.rounds), {}, []
    print(
        f"{2 * rates['products'] / 1e9:.0f} GFLOP/s in a large matrix product, {rates['bytes'] / 1e9:.1f} GB/s in a large sum"
    )
    names = ["recommended"] if why_no_reference() else ["recommended", REFERENCE, KEPT_REFERENCE]
    for key in GROUPS:
        parts = bound(key, rates, options.rounds)
        servers = {name: Server(name, key) for name in names}
        seconds = interleave(servers, rounds=max(2, options.rounds // 2), warmup=1, take=lambda server: server.seconds("step"))
        for server in servers.values():
            server.close()
        rows[key] = row = {"parts": parts, "bound": sum(parts.values()), **{name: median(seconds[name]) for name in names}}
        row["asked"] = SETTINGS[key].step_targets["recommended"]
        cells.append(
            [key, *(human_seconds(value) for value in (*parts.values(), row["bound"], *(row[name] for name in names)))]
        )
    print(table(["group", *next(iter(rows.values()))["parts"], "bound", *names], cells))
    write_measured(f"limits.py --rounds {options.rounds}", disturbance, options.out, rates=rates, rows=rows)


if __name__ == "__main__":
    main()
