"""Masked language modelling with BERT, on packed text.

From BERT (Devlin et al. 2018, arXiv:1810.04805): the sizes base and large, and 15 % of the tokens to predict. 80 % of
the tokens to predict become `[MASK]`, 10 % a random token, 10 % stay. Every sequence has the same number of them, as
with BERT's `max_predictions_per_seq`.

From RoBERTa (Liu et al. 2019, arXiv:1907.11692): no next-sentence loss, sequences across documents, and masks drawn
again each time. RoBERTa's table 9 has the values of base and large: peak learning rate, warm-up, linear decay, batch
8192, no gradient clipping. The table also has Adam's betas (0.9, 0.98) and epsilon 1e-6, weight decay 0.01, dropout
0.1.

A sequence holds several documents. Tokens attend across them, as in RoBERTa. With `document_mask` they attend within
their own document alone, and positions count from its start (Krell et al. 2021, arXiv:2107.02027).

Neither paper has the vocabulary (recipes/corpus.py) and the values of bert_tiny.
"""

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor, nn

from recipes.checks import check, check_transformer
from recipes.chunked_loss import cross_entropy
from recipes.corpus import Corpus, Settings, prepare
from recipes.huggingface.recipe import no_progress_bar
from recipes.wordpiece import CLS, MASK, SEP, SPECIALS
from trainer.annotated import check_arguments
from trainer.log import log

if TYPE_CHECKING:
    from transformers import BertForMaskedLM

ATTEND = "document_mask"  # name of `attend` for transformers

# Shapes: B samples, T tokens of a sequence, K of them to predict, H hidden, V vocabulary.


class MaskedLM(nn.Module):
    """The encoder on all tokens, and the head on the K tokens to predict.

    Args:
        document_mask: Tokens attend to those of their own document alone.
        loss_chunks: Parts of the B x K rows. With labels, the logits of one part are in memory at a time.
    """

    def __init__(self, bert: "BertForMaskedLM", document_mask: bool = False, loss_chunks: int = 1) -> None:
        super().__init__()
        self.bert, self.document_mask, self.loss_chunks = bert, document_mask, loss_chunks

    def forward(
        self, input_ids: Tensor, positions: Tensor, labels: Tensor | None = None, length: int | None = None
    ) -> Tensor:
        """Return the logits, or with `labels` (B, K) the mean cross-entropy.

        Args:
            length: Tokens that attend to each other, and count positions; a divisor of T. None: T.
        """
        rows = input_ids if length is None else input_ids.reshape(-1, length)
        hidden = self._encode(rows).view(*input_ids.shape, -1)
        # A boolean mask would cost a host sync: only the device knows how many tokens it selects.
        hidden = hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))  # (B, K, H)
        if labels is None:
            return self.bert.cls(hidden)  # (B, K, V)
        return cross_entropy(self.bert.cls, hidden.flatten(0, 1), labels.flatten(), self.loss_chunks)

    def _encode(self, input_ids: Tensor) -> Tensor:
        """Return the last hidden states (B, T, H)."""
        if not self.document_mask:
            return self.bert.bert(input_ids).last_hidden_state
        documents, places = find_documents(input_ids)
        flex = input_ids.is_cuda and not self.bert.config.attention_probs_dropout_prob  # FlexAttention has no dropout
        mask = block_mask(documents) if flex else (documents.unsqueeze(1) == documents.unsqueeze(2)).unsqueeze(1)
        hidden = self.bert.bert.embeddings(input_ids, position_ids=places)
        return self.bert.bert.encoder(hidden, attention_mask=mask).last_hidden_state


def find_documents(input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of each token's document in its sequence, and the token's place in it, both (B, T).

    A document ends with `[SEP]`. The first one of a sequence begins with `[CLS]`.
    """
    ends = input_ids == SEP
    starts = F.pad(ends[:, :-1], (1, 0))
    place = torch.arange(input_ids.shape[1], device=input_ids.device)
    return starts.cumsum(1), place - (place * starts).cummax(1).values


def block_mask(documents: Tensor) -> Any:
    """Return FlexAttention's mask of tokens of the same document, from their numbers (B, T)."""
    from torch.nn.attention.flex_attention import create_block_mask

    def same(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[b, q] == documents[b, k]

    size, length = documents.shape
    return create_block_mask(same, size, None, length, length, device=str(documents.device))


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Compute attention by FlexAttention under its own mask, else by SDPA. transformers calls it in each layer.

    FlexAttention skips blocks of 128 x 128 tokens without a common document (Dong et al. 2024, arXiv:2412.05496).
    """
    from torch.nn.attention.flex_attention import BlockMask
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    output = _flex_attention(query.is_cuda)(query, key, value, block_mask=mask, scale=options["scaling"])
    return output.transpose(1, 2), None


@cache
def _flex_attention(compiled: bool) -> Any:
    """Return FlexAttention. On a GPU only the compiled one has a kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


class Bert:
    """The recipe of BERT: a `BertForMaskedLM` of transformers, trained on text of the user's.

    The embedding has `vocab` rows even if little text yields fewer tokens, so that the weights fit other text.

    Args:
        text: As in recipes/text.py.
        cache: As in recipes/corpus.py.
        vocab: Tokens, at most.
        sequence: Tokens of a sample.
        mask: Fraction of tokens to predict.
        attention_dropout: Of the attention's probabilities; None: as `dropout`.
        document_mask: Tokens attend within their document alone, and positions count from its start. On a GPU
            FlexAttention computes this if `attention_dropout` is 0. Otherwise SDPA gets a boolean mask (B, 1, T, T).
        loss_chunks: Parts into which the head and the loss are cut. Logits of one part are in memory at a time, and the
            head is computed once more in the backward pass.
    """

    paths = ("text", "cache")
    length: int | None = None  # of a training sequence's parts, within which tokens attend; recipes/grow_sequence.py

    @check_arguments("recipe.")
    def __init__(  # noqa: PLR0913 each argument is a knob of the config
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
        attention_dropout: float | None = None,
        document_mask: bool = False,
        loss_chunks: int = 1,
    ) -> None:
        self.attention_dropout = dropout if attention_dropout is None else attention_dropout
        dropouts = {"dropout": dropout, "attention_dropout": self.attention_dropout}
        check_transformer(hidden, layers, heads, loss_chunks, val_fraction, **dropouts)
        check(vocab >= 256, f"recipe.vocab={vocab}: too few tokens for text; give 256 or more")
        check(sequence >= 8, f"recipe.sequence={sequence}: too short to mask tokens in; give 8 or more")
        check(0.5 < mask * sequence <= 0.4 * sequence, f"recipe.mask={mask}: must be at most 0.4, and a token or more")
        self.text, self.cache = text, cache
        self.settings = Settings(vocab, sequence, val_fraction)
        self.hidden, self.layers, self.heads, self.dropout = hidden, layers, heads, dropout
        self.document_mask, self.loss_chunks = document_mask, loss_chunks
        self.masked = round(mask * sequence)
        self.tokens_per_sample = sequence

    @cached_property
    def corpus(self) -> Corpus:
        return prepare(self.text, self.cache, self.settings)

    def model(self) -> MaskedLM:
        # Imported here, since transformers takes seconds.
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
        from transformers.modeling_utils import AttentionInterface
        from transformers.models.bert.configuration_bert import BertConfig
        from transformers.models.bert.modeling_bert import BertForMaskedLM

        if self.document_mask:
            AttentionInterface.register(ATTEND, attend)
            AttentionMaskInterface.register(ATTEND, sdpa_mask)
            if self.attention_dropout:
                log.info(
                    "bert: document_mask=true with attention_dropout=%g: FlexAttention has no dropout, so SDPA gets a "
                    "boolean mask, which no flash kernel takes; on a GPU recipe.attention_dropout=0 is faster",
                    self.attention_dropout,
                )
        config = BertConfig(
            vocab_size=self.settings.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.hidden,
            max_position_embeddings=self.settings.sequence,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.attention_dropout,
            attn_implementation=ATTEND if self.document_mask else "sdpa",  # pyright: ignore[reportCallIssue] a parameter of the base class
        )
        return MaskedLM(BertForMaskedLM(config), self.document_mask, self.loss_chunks)

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
        return model(batch["input_ids"], batch["positions"], batch["labels"], self.length)

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
        with no_progress_bar():  # the terminal is the trainer's
            model.bert.save_pretrained(folder)
        BertTokenizer(
            vocab=self.corpus.vocabulary(),
            do_lower_case=False,
            strip_accents=False,
            model_max_length=self.settings.sequence,
        ).save_pretrained(folder)

    @cached_property
    def flops_per_sample(self) -> float:
        """Operations of a sample, forward and backward: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.

        Each token makes 6 for each weight of a matrix, and attention has two products more. Only K tokens meet the
        head. With `document_mask`, pairs of tokens of one document count alone.
        """
        h, t = self.hidden, self.settings.sequence
        encoder = 6 * t * self.layers * 12 * h * h
        attention = 12 * self.layers * h * (self.corpus.pairs_within_documents(SEP) if self.document_mask else t * t)
        head = 6 * self.masked * (h * h + h * self.settings.vocab)
        return float(encoder + attention + head)
