"""What has to be measured in a process of its own. Called by `run.py`: first constructions and peak memory, printed as JSON,
and forward passes and training steps, one for each line of the input.

python benchmarks/probes.py model ours p4
python benchmarks/probes.py joint 32
echo step | python benchmarks/probes.py serve ours p4
"""

from __future__ import annotations

import json
import sys

import torch
from contestants import REFERENCE, SETTINGS
from measure import THREADS, answer, peak_memory, timed, wait_for_quiet

import revit
from revit.evaluation.memory import give_back_freed_memory
from revit.training.kept_memory import keep_memory

JOINT_BATCH, JOINT_FIELDS, JOINT_HEADS, JOINT_ORDER = 2, 16, 2, 4


def probe_model(name: str, key: str) -> dict[str, float]:
    """Seconds of the first construction, and bytes of a training step."""
    setting = SETTINGS[key]
    build = setting.builder(name)
    give_back_freed_memory()
    built = []
    wait_for_quiet()
    seconds = timed(lambda: built.append(build()))
    model = built[0].train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    setting.step_task(model, optimizer, batch=2)()  # loads libraries, starts threads, makes the optimizer's state
    parameters = sum(p.numel() for p in model.parameters())
    return {"construction": seconds, "peak memory": peak_memory(setting.step_task(model, optimizer)), "parameters": parameters}


def serve(name: str, key: str) -> None:
    """Ours keep freed memory, as `revit train` does; the reference runs as its users run it."""
    if name != REFERENCE:
        keep_memory()
    setting = SETTINGS[key]
    model = setting.builder(name)()
    answer({"forward": setting.forward_task(model), "step": setting.step_task(model)})


def probe_joint(size: int) -> dict[str, float]:
    """Bytes of forward and backward of joint attention on a map of `size` x `size`, and of its matrix of scores."""
    layer = revit.nn.GroupConvAttention(
        "p4", JOINT_FIELDS, JOINT_HEADS, kernel_size=3, attention="joint", neighbourhood="global"
    )

    def run(size: int) -> None:
        x = torch.randn(JOINT_BATCH, JOINT_FIELDS, JOINT_ORDER, size, size, requires_grad=True)
        layer(x).square().mean().backward()

    run(8)
    tokens = JOINT_ORDER * size**2
    matrix = JOINT_BATCH * JOINT_HEADS * tokens**2 * 4  # float32, one copy
    return {"tokens": JOINT_BATCH * tokens, "peak memory": peak_memory(lambda: run(size)), "matrix": matrix}


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    kind, *rest = sys.argv[1:]
    if kind == "serve":
        serve(*rest)
    else:
        print(json.dumps(probe_model(*rest) if kind == "model" else probe_joint(int(rest[0]))))
