"""Steps whose loss is not a number are left out and written down with the names of their images; three in a row are the end."""

from __future__ import annotations

import json
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from revit.training.progress import Progress
from revit.training.run_folder import RunFolder

MAX_BAD_STEPS = 3
BAD = "bad_batches.json"


class TrainingError(RuntimeError):
    """A run that cannot go on. The message says where it stopped and what is kept."""


class BadSteps:
    """The bad steps of a run, the latest hundred of them in `bad_batches.json`."""

    def __init__(self, folder: RunFolder, accelerator: Accelerator) -> None:
        self.folder, self.accelerator, self.rows = folder, accelerator, list[dict[str, Any]]()

    def leave_out(self, progress: Progress, culprits: list[str], batch: list[str], allowed: int) -> str:
        """Notes a step whose loss or gradient is not a number. Raises `TrainingError` at the last one allowed in a row."""
        if self.accelerator.num_processes > 1:
            gathered = gather_object([(culprits, batch)])
            culprits, batch = ([name for pair in gathered for name in pair[i]] for i in range(2))
        what = _sentence(progress, "the loss of" if culprits else "the gradient of a batch with", culprits or batch)
        self._note(progress, what, culprits, batch)
        progress.bad_steps += 1
        if progress.bad_steps >= allowed:
            raise TrainingError(
                f"{what}; steps in a row that are bad: {progress.bad_steps}. {self.folder.last} keeps the last good state,"
                f" {self.folder.path / BAD} the names. Look at these images, or lower --train.lr"
            )
        return f"{what}; the step is left out"

    def refuse(self, progress: Progress, culprits: list[str], batch: list[str]) -> TrainingError:
        """The error of images whose pixels are not numbers."""
        what = _sentence(progress, "the pixels of", culprits)
        self._note(progress, what, culprits, batch)
        return TrainingError(f"{what}; {self.folder.last} keeps the last good state. Mend or remove these images")

    def _note(self, progress: Progress, what: str, culprits: list[str], batch: list[str]) -> None:
        row = {"epoch": progress.epoch + 1, "step": progress.step + 1, "what": what, "not finite": culprits, "batch": batch}
        self.rows = [*self.rows[-99:], row]
        if self.accelerator.is_main_process:
            self.folder.write(BAD, json.dumps(self.rows, indent=1))


def _sentence(progress: Progress, what: str, names: list[str]) -> str:
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"epoch {progress.epoch + 1}, step {progress.step + 1}: {what} {shown} is not a finite number"
