"""`revit eval`: how good a run is on a split of its data, or of other data of the same classes."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from revit.cli.parser import Parser, UsageError
from revit.cli.report import print_scores, report_scores
from revit.cli.runs import TRAINED, LoadedRun, bit_exact_model, default_folder, find_trained, load_run, newest_run, run_data
from revit.cli.scanning import open_with_progress, report_skipped
from revit.data import Dataset
from revit.data.loader import EvalLoader, Reading
from revit.evaluation.tasks import task_of

ABOUT = """Accuracy, precision and recall of each class, confusion matrix and calibration of a run; of masks the mean IoU and
the accuracy of pixels. Writes scores.json, confusion_matrix.png and calibration.png to RUN/eval_SPLIT (eval_SPLIT/NAME
for weights), or to --out."""


def run(words: list[str]) -> int:
    parser = Parser("eval", "[RUN] [--split test|val|train] [--data-root DIR] [--out DIR]", ABOUT)
    parser.add_argument("run", metavar="RUN", nargs="?", type=str, help=f"{TRAINED} (default: the newest in runs/)")
    parser.add_argument("--split", default="test", choices=["test", "val", "train"], help="which images")
    parser.add_argument("--checkpoint", default="best", choices=["best", "last"], help="which weights")
    parser.add_argument("--data-root", metavar="DIR", type=str, help="folder with the data, if it is not where it was")
    parser.add_argument("--on-bad", metavar="stop|skip", type=str, help="images that cannot be read: stop, or skip and report")
    parser.add_argument("--bit-exact", action="store_true", help="the same answers for turned images, to the last bit")
    parser.add_argument("--batch-size", metavar="N", type=int, default=128, help="images at a time")
    parser.add_argument("--out", metavar="DIR", type=str, help="folder for the results")
    options = parser.parse_args(words)
    if options.batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1, got {options.batch_size}")
    console = Console()
    loaded = load_run(find_trained(options.run) if options.run else newest_run(), options.checkpoint)
    data = run_data(loaded, options.data_root, options.on_bad)
    dataset = open_with_progress(data, console)
    _check(loaded, dataset)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = (bit_exact_model(loaded) if options.bit_exact else loaded.model).to(device)
    loader = EvalLoader(
        dataset.split(options.split),
        loaded.spec,
        batch_size=options.batch_size,
        reading=Reading(workers=data.workers, on_bad=data.on_bad, max_bad=data.max_bad),
    )
    outputs = task_of(loaded.spec).collect(model, loader, device, next(model.parameters()).dtype)
    report_skipped(console, outputs.bad)
    folder = Path(options.out) if options.out else default_folder(loaded, f"eval_{options.split}")
    folder.mkdir(parents=True, exist_ok=True)
    scores = report_scores(outputs, loaded, options.split, folder, "scores")
    console.print(f"{loaded.path} on {dataset.spec.name} ({dataset.spec.source})", highlight=False, soft_wrap=True)
    print_scores(console, scores, options.split, len(outputs.samples))
    console.print(f"scores and pictures are in {folder}", highlight=False, soft_wrap=True)
    return 0


def _check(loaded: LoadedRun, dataset: Dataset) -> None:
    """The model must have been trained for such images."""
    ours, theirs = loaded.spec, dataset.spec
    if ours.task != theirs.task:
        raise UsageError(f"the run is for {ours.task}, the data for {theirs.task}; give data of the same kind")
    if ours.classes != theirs.classes:
        missing = sorted(set(ours.classes) ^ set(theirs.classes))
        raise UsageError(f"the classes of the data are not those of the run: {', '.join(missing[:5]) or 'another order'}")
    if (ours.channels, ours.size) != (theirs.channels, theirs.size):
        raise UsageError(
            f"the run takes images of {ours.channels} channels and {ours.size[0]} x {ours.size[1]} pixels;"
            f" these have {theirs.channels} and {theirs.size[0]} x {theirs.size[1]}; give --data-root of such images"
        )
