r"""The same answer for every turn and mirror of an image, to the last bit.

An equivariant network gives turned images the same answer up to rounding: it meets the same numbers in another order, and sums
depend on the order. `BitExact` takes that choice away before the network begins. Of all copies c = T_g^-1 x of an image, g in
the group, it takes the first one in the order of their pixels, runs the network N on it, and turns its maps back:

    answer(x) = N(c),    maps(x) = mean of T_g N(c) over all g with T_g c = x.

All turns and mirrors of an image have the same c, so the network runs the same instructions on the same numbers, whatever its
layers are. That costs one pass and some comparisons; averaging over the group (`revit.nn.Canonical`) costs |G| passes. Only an
image that is itself symmetric has several such g: its maps are added in sorted order, and have its symmetry exactly.

Kernels for other batch sizes add in other orders, too. With `one_by_one` each image goes through the network alone, and its
answer does not depend on what else is in the batch, nor on how many images there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from revit.actions import act_on_features, act_on_plane
from revit.groups import Group
from revit.nn.canonical import ordered_mean


class BitExact(nn.Module):
    """A deployed model whose answers and maps are bit-identical under all turns and mirrors that move pixels onto pixels.

    Made by `bit_exact(model)`. It has the outputs of the model up to rounding, with the same `forward_features`, `forward_head`
    and `named_features`, and is for inference alone.
    """

    def __init__(self, model: Any, *, one_by_one: bool = False) -> None:
        super().__init__()
        group = getattr(model, "group", None)
        if not isinstance(group, Group) or not hasattr(model, "named_features"):
            raise ValueError(f"bit_exact() needs a model on a group, made by create_model, got {type(model).__name__}")
        self.elements = [element for element in range(group.order) if group.is_exact_element(element)]
        if len(self.elements) == 1:
            raise ValueError(f"bit_exact() needs a group that moves pixels onto pixels, such as p4 or p4m, got {group}")
        self.model, self.group, self.one_by_one = model, group, one_by_one
        self.in_chans, self.num_classes = model.in_chans, model.num_classes
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits: those of an image stay to the last bit, those of its pixels turn with it."""
        return self._run(lambda first: {"": self.model(first)}, x)[""]

    def forward_features(self, x: Tensor, features: dict[str, Tensor] | None = None) -> Tensor:
        """Feature map [B, C, G, H', W']; the maps on the way are put into `features`, as in the model itself."""

        def network(first: Tensor) -> dict[str, Tensor]:
            found: dict[str, Tensor] = {}
            return {"": self.model.forward_features(first, found), **found}

        maps = self._run(network, x)
        last = maps.pop("")
        if features is not None:
            features |= maps
        return last

    def forward_head(self, x: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Feature map -> logits, or its invariant features with `pre_logits`: the same bits for every turned map.

        They are those of `forward` up to rounding: the first copy of an image and that of its map are turned differently.
        """
        return self._run(lambda first: {"": self.model.forward_head(first, pre_logits=pre_logits)}, x, axes=5)[""]

    def named_features(self, x: Tensor) -> dict[str, Tensor]:
        """Every map by name, from `lift` to `pre_class`, then `logits`, which are those of `forward`."""
        return self._run(self.model.named_features, x)

    def check_input_size(self, height: int, width: int | None = None) -> dict[str, tuple[int, int]]:
        """The sizes after each layer, as in the model itself."""
        return self.model.check_input_size(height, width)

    def train(self, mode: bool = True) -> Self:
        """Refused: the answers of a model in training depend on chance and on its batch."""
        if mode:
            raise ValueError("a bit-exact model is for inference; train the model that it was made from, and make it anew")
        return super().train(False)

    def _run(self, network: Callable[[Tensor], dict[str, Tensor]], x: Tensor, axes: int = 4) -> dict[str, Tensor]:
        """What a network says about the first copy of each image or map, turned back."""
        if x.ndim != axes or not x.numel():  # the network says what is wrong, if anything
            return network(x)
        first, leads = first_copy(x, self.group, self.elements)
        if self.one_by_one and torch.isfinite(first).all():  # otherwise the network is to name the bad ones among all
            # With memory of its own: kernels may take another path where a tensor does not start at a round address.
            pieces = [network(piece.clone()) for piece in first.split(1)]
        else:
            pieces = [network(first)]
        found, moved = {}, {}
        for name, value in pieces[0].items():
            if id(value) not in moved:  # one map may have two names
                whole = value if len(pieces) == 1 else torch.cat([piece[name] for piece in pieces])
                moved[id(value)] = _turned_back(whole, leads, self.group, self.elements)
            found[name] = moved[id(value)]
        return found

    def extra_repr(self) -> str:
        turned = Group(math.gcd(4, self.group.rotations), self.group.reflections)
        return f"bit-exact under {turned}{', one by one' * self.one_by_one}"


def first_copy(x: Tensor, group: Group, elements: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The first c of the copies T_g^-1 x of each image [B, C, H, W] or map [B, C, G, H, W], and which g lead back, [B, E].

    Copies are compared at the first number that differs. Of tall and wide ones, the wide are first. The layout of x in memory
    does not matter.
    """
    act, inverse = act_on_features if x.ndim == 5 else act_on_plane, group.inverse.tolist()
    x = x + 0 if x.is_floating_point() else x  # -0 is 0
    copies = {i: act(x, group, inverse[element]) for i, element in enumerate(elements)}
    shape = min(copy.shape for copy in copies.values())
    first = torch.empty(0)
    leads = torch.zeros(len(x), len(elements), dtype=torch.bool, device=x.device)
    for i, copy in copies.items():
        if copy.shape != shape:
            continue
        copy = copy.flatten(1)
        if not first.numel():
            first, leads[:, i] = copy, True
            continue
        place = (copy != first).byte().argmax(1, keepdim=True)  # the first that differs, if any does
        ours, theirs = copy.gather(1, place), first.gather(1, place)  # [B, 1]
        before, same = ours < theirs, ours == theirs
        first, leads = torch.where(before, copy, first), leads & ~before
        leads[:, i] = (before | same).flatten()
    return first.view(shape), leads


def _turned_back(value: Tensor, leads: Tensor, group: Group, elements: Sequence[int]) -> Tensor:
    """Maps [B, C, G, H, W] or [B, C, H, W] of the first copies, turned as the images are; vectors [B, K] stay."""
    if value.ndim < 4:
        return value
    act = act_on_features if value.ndim == 5 else act_on_plane
    sole, rows, parts = leads.sum(1) == 1, [], []
    for i, element in enumerate(elements):
        rows.append((leads[:, i] & sole).nonzero().flatten())
        if len(rows[-1]):
            parts.append(act(value[rows[-1]], group, element))
    for row in (~sole).nonzero().flatten():  # symmetric images
        several = [act(value[row : row + 1], group, elements[i]) for i in leads[row].nonzero().flatten().tolist()]
        rows.append(row.view(1))
        parts.append(ordered_mean(torch.stack(several)))
    return torch.cat(parts)[torch.cat(rows).argsort()]
