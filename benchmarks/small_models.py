"""A training step of the REViT that we recommend for digits, beside a G-CNN, a ViT and the released REViT of about its size.

python benchmarks/small_models.py [--rounds 9] [--out FILE]

64 images of 28 x 28. Each has a process of its own, which keeps freed memory, as `revit train` does with any of them. Needs
the `train` extra: the model is that of the recipe rotmnist_p4_fast, as `revit reproduce table4 --rows p4-fast --budget cpu`
trains it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import torch
from measure import THREADS, Disturbance, Server, answer, interleave, median_ratio, options_of, origin, write_report
from report import Target, human_seconds, table
from torch import nn

from revit.evaluation.memory import step_task
from revit.models import create_model
from revit.reproduce.plan import overrides
from revit.training.kept_memory import keep_memory
from revit.training.recipe import read_recipe

BATCH, SIZE, RECIPE, OPPONENT = 64, 28, "rotmnist_p4_fast", "p4-CNN, 19 channels"


def contestants() -> dict[str, nn.Module]:
    changed = {
        name.removeprefix("model."): value for name, value in overrides("cpu", RECIPE, "rotmnist").items() if "model." in name
    }
    options = {**read_recipe(RECIPE)["model"], **changed}
    released = {"stride": 2, "strict": False}
    return {
        RECIPE: create_model(options.pop("name"), in_chans=1, num_classes=10, **options),
        OPPONENT: create_model("gcnn_rotmnist", group="p4", dims=19),
        "ViT, 196 tokens": create_model("vit_tiny", in_chans=1, num_classes=10, img_size=SIZE, patch_size=2, dims=40, depths=5),
        "released REViT p4": create_model("revit_small_paper", group="p4", in_chans=1, **released),
    }


def serve(name: str) -> None:
    torch.manual_seed(0)
    keep_memory()
    model, images = contestants()[name], torch.randn(BATCH, 1, SIZE, SIZE)
    answer({"step": step_task(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-3), images)})


def main() -> None:
    torch.set_num_threads(THREADS)
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
        return
    options = options_of(__doc__, "small_models.json", rounds=9)
    disturbance, models = Disturbance(), contestants()
    servers = {name: Server(name, program=Path(__file__).name) for name in models}
    seconds = interleave(servers, rounds=options.rounds, take=lambda server: server.seconds("step"))
    for server in servers.values():
        server.close()
    ratios = {name: median_ratio(seconds[name], seconds[RECIPE]) for name in models}
    sizes = {name: sum(parameter.numel() for parameter in model.parameters()) for name, model in models.items()}
    rows = [[name, f"{sizes[name]:,}", human_seconds(median(seconds[name])), f"{ratios[name]:.2f}x"] for name in models]
    print(table(["model", "parameters", "step", "times as long"], rows))
    target = Target(f"{OPPONENT} beside {RECIPE}", ratios[OPPONENT], ">=", 1.0, unit="x")
    print(f"{target.verdict}: {target.name}, {target.value:.2f}{target.unit}, target {target.sign} {target.bound:g}")
    report = {
        **origin(f"small_models.py --rounds {options.rounds}"),
        "batch": BATCH, "size": SIZE, "parameters": sizes, "rounds": seconds, "ratios": ratios,
        "targets": [target.as_dict()], "share_of_processors_used_by_others": disturbance.share(),
    }  # fmt: skip
    write_report(report, options.out)


if __name__ == "__main__":
    main()
