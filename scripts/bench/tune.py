"""Measures `trainer.tools.tune`: its result beside the best of every combination, and the time that both took.

python -m scripts.bench.tune [--quick] [--rounds 1] [--json FILE]
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from recipes.bert import Bert

SIZES = {"10M": (320, 6, 5), "30M": (512, 8, 8)}  # hidden, layers, heads
VOCABULARY, SEQUENCE = 8192, 32


class Random(Dataset[dict[str, Tensor]]):
    """Rows of random tokens."""

    def __init__(self, rows: int, masked: int) -> None:
        self.rows, self.masked = rows, masked

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(row)
        columns = {"input_ids": (VOCABULARY, SEQUENCE), "positions": (SEQUENCE, self.masked)}
        columns["labels"] = (VOCABULARY, self.masked)
        return {name: torch.randint(high, (width,), generator=random) for name, (high, width) in columns.items()}


class Tokens:
    """BERT of about 10 or 30 million parameters, on random tokens."""

    def __init__(self, size: str = "10M") -> None:
        hidden, layers, heads = SIZES[size]
        bert = Bert(vocab=VOCABULARY, sequence=SEQUENCE, hidden=hidden, layers=layers, heads=heads)
        self.bert, self.weight = bert, bert.weight

    def model(self) -> nn.Module:
        return self.bert.model()

    def data(self, split: str) -> Dataset[Any] | None:
        return Random(4096, self.bert.masked) if split == "train" else None

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return self.bert.loss(model, batch)
