"""echelon shards index|verify|stat|pack: prepares and checks tar shards before a run."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from trainer.config.options import DataOptions
from trainer.data.remote.shard import Remote
from trainer.data.shards.classes import read_files, with_classes
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index, scan_shard
from trainer.data.shards.index_file import Shard, indexed
from trainer.data.shards.parquet import of_rows
from trainer.data.shards.tar import split_name
from trainer.data.shards.writer import refuse_member, write_shards
from trainer.errors import ConfigError, DataError, UnavailableError, printable, refuse_remote, require
from trainer.files import is_hidden, special
from trainer.process.arguments import ArgumentParser
from trainer.process.exit import run_guarded

DOTTED = re.compile(r"(.*\.)?\d[^.]*\.|.*\s")  # an extension that is the rest of a time, a date or a version


def index(shards: list[str], workers: int, **where: Any) -> None:
    """Index each shard that has no index, or has changed. Shards at URLs are downloaded again."""
    require("--workers", workers, at_least=1)
    made = Index.open(find_shards(shards, DataOptions(**where)), progress, workers, rebuild=True)
    say(f"{len(made.shards)} shards, {sum(made.counts)} samples, fingerprint {made.fingerprint[:16]}")


def progress(shard: str, done: int, total: int) -> None:
    say(f"indexed {shard}: {done} of {total} shards")


def verify(shards: list[str], workers: int, **where: Any) -> None:
    """Read every byte, and compare it with the index. For remote shards, the cached copy is read."""
    require("--workers", workers, at_least=1)
    paths = find_shards(shards, DataOptions(**where))
    wrong: list[str] = []
    with ThreadPoolExecutor(workers) as pool:
        for path, found in zip(paths, pool.map(compare, paths), strict=True):
            say(f"{path}: {found or 'as indexed'}")
            wrong += [str(path)] if found else []
    if wrong:
        raise DataError(f"{', '.join(wrong)}: differ from their index; restore the shards, or index them again")


def compare(path: Path | Remote) -> str:
    """Return how the shard differs from its index; "" if it does not."""
    if (known := indexed(path)) is None:
        return "has no index that can be read"
    try:
        rows, sha256, _ = scan_shard(path)
    except (DataError, UnavailableError) as error:
        return str(error)
    if sha256 == known.sha256:
        same = np.array_equal(rows, Index([known]).samples(0)[:])
        return "" if same else f"its index is wrong: remove {known.index_path}"
    if isinstance(path, Remote):
        path.drop()
    return "DIFFERS from its index"


def stat(shards: list[str], workers: int, **where: Any) -> None:
    """Print the samples and bytes of each shard, and of all."""
    require("--workers", workers, at_least=1)
    made = Index.open(find_shards(shards, DataOptions(**where)), progress, workers)
    for shard in made.shards:
        say(line(str(shard.path), [shard]))
    say(f"{line('all', made.shards)}, fingerprint {made.fingerprint[:16]}")


def line(name: str, shards: list[Shard]) -> str:
    samples, size = sum(shard.samples for shard in shards), sum(shard.bytes for shard in shards)
    return f"{name}: {samples} samples, {size / 1e6:.3f} MB, {size / max(1, samples) / 1e3:.3f} kB a sample"


def pack(source: Path, folder: Path, prefix: str, per_shard: int, classes: bool) -> None:
    """Write shards from the files of a folder, the lines of a .jsonl, or the rows of a .parquet; in a fixed order.

    `classes`: the source has a folder per class, as in `with_classes`.
    """
    require("--per-shard", per_shard, at_least=1)
    refuse_remote("SOURCE", source)
    refuse_remote("FOLDER", folder)
    if source.is_dir() and (found := special(source, "**/*")):
        raise DataError(f"{found}: is a pipe, a socket or a device; take it out of the folder")
    if Path(prefix).name != prefix:
        raise ConfigError(f"--prefix={prefix}: is not the name of a file; give folders by FOLDER")
    try:
        if not source.exists():
            raise DataError(f"{source}: does not exist; give a folder, a .jsonl or a .parquet")
        if classes and not source.is_dir():
            raise DataError(f"{source}: --classes takes a folder with a folder per class")
        found = with_classes(grouped(source), folder) if classes else samples(source)
        paths = write_shards(found, folder, prefix, per_shard, lambda shard, n: say(f"packed {shard}: {n} samples"))
    except OSError as error:
        reason = f"{error.filename or folder}: {error.strerror or error}"
        raise DataError(f"{reason}; make room or make it writable, or give another folder") from None
    if not paths:
        raise DataError(f"{source}: has no sample; give files KEY.EXTENSION, lines or rows")
    say(f"{len(paths)} shards: {paths[0]} to {paths[-1]}")


def samples(source: Path) -> Iterator[dict[str, Any]]:
    if source.is_dir():
        return (read_files(key, files) for key, files in grouped(source).items())
    if source.suffix == ".jsonl":
        return of_lines(source)
    if source.suffix == ".parquet":
        return of_rows(source)
    raise DataError(f"{source}: is not a folder, .jsonl or .parquet")


def grouped(source: Path) -> dict[str, dict[str, Path]]:
    """Return the files of a folder by key and extension, in order. `a/7.jpg` and `a/7.json` form a sample `a/7`."""
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
    found: dict[str, dict[str, Path]] = {}
    for name in names:
        key, extension = split_name(name)
        if key is None or is_hidden(name):
            why = "it has no extension" if key is None and not is_hidden(name) else "it is hidden, or a system's own"
            say(f"left out, since {why}: {source / name}", sys.stderr)
            continue
        refuse_member(str(source / name), extension)
        if DOTTED.match(extension):
            raise DataError(
                f"{source / name}: a key ends at the first dot, so this is {extension!r} of {Path(key).name!r}; rename "
                "it without other dots, as '10-15-30.jpeg'"
            )
        if extension in found.setdefault(key, {}):
            raise DataError(f"{source / name}: two files {extension!r} of {key!r}; rename one")
        found[key][extension] = source / name
    return found


def of_lines(source: Path) -> Iterator[dict[str, Any]]:
    with source.open("rb") as file:
        for number, text in enumerate(file):
            if not text.strip():
                continue
            try:
                json.loads(text)
            except ValueError as error:
                raise DataError(f"{source}: line {number + 1} is not JSON ({error}); correct it") from None
            yield {"__key__": f"{number:012d}", "json": text.strip()}


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line; names of files may be a stranger's."""
    print(printable(text), file=file, flush=True)


def main() -> int:
    parser = ArgumentParser(prog="echelon shards", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (index, verify, stat):
        made = commands.add_parser(command.__name__, help=(command.__doc__ or "").partition(".")[0])
        made.add_argument("shards", nargs="+", help="paths, patterns as 'train-{000..099}.tar', URLs, pipe:PROGRAM")
        made.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="threads that read")
        made.add_argument("--cache-dir", default=DataOptions.cache_dir, help="the data.cache_dir of the run")
        made.add_argument("--cache-gb", type=float, default=DataOptions.cache_gb, help="the data.cache_gb of the run")
        made.add_argument("--allow-pipe", action="store_true", help="allows programs, like data.allow_pipe=true")
        made.set_defaults(call=command)
    made = commands.add_parser("pack", help=(pack.__doc__ or "").partition(";")[0])
    made.add_argument("source", type=Path, help="a folder, a .jsonl or a .parquet")
    made.add_argument("folder", type=Path, help="the folder for PREFIX-000000.tar and so on")
    made.add_argument("--prefix", default="train")
    made.add_argument("--per-shard", type=int, default=10_000, help="samples")
    made.add_argument("--classes", action="store_true", help="a folder per class: gives samples cls, and classes.json")
    made.set_defaults(call=pack)
    arguments = vars(parser.parse_args())
    call = arguments.pop("call")
    del arguments["command"]
    if call is not pack:  # Ctrl-C would wait for threads and their downloads; a partial download is never used
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    return run_guarded(lambda: call(**arguments) or 0)


if __name__ == "__main__":
    sys.exit(main())
