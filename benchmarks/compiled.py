"""Does `torch.compile` pay? A training step and a forward pass, compiled beside eager, and what compiling takes.

python benchmarks/compiled.py [--rounds 7] [--out FILE]

64 images of 28 x 28, two threads. Needs a C++ compiler. Compiled code that is on disk already is not used again.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from contestants import SETTINGS
from measure import THREADS, Disturbance, interleave, median_ratio, options_of, timed, write_measured
from report import human_seconds, table
from torch import nn

SHAPES = {"p4, full projections": ("p4", "ours"), "p4, recommended": ("p4", "recommended")}


def tasks(key: str, model: nn.Module, compiled: nn.Module) -> dict[str, dict[str, Callable[[], None]]]:
    setting, optimizer = SETTINGS[key], torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {
        "step": {"eager": setting.step_task(model, optimizer), "compiled": setting.step_task(compiled, optimizer)},
        "forward": {"eager": setting.forward_task(model), "compiled": setting.forward_task(compiled)},
    }


def measure(key: str, name: str, rounds: int) -> dict[str, Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = SETTINGS[key].builder(name)()
    found: dict[str, Any] = {}
    for kind, pair in tasks(key, model, torch.compile(model, dynamic=False)).items():
        pair["eager"]()
        first = timed(pair["compiled"])
        seconds = interleave(pair, rounds=rounds)
        gain = median(seconds["eager"]) - median(seconds["compiled"])
        found[kind] = {
            "compiling": first, "rounds": seconds, "ratio": median_ratio(seconds["eager"], seconds["compiled"]),
            "pays_after": first / gain if gain > 0 else None,
        }  # fmt: skip
    return found


def main() -> None:
    options = options_of(__doc__, "compiled.json", rounds=7)
    torch.set_num_threads(THREADS)
    torch._inductor.config.force_disable_caches = True
    disturbance, models, rows = Disturbance(), {}, []
    for title, shape in SHAPES.items():
        models[title] = measure(*shape, options.rounds)
        for kind, row in models[title].items():
            pays = "never" if row["pays_after"] is None else f"{row['pays_after']:,.0f}"
            times = [human_seconds(median(row["rounds"][way])) for way in ("eager", "compiled")]
            rows.append([title, kind, *times, f"{row['ratio']:.2f}x", human_seconds(row["compiling"]), pays])
    print(table(["model", "", "eager", "compiled", "ratio", "compiling", "pays after"], rows))
    write_measured(f"compiled.py --rounds {options.rounds}", disturbance, options.out, models=models)


if __name__ == "__main__":
    main()
