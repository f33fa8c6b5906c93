"""Small runs for the tests: a few images, a model of a few fields."""

import numpy as np
import torch
from accelerate import Accelerator

from revit import create_model
from revit.data import ArrayImages, DataSpec
from revit.data.augment import AugmentOptions
from revit.data.loader import EvalLoader, Reading, TrainLoader
from revit.training.interrupt import StopRequest
from revit.training.loop import Training
from revit.training.recipe import Recipe, TrainOptions
from revit.training.run_folder import RunFolder

SPEC = DataSpec("toy", 1, (8, 8), ("dark", "bright", "striped"), (0.4,), (0.3,), "made here")


def toy(count=40, seed=0):
    """Three classes that a small model can tell apart."""
    generator = np.random.Generator(np.random.PCG64(seed))
    labels = np.arange(count) % 3
    pixels = generator.integers(0, 120, (count, 1, 8, 8))
    pixels[labels == 1] += 110
    pixels[labels == 2, :, ::2] += 110
    return ArrayImages(pixels.astype(np.uint8), labels, "toy/train")


class Killed(BaseException):
    """Ends a run at once, as SIGKILL does: nothing is saved."""


class KillAt:
    """A watcher that ends the run after some steps, and counts them all."""

    def __init__(self, steps=None):
        self.left, self.rows, self.losses, self.bad = steps, [], [], []

    def started(self, progress, steps): ...

    def stepped(self, progress, loss, lr):
        self.losses.append(loss)
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise Killed

    def finished_epoch(self, row, best):
        self.rows.append(row)

    def skipped(self, bad):
        self.bad += bad

    def close(self): ...


def make_training(path, *, images=None, workers=0, on_bad="stop", augment=None, watcher=None, stop=None, model=None, **options):
    options = TrainOptions(**{"epochs": 3, "batch_size": 8, "lr": 0.01, "save_seconds": 0, **options})
    torch.manual_seed(options.seed)
    defaults = {
        "group": "p4",
        "dims": 4,
        "depths": 1,
        "num_heads": 1,
        "drop_rate": 0.2,
        "drop_path_rate": 0.2,
        "window_size": 4,
    }
    network = create_model("revit_tiny", in_chans=1, num_classes=3, **{**defaults, **(model or {})})
    reading = Reading(workers=workers, on_bad=on_bad, max_bad=0.1)
    train = TrainLoader(
        toy() if images is None else images, SPEC, batch_size=options.batch_size, seed=options.seed,
        augment=augment or AugmentOptions(rotate=180, mixup=0.2), parts=options.accumulate, reading=reading,
    )  # fmt: skip
    folder = RunFolder(path)
    folder.path.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if options.precision == "bf16" else "no")
    return Training(
        network, train, EvalLoader(toy(20, 1), SPEC, batch_size=8, reading=reading), options,
        config={"recipe": Recipe().to_dict()}, folder=folder, accelerator=accelerator, watchers=[watcher or KillAt()],
        stop=StopRequest() if stop is None else stop,
    )  # fmt: skip
