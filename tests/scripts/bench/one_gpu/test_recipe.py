"""Random samples are of the form of real ones, and pairs of tokens are counted document by document."""

from dataclasses import replace

import pytest
import torch

from recipes.bert import find_documents
from recipes.wordpiece import CLS, SEP
from scripts.bench.one_gpu.cells import TINY, Cell, parts
from scripts.bench.one_gpu.recipe import DOCUMENTS, SAMPLES, RandomText

CELL = Cell("speed", "Echelon", 64, 2, size=TINY)


def test_samples_are_sequences_of_a_few_documents() -> None:
    recipe = RandomText(CELL)
    data = recipe.data("train")
    assert recipe.data("val") is None and recipe.weight({"labels": data.labels[:2]}) == 2 * recipe.masked
    for i in range(50):
        sample = data[i]
        tokens, positions = sample["input_ids"], sample["positions"]
        assert tokens[0] == CLS and tokens[-1] == SEP and (tokens == SEP).sum() == DOCUMENTS
        assert positions.unique().numel() == recipe.masked == len(sample["labels"])
        assert positions.min() >= 0 and positions.max() < 64 and tokens.max() < TINY.vocab


def test_flops_count_pairs_of_one_document() -> None:
    pytest.importorskip("transformers")
    across, apart = RandomText(CELL), RandomText(replace(CELL, documents=True))
    documents, _ = find_documents(apart.corpus.tokens)
    pairs = (documents.unsqueeze(1) == documents.unsqueeze(2)).sum((1, 2)).double().mean().item()
    assert apart.corpus.pairs_within_documents(SEP) == pytest.approx(pairs)
    saved = 12 * TINY.layers * TINY.hidden * (64 * 64 - pairs)
    assert across.flops_per_sample - apart.flops_per_sample == pytest.approx(saved)
    assert apart.attention_dropout == 0.0 and torch.equal(across.corpus.tokens, apart.corpus.tokens)


def test_no_cell_begins_a_second_epoch() -> None:
    cells = [cell for part in parts(139.0) for cell in part.cells if cell.kind in ("speed", "kernels", "snapshot")]
    assert max(cell.micro * (cell.warm + cell.timed) for cell in cells) <= SAMPLES
