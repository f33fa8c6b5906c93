"""Writes the tables of the documents from the result files: nobody types a number.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from report import human_bytes, human_seconds, pair_cells

from revit.reproduce.document import accuracies, headline, results_page

ROOT = Path(__file__).parents[1]
PAGE = "docs/results.md"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(report: dict[str, Any]) -> str:
    return f"`{report['command']}`, commit {report['commit'][:7]}, torch {report['versions']['torch']}, {report['date'][:10]}"


def speed_table(report: dict[str, Any]) -> str:
    """Ratios to the reference; times as "times faster", memory as a share."""
    rows = []
    others = ("same dropout", "checkpointed", "recommended")
    for setting, found in report["side_by_side"]["settings"].items():
        ratios = found["ratios"]
        cells = [f"{ratios['ours'][measure]:.1f}x" for measure in ("construction", "forward", "step")]
        cells += [f"{ratios[name]['step']:.1f}x" if name in ratios else "" for name in others]
        cells += [f"{ratios[name]['peak memory']:.2f}" if name in ratios else "" for name in ("ours", *others[1:])]
        rows.append([setting, *cells])
    steps = ["step", "step, its dropout", "step, checkpointed", "step, recommended"]
    memory = ["memory", "memory, checkpointed", "memory, recommended"]
    return f"{markdown(['model', 'construction', 'forward', *steps, *memory], rows)}\n\n{source(report)}"


def stages_table(report: dict[str, Any]) -> str:
    """The model of four stages: what the reference and ours take, and the ratios."""
    rows = []
    for setting, found in report["side_by_side"]["settings"].items():
        for measure, ratio in found["ratios"]["ours"].items():
            human = human_bytes if measure == "peak memory" else human_seconds
            theirs, ours = (human(median(found["rounds"][name][measure])) for name in ("reference", "ours"))
            rows.append([setting, measure, theirs, ours, f"{ratio:.2f}" if measure == "peak memory" else f"{ratio:.1f}x"])
    return f"{markdown(['model', '', 'reference', 'ours', 'ratio'], rows)}\n\n{source(report)}"


def filter_table(report: dict[str, Any]) -> str:
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        rows.setdefault(row["filters"], []).append(row)
    lines = [
        [
            f"`{name}`",
            *(f"{r['blur 1']:.3f} ({r['blur 2']:.3f})" for r in cells),
            ", ".join(str(r["parameters"]) for r in cells),
        ]
        for name, cells in rows.items()
    ]
    header = ["filters", "3 x 3", "5 x 5", "7 x 7", "parameters of a 3, 5, 7 filter"]
    return f"{markdown(header, lines)}\n\n{source(report)}"


def training_table(reports: list[dict[str, Any]]) -> str:
    rows = []
    for run in reports:
        facts = [f"{run['epochs']}", f"{run['training_seconds']:.0f} s", f"{100 * run['accuracy']:.2f} %", f"{run['images']:,}"]
        origin = f"`{run['command']}`, seed {run['seed']}, commit {run['commit']}, {run['threads']} threads"
        rows.append([run["data"], *facts, f"{run['consistency_percent']:.2f} %", origin])
    header = ["data", "epochs", "training", "test accuracy", "test images", "same under the group", "command"]
    return markdown(header, rows)


def loader_table(report: dict[str, Any]) -> str:
    rows = [
        [
            row["images"],
            f"{row['size']} x {row['size']}",
            f"{row['workers']}",
            f"{row['waiting']:.2%}",
            f"{row['augmenting']:.2%}",
        ]
        for row in report["rows"]
    ]
    origin = f"`{report['command']}`, commit {report['commit']}, batch {report['rows'][0]['batch_size']}, {report['machine']}"
    return f"{markdown(['images', 'size', 'workers', 'waiting', 'augmenting'], rows)}\n\n{origin}"


def relative_table(report: dict[str, Any]) -> str:
    """A training step of G-SA, ours, of the reference in the same run, and of the public code as it was measured before."""
    rows = []
    for group, found in report["groups"].items():
        pairs, public = found.get("pairs"), report["public"].get(group)
        cells = [f"{found['step_seconds']:.2f} s", f"{found['step_bytes'] / 1e9:.2f} GB"]
        cells += [f"{pairs['ratio']:.1f}x", f"{pairs['step_bytes'] / found['step_bytes']:.1f}x"] if pairs else ["", ""]
        if public:
            times = public["step_seconds"] / found["step_seconds"], public["step_bytes"] / found["step_bytes"]
            cells += [
                f"{public['step_seconds']:.0f} s, {times[0]:.1f}x",
                f"{public['step_bytes'] / 1e9:.1f} GB, {times[1]:.0f}x",
            ]
        else:
            cells += ["does not fit 24 GB", ""]
        rows.append([group, *cells])
    header = ["group", "step", "memory", "every pair, time", "every pair, memory", "public code, time", "public code, memory"]
    return f"{markdown(header, rows)}\n\n{source(report)}"


def algorithms_table(report: dict[str, Any]) -> str:
    """Fourier beside dense: how many times as fast, in training and in inference."""
    bounds = {target["name"]: target["bound"] for target in report["targets"]}
    rows = []
    for row in report["fixed"]:
        shape, training, inference = row["shape"], row["training"], row["inference"]
        kernel, fields = f"{shape['kernel_size']} x {shape['kernel_size']}", shape["fields"]
        times = f"{1000 * training['dense']:,.0f} ms", f"{1000 * training['other']:,.0f} ms"
        name = f"{shape['group']} {kernel}, {fields} -> {shape['times'] * fields}, {shape['batch']} maps of {shape['side']} px"
        goal = f"{bounds[name]:g}x" if name in bounds else ""
        cells = [shape["group"], kernel, f"{fields} -> {shape['times'] * fields}", f"{shape['batch']}", *times]
        rows.append([*cells, f"{training['ratio']:.1f}x", goal, f"{inference['ratio']:.1f}x"])
    header = ["group", "filters", "fields", "batch", "dense", "fourier", "both passes", "asked", "forward"]
    return f"{markdown(header, rows)}\n\n{source(report)}"


def growth_table(report: dict[str, Any]) -> str:
    """The convolutions of a block by group, and `auto` beside `dense` at shapes drawn at random."""
    grown, drawn = report["growth"], report["drawn"]
    rows = [
        [group, f"{1000 * row['dense']:,.0f} ms", f"{1000 * row['auto']:,.0f} ms"] for group, row in grown["groups"].items()
    ]
    rows.append(["log-log slope", f"{grown['slope_dense']:.2f}", f"{grown['slope_auto']:.2f}"])
    said = []
    for name in ("training", "inference"):
        ratios = sorted(row[name]["ratio"] for row in drawn if name in row["chosen"])
        said.append(
            f"in {name} the worst is {ratios[0]:.2f}, the median {ratios[len(ratios) // 2]:.2f}, the best {ratios[-1]:.1f}"
        )
    text = (
        f"`auto` beside `dense` at {len(drawn)} shapes drawn at random, times as fast: {'; '.join(said)}."
        f" {report['drawn_dense']} more take `dense` in both passes: the same code."
    )
    return f"{markdown(['group', 'dense', 'auto'], rows)}\n\n{text}\n\n{source(report)}"


def small_table(report: dict[str, Any]) -> str:
    """A training step of each model, and how many times as long as that of the first one."""
    rows = [
        [name, f"{report['parameters'][name]:,}", f"{1000 * median(seconds):,.0f} ms", f"{report['ratios'][name]:.2f}x"]
        for name, seconds in report["rounds"].items()
    ]
    return f"{markdown(['model', 'parameters', 'step', 'times as long'], rows)}\n\n{source(report)}"


def pairs_table(what: str, report: dict[str, Any]) -> str:
    return f"{markdown(*pair_cells(report['rows'], what))}\n\n{source(report)}"


def profile_table(report: dict[str, Any]) -> str:
    """The shares of a training step by kind of operation."""
    kinds = next(iter(report["rows"].values()))["shares"]
    rows = [
        [model, f"{1000 * row['seconds']:,.0f} ms", *(f"{share:.0%}" for share in row["shares"].values())]
        for model, row in report["rows"].items()
    ]
    return f"{markdown(['model', 'step', *kinds], rows)}\n\n{source(report)}"


def limits_table(report: dict[str, Any]) -> str:
    """The lower bound of a step by its parts, and how many times as fast as the reference it would be."""
    rows = []
    for group, row in report["rows"].items():
        times = [f"{1000 * seconds:,.0f} ms" for seconds in (*row["parts"].values(), row["bound"], row["recommended"])]
        reference, kept = row["reference"], row["reference, kept memory"]
        ratios = [f"{reference / row['bound']:.1f}x", *(f"{taken / row['recommended']:.1f}x" for taken in (reference, kept))]
        rows.append([group, *times, f"{1000 * reference:,.0f} ms", *ratios, f"{row['asked']:g}x"])
    parts = next(iter(report["rows"].values()))["parts"]
    faster = ["bound, times as fast", "step, times as fast", "if the reference kept memory", "asked"]
    return f"{markdown(['group', *parts, 'bound', 'step', 'reference', *faster], rows)}\n\n{source(report)}"


def time_table(report: dict[str, Any]) -> str:
    """Time to an accuracy, ours and the reference's; the latter may be a lower bound."""
    least = "" if report["released_reached"] else "more than "
    times = math.floor(10 * report["targets"][0]["value"]) / 10  # a bound is not rounded up
    epochs = sum(seconds <= report["seconds"] for seconds, _ in report["ours"])
    rows = [
        ["`rotmnist_p4_fast`", f"{epochs}", f"{report['seconds']:,.0f} s", ""],
        [
            "released recipe, model on escnn", f"{least}{len(report['released'])}",
            f"{least}{report['reference_seconds']:,.0f} s", f"{least}{times:.1f}x",
        ],
    ]  # fmt: skip
    header = ["training", "epochs", f"time to {report['goal']:.1%}", "times as long"]
    return f"{markdown(header, rows)}\n\n{source(report)}"


def faults_table(report: dict[str, Any]) -> str:
    """What the fault-injection suite tried, and what came of it."""
    rows = [
        [
            f"{row['item']}",
            row["name"],
            row["what"].rstrip("."),
            f"{row['tried']:,}",
            f"{row['survived']:,}",
            f"{len(row['lost']):,}",
        ]
        for row in report["rows"]
    ]
    header = ["", "fault", "what is checked", "tried", "survived", "lost"]
    commits = dict.fromkeys(row["commit"] for row in report["rows"])  # rows may be measured one by one
    origin = f"`{report['command']}`, torch {report['versions']['torch']}, {report['date'][:10]}, {report['machine']}"
    return f"{markdown(header, rows)}\n\n{origin}, seed {report['seed']}, by rows at {', '.join(commits)}"


def mutants_table(report: dict[str, Any]) -> str:
    """How many small changes of a file make one of its tests fail."""
    rows = [
        [f"`{path}`", f"{row['mutants']}", f"{row['tried']}", f"{row['killed']}", f"{row['killed'] / row['tried']:.0%}"]
        for path, row in report["rows"].items()
    ]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in report["rows"].values()))
    origin = f"`{report['command']}`, commit {commits}, torch {report['versions']['torch']}"
    return f"{markdown(['file', 'possible changes', 'tried', 'noticed', 'share'], rows)}\n\n{origin}"


def bit_exact_table(report: dict[str, Any]) -> str:
    """The cost of identical bits, as times of the deployed model, and how many images have them."""
    rows = []
    for row in report["rows"]:
        cells = [f"{ratio:.2f}x" for way, ratio in row["ratios"].items() if way != "deployed"]
        same = [f"{count} of {row['batch']}" for way, count in row["identical"].items() if way in ("deployed", "bit-exact")]
        rows.append([row["model"], f"{row['batch']}", f"{1000 * row['seconds']['deployed']:,.1f} ms", *cells, *same])
    ways = ["`bit_exact()`", "one by one", "`Canonical`", "same bits, deployed", "same bits, `bit_exact()`"]
    busy = f"{report['share_of_processors_used_by_others']:.0%} of the processors were busy with other work"
    return f"{markdown(['model', 'batch', 'deployed', *ways], rows)}\n\n{source(report)}; {busy}"


def compiled_table(report: dict[str, Any]) -> str:
    """What `torch.compile` takes and gains; steps (or forward passes) from which on it has paid."""
    rows = []
    for model, kinds in report["models"].items():
        for kind, row in kinds.items():
            times = [f"{1000 * median(row['rounds'][way]):,.0f} ms" for way in ("eager", "compiled")]
            pays = "never" if row["pays_after"] is None else f"{row['pays_after']:,.0f}"
            rows.append([model, kind, *times, f"{row['ratio']:.2f}x", f"{row['compiling']:,.0f} s", pays])
    header = ["model", "", "eager", "compiled", "times as fast", "compiling", "pays after"]
    return f"{markdown(header, rows)}\n\n{source(report)}"


def deployment_table(report: dict[str, Any]) -> str:
    """Milliseconds of each way to run a model, one image and 64."""
    ways = ("eager", "deployed", "compiled", "onnxruntime", "onnxruntime int8")
    rows = []
    for setting, found in report["settings"].items():
        for model, facts in found["models"].items():
            for kind, batch in (("latency", 1), ("throughput", 64)):
                cells = [f"{facts[kind][way]['milliseconds']:,.1f}" if way in facts[kind] else "" for way in ways]
                rows.append(
                    [setting, model, f"{facts['parameters']:,}", f"{facts['onnx_bytes'] / 1000:,.0f} kB", f"{batch}", *cells]
                )
    header = ["images", "model", "parameters", "ONNX", "batch", *(f"{way}, ms" for way in ways)]
    return f"{markdown(header, rows)}\n\n{source(report)}, onnxruntime {report['onnxruntime']}"


def reduced_table(report: dict[str, Any]) -> str:
    rows = []
    for name, row in report["models"].items():
        step = f"{1000 * median(report['rounds'][name]):,.0f} ms"
        scores = [f"{100 * row['accuracy']:.2f} %", f"{row['images']:,}", f"{row['consistency_percent']:.2f} %"]
        rows.append([name, *scores, step, f"{row['ratio']:.2f}x"])
    header = ["`kv_reduction`", "test accuracy", "images", "same under p4", "step", "times as fast"]
    facts = next(iter(report["models"].values()))
    return f"{markdown(header, rows)}\n\n{source(report)}, seed {facts['seed']}, {facts['data']}"


TABLES: dict[str, tuple[str, str | list[str], Callable[[Any], str]]] = {
    "speed": ("README.md", "benchmarks/results/latest.json", speed_table),
    "filters": ("docs/conventions.md", "benchmarks/results/filter_error.json", filter_table),
    "training": ("README.md", ["results/demo.json"], training_table),
    "loader": ("docs/training.md", "benchmarks/results/loader.json", loader_table),
    "algorithms": ("docs/performance.md", "benchmarks/results/algorithms.json", algorithms_table),
    "small": ("docs/performance.md", "benchmarks/results/small_models.json", small_table),
    "whole": ("docs/performance.md", "benchmarks/results/latest.json", speed_table),
    "larger": ("docs/performance.md", "benchmarks/results/larger_groups.json", speed_table),
    "stages": ("docs/performance.md", "benchmarks/results/four_stages.json", stages_table),
    "growth": ("docs/performance.md", "benchmarks/results/algorithms.json", growth_table),
    "relative": ("docs/performance.md", "benchmarks/results/relative_attention.json", relative_table),
    "faults": ("docs/reliability.md", "results/faults.json", faults_table),
    "mutants": ("docs/reliability.md", "results/mutants.json", mutants_table),
    "layouts": ("docs/performance.md", "benchmarks/results/layouts.json", partial(pairs_table, "convolution")),
    "chains": ("docs/performance.md", "benchmarks/results/chains.json", partial(pairs_table, "layer")),
    "shapes": ("docs/performance.md", "benchmarks/results/shapes.json", partial(pairs_table, "convolution")),
    "scores": ("docs/performance.md", "benchmarks/results/stored_scores.json", partial(pairs_table, "attention")),
    "profile": ("docs/performance.md", "benchmarks/results/profile_step.json", profile_table),
    "limits": ("docs/performance.md", "benchmarks/results/limits.json", limits_table),
    "time": ("docs/performance.md", "benchmarks/results/time_to_accuracy.json", time_table),
    "compiled": ("docs/performance.md", "benchmarks/results/compiled.json", compiled_table),
    "reduced": ("docs/performance.md", "benchmarks/results/reduced_keys.json", reduced_table),
    "deployment": ("docs/deployment.md", "benchmarks/results/deployment.json", deployment_table),
    "bit_exact": ("docs/deployment.md", "benchmarks/results/bit_exact.json", bit_exact_table),
    "headline": ("README.md", [], lambda _: headline(ROOT / "results")),
    "accuracies": ("README.md", [], lambda _: accuracies(ROOT / "results")),
}


def read(result: str) -> Any:
    return json.loads((ROOT / result).read_text())


def updated(name: str) -> tuple[Path, str]:
    """The document of a table, and its text with the table made anew."""
    document, results, make = TABLES[name]
    text = (ROOT / document).read_text()
    made = make(read(results) if isinstance(results, str) else [read(result) for result in results])
    pattern = rf"(<!-- table: {name} -->\n)(?:(?!<!-- ).)*(<!-- end -->)"
    if not re.search(pattern, text, flags=re.DOTALL):
        raise SystemExit(f"{document} has no place for the table {name!r}")
    return ROOT / document, re.sub(pattern, lambda match: f"{match[1]}{made}\n{match[2]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    for table in TABLES:
        path, text = updated(table)
        path.write_text(text)
    (ROOT / PAGE).write_text(results_page(ROOT / "results"))
