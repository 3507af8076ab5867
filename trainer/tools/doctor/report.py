"""Merges the findings of all ranks, compares ranks, and prints lines or JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.process.affinity import ranges
from trainer.tools.doctor.finding import ERROR, LEVELS, NOTE, OK, WARNING, Finding, share_by_speed

MOST = 8  # lines about a subject that differ between ranks; JSON has all
SEPARATORS = (" + ", ", ")  # of the entries of a list; the first that a value has
EQUAL = {  # subject -> how bad a difference between ranks is, what it causes, and the fix
    "Echelon": (ERROR, "ranks may call different collectives and hang", "install the same version"),
    "torch": (ERROR, "ranks may call different collectives and hang", "install the same version"),
    "NCCL": (ERROR, "NCCL refuses to connect ranks of different versions", "install the same torch"),
    "torch's accelerator": (WARNING, "ranks round differently", "install the same build of torch"),
    "NVIDIA driver": (WARNING, "ranks may differ in speed and in features", "install the same driver"),
    "Python": (NOTE, "a recipe may behave differently", "use the same Python"),
    "packages": (WARNING, "a recipe may behave differently", "install the same versions: constraints.txt"),
    "variables": (WARNING, "NCCL and gloo may not agree on how to connect", "set the same for all ranks"),
    "open files": (WARNING, "the rank with the least fails first", "set the same limit on all machines"),
    "processor": (NOTE, "the slowest rank sets the pace", ""),
    "kind of GPU": (NOTE, "the slowest rank sets the pace", ""),
}


@dataclass(frozen=True)
class Merged:
    finding: Finding
    ranks: tuple[int, ...]


def merge(rows: Mapping[int, Iterable[Finding]]) -> list[Merged]:
    found: dict[Finding, list[int]] = {}
    for rank in sorted(rows):
        for finding in dict.fromkeys(replace(finding, data=None) for finding in rows[rank]):
            found.setdefault(finding, []).append(rank)
    subjects = list(dict.fromkeys(finding.subject for finding in found))
    merged = [Merged(finding, tuple(ranks)) for finding, ranks in found.items()]
    return sorted(merged, key=lambda each: subjects.index(each.finding.subject))


def differences(rows: Mapping[int, Iterable[Finding]]) -> list[Finding]:
    """Return a finding for each subject that must be equal on all ranks but differs, or is missing on some."""
    values = {rank: {finding.subject: finding.value for finding in findings} for rank, findings in rows.items()}
    found = list[Finding]()
    for subject, (level, consequence, way_out) in EQUAL.items():
        by_value: dict[str, list[int]] = {}
        for rank, own in values.items():
            by_value.setdefault(own.get(subject, "missing"), []).append(rank)
        if len(by_value) > 1:
            listed = " | ".join(f"{value} ({in_words(among)})" for value, among in unlike(by_value))
            found.append(Finding(f"{subject} differs", listed, level, consequence, way_out or share_by_speed()))
    return found


def unlike(by_value: Mapping[str, list[int]]) -> list[tuple[str, list[int]]]:
    """Return the values. Lists, of packages, variables or GPUs, lose the entries that all ranks share."""
    separator = next((word for word in SEPARATORS if any(word in value for value in by_value)), " ")
    parts = {value: value.split(separator) for value in by_value}
    common = set.intersection(*map(set, parts.values()))
    cut = {value: separator.join(part for part in own if part not in common) or "-" for value, own in parts.items()}
    return [(cut[value] if common else value, among) for value, among in by_value.items()]


def in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0-2,5"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def lines(merged: Sequence[Merged], *usual: tuple[int, ...]) -> list[str]:
    """Return the facts, then the problems, the worst last, because a terminal shows the end.

    `usual` are the sets of ranks that need no mention: all ranks, and the first of each machine.
    """
    shown = list[str]()
    for level in reversed(LEVELS):
        of_level = [each for each in merged if each.finding.level == level]
        for subject in dict.fromkeys(each.finding.subject for each in of_level):
            rows = [each for each in of_level if each.finding.subject == subject]
            most = len(rows) if level != OK or subject == "links" else MOST
            for each in rows[:most]:
                who = "" if each.ranks in usual else f"  [{in_words(each.ranks)}]"
                shown.append(f"{level:<8} {each.finding.line()}{who}")
            if rows[most:]:
                shown.append(f"{level:<8} {subject}: {len(rows) - most} more values; --json FILE has all")
    return shown


def verdict(merged: Sequence[Merged]) -> str:
    count = {level: sum(each.finding.level == level for each in merged) for level in LEVELS}
    if count[ERROR]:
        return f"{count[ERROR]} error(s): training can't start; {count[WARNING]} warning(s)"
    return f"training can start; {count[WARNING]} warning(s), {count[NOTE]} note(s)"


def document(merged: Sequence[Merged], rows: Mapping[int, Iterable[Finding]]) -> dict[str, Any]:
    """Return the report as JSON: the merged findings, and each rank's own with numbers."""
    return {
        "ok": not any(each.finding.level == ERROR for each in merged),
        "findings": [{**asdict(each.finding), "ranks": list(each.ranks)} for each in merged],
        "ranks": {rank: [asdict(each) for each in rows[rank]] for rank in sorted(rows)},
    }
