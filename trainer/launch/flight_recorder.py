"""Finds the rank whose collective differs from the others', from the records that ranks wrote. Imports no torch."""

import contextlib
import json
from collections import Counter, defaultdict
from pathlib import Path

Position = tuple[str, int]  # a group, and the number of a collective in it


def find_mismatch(logs: Path, since: float) -> str:
    """Return a message that names the rank; empty if the files written after `since` show no difference."""
    made: defaultdict[Position, dict[int, str]] = defaultdict(dict)  # by position and rank
    last: dict[int, Position] = {}
    for file in logs.glob("collectives-rank*.json"):
        with contextlib.suppress(OSError, ValueError):  # a rank may have been killed while writing
            entries = json.loads(file.read_text())["entries"] if file.stat().st_mtime >= since else []
            for entry in entries:
                if not entry["is_p2p"]:
                    rank = int(file.stem.removeprefix("collectives-rank"))
                    last[rank] = entry["process_group"][0], entry["collective_seq_id"]
                    collective = f"{entry['profiling_name']} of {entry['input_sizes']}, {entry['input_dtypes']}"
                    made[last[rank]][rank] = collective
    for place in sorted(made, key=lambda place: place[1]):
        common, count = Counter(made[place].values()).most_common(1)[0]
        for rank, collective in made[place].items():
            if collective != common and 2 * count > len(made[place]):
                return describe_mismatch(rank, collective, common)
    for rank, place in last.items():  # a rank may be waiting in a collective that no other rank has called
        others = {last[other]: other for other in last if other != rank}
        if len(last) > 2 and len(others) == 1 and len(made[place]) == 1:
            ((theirs, other),) = others.items()
            return describe_mismatch(rank, made[place][rank], made[theirs][other])
    return ""


def describe_mismatch(rank: int, own: str, theirs: str) -> str:
    return f"echelon: rank {rank} made another collective than the others: {own}; theirs is {theirs}"
