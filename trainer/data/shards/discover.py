"""Finds the shards that a recipe names: files, patterns, URLs of a few schemes, and programs if allowed."""

import contextlib
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from trainer.config.options import DataOptions
from trainer.data.remote.decompress import LONGEST_START, is_packed, starts_packed
from trainer.data.remote.download import SCHEMES, shown, words_of
from trainer.data.remote.shard import Remote
from trainer.errors import ConfigError, DataError
from trainer.files import matching
from trainer.redact import redact_urls

MOST = 1_000_000  # names that one pattern may expand to
NUMBERED = re.compile(r"(.+)-\d{6}\.tar")  # as written by write_shards
RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")


def find_shards(data: str | Path | Sequence[str | Path], options: DataOptions | None = None) -> list[Path | Remote]:
    """Find the shards that a recipe names: paths, globs, URLs, programs, with braces (`train-{000..009}.tar`); sorted.

    Raises:
        DataError: A pattern matches no file or can't be listed, or `write_shards` has not finished its shards. The
            message names the pattern, or the marker file.
        ConfigError: A program is not allowed, or a URL is invalid.
    """
    options = options or DataOptions()
    files: list[str] = []
    urls: list[str] = []
    for pattern in [data] if isinstance(data, str | Path) else data:
        try:
            names = [str(pattern)] if os.path.isfile(pattern) else expanded(str(pattern))
        except ValueError as error:
            reason = redact_urls(f"{pattern}: is not a pattern ({error})")
            raise DataError(f"{reason}; write braces as {{000..009}} or {{a,b}}") from None
        for name in names:
            if name.startswith("pipe:") and not os.path.isfile(name):
                refuse_program(name, options.allow_pipe)
                urls.append(name)
            elif lowered(name).partition("://")[0] not in SCHEMES:
                files += _files(name.removeprefix("file://"), "" if name == str(pattern) else f" (of {pattern})")
            elif parsed(name := lowered(name)).username:
                raise DataError(f"{shown(name)}: a URL's user and password are not sent; give a URL without them")
            elif "*" in name:
                raise DataError(f"{shown(name)}: can't be listed; write braces as {{000..009}} or {{a,b}}")
            else:
                is_packed(shown(name))
                urls.append(name)

    refuse_incomplete(files)

    def kept(url: str) -> Remote:
        return Remote.kept(url, options.cache_dir, options.cache_gb)

    local = [kept(f"file://{path.absolute()}") if unpacks(path) else path for path in sorted(map(Path, files))]
    return [*local, *map(kept, sorted(urls, key=Path))]


def refuse_incomplete(files: Sequence[str]) -> None:
    """Refuse shards that `write_shards` has not finished writing, because it is still running or was killed."""
    for mark in sorted({f"{name[1]}.incomplete" for file in files if (name := NUMBERED.fullmatch(file))}):
        if os.path.exists(mark):
            raise DataError(
                f"{mark}: not all of these shards are written; wait for their writer, or remove them and this file, "
                "and write them again"
            )


def expanded(pattern: str) -> list[str]:
    """Expand the braces of a pattern. Raise a ValueError if they are unbalanced, or for more than `MOST` names."""
    from braceexpand import braceexpand  # imported here, since data without shards needs none

    sizes = (abs(int(last) - int(first)) // max(1, int(step or 1)) + 1 for first, last, step in RANGE.findall(pattern))
    names = list(itertools.islice(braceexpand(pattern), MOST + 1)) if max(sizes, default=0) <= MOST else []
    if not 0 < len(names) <= MOST:
        raise ValueError(f"its braces mean more than {MOST:,} names")
    return names


def unpacks(path: Path) -> bool:
    """Return whether a local file is compressed, by its name and, if it has no index yet, by its first bytes."""
    if is_packed(path.name) or os.path.exists(f"{path}.idx"):
        return is_packed(path.name)
    with contextlib.suppress(OSError), path.open("rb") as file:
        return starts_packed(file.read(LONGEST_START))
    return False


def lowered(name: str) -> str:
    """Lower the case of a name's scheme, if it has one."""
    scheme, mark, rest = name.partition("://")
    return scheme.lower() + mark + rest


def parsed(url: str) -> SplitResult:
    """Split a URL. Refuse one without a host, or with a port that is not a number from 1 to 65535."""
    try:
        parts = urlsplit(url)
        if parts.port == 0 or (not parts.hostname and parts.scheme in ("http", "https")):
            raise ValueError("port 0" if parts.port == 0 else "no host")
    except ValueError as error:
        raise ConfigError(f"{redact_urls(url)}: is not a valid URL ({error}); correct it") from None
    return parts


def refuse_program(name: str, allowed: bool) -> None:
    if not allowed:
        raise ConfigError(
            f"data.allow_pipe=false: {shown(name)} is a program, and programs are not run; if you trust it, set "
            "data.allow_pipe=true, or --allow-pipe for a tool"
        )
    try:
        words = words_of(name)
    except ValueError as error:
        raise DataError(f"{shown(name)}: can't be split into words ({error}); quote as for a shell") from None
    if not words:
        raise DataError(f"{name}: names no program; write 'pipe:PROGRAM ARGUMENTS'")


def _files(name: str, of: str) -> list[str]:
    found = [name] if os.path.isfile(name) else matching(name)
    found = [file for file in found if os.path.isfile(file) and not file.endswith(".idx")]
    named = redact_urls(f"{name}{of}")
    if not found and re.match(r"[A-Za-z][\w+.-]*:", name):
        raise DataError(f"{named}: no such file, and no URL of a known scheme; give file, {', '.join(SCHEMES)} or pipe")
    if not found:
        raise DataError(f"{named}: no such file; give tar files, for example 'data/train-*.tar'")
    return found
