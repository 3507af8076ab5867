"""Text files to token shards: documents, a WordPiece vocabulary, packed sequences; built once into a cache folder.

Every process that calls `prepare` with the same files and settings gets the same folder, `CACHE/HASH/`: `train-*.tar` and
`val-*.tar` (WebDataset; `npy` is one sequence of token ids), `vocab.txt`, `meta.json`. The same text gives the same bytes.

- The text: `null` is the source of the running interpreter's standard library, without tests. Else files, or folders with
  all that is in them: UTF-8 text, `.jsonl` (an object a line, with a field `text`), `.parquet` (a column `text`).
- The split is by document, by a hash of its name, so a document stays in its split when others come and go. A text file is
  cut at line ends into pieces of 64 KiB; they stay together, unless the file is the whole corpus: then each is a document.
- The vocabulary is WordPiece as BERT's, from the training split, but keeps case and accents: names in code differ by case.
- A sequence is RoBERTa's FULL-SENTENCES (Liu et al. 2019, arXiv:1907.11692): `[CLS]`, the next T - 2 tokens of the stream of
  documents, each ended by a `[SEP]`, and `[SEP]`. The last one is filled up from the start of its split: no padding, no loss.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger("echelon")

FORMAT = 1  # of the cache; part of the hash
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(len(SPECIALS))
NOT_TEXT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}  # in the standard library
PIECE = 1 << 16  # characters
BATCH = 1 << 20  # characters tokenized at a time
SEQUENCES_PER_SHARD = 4096
LOG_S = 10.0


class Document(NamedTuple):
    name: str  # decides the split
    text: str


@dataclass(frozen=True)
class Corpus:
    """What `prepare` made: the shards and the vocabulary in `folder`, and numbers about them."""

    folder: Path
    meta: dict[str, Any]

    def shards(self, split: str) -> list[Path]:
        return sorted(self.folder.glob(f"{split}-*.tar"))

    def vocabulary(self) -> dict[str, int]:
        tokens = (self.folder / "vocab.txt").read_text("utf-8").split("\n")[:-1]
        return {token: i for i, token in enumerate(tokens)}


@dataclass(frozen=True)
class Settings:
    vocab: int
    sequence: int
    val_fraction: float


class Source:
    """Text files by name; an error names `label`, the value of recipe.text."""

    def __init__(self, text: str | Sequence[str] | None) -> None:
        self.files: dict[str, Path] = {}
        self.hidden = 0
        roots = [text] if isinstance(text, str) else list(text or ())
        self.label = ",".join(roots) if text is not None else f"null ({sysconfig.get_path('stdlib')})"
        if text is None:
            self._walk(Path(sysconfig.get_path("stdlib")), standard_library=True)
        for root in map(Path, roots):
            if not root.exists():
                raise self.error(f"{root} does not exist; give a folder or files of text")
            if root.is_dir():
                self._walk(root)
            else:
                self.files[root.name if len(roots) == 1 else str(root)] = root
        self.stats = {name: path.stat() for name, path in self.files.items() if path.is_file()}
        if missing := self.files.keys() - self.stats.keys():
            raise self.error(f"{min(missing)} is not a file (a broken link?); remove it")
        if not any(stat.st_size for stat in self.stats.values()):
            raise self.error("empty text folder: no file with text in it; give .txt, .jsonl or .parquet files")

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"recipe.text={self.label}: {reason}")

    def _walk(self, root: Path, standard_library: bool = False) -> None:
        seen = set()  # links may lead back
        for folder, folders, names in os.walk(root, followlinks=True):
            real = os.path.realpath(folder)
            self.hidden += sum(name.startswith(".") for name in folders + names)
            kept = (f for f in folders if not f.startswith(".") and not (standard_library and f in NOT_TEXT))
            folders[:] = [] if real in seen else sorted(kept)
            for name in [] if real in seen else sorted(names):
                if not name.startswith(".") and (name.endswith(".py") or not standard_library):
                    path = Path(folder, name)
                    self.files[path.relative_to(root).as_posix()] = path
            seen.add(real)

    def documents(self) -> Iterator[Document]:
        """Every document that is not blank; the same ones in the same order each time."""
        for name, path in self.files.items():
            rows = {".jsonl": self._jsonl, ".parquet": self._parquet}.get(path.suffix)
            try:
                for i, text in enumerate(rows(name, path) if rows else self._pieces(name, path)):
                    if text.strip():
                        yield Document(f"{name}:{i}" if rows or len(self.files) == 1 else name, text)
            except OSError as error:
                raise self.error(f"can't read {name}: {error.strerror or error}") from None

    def _pieces(self, name: str, path: Path) -> Iterator[str]:
        data = path.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{name} is not UTF-8 text (byte {error.start}); convert it, or move it elsewhere") from None
        if "\0" in text:
            raise self.error(f"{name} is binary (a NUL at byte {data.index(0)}); move it elsewhere")
        start = 0
        while start < len(text):
            end = text.find("\n", start + PIECE) + 1 or len(text)
            yield text[start:end]
            start = end

    def _jsonl(self, name: str, path: Path) -> Iterator[str]:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        text = json.loads(line)["text"]
                        text.encode()  # half a surrogate pair has no UTF-8
                    except (ValueError, LookupError, TypeError, AttributeError):
                        reason = 'is no JSON object with a field "text" of valid text; mend or remove it'
                        raise self.error(f"{name}, line {number} {reason}") from None
                    yield text

    def _parquet(self, name: str, path: Path) -> Iterator[str]:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise self.error(f"{name} needs pyarrow; pip install pyarrow, or convert it to .jsonl") from None
        try:
            for rows in parquet.ParquetFile(path).iter_batches(columns=["text"]):
                for text in rows.column("text").to_pylist():
                    text.encode()
                    yield text
        except (pyarrow.ArrowException, LookupError, AttributeError) as error:
            raise self.error(f'{name} has no column "text" of strings without nulls ({error}); convert it') from None


def prepare(text: str | Sequence[str] | None, cache: str | None, settings: Settings) -> Corpus:
    """Shards of `text` under `cache` (null: the user's cache folder); tokenizes only what is not there yet.

    Raises:
        ConfigError: for text that can't be used, and for a cache that can't be written.
    """
    source = Source(text)
    root = Path(cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "echelon")).expanduser()
    stats = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in source.stats.items()]
    version = importlib.metadata.version("tokenizers")
    key = json.dumps([FORMAT, version, vars(settings), stats])
    folder = root / hashlib.sha256(key.encode()).hexdigest()[:16]
    try:
        if not folder.exists():
            with _lock(folder.with_suffix(".lock")):
                if not folder.exists():
                    _build(source, folder, settings)
        return Corpus(folder, json.loads((folder / "meta.json").read_text()))
    except OSError as error:
        raise ConfigError(f"recipe.cache={root}: {error}; give a folder with space that you may write to") from None
