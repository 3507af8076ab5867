"""What the peers train: a small network on synthetic data, 12 steps of 12 samples, an epoch and a half. And the faults.

`TROUBLE="what rank step"` happens to one rank after that step, in the first attempt.
"""

import json
import os
import resource
import signal
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SAMPLES, BATCH, STEPS = 96, 12, 12
EVERY = 4  # steps between checkpoints, in the middle of an epoch and at its end
WORLD, RANK = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0")))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


class Points(Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor]:
        x = torch.rand(16, generator=torch.Generator().manual_seed(i))
        return i, x, torch.sin(3 * x[:4])


def network() -> nn.Module:
    torch.manual_seed(0)
    dropout = nn.Dropout(float(os.environ.get("DROPOUT", "0")))
    return nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), dropout, nn.Linear(128, 4))


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[1]), batch[2])


def after_step(step: int, batch: list[Tensor]) -> None:
    """Notes this rank's samples of the step, and makes the trouble that is due."""
    with open(f"samples-{RANK}.jsonl", "a") as file:
        file.write(json.dumps([ATTEMPT, step, batch[0].tolist()]) + "\n")
    what, rank, at = (os.environ.get("TROUBLE") or "none 0 0").split()
    if (RANK, step, ATTEMPT) != (int(rank), int(at), 0):
        return
    if what == "cut":  # killed at the 20000th byte of the next file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
    elif what == "agent":
        os.kill(os.getppid(), signal.SIGTERM)
    elif what != "none":
        os.kill(os.getpid(), signal.Signals[what])


def finish(parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Writes the weights and the optimizer's state, byte for byte."""
    state = (value for entry in optimizer.state.values() for _, value in sorted(entry.items()))
    content = b"".join(tensor.detach().numpy().tobytes() for tensor in (*parameters, *state))
    if RANK == 0:
        Path("final").write_bytes(content)
