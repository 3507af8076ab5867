"""Recommendation by a DLRM (Naumov et al. 2019, arXiv:1906.00091), from clicks in Criteo's format."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor, nn

from recipes import calls, criteo
from recipes.auc import AUC
from recipes.criteo import CATEGORIES, INTEGERS, Clicks
from recipes.dlrm import DLRM
from trainer.annotated import check_arguments
from trainer.errors import ConfigError, require


class Recommendation:
    """The recipe of a DLRM on rows of a label, 13 integers and 26 categories.

    An integer x becomes log(1 + x), as in the paper's code; one that is negative or missing becomes 0. A category c
    takes the row c modulo the rows of its table; one that is missing has the row 0.

    Args:
        train: Files in Criteo's format as text, .gz or .parquet, in order of time; a folder, a pattern or a list. Or
            tar shards of such rows as JSON. None: the calls of recipes/calls.py.
        val: The same for validation; None: the last part of `train`, but for shards.
        val_fraction: Share of the rows of `train` in that part.
        cache: Folder for the rows of files as binary; None: the user's cache folder.
        rows: Of each of the 26 tables; one number stands for all. A feature with 0 rows is left out.
        bottom: Widths of the MLP of numbers; the last is the width of an embedding.
        top: Widths of the MLP over the dot products, before the logit.
        sparse_gradients: Of the embeddings: torch's sparse tensors instead of dense ones.
    """

    paths = ("train", "val", "cache")

    @check_arguments("recipe.")
    def __init__(
        self,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        val_fraction: float = 0.1,
        cache: str | None = None,
        rows: int | list[int] = 100_000,
        bottom: list[int] | None = None,
        top: list[int] | None = None,
        sparse_gradients: bool = False,
    ) -> None:
        tables = [rows] * CATEGORIES if isinstance(rows, int) else list(rows)
        if len(tables) != CATEGORIES or min(tables) < 0 or not any(tables):
            raise ConfigError(f"recipe.rows={rows}: give a number of rows, or {CATEGORIES}, of which 0 leaves one out")
        bottom, top = [512, 256, 64] if bottom is None else bottom, [512, 256] if top is None else top
        for key, value in (("bottom", bottom), ("top", top)):
            if min(value, default=0) < 1:
                raise ConfigError(f"recipe.{key}={value}: give widths of 1 or more")
        require("recipe.val_fraction", val_fraction, above=0, below=1)
        if train is None and val is not None:
            raise ConfigError(f"recipe.val={val}: the calls have a validation part of their own; give recipe.train too")
        self.sources, self.val_fraction, self.cache = {"train": train, "val": val}, val_fraction, cache
        self.tables, self.bottom, self.top = np.array(tables), list(bottom), list(top)
        self.sparse_gradients = sparse_gradients
        self.auc = AUC()
        self.positives = math.nan  # share of the validation's rows

    def model(self) -> nn.Module:
        return DLRM(INTEGERS, self.tables[self.tables > 0].tolist(), self.bottom, self.top, self.sparse_gradients)

    def blocks(self, model: DLRM) -> list[nn.Module]:
        return [model.bottom, model.top]

    def data(self, split: str) -> Any:
        """Return shards as they are given, or the rows of files. Without `val`, validation has the last rows."""
        source, part = self.sources[split], (0.0, 1.0)
        if source is None or self.sources["val"] is None:
            source, cut = self.sources["train"], 1 - self.val_fraction
            if is_shards(source):
                return source if split == "train" else None
            part = (0.0, cut) if split == "train" else (cut, 1.0)
        if is_shards(source):
            return source
        paths = calls.days(self.cache) if source is None else criteo.files(source, f"recipe.{split}")
        clicks = Clicks([criteo.prepare(path, self.cache) for path in paths], part)
        if split == "val" and len(clicks):
            self.positives = clicks.positives() / len(clicks)
        return clicks

    def transform(self, sample: Any, rng: Generator) -> np.ndarray:
        """Return the row (40,) of a sample of a shard; that of a file is one already."""
        return criteo.of_json(sample.get("json"), str(sample.get("__key__"))) if isinstance(sample, Mapping) else sample

    def collate(self, samples: list[np.ndarray]) -> dict[str, Tensor]:
        """Return `label` (B,) and `dense` (B, 13) as float32, and `categories` (B, features) as rows of tables."""
        rows = np.stack(samples)
        kept = np.flatnonzero(self.tables)
        numbers, kinds = rows[:, 1 : 1 + INTEGERS], rows[:, 1 + INTEGERS :].view(np.uint32)[:, kept]
        return {
            "label": torch.from_numpy(rows[:, 0].astype(np.float32)),
            "dense": torch.from_numpy(np.log1p(np.maximum(numbers, 0).astype(np.float32))),
            "categories": torch.from_numpy(kinds.astype(np.int64) % self.tables[kept]),
        }

    def _logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(batch["dense"], batch["categories"]).float()

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(self._logits(model, batch), batch["label"])

    def metrics(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss, in nats a sample, and the AUC over the whole validation."""
        logits, labels = self._logits(model, batch), batch["label"]
        self.auc.update(logits, labels)
        loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return {"loss": (loss, len(labels)), "auc": self.auc}

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the probability of a click."""
        return self._logits(model, batch).sigmoid()

    def summary(self) -> dict[str, float]:
        """Return the share of clicks in the validation, and the loss of a model that knows this share alone."""
        share = self.positives
        if not 0 < share < 1:
            return {}
        return {"val_positives": share, "base_rate_loss": -share * math.log(share) - (1 - share) * math.log(1 - share)}


def is_shards(source: str | list[str] | None) -> bool:
    """Return whether all sources are tar shards, or a program's."""
    given = [source] if isinstance(source, str) else source or []
    return bool(given) and all(".tar" in each or each.startswith("pipe:") for each in given)
