"""Samples from the rows of a parquet file: columns of bytes are members, the others one JSON member."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import DataError, printable

MEMBER = re.compile(r"(?!json$)[a-z0-9][\w.-]*")  # webdataset's writer drops `_a`


def of_rows(source: Path) -> Iterator[dict[str, Any]]:
    """Yield samples of the rows. A null of bytes is no member, any other null is JSON's.

    Raises:
        DataError: before the first sample, for another kind of file and for a column that has no form in a sample.
            Later, for damage.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{source}: needs pyarrow; pip install 'pyarrow>=20,<27', or give a .jsonl") from None
    with readable(source):
        file = parquet.ParquetFile(source)
    members: dict[str, str] = {}  # extension -> column
    for column in file.schema_arrow:
        if is_bytes(column.type):
            extension = column.name.lower()
            if not MEMBER.fullmatch(extension) or extension in members:
                raise DataError(
                    f"{source}: column {column.name!r}: no extension of a member, or of two; rename it, as 'jpg'"
                )
            members[extension] = column.name
        elif not is_plain(column.type):
            raise DataError(
                f"{source}: column {column.name!r} is of {printable(str(column.type))}, which JSON does not know; "
                "make it numbers or text, or leave it out"
            )
    with readable(source):
        rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
        for number, row in enumerate(rows):
            found = {extension: row.pop(column) for extension, column in members.items()}
            found = {extension: content for extension, content in found.items() if content is not None}
            yield {"__key__": f"{number:012d}"} | found | ({"json": row} if row or not found else {})


@contextlib.contextmanager
def readable(source: Path) -> Iterator[None]:
    """Turn pyarrow's errors of a damaged file into ours.

    Raises:
        DataError: for what pyarrow says of a damaged file.
    """
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ValueError, ArrowException) as error:
        told = printable(str(error).partition("\n")[0])
        raise DataError(f"{source}: can't be read ({told}); write it again") from None


def is_bytes(kind: Any) -> bool:
    from pyarrow import types

    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def is_plain(kind: Any) -> bool:
    """Whether JSON has a form for all of its values."""
    from pyarrow import types

    if types.is_struct(kind):
        return all(is_plain(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_dictionary(kind):
        return is_plain(kind.value_type)
    plain = (types.is_integer, types.is_floating, types.is_string, types.is_large_string, types.is_boolean)
    return types.is_null(kind) or any(is_one(kind) for is_one in plain)
