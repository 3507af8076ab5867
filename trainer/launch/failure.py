"""What has ended an attempt of a node's ranks, by how each of them ended. No torch here."""

import contextlib
import json
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import STOPPED

HANGS = 124  # exit code: no rank has moved for too long (as of `timeout`)


@dataclass(frozen=True)
class Failure:
    """What ended an attempt: of the rank that failed first."""

    rank: int
    text: str  # for the user
    code: int  # of the run
    reported: bool  # by the rank itself, as an error of Python's


def find(
    codes: Mapping[int, int], ranks: Iterable[int], private: Path, logs: Path, passed: list[int]
) -> Failure | None:
    """What failed first, or is likely to have made others fail; None where nothing did."""
    if not codes:
        return Failure(0, f"echelon: no rank has moved for too long; the stacks of all are in {logs}", HANGS, False)
    failed = {rank: code for rank, code in codes.items() if code not in (0, STOPPED)}
    hung = [rank for rank in ranks if rank not in codes]
    if not failed and hung:
        text = f"echelon: {named(hung)} did not end when the others had; their stacks are in {logs}"
        return Failure(hung[0], text, HANGS, False)
    if not failed:
        return None
    reports: dict[int, dict[str, Any]] = {}
    for rank in failed:
        with contextlib.suppress(OSError, ValueError):
            reports[rank] = json.loads((private / f"error-{rank}.json").read_text())
    # Killed from outside or by its own fault; not an abort, which may be what a peer's failure has led to.
    silent = [rank for rank, code in failed.items() if rank not in reports and code != -signal.SIGABRT]
    if passed and not reports:
        name = signal.Signals(passed[0]).name
        return Failure(min(failed), f"echelon: {name}: ended without a checkpoint", 128 + passed[0], False)
    if silent or not reports:
        rank, code = next((rank, failed[rank]) for rank in silent or failed)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        text = f"echelon: rank {rank} {how}; its log: {logs}/rank{rank}.log"
        return Failure(rank, text, 128 - code if code < 0 else code, False)
    # A rank that hangs or has gone lets its peers fail, in a collective.
    rank = min(reports, key=lambda rank: (reports[rank]["in_collective"], reports[rank]["time"]))
    text, code = reports[rank]["text"], reports[rank]["code"]
    text = text if text.startswith("echelon: ") else f"echelon: rank {rank} failed first:\n{text}"
    gone = [r for r in codes if codes[r] == 0]
    if not reports[rank]["in_collective"] or not (gone or hung):
        return Failure(rank, text, code, True)
    which, rank = named(gone or hung), (gone or hung)[0]
    how = "ended with code 0 before the others" if gone else "did not end and had to be killed"
    text = f"{text.rstrip()}\nechelon: {which} {how}: the likely cause; its log: {logs}/rank{rank}.log"
    return Failure(rank, text, code, False)


def named(ranks: Iterable[int]) -> str:
    return f"rank(s) {', '.join(map(str, ranks))}"
