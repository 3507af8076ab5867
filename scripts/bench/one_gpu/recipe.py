"""Masked language modelling of recipes/bert.py on random tokens, so that no text is needed."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor
from torch.utils.data import Dataset

from recipes.bert import Bert
from recipes.wordpiece import CLS, SEP, SPECIALS
from scripts.bench.one_gpu.cells import Cell

SAMPLES = 8192  # more than any cell takes: other trainers restart their data workers at the end of an epoch
DOCUMENTS = 4  # of a sequence


class Sequences(Dataset[dict[str, Tensor]]):
    """Random tokens (T,) of a few documents, positions (K,) and labels (K,)."""

    def __init__(self, vocab: int, sequence: int, masked: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(len(SPECIALS), vocab, (SAMPLES, sequence), generator=random)
        ends = torch.rand(SAMPLES, sequence - 2, generator=random).topk(DOCUMENTS - 1).indices + 1
        self.tokens.scatter_(1, ends, SEP)
        self.tokens[:, 0], self.tokens[:, -1] = CLS, SEP
        self.positions = torch.rand(SAMPLES, sequence, generator=random).topk(masked).indices.sort().values
        self.labels = torch.randint(len(SPECIALS), vocab, (SAMPLES, masked), generator=random)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "positions": self.positions[i], "labels": self.labels[i]}

    def pairs_within_documents(self, end: int) -> float:
        """Return the pairs of tokens of one document, whose last is `end`, in a sequence: the mean."""
        ends = (self.tokens == end).nonzero()[:, 1].view(SAMPLES, DOCUMENTS)
        lengths = ends.diff(prepend=torch.full((SAMPLES, 1), -1))
        return float(lengths.square().sum(1).double().mean())


class RandomText(Bert):
    def __init__(self, cell: Cell) -> None:
        super().__init__(
            **cell.size._asdict(),
            sequence=cell.sequence,
            document_mask=cell.documents,
            loss_chunks=cell.chunks,
            attention_dropout=0.0 if cell.documents else None,
        )

    @cached_property
    def corpus(self) -> Any:
        return Sequences(self.settings.vocab, self.settings.sequence, self.masked)

    def data(self, split: str) -> Any:
        return self.corpus if split == "train" else None

    def transform(self, sample: Mapping[str, Any], rng: Generator) -> Any:
        return sample

    def summary(self) -> dict[str, float]:
        return {}

    def export(self, model: Any, folder: Path) -> None:
        """Write nothing: there is no vocabulary."""
