"""Reads samples from the rows of a parquet file: bytes columns become members, and the others form a JSON member."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import DataError, printable

MEMBER = re.compile(r"(?!json$)[a-z0-9][\w.-]*")  # webdataset's writer drops `_a`


def of_rows(source: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows as samples. A null in a bytes column omits the member; any other null is stored as JSON null.

    Raises:
        DataError: The file is not parquet, is damaged, or has an unsupported column. Damage may be found late.
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
                    f"{source}: column {column.name!r}: is not an extension, or one of two columns; rename it, as 'jpg'"
                )
            members[extension] = column.name
        elif not is_plain(column.type):
            fix = "make it numbers or text, or leave it out"
            if is_media(column.type):
                fix = "give the images to write_shards, as docs/samples.md shows for a Hugging Face data set"
            raise DataError(
                f"{source}: column {column.name!r} is of {printable(str(column.type))}, which JSON lacks; {fix}"
            )
    with readable(source):
        rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
        for number, row in enumerate(rows):
            found = {extension: row.pop(column) for extension, column in members.items()}
            found = {extension: content for extension, content in found.items() if content is not None}
            yield {"__key__": f"{number:012d}"} | found | ({"json": row} if row or not found else {})


@contextlib.contextmanager
def readable(source: Path) -> Iterator[None]:
    """Turn pyarrow's errors into a DataError about a damaged file."""
    from pyarrow import ArrowException

    try:
        yield
    except (OSError, ValueError, ArrowException) as error:
        reason = printable(str(error).partition("\n")[0])
        raise DataError(f"{source}: can't be read ({reason}); write it again") from None


def is_bytes(kind: Any) -> bool:
    from pyarrow import types

    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def is_media(kind: Any) -> bool:
    """Return whether a column contains images or audio as stored by Hugging Face's data sets."""
    from pyarrow import types

    return types.is_struct(kind) and {kind.field(i).name for i in range(kind.num_fields)} == {"bytes", "path"}


def is_plain(kind: Any) -> bool:
    """Return whether JSON can represent all values of this type."""
    from pyarrow import types

    if types.is_struct(kind):
        return all(is_plain(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_dictionary(kind):
        return is_plain(kind.value_type)
    plain = (types.is_integer, types.is_floating, types.is_string, types.is_large_string, types.is_boolean)
    return types.is_null(kind) or any(is_one(kind) for is_one in plain)
