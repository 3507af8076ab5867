"""Files that are there whole or not at all."""

import os
import resource

import pytest

from trainer.files import write_whole


def test_what_can_not_be_written_leaves_what_was_there(tmp_path):
    file = tmp_path / "a.json"
    write_whole(file, b"1" * 100)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            write_whole(file, b"2" * 5000)  # part of it fits
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == b"1" * 100 and os.listdir(tmp_path) == ["a.json"]
    write_whole(file, b"2" * 5000)
    assert file.read_bytes() == b"2" * 5000
