"""Speed and memory, side by side with the same model built on escnn. See README.md in this folder for the method.

python benchmarks/run.py [--quick] [--settings p4 p8 ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from contestants import REFERENCE, SETTINGS, Setting
from measure import HERE, THREADS, Disturbance, Server, in_fresh_process, interleave, median_ratio, origin, write_report
from report import BLUE, VERMILLION, Line, Target, human_bytes, human_seconds, plot, slope, table
from torch import nn

from revit.nn import set_algorithm
from revit.nn.filter_bank import TurnedFilters

QUICKLY_BUILT = [key for key, setting in SETTINGS.items() if not setting.builds_slowly]
MEASURES = ("construction", "forward", "step", "peak memory")
BANKS = ("p4", "p8", "p4m")
JOINT_SIZES = (24, 32, 48, 64)

Report = dict[str, Any]


class Rounds(NamedTuple):
    probes: int = 2
    forward: int = 11
    step: int = 5
    joint: int = 3

    def of(self, setting: Setting) -> Rounds:
        """Fewer of them for large models, never less than two."""
        return Rounds(*(max(2, round(count * setting.rounds)) if count > 2 else count for count in self))


QUICK = Rounds(probes=1, forward=5, step=3, joint=1)


def say(text: str = "") -> None:
    print(text, flush=True)


# Side by side with the reference.


def why_no_reference() -> str | None:
    try:
        importlib.import_module("escnn_reference")
    except ImportError as error:
        missing = error.name or "escnn"
        return f"not obtained beside escnn, {missing} cannot be imported: pip install escnn (compiles, needs gfortran)"
    return None


def measure_models(key: str, rounds: Rounds) -> Report:
    """What each contestant took in each round: {contestant: {measure: [...], "parameters": count}}."""
    setting = SETTINGS[key]
    found: Report = {name: {"construction": [], "peak memory": []} for name in setting.contestants}
    if not setting.builds_slowly:
        in_fresh_process("model", REFERENCE, key)  # fills escnn's cache on disk
    for _ in range(1 if setting.builds_slowly else rounds.probes):
        for name in setting.contestants:
            probe = in_fresh_process("model", name, key)
            found[name]["parameters"] = probe["parameters"]
            for measure in ("construction", "peak memory"):
                found[name][measure].append(probe[measure])
    servers = {name: Server(name, key) for name in setting.contestants}
    for measure, count in (("forward", rounds.forward), ("step", rounds.step)):
        seconds = interleave(servers, rounds=count, warmup=1, take=lambda server, task=measure: server.seconds(task))
        for name in servers:
            found[name][measure] = seconds[name]
    for server in servers.values():
        server.close()
    return found


def ratio(found: Report, name: str, measure: str) -> float:
    """Times: reference over ours, larger is better. Memory: ours over reference, smaller is better."""
    ours, reference = found[name][measure], found[REFERENCE][measure]
    return median_ratio(ours, reference) if measure == "peak memory" else median_ratio(reference, ours)


def model_targets(key: str, ratios: Report | None) -> dict[tuple[str, str], Target]:
    """The targets of a setting by (measure, contestant); without ratios all are not obtained."""
    targets = SETTINGS[key].step_targets
    bounds: dict[tuple[str, str], tuple[str, float]] = {("construction", name): (">=", 20.0) for name in targets}
    bounds |= {("forward", name): (">=", 1.0) for name in targets}
    bounds |= {("step", name): (">=", bound) for name, bound in targets.items()}
    bounds["peak memory", "ours"] = ("<=", 1 / 3)
    return {
        (measure, name): Target(f"{key}: {measure}, {name}", ratios[name][measure] if ratios else None, *bound, unit="x")
        for (measure, name), bound in bounds.items()
    }


def show_models(key: str, found: Report, ratios: Report, targets: dict[tuple[str, str], Target]) -> None:
    rows, ours = [], SETTINGS[key].contestants[1:]
    for measure in MEASURES:
        human = human_bytes if measure == "peak memory" else human_seconds
        row = [measure, human(median(found[REFERENCE][measure]))]
        for name in ours:
            row += [human(median(found[name][measure])), f"{ratios[name][measure]:.2f}x", str(targets.get((measure, name), ""))]
        rows.append(row)
    counts = {name: f"{found[name]['parameters']:,}" for name in (REFERENCE, *ours)}
    rows.append(["parameters", counts[REFERENCE], *(cell for name in ours for cell in (counts[name], "", ""))])
    header = [key, REFERENCE, *(cell for name in ours for cell in (name, "ratio", "target"))]
    say(table(header, rows) + "\n")


def side_by_side(settings: list[str], rounds: Rounds, save: Callable[[Report], None]) -> tuple[Report, list[Target]]:
    """`save` gets what was found after each setting: the large ones take long, and may not end."""
    say("Side by side with escnn")
    reason = why_no_reference()
    if reason:
        say(f"{reason}\n")
        targets = [target for key in settings for target in model_targets(key, None).values()]
        return {"obtained": False, "reason": reason}, targets
    say("Medians over rounds; times as reference / ours (more is better), memory as ours / reference (less is better).")
    say("Construction is the first one in a fresh process. escnn caches solved bases in memory and on disk: the disk cache")
    say("may be warm (it is filled before measuring), which favours the reference.\n")
    report: Report = {"obtained": True, "settings": {}}
    targets = []
    for key in settings:
        setting = SETTINGS[key]
        say(f"{key}: {setting.batch} images of {setting.image_size} x {setting.image_size}, {setting.shape}")
        found = measure_models(key, rounds.of(setting))
        ours = setting.contestants[1:]
        ratios = {name: {measure: ratio(found, name, measure) for measure in MEASURES} for name in ours}
        of_setting = model_targets(key, ratios)
        show_models(key, found, ratios, of_setting)
        report["settings"][key] = {"rounds": found, "ratios": ratios}
        save(report)
        targets += of_setting.values()
    return report, targets


# Joint attention does not store the token-by-token matrix.


def joint_memory(rounds: Rounds, picture: Path) -> tuple[Report, list[Target]]:
    say("Peak memory of joint attention, forward + backward: p4, 16 fields, 2 heads, batch 2, global neighbourhood")
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
    lines = [
        Line("token-by-token matrix alone", tokens, [size / 2**20 for size in matrix], "s--", VERMILLION),
        Line("measured peak, forward + backward", tokens, [size / 2**20 for size in peaks], "o-", BLUE),
    ]
    title = "Joint attention, global, p4, 16 fields, 2 heads"
    if not plot(lines, picture, title=title, xlabel="tokens in the batch", ylabel="memory [MiB]"):
        say("no plot: matplotlib is not installed")
    return {"sizes": rows, "slope": target.value}, [target]


# The kernel bank.


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
    setting = SETTINGS[group]
    model = setting.builder("ours")().train()
    set_algorithm(model, "dense")
    filters, step = filters_of(model), setting.step_task(model)

    def bank() -> None:
        model.zero_grad()
        torch.stack([module().sum() for module in filters]).sum().backward()

    seconds = interleave({"bank": bank, "step": step}, rounds=rounds.step)
    in_step = count_builds(model, step)
    model.eval()
    x = setting.images(2)
    with torch.no_grad():
        in_eval = count_builds(model, lambda: [model(x) for _ in range(3)])
    return {
        "rounds": seconds,
        "share": median_ratio(seconds["bank"], seconds["step"]),
        "filters": len(filters),
        "builds in a step": sorted(set(in_step.values())),
        "builds in 3 eval forwards": sorted(set(in_eval.values())),
    }


def kernel_bank(rounds: Rounds) -> tuple[Report, list[Target]]:
    say("The kernel bank of the dense algorithm: share of a training step, and builds per filter")
    report = {group: bank_of_group(group, rounds) for group in BANKS}
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
    only = "these beside escnn, and nothing else; default all that the reference builds in seconds"
    parser.add_argument("--settings", nargs="+", default=QUICKLY_BUILT, choices=SETTINGS, metavar="NAME", help=only)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "latest.json", help="default results/latest.json")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    rounds, disturbance = QUICK if args.quick else Rounds(), Disturbance()
    named = "" if args.settings == QUICKLY_BUILT else " --settings " + " ".join(f'"{key}"' for key in args.settings)
    report: Report = {
        **origin(f"run.py{' --quick' * args.quick}{named}"),
        "settings": {key: vars(SETTINGS[key]) for key in args.settings}, "rounds": rounds._asdict(),
    }  # fmt: skip
    say(f"{report['command']}\n{report['machine']}\n{report['versions']}\n")

    def save(part: Report) -> None:
        write_report({**report, "side_by_side": part}, args.out)

    targets = []
    if not named:
        report["joint_memory"], of_joint = joint_memory(rounds, args.out.with_name("joint_memory.png"))
        report["kernel_bank"], of_bank = kernel_bank(rounds)
        targets += of_joint + of_bank
    report["side_by_side"], of_models = side_by_side(args.settings, rounds, save)
    targets += of_models
    report["share_of_processors_used_by_others"] = others = disturbance.share()
    report["targets"] = [target.as_dict() for target in targets]
    report["met"], report["of"] = sum(target.met for target in targets), len(targets)
    write_report(report, args.out)
    if others is not None:
        say(f"Other processes took {others:.0%} of the processors during this run" + (": a disturbed run." * (others > 0.1)))
    for target in targets:
        if not target.met:
            value = "" if target.value is None else f"{target.value:.2f}{target.unit}, "
            say(f"{target.verdict}: {target.name}: {value}target {target.sign} {target.bound:g}{target.unit}")
    say(f"{report['met']} of {report['of']} targets met")


if __name__ == "__main__":
    main()
