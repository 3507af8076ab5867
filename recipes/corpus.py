"""Documents to token shards: a WordPiece vocabulary, packed sequences; built once into a cache folder.

`CACHE/HASH/` has `train-*.tar` and `val-*.tar` (WebDataset; `npy` is a sequence of token ids), `vocab.txt` and
`meta.json`. The hash is of the files' paths, sizes and times, and of the settings. The same text gives the same bytes.

- A hash of a document's name decides its split: a document stays in its split when others come and go.
- The vocabulary is BERT's WordPiece, from the training split. Case and accents stay, since they tell names in code
  apart.
- A sequence is RoBERTa's FULL-SENTENCES (Liu et al. 2019, arXiv:1907.11692): `[CLS]`, the next T - 2 tokens of the
  documents, each ended by `[SEP]`, and `[SEP]`. The start of the split fills the last sequence up: no token is padding,
  and no text is lost.
"""

import fcntl
import hashlib
import importlib.metadata
import io
import json
import logging
import os
import re
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.text import Document, Source, batches, show
from trainer.data.remote.eviction import open_regular
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger("echelon")

FORMAT = 1  # of the cache; part of the hash
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(len(SPECIALS))
SEQUENCES_PER_SHARD = 4096
CODE_POINTS = 0x110000
LONGEST_WORD = 100  # characters: longer words are [UNK] to WordPiece, and learning takes their length squared
LONG = re.compile(rf"\w{{{LONGEST_WORD + 1},}}")


@dataclass(frozen=True)
class Settings:
    vocab: int
    sequence: int  # tokens, the special ones included
    val_fraction: float


@dataclass(frozen=True)
class Corpus:
    folder: Path
    meta: dict[str, Any]

    def shards(self, split: str) -> list[Path]:
        return sorted(self.folder.glob(f"{split}-*.tar"))

    def pairs_within_documents(self) -> float:
        """Return the pairs of tokens of one document in a sequence: the mean over the first shard for training."""
        pairs = []
        with tarfile.open(self.shards("train")[0]) as shard:
            for member in shard:
                file = shard.extractfile(member)
                assert file
                ends = np.flatnonzero(np.load(io.BytesIO(file.read())) == SEP)  # the last token is one
                pairs.append(np.square(np.diff(ends, prepend=-1)).sum())
        return float(np.mean(pairs))

    def vocabulary(self) -> dict[str, int]:
        tokens = (self.folder / "vocab.txt").read_text("utf-8").split("\n")[:-1]
        return {token: i for i, token in enumerate(tokens)}


def prepare(text: str | list[str] | None, cache: str | None, settings: Settings) -> Corpus:
    """Return the shards of `text` under `cache` (null: the user's cache folder), and build them if they are missing.

    Raises:
        ConfigError: The text can't be used, or the cache can't be written.
    """
    source = Source(text)
    root = Path(cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "echelon")).expanduser()
    files = [(os.path.abspath(source.files[name]), s.st_size, s.st_mtime_ns) for name, s in source.stats.items()]
    identity = [FORMAT, importlib.metadata.version("tokenizers"), asdict(settings), list(source.files), files]
    folder = root / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    try:
        if not _is_whole(folder):
            with _lock(folder.with_suffix(".lock")):
                if not _is_whole(folder):
                    _build(source, folder, settings)
        return Corpus(folder, json.loads((folder / "meta.json").read_text()))
    except OSError as error:
        raise ConfigError(f"recipe.cache={root}: {error}; give a writable folder with free space") from None


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", opener=open_regular) as file:  # in a shared cache, a pipe of a neighbour's would not open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("text: another process is preparing %s; waiting for it", path.with_suffix(""))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(source: Source, folder: Path, settings: Settings) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a build that was killed: this process has the lock
    partial.mkdir()
    text = "text: preparing recipe.text=%s: %d files; %d hidden files are left out"
    log.info(text, source.label, len(source.files), source.hidden)
    survey = _Survey(source, settings)
    tokens = _learn_vocabulary(survey.documents("train", "vocabulary"), survey.alphabet, settings.vocab)
    (partial / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), "utf-8")
    counts = {split: _write(split, survey, tokens, partial, settings) for split in ("train", "val")}
    maskable = np.delete(counts["train"], [CLS, SEP])
    share = maskable[maskable > 0] / maskable.sum()
    meta = {
        "text": source.label,
        "files": len(source.files),
        "hidden": source.hidden,
        "vocabulary": len(tokens),
        "tokens": {split: int(count.sum()) for split, count in counts.items()},
        "unknown": {split: int(count[UNK]) for split, count in counts.items()},
        "unigram_entropy_nats": float(-(share * np.log(share)).sum()),
        **asdict(settings),
    }
    meta["content"] = {path.name: _size_and_sha256(path) for path in sorted(partial.iterdir())}
    (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    text = "text: %d tokens for training and %d for validation in %s"
    log.info(text, meta["tokens"]["train"], meta["tokens"]["val"], folder)
    for path in (*partial.iterdir(), partial):
        _sync(path)  # else a power cut may leave the folder with empty files
    if folder.exists():
        log.warning("text: %s: is damaged, and is replaced", folder)
        shutil.rmtree(folder)
    partial.rename(folder)
    _sync(folder.parent)
    # Data workers are forks, which the threads of tokenizers don't survive: each worker would warn.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _is_whole(folder: Path) -> bool:
    """Return whether the files have the sizes in `meta.json`, and the vocabulary has its sha256.

    The index of a shard checks its content. A cache without sizes is believed: earlier versions noted none.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if "content" not in meta:
            return len(Corpus(folder, meta).vocabulary()) == meta["vocabulary"]
        sizes = {name: (folder / name).stat().st_size for name in meta["content"]}
        vocabulary = _size_and_sha256(folder / "vocab.txt")
        return (
            all(sizes[n] == size for n, (size, _) in meta["content"].items())
            and vocabulary == meta["content"]["vocab.txt"]
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return False


def _size_and_sha256(path: Path) -> list[Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return [path.stat().st_size, digest.hexdigest()]


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Survey:
    """The split and the alphabet of a text. Reading all of it once refuses unreadable files before any work.

    The alphabet has the most frequent characters, up to an eighth of the vocabulary. Another character makes its word
    `[UNK]`.
    """

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
        self.characters = int(counts.sum())
        frequent = map(chr, np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].tolist())
        self.alphabet = [c for c in frequent if c.isprintable() and not c.isspace()][: settings.vocab // 8]

    def documents(self, split: str, task: str) -> Iterator[Document]:
        for document in show(self.source.documents(), f"text: {task}", self.characters):
            if (_point(document.name) <= self.threshold) == (split == "val"):
                yield document


def _point(name: str) -> float:
    """Return a number in [0, 1): names are spread evenly."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:6], "big") / (1 << 48)


def _tokenizer(tokens: list[str]) -> "Tokenizer":
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIALS[UNK]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _learn_vocabulary(documents: Iterable[Document], alphabet: list[str], size: int) -> list[str]:
    """Learn at most `size` tokens, and return them in the order of their ids.

    The trainer breaks ties between merges by the numbers of the `##` characters. A hash table that is seeded anew in
    each process orders these numbers. Special tokens are numbered first, in the given order, so the whole alphabet is
    special.
    """
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = _tokenizer(SPECIALS)
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


def _write(split: str, survey: _Survey, tokens: list[str], folder: Path, settings: Settings) -> np.ndarray:
    """Write the shards of `split`, and return how often each token occurs."""
    from trainer.data.shards.writer import write_shards

    counts = np.zeros(len(tokens), np.int64)
    tokenizer = _tokenizer(tokens)  # knows no special tokens: "[MASK]" in the text is three words

    def stream() -> Iterator[np.ndarray]:
        for batch in batches(survey.documents(split, f"{split} shards")):
            encodings = tokenizer.encode_batch_fast([document.text for document in batch], add_special_tokens=False)
            ids = np.array([i for e in encodings if e.ids for i in (*e.ids, SEP)], np.int64)
            counts[:] += np.bincount(ids, minlength=len(tokens))
            yield ids

    sequences = enumerate(pack(stream(), settings.sequence))
    kind = np.uint16 if settings.vocab <= 1 << 16 else np.int32
    samples = ({"__key__": f"{i:08d}", "npy": sequence.astype(kind)} for i, sequence in sequences)
    write_shards(samples, folder, split, SEQUENCES_PER_SHARD)
    return counts


def pack(stream: Iterable[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """Yield sequences of `length` tokens: `[CLS]`, the next tokens of the arrays, `[SEP]`."""
    body = length - 2
    first = rest = np.empty(0, np.int64)
    for ids in stream:
        rest = np.concatenate([rest, ids])
        first = rest[:body].copy() if len(first) < body else first
        whole = len(rest) // body * body
        yield from (np.concatenate([[CLS], row, [SEP]]) for row in rest[:whole].reshape(-1, body))
        rest = rest[whole:]
    if len(rest):
        yield np.concatenate([[CLS], np.resize(np.concatenate([rest, first]), body), [SEP]])
