"""A deployed REViT beside a plain ViT and a plain CNN of about as many parameters: latency, throughput, size of the file.

python benchmarks/deployment.py [--rounds 7] [--settings '28 pixels,96 pixels'] [--out FILE]

Each model runs as it was trained (eval mode), deployed, and in onnxruntime with weights of 32 and of 8 bits, the equivariant
one also compiled by torch.compile; one image at a time (latency) and 64 (throughput). All run in every round, in a new order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import HERE, THREADS, Disturbance, interleave, median_ratio, origin, repeated, write_report
from torch import Tensor, nn

from revit.export import export_model
from revit.int8 import quantise_weights
from revit.models import create_model
from revit.models.budget import count_parameters, match_parameters

BATCHES = {"latency": 1, "throughput": 64}
RUNNERS = ("eager", "deployed", "compiled", "onnxruntime", "onnxruntime int8")
SETTINGS: dict[str, dict[str, Any]] = {
    "28 pixels": {
        "size": 28,
        "subject": ("REViT p4", "revit_small", {"group": "p4", "in_chans": 1, "num_classes": 10}),
        "plain": [
            ("ViT", "vit_tiny", {"in_chans": 1, "num_classes": 10}, 26, 2),
            ("plain CNN", "gcnn_rotmnist", {"group": "z2", "in_chans": 1, "num_classes": 10}, 20, 1),
        ],
    },
    "96 pixels": {
        "size": 96,
        "subject": ("REViT p4m", "revit_small", {"group": "p4m", "in_chans": 3, "num_classes": 2, "stride": 4}),
        "plain": [
            ("ViT", "vit_tiny", {"in_chans": 3, "num_classes": 2, "img_size": 96, "patch_size": 8}, 26, 2),
            ("plain CNN", "gcnn_pcam", {"group": "z2", "in_chans": 3, "num_classes": 2}, 26, 1),
        ],
    },
}
"""The plain models with the widths and heads that the search for a width starts from."""


def contestants(setting: dict[str, Any]) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """The equivariant model, and plain ones of at most as many parameters."""
    label, name, options = setting["subject"]
    torch.manual_seed(0)
    found = {label: (create_model(name, **options).eval(), {"model": name, **options})}
    budget = count_parameters(found[label][0])
    for plain, name, options, dims, heads in setting["plain"]:

        def build(width: Any, name: str = name, options: dict[str, Any] = options) -> nn.Module:
            return create_model(name, **options, dims=width)

        width, _ = match_parameters(build, dims, heads, budget)
        found[plain] = (build(width).eval(), {"model": name, **options, "dims": width})
    return found


def runners(model: nn.Module, images: Tensor, *, compiled: bool) -> tuple[dict[str, Callable[[Tensor], Any]], dict[str, Any]]:
    """Ways to run a model, by name, and what was noted on the way. A compiler takes a minute for each batch size."""
    plain = model.deploy()  # type: ignore[operator]
    exported = export_model(model, images, any_size=False)
    small = replace(exported, data=quantise_weights(exported.data))
    with torch.no_grad():
        same = (small.load()(images).argmax(1) == model(images).argmax(1)).float().mean().item()
    facts = {
        "parameters": count_parameters(model),
        "deployed_parameters": count_parameters(plain),
        "onnx_bytes": len(exported.data),
        "onnx_int8_bytes": len(small.data),
        "onnx_difference": exported.difference,
        "int8_agreement_on_noise": same,
    }
    found = {"eager": model, "deployed": plain}
    found |= {"onnxruntime": exported.load(), "onnxruntime int8": small.load()}
    return found | ({"compiled": torch.compile(plain, dynamic=False)} if compiled else {}), facts


def measure(setting: dict[str, Any], rounds: int) -> dict[str, Any]:
    models, tasks, report = contestants(setting), {}, {}
    for label, (model, options) in models.items():
        side, generator = setting["size"], torch.Generator().manual_seed(0)
        images = torch.randn(64, options["in_chans"], side, side, generator=generator)
        ways, facts = runners(model, images, compiled=not report)
        report[label] = {**facts, "options": options}
        for name, run in ways.items():
            for kind, batch in BATCHES.items():
                tasks[f"{label}|{name}|{kind}"] = repeated(run, images[:batch], times=4 if batch == 1 else 1)
    seconds = interleave(tasks, rounds=rounds, warmup=1)
    first = next(iter(models))
    for label in models:
        for kind, batch in BATCHES.items():
            report[label][kind] = {
                name: {
                    "milliseconds": 1000 * median(seconds[f"{label}|{name}|{kind}"]) / (4 if batch == 1 else 1),
                    "times_eager": median_ratio(seconds[f"{label}|eager|{kind}"], seconds[f"{label}|{name}|{kind}"]),
                    "of_equivariant": median_ratio(seconds[f"{label}|{name}|{kind}"], seconds[f"{first}|{name}|{kind}"]),
                }
                for name in RUNNERS
                if f"{label}|{name}|{kind}" in seconds
            }
    return {"size": setting["size"], "models": report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "deployment.json")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    disturbance = Disturbance()
    settings = {}
    for name in options.settings.split(","):
        settings[name] = measure(SETTINGS[name], options.rounds)
        for label, facts in settings[name]["models"].items():
            for kind in BATCHES:
                times = ", ".join(f"{way} {found['milliseconds']:.1f}" for way, found in facts[kind].items())
                print(f"{name}, {label} ({facts['parameters']:,}), {kind}, ms: {times}", flush=True)
    report = {
        **origin(f"deployment.py --rounds {options.rounds} --settings '{options.settings}'"),
        "settings": settings, "onnxruntime": version("onnxruntime"),
        "share_of_processors_used_by_others": disturbance.share(),
    }  # fmt: skip
    write_report(report, options.out)


if __name__ == "__main__":
    main()
