"""What answers that are identical to the last bit cost: a deployed model, and the same in bit-exact mode.

python benchmarks/bit_exact.py [--rounds 5] [--threads 2] [--out FILE]

`bit_exact()` runs batches as they come, or one image after the other; `Canonical`, the average over the group, is another way
to the same promise. Each row also counts the images whose answers for all turns and mirrors have the same bits.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from measure import THREADS, Disturbance, interleave, median_ratio, options_of, origin, repeated, write_report
from report import human_seconds, table
from torch import Tensor, nn

from revit import act_on_plane
from revit.models import create_model
from revit.nn import Canonical

SETTINGS: dict[str, dict[str, Any]] = {
    "revit_small p4, 28 px": {"name": "revit_small", "group": "p4", "in_chans": 1, "size": 28, "batches": (1, 64)},
    "revit_small p4m, 28 px": {"name": "revit_small", "group": "p4m", "in_chans": 1, "size": 28, "batches": (1, 32)},
    "revit_hier_tiny p4m, 96 px": {"name": "revit_hier_tiny", "group": "p4m", "in_chans": 3, "size": 96, "batches": (1, 16)},
}
REPEATED = 5
"""Passes of a single image in one measurement."""
WAYS = ("deployed", "bit-exact", "one by one", "average over the group")


def ways(model: Any) -> dict[str, nn.Module]:
    plain = model.deploy()
    modules = (plain, model.bit_exact(), model.bit_exact(one_by_one=True), Canonical(plain, model.group))
    return dict(zip(WAYS, modules, strict=True))


def identical(run: nn.Module, x: Tensor, group: Any) -> int:
    """Images with the same bits under every element."""
    with torch.no_grad():
        upright = run(x)
        same = [(run(act_on_plane(x, group, element).contiguous()) == upright).all(1) for element in range(group.order)]
    return int(torch.stack(same).all(0).sum())


def main() -> None:
    options = options_of(__doc__, "bit_exact.json", rounds=5, threads=THREADS)
    torch.set_num_threads(options.threads)
    disturbance, tasks, rows = Disturbance(), {}, []
    for label, setting in SETTINGS.items():
        torch.manual_seed(0)
        model: Any = create_model(setting["name"], group=setting["group"], in_chans=setting["in_chans"], num_classes=10).eval()
        images = torch.randn(max(setting["batches"]), setting["in_chans"], setting["size"], setting["size"])
        runs = ways(model)
        for batch in setting["batches"]:
            x, times = images[:batch], REPEATED if batch == 1 else 1
            tasks |= {(label, batch, way): repeated(run, x, times) for way, run in runs.items()}
            same = {way: identical(run, x, model.group) for way, run in runs.items() if way in ("deployed", "bit-exact")}
            rows.append({"model": label, "batch": batch, "identical": same})
    seconds = interleave({"|".join(map(str, key)): task for key, task in tasks.items()}, rounds=options.rounds, warmup=1)
    for row in rows:
        found = {way: seconds[f"{row['model']}|{row['batch']}|{way}"] for way in WAYS}
        times = REPEATED if row["batch"] == 1 else 1
        row["seconds"] = {way: median(values) / times for way, values in found.items()}
        row["ratios"] = {way: median_ratio(values, found["deployed"]) for way, values in found.items()}
    cells = [
        [
            row["model"],
            f"{row['batch']}",
            human_seconds(row["seconds"]["deployed"]),
            *(f"{row['ratios'][way]:.2f}x" for way in WAYS),
        ]
        for row in rows
    ]
    print(table(["model", "batch", "deployed", *WAYS], cells))
    report = {
        **origin(f"bit_exact.py --rounds {options.rounds} --threads {options.threads}"), "rows": rows,
        "share_of_processors_used_by_others": disturbance.share(),
    }  # fmt: skip
    report["machine"]["threads"] = options.threads
    write_report(report, options.out)


if __name__ == "__main__":
    main()
