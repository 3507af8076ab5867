"""BERT's vocabulary: which words it is learned from, and what its file gives back."""

from pathlib import Path

from recipes.text import Document
from recipes.wordpiece import SPECIALS, UNK, WordPiece, learn_tokens


def test_words_are_learned_from_as_before_unless_they_are_long():
    """Chinese has no spaces, and its words are characters."""
    texts = ["\u4e2d\u6587" * 200 + " one_two" * 3, "one two three"]
    alphabet = sorted(set("".join(texts)) - set(" "))
    learned = learn_tokens([Document(str(i), text) for i, text in enumerate(texts)], alphabet, 60)
    longer = [text + " " + "x" * 101 for text in texts]
    assert learned == learn_tokens([Document(str(i), t) for i, t in enumerate(longer)], alphabet, 60)
    assert {"\u4e2d", "\u6587", "one"} <= set(learned)


def test_the_alphabet_is_the_most_frequent_characters_and_others_are_unknown(tmp_path: Path):
    """An eighth of 64 tokens is eight characters, without the space."""
    documents = [Document("a", "abcdefgh " * 9), Document("b", "x")]
    made = WordPiece.learn(documents, [" ", *"abcdefgh", "x"], 64)
    assert made.encode(["x abc", ""])[0][0] == UNK and made.encode([""]) == [[]]
    made.save(tmp_path)
    assert WordPiece.vocabulary(tmp_path) == {token: i for i, token in enumerate(made.tokens)}
    assert made.tokens[:13] == [*SPECIALS, *"abcdefgh"] and len(made) == len(made.tokens) <= 64


def test_special_tokens_in_the_text_are_words():
    made = WordPiece.learn([Document("a", "[MASK] one")], [*"[MASK]one"], 256)
    assert not set(made.encode(["[MASK] one"])[0]) & set(range(len(SPECIALS)))
