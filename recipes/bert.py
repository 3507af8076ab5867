"""Masked language modelling with BERT, on packed text.

From BERT (Devlin et al. 2018, arXiv:1810.04805): the sizes base and large, and 15 % of the tokens to predict. 80 % of
the tokens to predict become `[MASK]`, 10 % a random token, 10 % stay. Every sequence has the same number of them, as
with BERT's `max_predictions_per_seq`.

From RoBERTa (Liu et al. 2019, arXiv:1907.11692): no next-sentence loss, sequences across documents, and masks drawn
anew each time. RoBERTa's table 9 has the values of base and large: peak learning rate, warm-up, linear decay, batch
8192, no gradient clipping. The table also has Adam's betas (0.9, 0.98) and epsilon 1e-6, weight decay 0.01, dropout
0.1.

Neither paper has the vocabulary (recipes/corpus.py) and the values of bert_tiny.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor, nn

from recipes.corpus import CLS, MASK, SEP, SPECIALS, Corpus, Settings, prepare
from trainer.errors import ConfigError, require

if TYPE_CHECKING:
    from transformers import BertForMaskedLM

# Shapes: B samples, T tokens of a sequence, K of them to predict, H hidden, V vocabulary.


class MaskedLM(nn.Module):
    """The encoder on all tokens, and the head on the K tokens to predict."""

    def __init__(self, bert: "BertForMaskedLM") -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.bert.bert(input_ids).last_hidden_state  # (B, T, H)
        # A boolean mask would cost a host sync: only the device knows how many tokens it selects.
        hidden = hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))  # (B, K, H)
        return self.bert.cls(hidden)  # (B, K, V)


class Bert:
    """The recipe of BERT: a `BertForMaskedLM` of transformers, trained on text of the user's.

    The embedding has `vocab` rows even if little text yields fewer tokens, so that the weights fit other text.

    Args:
        text: As in recipes/text.py.
        cache: As in recipes/corpus.py.
        vocab: Tokens, at most.
        sequence: Tokens of a sample.
        mask: Fraction of tokens to predict.
    """

    paths = ("text", "cache")

    def __init__(
        self,
        text: str | list[str] | None = None,
        cache: str | None = None,
        val_fraction: float = 0.05,
        vocab: int = 30528,
        sequence: int = 512,
        mask: float = 0.15,
        hidden: int = 768,
        layers: int = 12,
        heads: int = 12,
        dropout: float = 0.1,
    ) -> None:
        _check(
            all(map(importlib.util.find_spec, ("transformers", "tokenizers"))),
            "recipe: needs transformers and tokenizers; pip install 'transformers>=5,<6' 'tokenizers>=0.22,<1'",
        )
        for key, value in (("hidden", hidden), ("layers", layers), ("heads", heads)):
            require(f"recipe.{key}", value, at_least=1)
        _check(0 <= dropout < 1, f"recipe.dropout={dropout}: must be at least 0, and below 1")
        _check(vocab >= 256, f"recipe.vocab={vocab}: too few tokens for text; give 256 or more")
        _check(sequence >= 8, f"recipe.sequence={sequence}: too short to mask tokens in; give 8 or more")
        _check(0 < val_fraction <= 0.5, f"recipe.val_fraction={val_fraction}: must be above 0, and at most 0.5")
        _check(0.5 < mask * sequence <= 0.4 * sequence, f"recipe.mask={mask}: must be at most 0.4, and a token or more")
        _check(hidden % heads == 0, f"recipe.heads={heads}: must divide recipe.hidden={hidden}")
        self.text, self.cache = text, cache
        self.settings = Settings(vocab, sequence, val_fraction)
        self.hidden, self.layers, self.heads, self.dropout = hidden, layers, heads, dropout
        self.masked = round(mask * sequence)
        self.tokens_per_sample = sequence
        self.flops_per_sample = self._flops()

    @cached_property
    def corpus(self) -> Corpus:
        return prepare(self.text, self.cache, self.settings)

    def model(self) -> MaskedLM:
        # Imported here, since transformers takes seconds.
        from transformers.models.bert.configuration_bert import BertConfig
        from transformers.models.bert.modeling_bert import BertForMaskedLM

        config = BertConfig(
            vocab_size=self.settings.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.hidden,
            max_position_embeddings=self.settings.sequence,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            attn_implementation="sdpa",  # pyright: ignore[reportCallIssue] a parameter of the base class
        )
        return MaskedLM(BertForMaskedLM(config))

    def data(self, split: str) -> list[Path]:
        return self.corpus.shards(split)

    def transform(self, sample: Mapping[str, Any], rng: Generator) -> dict[str, np.ndarray]:
        """Mask a sequence (T,) of token ids at random `positions` (K,); `labels` (K,) are the original tokens."""
        input_ids = sample["npy"].astype(np.int64)
        candidates = np.flatnonzero((input_ids != CLS) & (input_ids != SEP))
        positions = np.sort(rng.choice(candidates, self.masked, replace=False))
        labels = input_ids[positions]
        draw = rng.random(self.masked)
        others = rng.integers(len(SPECIALS), self.corpus.meta["vocabulary"], self.masked)
        input_ids[positions] = np.where(draw < 0.8, MASK, np.where(draw < 0.9, others, labels))
        return {"input_ids": input_ids, "positions": positions, "labels": labels}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"], batch["positions"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        return batch["labels"].numel()

    def metrics(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        logits, labels = model(batch["input_ids"], batch["positions"]).flatten(0, 1), batch["labels"].flatten()
        return {
            "loss": (F.cross_entropy(logits, labels, reduction="sum"), len(labels)),
            "accuracy": ((logits.argmax(-1) == labels).sum(), len(labels)),
        }

    def summary(self) -> dict[str, float]:
        """Return the loss of a model that knows the tokens' frequencies and nothing else."""
        return {"unigram_entropy_nats": self.corpus.meta["unigram_entropy_nats"]}

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write what `AutoModelForMaskedLM` and `AutoTokenizer` load."""
        from transformers.models.bert.tokenization_bert import BertTokenizer

        assert isinstance(model, MaskedLM)
        with _no_progress_bar():  # the terminal is the trainer's
            model.bert.save_pretrained(folder)
        BertTokenizer(
            vocab=self.corpus.vocabulary(),
            do_lower_case=False,
            strip_accents=False,
            model_max_length=self.settings.sequence,
        ).save_pretrained(folder)

    def _flops(self) -> float:
        """Count the operations of a sample, forward and backward: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.

        Each token makes 6 for each weight of a matrix, and attention has two products more. Only K tokens meet the
        head.
        """
        h, t = self.hidden, self.settings.sequence
        encoder = 6 * t * self.layers * 12 * h * h
        attention = 12 * self.layers * h * t * t
        head = 6 * self.masked * (h * h + h * self.settings.vocab)
        return float(encoder + attention + head)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check(fine: bool, message: str) -> None:
    if not fine:
        raise ConfigError(message)
