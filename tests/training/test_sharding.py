"""What processes have in common; `tests/cli/test_processes.py` has whole runs."""

import torch
from torch import distributed

from revit.training.sharding import take_first
from tests.faults import victims


def test_all_processes_take_the_buffers_of_the_first(tmp_path):
    processes = [victims.start(one_of_two, str(tmp_path), rank) for rank in range(2)]
    for process in processes:
        process.join(120)
        assert process.exitcode == 0


def one_of_two(folder, rank):
    """Statistics of three shapes and two types, that are another process's before and the first one's after."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    buffers = [torch.full((3,), float(rank)), torch.tensor(rank + 5), torch.full((2, 2), rank + 0.5)]
    kept = [buffer.data_ptr() for buffer in buffers]
    take_first(buffers)
    assert [buffer.tolist() for buffer in buffers] == [[0.0] * 3, 5, [[0.5] * 2] * 2]
    assert kept == [buffer.data_ptr() for buffer in buffers]  # in place
    distributed.destroy_process_group()
