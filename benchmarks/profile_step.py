"""Where the time of a training step goes, by kind of operation, for the models that `run.py` compares.

python benchmarks/profile_step.py [--steps 5] [--out FILE]
"""

from __future__ import annotations

from typing import Any

import torch
from contestants import SETTINGS
from measure import THREADS, Disturbance, options_of, write_measured
from report import human_seconds, table
from torch.profiler import ProfilerActivity, profile

MODELS = [("p4", "recommended"), ("p8", "recommended"), ("p16", "recommended"), ("p8", "ours"), ("p16", "ours")]
KINDS = {
    "convolutions": ("mkldnn_convolution", "convolution_backward", "ConvolutionBackward0"),
    "Fourier basis": ("fourier_transform",),
    "MLP in one go": ("_MLP",),
    "attention in one go": ("_Attention",),
    "attention": ("scaled_dot_product", "aten::bmm", "softmax"),
    "norms": ("batch_norm", "_BatchNorm", "layer_norm"),
}
"""Parts of the names of operations; all others are "the rest": sums, products, copies, dropout, ReLU, the optimizer."""


def shares(key: str, name: str, steps: int) -> dict[str, Any]:
    setting = SETTINGS[key]
    step = setting.step_task(setting.builder(name)())
    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            step()
    found = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for event in profiled.key_averages():
        kind = next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), "the rest")
        found[kind] += event.self_cpu_time_total / 1e6 / steps
    total = sum(found.values())
    return {"seconds": total, "shares": {kind: seconds / total for kind, seconds in found.items()}}


def main() -> None:
    options = options_of(__doc__, "profile_step.json", steps=5)
    torch.set_num_threads(THREADS)
    disturbance, rows = Disturbance(), {}
    for key, name in MODELS:
        rows[f"{key}, {name}"] = shares(key, name, options.steps)
    cells = []
    for model, row in rows.items():
        cells.append([model, human_seconds(row["seconds"]), *(f"{share:.0%}" for share in row["shares"].values())])
    print(table(["model", "step", *KINDS, "the rest"], cells))
    write_measured(f"profile_step.py --steps {options.steps}", disturbance, options.out, rows=rows)


if __name__ == "__main__":
    main()
