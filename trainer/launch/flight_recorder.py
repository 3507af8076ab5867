"""Which rank has made another collective than the others, by what each has noted of its last. No torch here."""

import contextlib
import json
from collections import Counter, defaultdict
from pathlib import Path

Place = tuple[str, int]  # a group, and the number of a collective in it


def odd_one(logs: Path, since: float) -> str:
    """In words; empty where what ranks noted after `since` does not tell. One that gloo aborts notes nothing."""
    made: defaultdict[Place, dict[int, str]] = defaultdict(dict)  # what each rank made there
    last: dict[int, Place] = {}
    for file in logs.glob("collectives-rank*.json"):
        with contextlib.suppress(OSError, ValueError):  # of a rank that was killed as it wrote
            entries = json.loads(file.read_text())["entries"] if file.stat().st_mtime >= since else []
            for entry in entries:
                if not entry["is_p2p"]:
                    rank = int(file.stem.removeprefix("collectives-rank"))
                    last[rank] = entry["process_group"][0], entry["collective_seq_id"]
                    what = f"{entry['profiling_name']} of {entry['input_sizes']}, {entry['input_dtypes']}"
                    made[last[rank]][rank] = what
    for place in sorted(made, key=lambda place: place[1]):
        common, count = Counter(made[place].values()).most_common(1)[0]
        for rank, what in made[place].items():
            if what != common and 2 * count > len(made[place]):
                return in_words(rank, what, common)
    for rank, place in last.items():  # it may wait where no other comes
        others = {last[other]: other for other in last if other != rank}
        if len(last) > 2 and len(others) == 1 and len(made[place]) == 1:
            ((theirs, other),) = others.items()
            return in_words(rank, made[place][rank], made[theirs][other])
    return ""


def in_words(rank: int, own: str, theirs: str) -> str:
    return f"echelon: rank {rank} made another collective than the others: {own}; theirs is {theirs}"
