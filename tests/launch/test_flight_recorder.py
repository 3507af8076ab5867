"""The rank that made another collective than the others, by what each has noted."""

import json
import time
from pathlib import Path

from trainer.launch.flight_recorder import find_mismatch


def note(logs: Path, rank: int, *sizes: int) -> None:
    entries = [
        {"is_p2p": False, "process_group": ["0", "x"], "collective_seq_id": n, "profiling_name": "gloo:all_reduce",
         "input_sizes": [[size]], "input_dtypes": ["Float"]}
        for n, size in enumerate(sizes, start=1)
    ]  # fmt: skip
    (logs / f"collectives-rank{rank}.json").write_text(json.dumps({"entries": entries}))


def test_33_who_made_another_collective(tmp_path):
    note(tmp_path, 0, 5, 5, 7)
    note(tmp_path, 1, 5, 5, 7, 9)
    assert find_mismatch(tmp_path, 0) == ""  # one against one
    said = "echelon: rank {} made another collective than the others: gloo:all_reduce of [[{}]], ['Float']; theirs is "
    note(tmp_path, 2, 5, 5, 7)
    assert find_mismatch(tmp_path, 0).startswith(said.format(1, 9))  # it waits where no other comes
    note(tmp_path, 2, 5, 5)
    assert find_mismatch(tmp_path, 0) == ""  # all at different places of the same way
    note(tmp_path, 2, 5, 1, 5)
    assert find_mismatch(tmp_path, 0) == f"{said.format(2, 1)}gloo:all_reduce of [[5]], ['Float']"
    assert find_mismatch(tmp_path, time.time() + 60) == ""  # of an attempt before
    (tmp_path / "collectives-rank0.json").write_text("torn")
    assert find_mismatch(tmp_path, 0) == ""  # one against one
