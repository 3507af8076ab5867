"""Documents to token shards: a learned vocabulary, packed sequences; built once into a cache folder.

`CACHE/HASH/` has `train-*.tar` and `val-*.tar` (WebDataset; `npy` is a sequence of token ids), the vocabulary and
`meta.json`. The hash is of the files' paths, sizes and times, and of the settings. The same text gives the same bytes.

- A hash of a document's name decides its split: a document stays in its split when others come and go.
- The vocabulary is from the training split: recipes/wordpiece.py or recipes/byte_pairs.py.
- A sequence has the next tokens of the documents, each ended by a token of its own, between the tokens that BERT puts
  around a sequence: RoBERTa's FULL-SENTENCES (Liu et al. 2019, arXiv:1907.11692). The start of the split fills the last
  sequence up: no token is padding, and no text is lost.
"""

import hashlib
import importlib.metadata
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from recipes.byte_pairs import BytePairs
from recipes.cache import build_once, digest, root
from recipes.text import Document, Source, batches, show
from recipes.wordpiece import WordPiece
from trainer.files import sha256_of
from trainer.log import log

FORMAT = 2  # of the cache; part of the hash
SEQUENCES_PER_SHARD = 4096
CODE_POINTS = 0x110000
TOKENIZERS = {"wordpiece": WordPiece, "byte_pairs": BytePairs}


class Tokenizer(Protocol):
    """The part of a tokenizer that packs text. `encode` knows no special token."""

    file: ClassVar[str]  # in the cache, with the vocabulary
    before: ClassVar[list[int]]  # the tokens around a sequence
    after: ClassVar[list[int]]
    end: ClassVar[int]  # the token after each document
    unknown: ClassVar[list[int]]  # the token of words that no others spell

    def encode(self, texts: list[str]) -> list[list[int]]: ...

    def save(self, folder: Path) -> None: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Settings:
    vocab: int
    sequence: int  # tokens, the special ones included
    val_fraction: float
    tokenizer: Literal["wordpiece", "byte_pairs"] = "wordpiece"


@dataclass(frozen=True)
class Corpus:
    folder: Path
    meta: dict[str, Any]

    def shards(self, split: str) -> list[Path]:
        return sorted(self.folder.glob(f"{split}-*.tar"))

    def pairs_within_documents(self, end: int) -> float:
        """Return the pairs of tokens of one document in a sequence: the mean over the first shard for training.

        Args:
            end: The last token of a document, and of a sequence.
        """
        pairs = []
        with tarfile.open(self.shards("train")[0]) as shard:
            for member in shard:
                file = shard.extractfile(member)
                assert file
                ends = np.flatnonzero(np.load(io.BytesIO(file.read())) == end)  # the last token is one
                pairs.append(np.square(np.diff(ends, prepend=-1)).sum())
        return float(np.mean(pairs))

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token."""
        return TOKENIZERS[self.meta["tokenizer"]].vocabulary(self.folder)


def prepare(text: str | list[str] | None, cache: str | None, settings: Settings) -> Corpus:
    """Return the shards of `text` under `cache` (null: the user's cache folder), and build them if they are missing.

    Raises:
        ConfigError: The text can't be used, or the cache can't be written.
    """
    source = Source(text)
    files = [(os.path.abspath(source.files[name]), s.st_size, s.st_mtime_ns) for name, s in source.stats.items()]
    identity = [FORMAT, importlib.metadata.version("tokenizers"), asdict(settings), list(source.files), files]
    folder = root(cache) / digest(identity)
    build_once(folder, "text", _is_whole, lambda partial: _build(source, partial, folder, settings))
    return Corpus(folder, json.loads((folder / "meta.json").read_text()))


def _build(source: Source, partial: Path, folder: Path, settings: Settings) -> None:
    partial.mkdir()
    text = "text: preparing recipe.text=%s: %d files; %d hidden files are left out"
    log.info(text, source.label, len(source.files), source.hidden)
    survey = _Survey(source, settings)
    learn = TOKENIZERS[settings.tokenizer].learn
    tokenizer: Tokenizer = learn(survey.documents("train", "vocabulary"), survey.characters, settings.vocab)
    tokenizer.save(partial)
    counts = {split: _write(split, survey, tokenizer, partial, settings) for split in ("train", "val")}
    predicted = np.delete(counts["train"], [*tokenizer.before, *tokenizer.after])
    share = predicted[predicted > 0] / predicted.sum()
    meta = {
        "text": source.label,
        "files": len(source.files),
        "hidden": source.hidden,
        "vocabulary": len(tokenizer),
        "tokens": {split: int(count.sum()) for split, count in counts.items()},
        "unknown": {split: int(count[tokenizer.unknown].sum()) for split, count in counts.items()},
        "unigram_entropy_nats": float(-(share * np.log(share)).sum()),
        **asdict(settings),
    }
    meta["content"] = {path.name: _size_and_sha256(path) for path in sorted(partial.iterdir())}
    (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    text = "text: %d tokens for training and %d for validation in %s"
    log.info(text, meta["tokens"]["train"], meta["tokens"]["val"], folder)
    # Data workers are forks, which the threads of tokenizers don't survive: each worker would warn.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _is_whole(folder: Path) -> bool:
    """Return whether the files have the sizes in `meta.json`, and the vocabulary has its sha256.

    The index of a shard checks its content.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        sizes = {name: (folder / name).stat().st_size for name in meta["content"]}
        file = TOKENIZERS[meta["tokenizer"]].file
        return (
            all(sizes[n] == size for n, (size, _) in meta["content"].items())
            and _size_and_sha256(folder / file) == meta["content"][file]
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return False


def _size_and_sha256(path: Path) -> list[Any]:
    with path.open("rb") as file:
        return [path.stat().st_size, sha256_of(file)]


class _Survey:
    """The split and the characters of a text. Reading all of it once refuses unreadable files before any work."""

    def __init__(self, source: Source, settings: Settings) -> None:
        self.source = source
        points: list[float] = []
        counts = np.zeros(CODE_POINTS, np.int64)
        for batch in batches(source.documents()):
            points += [_point(document.name) for document in batch]
            codes = np.frombuffer("".join(document.text for document in batch).encode("utf-32-le"), np.uint32)
            counts += np.bincount(codes, minlength=CODE_POINTS)
        if not points:
            raise source.empty()
        self.threshold = max(settings.val_fraction, min(points))  # small corpora have a validation document, too
        if max(points) <= self.threshold:
            raise source.error("one document can't be split for validation; give more documents, or longer text")
        self.size = int(counts.sum())
        self.characters = [chr(i) for i in np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist()]

    def documents(self, split: str, task: str) -> Iterator[Document]:
        for document in show(self.source.documents(), f"text: {task}", self.size):
            if (_point(document.name) <= self.threshold) == (split == "val"):
                yield document


def _point(name: str) -> float:
    """Return a number in [0, 1): names are spread evenly."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:6], "big") / (1 << 48)


def _write(split: str, survey: _Survey, tokenizer: Tokenizer, folder: Path, settings: Settings) -> np.ndarray:
    """Write the shards of `split`, and return how often each token occurs."""
    from trainer.data.shards.writer import write_shards

    counts = np.zeros(len(tokenizer), np.int64)

    def stream() -> Iterator[np.ndarray]:
        for batch in batches(survey.documents(split, f"{split} shards")):
            encoded = tokenizer.encode([document.text for document in batch])
            ids = np.array([i for own in encoded if own for i in (*own, tokenizer.end)], np.int64)
            counts[:] += np.bincount(ids, minlength=len(tokenizer))
            yield ids

    sequences = enumerate(pack(stream(), settings.sequence, tokenizer.before, tokenizer.after))
    kind = np.uint16 if settings.vocab <= 1 << 16 else np.int32
    samples = ({"__key__": f"{i:08d}", "npy": sequence.astype(kind)} for i, sequence in sequences)
    write_shards(samples, folder, split, SEQUENCES_PER_SHARD)
    return counts


def pack(
    stream: Iterable[np.ndarray], length: int, before: Sequence[int] = (), after: Sequence[int] = ()
) -> Iterator[np.ndarray]:
    """Yield sequences of `length` tokens: those of `before`, the next tokens of the arrays, those of `after`."""
    body = length - len(before) - len(after)
    first = rest = np.empty(0, np.int64)
    for ids in stream:
        rest = np.concatenate([rest, ids])
        first = rest[:body].copy() if len(first) < body else first
        whole = len(rest) // body * body
        yield from (np.concatenate([before, row, after]).astype(np.int64) for row in rest[:whole].reshape(-1, body))
        rest = rest[whole:]
    if len(rest):
        yield np.concatenate([before, np.resize(np.concatenate([rest, first]), body), after]).astype(np.int64)
