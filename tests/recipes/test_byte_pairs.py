"""Byte pairs: every text comes back, the most frequent pair is learned first, and long runs cost no time."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.byte_pairs import BYTES, END, END_TOKEN, LONGEST_RUN, BytePairs, pieces, read_model
from recipes.text import Document

TEXT = "the cat sat on the mat, then the hat. D\u00e9j\u00e0 vu: \u4e2d\u6587 \U0001f600\n\n\tx = 12345\n"


@pytest.fixture(scope="module")
def made() -> BytePairs:
    return BytePairs.learn([Document("a", TEXT * 3)], [], 300)


@given(text=st.text(), blank=st.sampled_from([" ", "\n", "\r\n", "\t \u00a0"]))
def test_decode_of_encode_is_the_text(made: BytePairs, text: str, blank: str):
    whole = text + blank + TEXT + blank * 3 + END_TOKEN + text
    (ids,) = made.encode([whole])
    assert made.inner.decode(ids, skip_special_tokens=False) == whole
    assert END not in ids and max(ids) < len(made)


def test_pairs_by_hand():
    """As in Sennrich et al. 2016, arXiv:1508.07909, section 3.2, on bytes; ` low` is a word with its space."""
    text = "low" + " low" * 4 + " lower" * 2 + " newest" * 6 + " widest" * 3
    made = BytePairs.learn([Document("a", text)], [], BYTES + 1 + 5)
    merges = made.inner.to_str()
    learned = [token for token, i in sorted(made.inner.get_vocab().items(), key=lambda item: item[1]) if i > BYTES]
    words = Counter(("low", *("\u0120low",) * 4, *("\u0120lower",) * 2, *("\u0120newest",) * 6, *("\u0120widest",) * 3))
    assert learned == by_hand(words, 5, made.inner.get_vocab()) and '"\\u0120low"' not in merges.lower()


def by_hand(words: Counter[str], merges: int, ids: dict[str, int]) -> list[str]:
    """The most frequent pair each time; of equal ones, the one of the lowest ids."""
    split = {word: list(word) for word in words}
    learned = []
    for _ in range(merges):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in split.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], ids[pair[0]], ids[pair[1]]))
        learned.append("".join(best))
        for word, parts in split.items():
            new, i = [], 0
            while i < len(parts):
                joined = tuple(parts[i : i + 2]) == best
                new.append("".join(best) if joined else parts[i])
                i += 1 + joined
            split[word] = new
    return learned


def test_each_byte_is_a_token_and_the_file_has_all(made: BytePairs, tmp_path: Path):
    made.save(tmp_path)
    vocabulary, model = BytePairs.vocabulary(tmp_path), read_model(tmp_path)
    assert sorted(vocabulary.values()) == list(range(len(made))) and vocabulary[END_TOKEN] == END
    assert len(model["merges"]) == len(made) - BYTES - 1 > 10
    assert all("".join(pair) in vocabulary for pair in model["merges"])


@given(st.lists(st.tuples(st.sampled_from(["ab", " ", "\n", "-"]), st.integers(1, 250)), max_size=5))
def test_pieces_are_the_text_and_have_no_long_run(runs: list[tuple[str, int]]):
    text = "".join(part * times for part, times in runs)
    found = list(pieces(text))
    assert "".join(found) == text
    assert all(len(word) <= LONGEST_RUN for piece in found for word in piece.split())
    short = "one two  three\n" * 50
    assert list(pieces(short)) == [short]


def test_text_without_spaces_is_learned_from():
    made = BytePairs.learn([Document("a", "\u4e2d\u6587" * 500)], [], 270)
    assert len(made.encode(["\u4e2d\u6587" * 8])[0]) < 16  # of 48 bytes
