"""Documents from files: the standard library's source, or text, `.jsonl` and `.parquet` files of the user's own."""

import json
import os
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.errors import ConfigError
from trainer.files import is_hidden
from trainer.log import log

NOT_TEXT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}  # in the standard library
PIECE = 1 << 16  # characters
BATCH = 1 << 20  # characters
LOG_EVERY_S = 10.0


class Document(NamedTuple):
    name: str  # decides the split
    text: str


class Source:
    """The files of `recipe.text`, in an order that does not depend on the file system.

    - Null is the source text of the running interpreter's standard library, without tests.
    - A path is a file, or a folder with all that is in it. A file is UTF-8 text, `.jsonl` (each line an object with a
      field `text`) or `.parquet` (a column `text`). A row is a document.
    - A text file is a document, cut at line ends into pieces of 64 KiB. If it is the only file, each piece is one.
    - Hidden files and folders are left out, and counted in `hidden`. Any other file that is no text is an error.

    Raises:
        ConfigError: A file can't be used, here or in `documents`. The message names recipe.text and the file.
    """

    def __init__(self, text: str | list[str] | None) -> None:
        standard_library = sysconfig.get_path("stdlib")
        roots = [standard_library] if text is None else [text] if isinstance(text, str) else list(text)
        self.label = "null" if text is None else ",".join(roots)
        self.hidden = 0
        self.files: dict[str, Path] = {}
        for root in map(Path, roots):
            for path in self._walk(root, text is None) if root.is_dir() else [root]:
                name = path.relative_to(root if root.is_dir() else root.parent).as_posix()
                self.files[name if len(roots) == 1 else f"{root}/{name}"] = path
        for name, path in self.files.items():
            if not path.is_file():
                raise self.error(f"{name} does not exist, or is not a file; give files or folders of text")
        self.stats = {name: path.stat() for name, path in self.files.items()}
        if not any(stat.st_size for stat in self.stats.values()):
            raise self.empty()

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"recipe.text={self.label}: {reason}")

    def empty(self) -> ConfigError:
        return self.error("there is no text in it; give UTF-8 text, .jsonl or .parquet files")

    def _walk(self, root: Path, standard_library: bool) -> Iterator[Path]:
        def refuse(error: OSError) -> None:
            raise self.error(f"can't list {error.filename} ({error.strerror}); make it readable")

        seen = set()
        for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
            real = os.path.realpath(folder)
            if real in seen:  # a link led back
                folders.clear()
                continue
            seen.add(real)
            if standard_library:
                folders[:] = [f for f in folders if f not in NOT_TEXT]
                names = [n for n in names if n.endswith(".py")]
            self.hidden += sum(map(is_hidden, folders + names))
            folders[:] = sorted(f for f in folders if not is_hidden(f))
            yield from (Path(folder, name) for name in sorted(names) if not is_hidden(name))

    def documents(self) -> Iterator[Document]:
        """Yield every document that is not blank, the same ones each time."""
        for name, path in self.files.items():
            rows = {".jsonl": self._jsonl, ".parquet": self._parquet}.get(path.suffix)
            try:
                for i, text in enumerate((rows or self._pieces)(name, path)):
                    if text.strip():
                        yield Document(f"{name}:{i}" if rows or len(self.files) == 1 else name, text)
            except OSError as error:
                raise self.error(f"can't read {name} ({error}); make it readable, or remove it") from None

    def _pieces(self, name: str, path: Path) -> Iterator[str]:
        data = path.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise self.error(
                f"{name} is not UTF-8 text (byte {error.start}); convert it, or move it elsewhere"
            ) from None
        if "\0" in text:
            raise self.error(f"{name} is binary (NUL at byte {data.index(0)}); move it elsewhere")
        start = 0
        while start < len(text):
            end = text.find("\n", start + PIECE) + 1 or len(text)
            yield text[start:end]
            start = end

    def _jsonl(self, name: str, path: Path) -> Iterator[str]:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                    text.encode()  # fails for half a surrogate pair, which has no UTF-8
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    reason = 'is not a JSON object with a string "text"; correct or remove it'
                    raise self.error(f"{name}, line {number}: {reason}") from None
                yield text

    def _parquet(self, name: str, path: Path) -> Iterator[str]:
        try:
            import pyarrow  # pyright: ignore[reportMissingImports] no dependency of ours
            from pyarrow import parquet  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise self.error(f"{name} needs pyarrow; pip install 'pyarrow>=20,<27', or convert it to .jsonl") from None
        try:
            for rows in parquet.ParquetFile(path).iter_batches(columns=["text"]):
                for text in rows.column("text").to_pylist():
                    text.encode()  # fails for null
                    yield text
        except (pyarrow.ArrowException, LookupError, AttributeError) as error:
            raise self.error(f'{name} has no column "text" of strings without nulls ({error}); correct it') from None


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield lists of about a MiB of text."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def show(documents: Iterable[Document], task: str, characters: int) -> Iterator[Document]:
    """Yield the documents, and show the progress: a bar on a terminal, else a log line now and then."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    done, due = 0, time.monotonic() + LOG_EVERY_S
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task(task, total=characters)
        for document in documents:
            yield document
            done += len(document.text)
            bar.update(shown, completed=done)
            if not console.is_terminal and time.monotonic() > due:
                log.info("%s: %.0f %%", task, 100 * done / characters)
                due = time.monotonic() + LOG_EVERY_S
