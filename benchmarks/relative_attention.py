"""A training step of G-SA beside the same network that forms every score, as the public code does.

python benchmarks/relative_attention.py [--groups p4,p8] [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from measure import HERE, THREADS, Disturbance, interleave, median_ratio, origin, write_report
from torch import Tensor, nn

from revit.evaluation.memory import in_fresh_process, step_memory, step_task
from revit.models import create_model
from revit.nn import relative_attention
from revit.nn.neighbourhoods import unfold_neighbours

BATCH, SIZE = 16, 28
PUBLIC = {"p4": {"step_seconds": 23.0, "step_bytes": 6.2e9}}
"""dwromero/g_selfatt at this batch, size and patch on two threads of such a machine; its p8 does not fit 24 GB."""
PAIRS = ("p4",)
"""Where the reference is run: it needs |G|^3 scores for every pair of pixels, tens of gigabytes at p8."""


def attend_pairs(
    q: Tensor, k: Tensor, v: Tensor, encodings: Tensor, elements: Tensor, encoding_of: Tensor, size: int, scale: float
) -> Tensor:
    """Every score of Eq. 5, at once: [B, heads, V, g, pixel, h, offset]."""
    batch, heads, _, _, height, width = q.shape
    near_k, near_v = (unfold_neighbours(x.flatten(0, 1), size).unflatten(0, (batch, heads)) for x in (k, v))
    queries = q.flatten(-2)
    positions, relative = encodings[encoding_of], elements  # [O, V, D], [g, h, D]
    scores = torch.einsum("bndgx,bnxdho->bngxho", queries, near_k).unsqueeze(2)
    scores = scores + torch.einsum("bndgx,ovd->bnvgxo", queries, positions).unsqueeze(5)
    scores = scores + torch.einsum("bndgx,ghd->bngxh", queries, relative)[:, :, None, ..., None]
    there = unfold_neighbours(torch.ones(1, 1, 1, height, width), size)[0, :, 0, 0] > 0  # [pixel, offset]
    scores = (scale * scores).masked_fill(~there[:, None], -torch.inf)
    weights = scores.flatten(-2).softmax(-1).view_as(scores)
    out = torch.einsum("bnvgxho,bnxdho->bndvx", weights, near_v)
    return out.unflatten(-1, (height, width))


def build(group: str) -> nn.Module:
    torch.manual_seed(0)
    return create_model("gsa_rotmnist", group=group)


def images() -> Tensor:
    return torch.randn(BATCH, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


def peak(group: str, pairs: bool) -> int:
    """Peak bytes of a step, in the process that calls this."""
    torch.set_num_threads(THREADS)
    with mock.patch.object(relative_attention, "attend_local", attend_pairs if pairs else relative_attention.attend_local):
        return step_memory(build(group), images())


def measure(group: str, rounds: int) -> dict[str, Any]:
    x = images()
    model = build(group)
    step = step_task(model, torch.optim.AdamW(model.parameters(), lr=0.0), x)

    def pairs_step() -> None:
        with mock.patch.object(relative_attention, "attend_local", attend_pairs):
            step()

    tasks = {"ours": step} | ({"pairs": pairs_step} if group in PAIRS else {})
    seconds = interleave(tasks, rounds=rounds, warmup=1)
    found: dict[str, Any] = {
        "seconds": seconds,
        "step_seconds": median(seconds["ours"]),
        "step_bytes": in_fresh_process(peak, group, False),
    }
    if group in PAIRS:
        with torch.no_grad(), mock.patch.object(relative_attention, "attend_local", attend_pairs):
            theirs = model.eval()(x)
        with torch.no_grad():
            difference = float((model(x) - theirs).abs().max() / theirs.abs().max())
        found["pairs"] = {
            "step_seconds": median(seconds["pairs"]),
            "step_bytes": in_fresh_process(peak, group, True),
            "ratio": median_ratio(seconds["pairs"], seconds["ours"]),
            "difference_of_logits": difference,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="p4,p8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "relative_attention.json")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    disturbance = Disturbance()
    groups: dict[str, Any] = {}
    for group in options.groups.split(","):
        groups[group] = found = measure(group, options.rounds)
        print(f"{group}: step {found['step_seconds']:.2f} s, peak {found['step_bytes'] / 1e9:.2f} GB", flush=True)
        if "pairs" in found:
            pairs = found["pairs"]
            print(f"  every pair: {pairs['step_seconds']:.1f} s ({pairs['ratio']:.1f} times as long)", flush=True)
            print(f"  {pairs['step_bytes'] / 1e9:.1f} GB; logits differ by {pairs['difference_of_logits']:.1e}", flush=True)
    report = {
        **origin(f"relative_attention.py --groups {options.groups} --rounds {options.rounds}"),
        "batch": BATCH, "size": SIZE, "groups": groups, "public": PUBLIC,
        "share_of_processors_used_by_others": disturbance.share(),
    }  # fmt: skip
    write_report(report, options.out)


if __name__ == "__main__":
    main()
