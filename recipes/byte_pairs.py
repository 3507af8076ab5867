"""GPT-2's byte-level byte pair encoding (Radford et al. 2019), learned from text.

Each byte is a token, so there is no unknown one. `decode(encode(text))` is the text.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.text import Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256
END = 0  # the id of the token after each document; GPT-2's own is the last id
END_TOKEN = "<|endoftext|>"
LONGEST_RUN = 100  # characters: to learn from longer words takes their length squared
LONG = re.compile(rf"\S{{{LONGEST_RUN + 1},}}|\s{{{LONGEST_RUN + 1},}}")


class BytePairs:
    """A tokenizer as recipes/corpus.py takes it. A sequence is the next tokens; a document ends by `<|endoftext|>`.

    Args:
        inner: Knows no special token: `<|endoftext|>` in the text is a word like any other.
    """

    file = "tokenizer.json"
    before, after, end, unknown = list[int](), list[int](), END, list[int]()

    def __init__(self, inner: "Tokenizer") -> None:
        self.inner = inner

    @classmethod
    def learn(cls, documents: Iterable[Document], frequent: list[str], size: int) -> "BytePairs":
        """Learn at most `size` tokens: the end of a document, the bytes, and pairs that occur twice or more.

        The most frequent pair is the next token; of equal ones, the pair with the lowest ids.

        Args:
            frequent: Not used: the alphabet is the 256 bytes.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from tokenizers.trainers import BpeTrainer

        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = BpeTrainer(
            vocab_size=size,
            min_frequency=2,
            special_tokens=[END_TOKEN],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator((piece for document in documents for piece in pieces(document.text)), trainer)
        inner.encode_special_tokens = True
        return cls(inner)

    def save(self, folder: Path) -> None:
        self.inner.save(str(folder / self.file), pretty=False)

    @classmethod
    def vocabulary(cls, folder: Path) -> dict[str, int]:
        """Return the ids of the tokens that `save` has written."""
        return read_model(folder)["vocab"]

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def __len__(self) -> int:
        return self.inner.get_vocab_size()


def read_model(folder: Path) -> dict[str, Any]:
    """Return `vocab`, a dict of token -> id, and `merges`, pairs of tokens in their order."""
    return json.loads((folder / BytePairs.file).read_text("utf-8"))["model"]


def pieces(text: str) -> Iterator[str]:
    """Yield all of a text, cut inside runs of characters without a space, or of spaces, that are long."""
    start = 0
    for run in LONG.finditer(text):
        yield text[start : run.start()]
        yield from (run[0][i : i + LONGEST_RUN] for i in range(0, len(run[0]), LONGEST_RUN))
        start = run.end()
    yield text[start:]
