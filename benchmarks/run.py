"""Speed and memory, side by side with the same model built on escnn. See README.md in this folder for the method.

python benchmarks/run.py [--quick] [--groups p4,p8,p4m] [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from contestants import BATCH, IMAGE_SIZE, OURS, REFERENCE, SHAPE, builder, forward_task, images, step_task
from measure import HERE, THREADS, Disturbance, commit, in_fresh_process, interleave, machine, median_ratio, versions
from report import Target, human_bytes, human_seconds, plot_joint_memory, slope, table
from torch import nn

from revit.nn.filter_bank import TurnedFilters

CONTESTANTS = (REFERENCE, *OURS)
MEASURES = ("construction", "forward", "step", "peak memory")
STEP_TARGETS = {
    "p4": {"dense": 1.7, "separable": 2.0},
    "p8": {"dense": 1.2, "separable": 2.5},
    "p4m": {"dense": 1.2, "separable": 2.5},
}
JOINT_SIZES = (24, 32, 48, 64)

Report = dict[str, Any]


class Rounds(NamedTuple):
    probes: int = 5
    forward: int = 21
    step: int = 9
    joint: int = 3


QUICK = Rounds(probes=1, forward=5, step=3, joint=1)


def say(text: str = "") -> None:
    print(text, flush=True)


# 1. Side by side with the reference.


def why_no_reference() -> str | None:
    try:
        importlib.import_module("escnn_reference")
    except ImportError as error:
        missing = error.name or "escnn"
        return f"part 1 is not obtained, {missing} cannot be imported: pip install escnn (compiles, needs gfortran)"
    return None


def measure_models(group: str, rounds: Rounds) -> Report:
    """What each contestant took in each round: {contestant: {measure: [...], "parameters": count}}."""
    found: Report = {name: {"construction": [], "peak memory": []} for name in CONTESTANTS}
    in_fresh_process("model", REFERENCE, group)  # fills escnn's cache on disk
    for _ in range(rounds.probes):
        for name in CONTESTANTS:
            probe = in_fresh_process("model", name, group)
            found[name]["parameters"] = probe["parameters"]
            for measure in ("construction", "peak memory"):
                found[name][measure].append(probe[measure])
    models = {name: builder(name, group)() for name in CONTESTANTS}
    for measure, task, count in (("forward", forward_task, rounds.forward), ("step", step_task, rounds.step)):
        for model in models.values():
            model.train(measure == "step")
        seconds = interleave({name: task(model) for name, model in models.items()}, rounds=count)
        for name in CONTESTANTS:
            found[name][measure] = seconds[name]
    return found


def ratio(found: Report, name: str, measure: str) -> float:
    """Times: reference over ours, larger is better. Memory: ours over reference, smaller is better."""
    ours, reference = found[name][measure], found[REFERENCE][measure]
    return median_ratio(ours, reference) if measure == "peak memory" else median_ratio(reference, ours)


def model_targets(group: str, ratios: Report | None) -> dict[tuple[str, str], Target]:
    """The targets of a group by (measure, contestant); without ratios all are not obtained."""
    bounds: dict[tuple[str, str], tuple[str, float]] = {("construction", name): (">=", 20.0) for name in OURS}
    bounds["forward", "dense"] = (">=", 1.0)
    bounds |= {("step", name): (">=", bound) for name, bound in STEP_TARGETS[group].items()}
    bounds["peak memory", "dense"] = ("<=", 0.5)
    return {
        (measure, name): Target(f"{group} {measure}, {name}", ratios[name][measure] if ratios else None, *bound, unit="x")
        for (measure, name), bound in bounds.items()
    }


def show_models(group: str, found: Report, ratios: Report, targets: dict[tuple[str, str], Target]) -> None:
    rows = []
    for measure in MEASURES:
        human = human_bytes if measure == "peak memory" else human_seconds
        row = [measure, human(median(found[REFERENCE][measure]))]
        for name in OURS:
            row += [human(median(found[name][measure])), f"{ratios[name][measure]:.2f}x", str(targets.get((measure, name), ""))]
        rows.append(row)
    counts = {name: f"{found[name]['parameters']:,}" for name in CONTESTANTS}
    rows.append(["parameters", counts[REFERENCE], *(cell for name in OURS for cell in (counts[name], "", ""))])
    header = [group, REFERENCE, *(cell for name in OURS for cell in (name, "ratio", "target"))]
    say(table(header, rows) + "\n")


def side_by_side(groups: list[str], rounds: Rounds) -> tuple[Report, list[Target]]:
    say(
        f"1. Side by side with escnn: batch {BATCH}, {IMAGE_SIZE}x{IMAGE_SIZE}, "
        + ", ".join(f"{key}={value}" for key, value in SHAPE.items())
    )
    reason = why_no_reference()
    if reason:
        say(f"{reason}\n")
        targets = [target for group in groups for target in model_targets(group, None).values()]
        return {"obtained": False, "reason": reason}, targets
    say("Medians over rounds; times as reference / ours (more is better), memory as ours / reference (less is better).")
    say("Construction is the first one in a fresh process. escnn caches solved bases in memory and on disk: the disk cache")
    say("may be warm (it is filled before measuring), which favours the reference.\n")
    report: Report = {"obtained": True, "groups": {}}
    targets = []
    for group in groups:
        found = measure_models(group, rounds)
        ratios = {name: {measure: ratio(found, name, measure) for measure in MEASURES} for name in OURS}
        of_group = model_targets(group, ratios)
        show_models(group, found, ratios, of_group)
        report["groups"][group] = {"rounds": found, "ratios": ratios}
        targets += of_group.values()
    return report, targets


# 2. Joint attention does not store the token-by-token matrix.


def joint_memory(rounds: Rounds, plot: Path) -> tuple[Report, list[Target]]:
    say("2. Peak memory of joint attention, forward + backward: p4, 16 fields, 2 heads, batch 2, global neighbourhood")
    rows: list[Report] = []
    for size in JOINT_SIZES:
        probes = [in_fresh_process("joint", str(size)) for _ in range(rounds.joint)]
        peaks = [probe["peak memory"] for probe in probes]
        rows.append({"size": size, **probes[0], "peak memory": median(peaks), "rounds": peaks})
    for row in rows:
        row["bytes per token"] = row["peak memory"] / row["tokens"]
    tokens, peaks, matrix = ([row[key] for row in rows] for key in ("tokens", "peak memory", "matrix"))
    target = Target("joint attention, log-log slope of memory", slope(tokens, peaks), "<=", 1.2)
    cells = [
        [f"{row['size']}x{row['size']}", f"{row['tokens']:,}", human_bytes(row["peak memory"]),
         f"{row['bytes per token']:,.0f}", human_bytes(row["matrix"])] for row in rows
    ]  # fmt: skip
    say(table(["map", "tokens in the batch", "peak memory", "bytes per token", "the matrix would need"], cells))
    say(f"log-log slope {target.value:.2f} {target} (1 is linear, 2 would be the matrix)")
    drawn = plot_joint_memory(tokens, peaks, matrix, plot)
    say(f"plot: {plot.name}\n" if drawn else "no plot: matplotlib is not installed\n")
    return {"sizes": rows, "slope": target.value}, [target]


# 3. The kernel bank.


def filters_of(model: nn.Module) -> list[TurnedFilters]:
    return [module for module in model.modules() if isinstance(module, TurnedFilters)]


def count_builds(model: nn.Module, run: Any) -> Counter[int]:
    """How often each filter (by its place in the model) builds its bank while `run` is called."""
    places = {id(module): place for place, module in enumerate(filters_of(model))}
    counts: Counter[int] = Counter(dict.fromkeys(places.values(), 0))
    build = TurnedFilters._build

    def counted(self: TurnedFilters) -> torch.Tensor:
        counts[places[id(self)]] += 1
        return build(self)

    TurnedFilters._build = counted  # type: ignore[method-assign]
    try:
        run()
    finally:
        TurnedFilters._build = build  # type: ignore[method-assign]
    return counts


def bank_of_group(group: str, rounds: Rounds) -> Report:
    model = builder("dense", group)().train()
    filters, step = filters_of(model), step_task(model)

    def bank() -> None:
        model.zero_grad()
        torch.stack([module().sum() for module in filters]).sum().backward()

    seconds = interleave({"bank": bank, "step": step}, rounds=rounds.step)
    in_step = count_builds(model, step)
    model.eval()
    x = images(2)
    with torch.no_grad():
        in_eval = count_builds(model, lambda: [model(x) for _ in range(3)])
    return {
        "rounds": seconds,
        "share": median_ratio(seconds["bank"], seconds["step"]),
        "filters": len(filters),
        "builds in a step": sorted(set(in_step.values())),
        "builds in 3 eval forwards": sorted(set(in_eval.values())),
    }


def kernel_bank(groups: list[str], rounds: Rounds) -> tuple[Report, list[Target]]:
    say(f"3. The kernel bank of the dense model: share of a training step at batch {BATCH}, and builds per filter")
    report = {group: bank_of_group(group, rounds) for group in groups}
    targets, cells = [], []
    for group, found in report.items():
        share = Target(f"{group} kernel bank, share of a step in %", 100 * found["share"], "<", 10, unit=" %")
        # The largest distance from one build, so that a filter built twice cannot hide behind one never built.
        builds = [
            Target(f"{group} {key}, each filter", max(found[key], key=lambda n: abs(n - 1)), "==", 1)
            for key in ("builds in a step", "builds in 3 eval forwards")
        ]
        medians = [human_seconds(median(found["rounds"][task])) for task in ("bank", "step")]
        counts = [cell for target in builds for cell in (f"{target.value}", str(target))]
        cells.append([group, str(found["filters"]), *medians, f"{share.value:.2f} %", str(share), *counts])
        targets += [share, *builds]
    header = ["group", "filters", "bank", "step", "share", "target", "builds: 1 step", "target", "3 eval forwards", "target"]
    say(table(header, cells) + "\n")
    return report, targets


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a result")
    parser.add_argument("--groups", default=",".join(STEP_TARGETS), help="comma-separated, default %(default)s")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "latest.json", help="default results/latest.json")
    args = parser.parse_args()
    args.groups = args.groups.split(",")
    if unknown := [group for group in args.groups if group not in STEP_TARGETS]:
        parser.error(f"no targets for {', '.join(unknown)}; choose from {', '.join(STEP_TARGETS)}")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    rounds, disturbance = QUICK if args.quick else Rounds(), Disturbance()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report: Report = {
        "command": f"python benchmarks/run.py {'--quick ' * args.quick}--groups {','.join(args.groups)}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"), **commit(), "machine": machine(), "versions": versions(),
        "settings": {"batch": BATCH, "image_size": IMAGE_SIZE, **SHAPE}, "rounds": rounds._asdict(),
    }  # fmt: skip
    say(f"{report['command']}\n{report['machine']}\n{report['versions']}\n")
    report["side_by_side"], targets = side_by_side(args.groups, rounds)
    report["joint_memory"], of_joint = joint_memory(rounds, args.out.with_name("joint_memory.png"))
    report["kernel_bank"], of_bank = kernel_bank(args.groups, rounds)
    targets += of_joint + of_bank
    report["share_of_processors_used_by_others"] = others = disturbance.share()
    report["targets"] = [target.as_dict() for target in targets]
    report["met"], report["of"] = sum(target.met for target in targets), len(targets)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if others is not None:
        say(f"Other processes took {others:.0%} of the processors during this run" + (": a disturbed run." * (others > 0.1)))
    for target in targets:
        if not target.met:
            value = "" if target.value is None else f"{target.value:.2f}{target.unit}, "
            say(f"{target.verdict}: {target.name}: {value}target {target.sign} {target.bound:g}{target.unit}")
    say(f"{report['met']} of {report['of']} targets met")


if __name__ == "__main__":
    main()
