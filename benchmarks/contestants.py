"""Who is compared: models built on escnn as the authors did, and ours of the same shape, on the same batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revit

REFERENCE = "reference"
KEPT_REFERENCE = "reference, kept memory"
"""The same in a process that keeps freed memory, as `revit train` does for ours."""
FLAT: dict[str, Any] = {"in_chans": 1, "dims": 12, "depths": 4, "num_heads": 6, "kernel_size": 5, "stride": 2}
STAGES: dict[str, Any] = {
    "in_chans": 3, "dims": (24, 48, 96, 192), "depths": (1, 2, 4, 1), "num_heads": (1, 2, 4, 8), "kernel_size": 3
}  # fmt: skip
FIELDS: dict[str, Any] = {"elementwise_dropout": False, "attn_drop_rate": 0.0}
OURS: dict[str, dict[str, Any]] = {
    "ours": FIELDS,
    "recommended": {**FIELDS, "projection": "separable", "num_heads": 1},
    "same dropout": {},
    "checkpointed": FIELDS,
}
"""Ours by name; `checkpointed` keeps nothing of a block for the backward pass but its input."""

# The released code halves images of even size with odd kernels. All contestants do the same, which ours warn about.
warnings.filterwarnings("ignore", message="a layer with kernel_size=.* is not .* equivariant")


@dataclass(frozen=True)
class Setting:
    """A group, the shape of the models on it, the batch, and who of ours takes part with which target for a training step."""

    group: str
    step_targets: dict[str, float]
    shape: dict[str, Any] = field(default_factory=lambda: FLAT)
    batch: int = 64
    image_size: int = 28
    others: tuple[str, ...] = ()
    rounds: float = 1.0
    """Of the usual number: large models take few."""
    builds_slowly: bool = False
    """Whether the reference takes minutes to build: then it is built once less for escnn's cache, and measured once."""

    @property
    def contestants(self) -> tuple[str, ...]:
        return REFERENCE, *self.step_targets, *self.others

    @property
    def is_flat(self) -> bool:
        return "stride" in self.shape

    def builder(self, name: str) -> Callable[[], nn.Module]:
        """A function that constructs a contestant. Imports happen here, so that timing the function leaves them out."""
        if name in (REFERENCE, KEPT_REFERENCE):
            import escnn_reference

            if self.is_flat:
                return partial(escnn_reference.Reference, self.group, **self.shape)
            return partial(escnn_reference.HierarchicalReference, self.group, window=7, **self.shape)
        model = "revit_small_paper" if self.is_flat else "revit_hier_small_paper"
        options = {**self.shape, **(OURS[name] if self.is_flat else {})}
        build = partial(revit.create_model, model, group=self.group, strict=False, **options)
        return partial(_checkpointed, build) if name == "checkpointed" else build

    def images(self, batch: int | None = None) -> Tensor:
        return torch.randn(self.batch if batch is None else batch, self.shape["in_chans"], self.image_size, self.image_size)

    def forward_task(self, model: nn.Module) -> Callable[[], None]:
        """A forward pass for inference."""
        x = self.images()

        def forward() -> None:
            model.eval()
            with torch.no_grad():
                model(x)

        return forward

    def step_task(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, batch: int | None = None
    ) -> Callable[[], None]:
        """A training step: forward, cross entropy, backward, AdamW."""
        x = self.images(batch)
        labels = torch.randint(10, (len(x),))
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> None:
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(x), labels).backward()
            optimizer.step()

        return step


def _checkpointed(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    model.set_grad_checkpointing()  # type: ignore[operator]
    return model


WIDE = {**FLAT, "dims": 48}
SETTINGS = {
    "p4": Setting("p4", {"ours": 1.8, "recommended": 3.0}, others=("same dropout",)),
    "p8": Setting("p8", {"ours": 1.4, "recommended": 5.0}, others=("same dropout",)),
    "p4m": Setting("p4m", {"ours": 1.4, "recommended": 5.0}, others=("same dropout",)),
    "p16": Setting("p16", {"ours": 1.5, "recommended": 8.0, "checkpointed": 1.5}, rounds=0.4),
    "p8, 48 fields": Setting("p8", {"ours": 2.0, "checkpointed": 2.0}, WIDE, rounds=0.3),
    "p4m, 48 fields": Setting("p4m", {"ours": 2.0, "checkpointed": 2.0}, WIDE, rounds=0.3),
    "p4m, four stages, 224 px": Setting(
        "p4m", {"ours": 2.0, "checkpointed": 2.0}, STAGES, batch=4, image_size=224, rounds=0.3, builds_slowly=True
    ),
}
