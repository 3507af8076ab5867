"""Language modelling with GPT-2, on packed text.

From GPT-2 (Radford et al. 2019): the four sizes, byte pairs, sequences of 1024 tokens in batches of 512. The paper has
no learning rates. Those of conf/recipe/gpt2*.yaml are from GPT-3 (Brown et al. 2020, arXiv:2005.14165), table 2.1 and
appendix B: Adam with betas (0.9, 0.95), epsilon 1e-8, weight decay 0.1 and clipping at 1. The rate warms up over 375
million tokens, then falls by a cosine to a tenth. GPT-3's cosine ends earlier, and its XL has batches twice as large.

A sequence holds several documents, each ended by `<|endoftext|>`. Tokens attend across them.

The vocabulary (recipes/corpus.py) is not the published one, and gpt2_tiny is of neither paper.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.random import Generator
from torch import Tensor, nn

from recipes.byte_pairs import BYTES, END, END_TOKEN, read_model
from recipes.checks import check_transformer
from recipes.chunked_loss import cross_entropy
from recipes.corpus import Corpus, Settings, prepare
from recipes.huggingface.recipe import no_progress_bar
from trainer.annotated import check_arguments
from trainer.errors import require

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

# Shapes: B samples, T tokens of a sequence, H hidden, V vocabulary.


class CausalLM(nn.Module):
    """The model with its loss. The head's matrix is the embedding's.

    Args:
        loss_chunks: Parts of the B x (T - 1) rows. The logits of one part are in memory at a time.
    """

    def __init__(self, gpt2: "GPT2LMHeadModel", loss_chunks: int = 1) -> None:
        super().__init__()
        self.gpt2, self.loss_chunks = gpt2, loss_chunks

    def forward(self, input_ids: Tensor, length: int | None = None) -> Tensor:
        """Return the mean cross-entropy of the tokens (B, T) but the first, each after those before it.

        Args:
            length: Tokens that attend to each other, and count positions; a divisor of T. None: T.
        """
        rows = input_ids if length is None else input_ids.reshape(-1, length)
        hidden = self.gpt2.transformer(rows, use_cache=False).last_hidden_state.view(*input_ids.shape, -1)  # (B, T, H)
        before, labels = hidden[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()
        return cross_entropy(self.gpt2.lm_head, before, labels, self.loss_chunks)


class Gpt2:
    """The recipe of GPT-2: a `GPT2LMHeadModel` of transformers, trained on text of the user's.

    The embedding has `vocab` rows even if little text yields fewer tokens.

    Args:
        text: As in recipes/text.py.
        cache: As in recipes/corpus.py.
        vocab: Tokens, at most.
        sequence: Tokens of a sample.
        dropout: Of embeddings, of the attention's probabilities and of each block's two sums.
        loss_chunks: Parts into which the head and the loss are cut. Logits of one part are in memory at a time, and the
            head is computed once more in the backward pass.
    """

    paths = ("text", "cache")
    length: int | None = None  # of a training sequence's parts, within which tokens attend; recipes/grow_sequence.py

    @check_arguments("recipe.")
    def __init__(
        self,
        text: str | list[str] | None = None,
        cache: str | None = None,
        val_fraction: float = 0.05,
        vocab: int = 50257,
        sequence: int = 1024,
        hidden: int = 768,
        layers: int = 12,
        heads: int = 12,
        dropout: float = 0.1,
        loss_chunks: int = 8,
    ) -> None:
        check_transformer(hidden, layers, heads, loss_chunks, val_fraction, dropout=dropout)
        require("recipe.vocab", vocab, at_least=BYTES + 1)
        require("recipe.sequence", sequence, at_least=8)
        self.text, self.cache = text, cache
        self.settings = Settings(vocab, sequence, val_fraction, "byte_pairs")
        self.hidden, self.layers, self.heads, self.dropout = hidden, layers, heads, dropout
        self.loss_chunks, self.tokens_per_sample = loss_chunks, sequence

    @cached_property
    def corpus(self) -> Corpus:
        return prepare(self.text, self.cache, self.settings)

    def model(self) -> CausalLM:
        # Imported here, since transformers takes seconds.
        from transformers.models.gpt2.configuration_gpt2 import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=self.settings.vocab,
            n_positions=self.settings.sequence,
            n_embd=self.hidden,
            n_layer=self.layers,
            n_head=self.heads,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=self.dropout,
            bos_token_id=END,
            eos_token_id=END,
            attn_implementation="sdpa",  # pyright: ignore[reportCallIssue] a parameter of the base class
        )
        return CausalLM(GPT2LMHeadModel(config), self.loss_chunks)

    def data(self, split: str) -> list[Path]:
        return self.corpus.shards(split)

    def transform(self, sample: Mapping[str, Any], rng: Generator) -> dict[str, np.ndarray]:
        return {"input_ids": sample["npy"].astype(np.int64)}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(batch["input_ids"], self.length)

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        return batch["input_ids"][:, 1:].numel()

    def metrics(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        return {"loss": (model(batch["input_ids"]) * self.weight(batch), self.weight(batch))}

    def summary(self) -> dict[str, float]:
        """Return the loss of a model that knows the tokens' frequencies and nothing else."""
        return {"unigram_entropy_nats": self.corpus.meta["unigram_entropy_nats"]}

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write what `GPT2LMHeadModel` and `AutoTokenizer` load."""
        from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer

        assert isinstance(model, CausalLM)
        with no_progress_bar():  # the terminal is the trainer's
            model.gpt2.save_pretrained(folder)
        learned = read_model(self.corpus.folder)
        GPT2Tokenizer(
            vocab=learned["vocab"],
            merges=[tuple(pair) for pair in learned["merges"]],  # pyright: ignore[reportArgumentType] tokenizers' form
            bos_token=END_TOKEN,
            eos_token=END_TOKEN,
            unk_token=END_TOKEN,
            model_max_length=self.settings.sequence,
        ).save_pretrained(folder)

    @cached_property
    def flops_per_sample(self) -> float:
        """Operations of a sample, forward and backward: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.

        Each token makes 6 for each weight of a matrix, and attention has two products more. All pairs of tokens count,
        though half of them are masked. The last token does not meet the head.
        """
        h, t = self.hidden, self.settings.sequence
        blocks = 6 * t * self.layers * 12 * h * h
        attention = 12 * self.layers * h * t * t
        head = 6 * (t - 1) * h * self.settings.vocab
        return float(blocks + attention + head)
