"""`revit train`: a recipe and some options in, a run folder out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from jsonargparse import Namespace
from rich.console import Console

from revit.cli.parser import Parser, UsageError
from revit.cli.report import print_audit, print_scores, report_audit, report_scores
from revit.cli.runs import LoadedRun, build_model, checkpoint_config, load_run
from revit.cli.scanning import open_with_progress
from revit.data import Dataset, Images
from revit.data.loader import EvalLoader, Reading, Share, TrainLoader
from revit.evaluation import draw_curves
from revit.evaluation.collect import Outputs
from revit.evaluation.segmentation import MaskOutputs
from revit.evaluation.tasks import task_of
from revit.models.budget import count_parameters, match_parameters
from revit.training.interrupt import Interrupted, StopRequest, stop_requests
from revit.training.kept_memory import keep_memory
from revit.training.loop import Training
from revit.training.progress import Watcher
from revit.training.recipe import ModelOptions, Recipe
from revit.training.run_folder import PROCESSES, RunFolder
from revit.training.watchers import TensorBoard, Terminal

USAGE = "RECIPE [--data-root DIR] [--out DIR] [--section.option value ...]"
ABOUT = """Trains a model and writes a run folder: weights, results.csv, curves, confusion matrix, equivariance audit.
RECIPE is a name (`revit recipes` lists them), a YAML file, or a run folder, whose recipe is taken. Every option of a recipe
can be changed here. On several processes: torchrun --nproc_per_node N -m revit train RECIPE ..."""
EVAL_BATCH = 128
RESULT = "test.json"
NAMES = {"accuracy": "accuracy", "mean_iou": "mean IoU"}
Answers = Outputs | MaskOutputs
PARTS = {"train": "training", "val": "validation", "test": "test"}


def run(words: list[str]) -> int:
    parser = Parser("train", USAGE, ABOUT)
    parser.add_argument("recipe", metavar="RECIPE", help="recipe, YAML file or run folder", type=str)
    parser.add_argument("--data-root", metavar="DIR", type=str, help="folder with the data; for `folder` one subfolder a class")
    parser.add_argument("--out", metavar="DIR", type=str, help="run folder to write (default: a new one, runs/RECIPE)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out from its last checkpoint")
    parser.add_argument("--allow-change", metavar="NAMES", type=str, help="what --resume may find changed: train.lr,processes")
    parser.add_argument("--match-params", metavar="N", type=int, help="the largest width with at most N parameters")
    parser.add_argument("--on-bad", metavar="stop|skip", type=str, help="images that cannot be read: stop, or skip and report")
    parser.add_argument(
        "--no-test", action="store_true", help="a trial: scores of validation images, the test images stay unread"
    )
    parser.add_argument("--print_config", action="store_true", help="print the whole recipe and exit")
    parser.add_recipe_options()
    print_config = "--print_config" in words  # the parser has a meaning of its own for this word, so it does not see it
    options, recipe = _read(parser, [word for word in words if word != "--print_config"])
    may_change = _may_change(options, recipe)
    if print_config and options.match_params is None:
        print(recipe.to_yaml(), end="")
        return 0

    precision = "bf16" if recipe.train.precision == "bf16" else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=not torch.cuda.is_available())
    console = Console(quiet=not accelerator.is_main_process)
    with accelerator.main_process_first():  # the others find in the cache what the first one computed
        dataset = open_with_progress(recipe.data, console)
    if options.match_params is not None:
        recipe.model = _matched(recipe.model, dataset, options.match_params, console)
        if print_config:
            print(recipe.to_yaml(), end="")
            return 0
    if accelerator.device.type == "cpu":
        keep_memory()
    model = _built(recipe, dataset)
    held_out = "val" if options.no_test else "test"
    with RunFolder(_out(options, accelerator)) as folder:
        if accelerator.is_main_process:
            folder.start(recipe, resume=options.resume, may_change=may_change)
        accelerator.wait_for_everyone()
        console.print(_summary(recipe, dataset, model, folder), highlight=False, soft_wrap=True)
        try:
            with stop_requests() as stop:
                training = _training(model, recipe, dataset, folder, accelerator, console, stop)
                best, outputs = _train_and_test(training, dataset, recipe, held_out, resume=options.resume)
        except Interrupted as interruption:
            console.print(f"stopped; `revit train {folder.path} --resume` goes on from here", highlight=False, soft_wrap=True)
            return interruption.code
        if accelerator.is_main_process:
            _finish(best, outputs, training, dataset.split(held_out), PARTS[held_out], console)
    # What exchanges gradients goes before the process group: as its last owner it would wait for the threads of gloo while it
    # holds the interpreter's lock, which these may be waiting for, and the run would never end.
    del training
    accelerator.free_memory()
    accelerator.end_training()
    return 0


def _train_and_test(
    training: Training, dataset: Dataset, recipe: Recipe, held_out: str, *, resume: bool
) -> tuple[LoadedRun, Answers | None]:
    try:
        if resume:
            training.resume()
        training.run()
        training.accelerator.wait_for_everyone()  # until the first process has written the best epoch
        best = load_run(training.folder.path)
        return best, _test(best, dataset.split(held_out), PARTS[held_out], recipe, training)
    finally:
        for watcher in training.watchers:
            watcher.close()


def _summary(recipe: Recipe, dataset: Dataset, model: torch.nn.Module, folder: RunFolder) -> str:
    counts = ", ".join(f"{len(dataset.split(part)):,} {word}" for part, word in PARTS.items())
    return (
        f"{dataset.spec.name}: {counts} images ({dataset.spec.source})\n"
        f"{recipe.model.name} {recipe.model.group}: {count_parameters(model):,} parameters  ->  {folder.path}"
    )


def _training(
    model: torch.nn.Module, recipe: Recipe, dataset: Dataset, folder: RunFolder, accelerator: Accelerator, console: Console,
    stop: StopRequest,
) -> Training:  # fmt: skip
    reading = _reading(recipe, accelerator)
    train = TrainLoader(
        dataset.train, dataset.spec, batch_size=recipe.train.batch_size, seed=recipe.train.seed, augment=recipe.augment,
        parts=recipe.train.accumulate, reading=reading,
    )  # fmt: skip
    watchers: list[Watcher] = []
    if accelerator.is_main_process:
        watchers = [Terminal(console, recipe.train.epochs), TensorBoard(folder.path / "tb")]
    return Training(
        model, train, EvalLoader(dataset.val, dataset.spec, batch_size=EVAL_BATCH, reading=reading), recipe.train,
        config=checkpoint_config(recipe, dataset.spec), folder=folder, accelerator=accelerator, watchers=watchers, stop=stop,
    )  # fmt: skip


def _read(parser: Parser, words: list[str]) -> tuple[Namespace, Recipe]:
    """Options and recipe. A run folder in the place of the recipe stands for its recipe and, to resume, for --out."""
    name = parser.recipe_of(words)
    is_run = (Path(name) / "config.yaml").is_file()
    options, recipe = parser.read_recipe_options(str(Path(name) / "config.yaml") if is_run else name, words)
    if is_run and options.resume and options.out is None:
        options.out = name
    if options.resume and options.out is None:
        raise UsageError("--resume needs the run: --out DIR, or the run folder in the place of RECIPE")
    if options.data_root is not None:
        recipe.data.root = options.data_root
    if options.on_bad is not None:
        recipe.data = replace(recipe.data, on_bad=options.on_bad)
    return options, recipe


def _may_change(options: Namespace, recipe: Recipe) -> frozenset[str]:
    """The names in --allow-change. A wrong one would allow nothing and look as if it did."""
    names = frozenset(options.allow_change.split(",")) if options.allow_change else frozenset()
    known = {f"{section}.{option}" for section, values in recipe.to_dict().items() for option in values} | {PROCESSES}
    if names - known:
        raise UsageError(f"--allow-change: unknown name {sorted(names - known)[0]!r}; give options as train.lr, or {PROCESSES}")
    return names


def _matched(options: ModelOptions, dataset: Dataset, budget: int, console: Console) -> ModelOptions:
    """The model options with the width that fits a budget of parameters."""
    model = build_model(options, dataset.spec)
    dims, heads = getattr(model, "dims", None), getattr(model, "num_heads", None)
    if dims is None or heads is None:
        raise UsageError(f"--match-params: {options.name} has no widths to choose")
    dims, heads = (dims[0], heads[0]) if len(dims) == 1 else (dims, heads)
    widths, count = match_parameters(lambda dims: build_model(replace(options, dims=dims), dataset.spec), dims, heads, budget)
    console.print(f"dims {widths}: {count:,} of at most {budget:,} parameters", highlight=False)
    return replace(options, dims=widths)


def _built(recipe: Recipe, dataset: Dataset) -> torch.nn.Module:
    torch.manual_seed(recipe.train.seed)
    return build_model(recipe.model, dataset.spec)


def _out(options: Namespace, accelerator: Accelerator) -> Path:
    """--out, or the first free name under runs/; all processes agree on it."""
    chosen = [options.out]
    if options.out is None and accelerator.is_main_process:
        name = Path(options.recipe).stem if options.recipe.endswith((".yaml", ".yml")) else Path(options.recipe).name
        path, count = Path("runs") / name, 1
        while path.exists():
            count += 1
            path = Path("runs") / f"{name}-{count}"
        chosen = [str(path)]
    return Path(broadcast_object_list(chosen)[0])


def _reading(recipe: Recipe, accelerator: Accelerator) -> Reading:
    share = Share(accelerator.process_index, accelerator.num_processes)
    return Reading(share, recipe.data.workers, recipe.data.on_bad, recipe.data.max_bad)


def _test(run: LoadedRun, images: Images, part: str, recipe: Recipe, training: Training) -> Answers | None:
    """The test images, read once, by the best epoch (or validation images, in a trial): each process its share. Nothing if that
    has been done."""
    if (run.path / RESULT).exists() or (run.path / f"{part}.json").exists():
        return None
    device = training.accelerator.device
    loader = EvalLoader(images, run.spec, batch_size=EVAL_BATCH, reading=_reading(recipe, training.accelerator))
    task = task_of(run.spec)
    outputs = task.collect(run.model.to(device), loader, device, training.dtype, check=training.stop.check)
    joined: Answers = task.join(gather_object([outputs]))
    return joined


def _finish(run: LoadedRun, outputs: Answers | None, training: Training, images: Images, part: str, console: Console) -> None:
    """Scores, curves, audit: the files of a finished run, and what to try next."""
    folder, history = run.path, training.progress.history
    if outputs is None:
        done = RESULT if (folder / RESULT).exists() else f"{part}.json"
        result = json.loads((folder / done).read_text())
        iou = f", mean IoU {result['mean_iou']:.2%}" if "mean_iou" in result else ""
        scored = f"{result['split']} accuracy {result['accuracy']:.2%}{iou}"
        console.print(f"finished before: {scored} in {folder / done}", highlight=False)
        return
    draw_curves(history, folder / "curves.png")
    audit = report_audit(images, run, folder)
    best = training.progress.best
    metric = training.progress.metric
    facts = {
        f"validation_{metric}": best[f"val_{metric}"],
        "epochs": len(history),
        "training_seconds": round(sum(row["seconds"] for row in history), 1),
        "consistency_percent": audit.mean_consistency_percent,
    }
    scores = report_scores(outputs, run, part, folder, part, **facts)  # last: it says "finished"
    chosen = f"validation {NAMES[metric]} {best[f'val_{metric}']:.2%}"
    console.print(f"chosen epoch {best['epoch']}: {chosen}", highlight=False)
    print_scores(console, scores, part, len(outputs.samples))
    print_audit(console, audit)
    console.print(f"weights, results and pictures are in {folder}", highlight=False, soft_wrap=True)
