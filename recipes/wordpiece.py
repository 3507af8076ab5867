"""BERT's WordPiece vocabulary (Devlin et al. 2018, arXiv:1810.04805), learned from text.

Case and accents stay, since they distinguish names in code.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.text import Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(len(SPECIALS))
LONGEST_WORD = 100  # characters: longer words are [UNK] to WordPiece, and learning takes their length squared
LONG = re.compile(rf"\w{{{LONGEST_WORD + 1},}}")


class WordPiece:
    """A tokenizer as recipes/corpus.py takes it. A sequence is `[CLS]`, tokens, `[SEP]`; a document ends by `[SEP]`.

    Args:
        tokens: In the order of their ids.
    """

    file = "vocab.txt"
    before, after, end, unknown = [CLS], [SEP], SEP, [UNK]

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.inner = tokenizer_of(tokens)  # knows no special tokens: "[MASK]" in the text is three words

    @classmethod
    def learn(cls, documents: Iterable[Document], frequent: list[str], size: int) -> "WordPiece":
        """Learn at most `size` tokens.

        The alphabet has the most frequent characters, up to an eighth of the vocabulary. Another character makes its
        word `[UNK]`.

        Args:
            frequent: The characters of the text, the most frequent first.
        """
        alphabet = [c for c in frequent if c.isprintable() and not c.isspace()][: size // 8]
        return cls(learn_tokens(documents, alphabet, size))

    def save(self, folder: Path) -> None:
        (folder / self.file).write_text("".join(f"{token}\n" for token in self.tokens), "utf-8")

    @classmethod
    def vocabulary(cls, folder: Path) -> dict[str, int]:
        """Return the ids of the tokens that `save` has written."""
        tokens = (folder / cls.file).read_text("utf-8").split("\n")[:-1]
        return {token: i for i, token in enumerate(tokens)}

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def __len__(self) -> int:
        return len(self.tokens)


def tokenizer_of(tokens: list[str]) -> "Tokenizer":
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIALS[UNK]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def learn_tokens(documents: Iterable[Document], alphabet: list[str], size: int) -> list[str]:
    """Learn at most `size` tokens, and return them in the order of their ids.

    The trainer breaks ties between merges by the numbers of the `##` characters. A hash table that is reseeded in
    each process orders these numbers. Special tokens are numbered first, in the given order, so the whole alphabet is
    special.
    """
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = tokenizer_of(SPECIALS)
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[*SPECIALS, *alphabet, *(f"##{character}" for character in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    words, normal = tokenizer.pre_tokenizer, tokenizer.normalizer

    def shorten(run: re.Match[str]) -> str:
        found = words.pre_tokenize_str(normal.normalize_str(run[0]))
        return " ".join(word for word, _ in found if len(word) <= LONGEST_WORD)

    tokenizer.train_from_iterator((LONG.sub(shorten, document.text) for document in documents), trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)
