"""Finds the failure that ended an attempt, from how the ranks of a node ended. Imports no torch."""

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.errors import HUNG, STOPPED
from trainer.process.heartbeat import last

# The rank that reports a killed data worker is not at fault, since the kernel or a user may have killed the worker.
KILLED_WORKER = re.compile("DataLoader worker .* killed by signal")
NO_MEMORY = (
    "memory ran out, so the kernel killed it; give fewer trainer.devices or data.workers, a smaller micro_batch, "
    "'+callbacks=[shard]', or a machine or container with more memory"
)


@dataclass(frozen=True)
class Failure:
    rank: int
    text: str  # the message for the user
    code: int  # the run's exit code
    reported: bool  # the rank itself reported a Python error, whose cause it is
    out_of_memory: bool = False  # the kernel killed a process because memory ran out


def find_failure(
    codes: Mapping[int, int], ranks: Iterable[int], private: Path, logs: Path | None, passed: list[int]
) -> Failure | None:
    """Return the first failure, or the likely cause of the others; None if nothing failed.

    Args:
        codes: The exit code of each rank that has ended, negative for a signal.
        private: The folder with the ranks' error reports.
        logs: The folder with the ranks' output, for the message, if there is one.
        passed: The stop signals that the supervisor has forwarded.
    """
    if not codes:
        text = f"echelon: no rank has moved for too long{naming('the stacks of all are in', logs)}"
        return Failure(0, text, HUNG, False)
    failed = {rank: code for rank, code in codes.items() if code not in (0, STOPPED)}
    hung = [rank for rank in ranks if rank not in codes]
    if not failed and hung:
        text = f"echelon: {named(hung)} did not end after the others{naming('their stacks are in', logs)}"
        return Failure(hung[0], text, HUNG, False)
    if not failed:
        return None
    reports = read_reports(failed, private)
    if passed and not reports:
        return stopped_early(min(failed), passed[0])
    if silent := find_silent(failed, reports):
        return silent_failure(silent, failed, logs)
    # If a rank hangs or is gone, its peers fail in a collective.
    rank = min(reports, key=lambda rank: (reports[rank]["in_collective"], reports[rank]["time"]))
    if passed and not hung and reports[rank]["in_collective"]:  # a peer on another node heard the signal first
        return stopped_early(rank, passed[0])
    text, code = reports[rank]["text"], reports[rank]["code"]
    own = not KILLED_WORKER.search(text)
    text = text if text.startswith("echelon: ") else f"echelon: rank {rank} failed first:\n{text}"
    gone = [r for r in codes if codes[r] == 0]
    if not reports[rank]["in_collective"] or not (gone or hung):
        return Failure(rank, text, code, own)
    which, rank = named(gone or hung), (gone or hung)[0]
    how = "ended with code 0 before the others" if gone else "did not end and had to be killed"
    text = f"{text}\nechelon: {which} {how}: the likely cause{naming_log(rank, logs)}"
    beat = None if gone else last(private / f"heartbeat-{rank}")
    if beat and beat.until > time.monotonic():
        text += f"\nechelon: rank {rank} had announced long work, as a compilation is; raise trainer.timeout_s"
    return Failure(rank, text, code, False)


def blame_memory(failure: Failure) -> Failure:
    """Attribute a failure to the kernel's out-of-memory killer, with advice, if it killed a process."""
    worker = bool(KILLED_WORKER.search(failure.text))
    if not worker and (failure.reported or failure.code != 128 + signal.SIGKILL):
        return failure
    advice = f"\nechelon: a data worker: {NO_MEMORY}" if worker else f"; {NO_MEMORY}"
    return replace(failure, text=failure.text + advice, out_of_memory=True)


def stopped_early(rank: int, number: int) -> Failure:
    return Failure(rank, f"echelon: {signal.Signals(number).name}: ended without a checkpoint", 128 + number, False)


def read_reports(failed: Iterable[int], private: Path) -> dict[int, dict[str, Any]]:
    reports: dict[int, dict[str, Any]] = {}
    for rank in failed:
        with contextlib.suppress(OSError, ValueError):
            reports[rank] = json.loads((private / f"error-{rank}.json").read_text())
    return reports


def find_silent(failed: Mapping[int, int], reports: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the ranks that are the likely cause although they reported nothing.

    An abort may result from a peer's failure. But if all reports are about collectives, the abort is the cause. NCCL
    aborts a rank whose GPU has failed, while the peers wait for that rank.
    """
    silent = [rank for rank in failed if rank not in reports]
    others = [rank for rank in silent if failed[rank] != -signal.SIGABRT]
    return others or ([] if any(not report["in_collective"] for report in reports.values()) else silent)


def silent_failure(silent: list[int], failed: Mapping[int, int], logs: Path | None) -> Failure:
    rank = silent[0]
    code = failed[rank]
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    text = f"echelon: rank {rank} {how}{naming_log(rank, logs)}"
    if code == -signal.SIGABRT and len(failed) > 1 and len(silent) == len(failed):
        text = f"echelon: all ranks were aborted: a collective timed out{naming('their collectives are in', logs)}"
    return Failure(rank, text, 128 - code if code < 0 else code, False)


def naming(what: str, path: Path | None) -> str:
    return f"; {what} {path}" if path else ""


def naming_log(rank: int, logs: Path | None) -> str:
    return naming("its log:", logs and logs / f"rank{rank}.log")


def named(ranks: Iterable[int]) -> str:
    return f"rank(s) {', '.join(map(str, ranks))}"
