"""The shards that a recipe names: files, patterns, URLs of a few schemes, and nothing else."""

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from braceexpand import braceexpand

from trainer.data.remote import SCHEMES, Remote, shown
from trainer.errors import DataError
from trainer.options import DataOptions


def find_shards(data: str | Path | Sequence[str | Path], options: DataOptions | None = None) -> list[Path | Remote]:
    """What a recipe names: paths, glob patterns and URLs, with braces such as `train-{000..009}.tar`; sorted.

    Raises:
        DataError: naming the pattern that matches no file, or that can't be looked up.
    """
    options = options or DataOptions()
    files: list[str] = []
    urls: list[str] = []
    for pattern in [data] if isinstance(data, str | Path) else data:
        try:
            names = [str(pattern)] if os.path.isfile(pattern) else list(braceexpand(str(pattern)))
        except ValueError as error:
            raise DataError(f"{pattern}: not a pattern ({error}); write braces as {{000..009}} or {{a,b}}") from None
        for name in names:
            if name.partition("://")[0] not in SCHEMES:
                files += _files(name.removeprefix("file://"), "" if name == str(pattern) else f" (of {pattern})")
            elif urlsplit(name).username:
                raise DataError(f"{shown(name)}: a URL's user and password are not sent; give one without")
            elif "*" in name:
                raise DataError(f"{shown(name)}: can't be listed; write braces as {{000..009}} or {{a,b}}")
            else:
                urls.append(name)
    remote = [Remote.kept(url, options.cache_dir, options.cache_gb) for url in sorted(urls, key=Path)]
    return [*sorted(map(Path, files)), *remote]


def _files(name: str, of: str) -> list[str]:
    found = [name] if os.path.isfile(name) else glob.glob(name, recursive=True)
    found = [file for file in found if os.path.isfile(file) and not file.endswith(".idx")]
    if not found and re.match(r"[A-Za-z][\w+.-]*:", name):
        raise DataError(f"{name}{of}: no such file, and no URL of file, {', '.join(SCHEMES)}, which alone are read")
    if not found:
        raise DataError(f"{name}{of}: no such file; give tar files, for example 'data/train-*.tar'")
    return found
