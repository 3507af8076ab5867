"""A column that has no form in a sample is named before the first sample; so is a package that is missing."""

import sys
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from trainer.data.shards.parquet import of_rows
from trainer.errors import DataError


def parquet(path: Path, columns: dict[str, Any]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("when", [datetime(2020, 1, 1)], "is of timestamp[us], which JSON lacks; make it"),
        ("price", [Decimal("1.5")], "is of decimal128(2, 1), which JSON lacks; make it"),
        ("deep", [[{"a": b"x"}]], "is of list<element: struct<a: binary>>, which JSON lacks; make it"),
        ("image", [{"bytes": b"x", "path": "a"}], "is of struct<bytes: binary, path: string>, which JSON lacks; give"),
        ("json", [b"{}"], ": is not an extension, or one of two columns; rename it"),
        ("_id", [b"1"], ": is not an extension, or one of two columns; rename it"),
        ("a/b", [b"1"], ": is not an extension, or one of two columns; rename it"),
        ("TXT", [b"1"], ": is not an extension, or one of two columns; rename it"),
    ],
)
def test_a_column_that_no_sample_can_have_is_named(tmp_path, column, values, said):
    parquet(tmp_path / "a.parquet", {"txt": [b"x"], column: values})
    with pytest.raises(DataError) as caught:
        next(of_rows(tmp_path / "a.parquet"))
    start = f"{tmp_path}/a.parquet: column {column!r}{'' if said[0] == ':' else ' '}"
    assert str(caught.value).startswith(start + said) and "\n" not in str(caught.value)


def test_without_pyarrow_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"a\.parquet: needs pyarrow; pip install 'pyarrow>=20,<27', or give"):
        next(of_rows(tmp_path / "a.parquet"))
