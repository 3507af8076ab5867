"""The task of all peers: a model, data and an optimizer, and the clock that the bench reads.

The bench writes the order into the environment variable PEERS_TASK. A step ends with `tick`. No module of Echelon is
imported here, since its time would count for all peers.
"""

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset

TASK, TICKS = "PEERS_TASK", "ticks.json"
NOTHING = '{"model": "MLP", "steps": 0, "save_at": 0, "ticks": 0}'  # in the bench itself
ORDER: dict[str, Any] = json.loads(os.environ.get(TASK, NOTHING))
STEPS, SAVE_AT = ORDER["steps"], ORDER["save_at"]
RANK, WORLD = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else torch.device("cpu")
BATCH = {"MLP": 32, "transformer": 10}[ORDER["model"]]  # samples of a rank
LOG_EVERY = 50
ticks: list[float] = []


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.net(x), labels)}


class Transformer(nn.Module):
    """An encoder of 10 million parameters on tokens x (B, T), with its loss."""

    VOCAB = 4096

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(320, 5, 1280, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(self.VOCAB, 320)
        self.encoder = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
        self.head = nn.Linear(320, self.VOCAB)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.encoder(self.embed(x)))  # (B, T, VOCAB)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Random(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(i)
        if ORDER["model"] == "MLP":
            return {"x": torch.randn(64, generator=draw), "labels": torch.randint(10, (), generator=draw)}
        x, labels = torch.randint(Transformer.VOCAB, (2, 32), generator=draw)
        return {"x": x, "labels": labels}


def model() -> nn.Module:
    torch.manual_seed(0)
    return {"MLP": Mlp, "transformer": Transformer}[ORDER["model"]]()


def optimizer(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-4, fused=True)


def tick() -> None:
    """Note the end of a step; after the last one of the order, rank 0 writes the times and its peak of memory."""
    if CUDA:
        torch.cuda.synchronize()
    ticks.append(time.monotonic())
    if len(ticks) == ORDER["ticks"] and RANK == 0:
        resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = torch.cuda.max_memory_allocated() if CUDA else resident
        Path(TICKS).write_text(json.dumps({"ticks": ticks, "peak": peak}))
