"""DLRM, a deep learning recommendation model (Naumov et al. 2019, arXiv:1906.00091)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class DLRM(nn.Module):
    """Embeddings of categories and an MLP of numbers, their dot products, and an MLP that gives one logit.

    The starting values are those of the paper's code.

    Args:
        dense: Numbers of a sample.
        rows: Of the table of each categorical feature.
        bottom: Widths of the layers over the numbers; the last is the width of an embedding.
        top: Widths of the layers over the dot products, before the logit.
        sparse_gradients: Embeddings have torch's sparse gradients, with the rows of the batch alone.
    """

    def __init__(
        self, dense: int, rows: Sequence[int], bottom: Sequence[int], top: Sequence[int], sparse_gradients: bool
    ) -> None:
        super().__init__()
        width, vectors = bottom[-1], 1 + len(rows)
        self.bottom = mlp([dense, *bottom])
        self.embeddings = nn.ModuleList(nn.Embedding(each, width, sparse=sparse_gradients) for each in rows)
        self.top = mlp([width + vectors * (vectors - 1) // 2, *top, 1])
        self.top.pop(-1)  # the logit has no ReLU
        with torch.no_grad():
            for table in self.embeddings:
                assert isinstance(table, nn.Embedding)
                table.weight.uniform_(-(table.num_embeddings**-0.5), table.num_embeddings**-0.5)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Return logits (B,) of numbers (B, dense) and of row numbers (B, features)."""
        numbers = self.bottom(dense)  # (B, width)
        looked_up = [table(rows) for table, rows in zip(self.embeddings, categories.unbind(1), strict=True)]
        vectors = torch.stack([numbers, *(each.to(numbers.dtype) for each in looked_up)], 1)  # (B, vectors, width)
        products = vectors @ vectors.transpose(1, 2)
        first, second = self.get_buffer("pairs")
        return self.top(torch.cat([numbers, products[:, first, second]], 1)).squeeze(1)


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Return linear layers from width to width, with a ReLU after each."""
    layers = nn.Sequential()
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        nn.init.normal_(linear.weight, std=(2 / (inputs + outputs)) ** 0.5)
        nn.init.normal_(linear.bias, std=outputs**-0.5)
        layers.extend([linear, nn.ReLU()])
    return layers
