"""Reads everything in the folder of a run. A missing file becomes a line of `notes`, never an error."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.checkpoint.direction import usual
from trainer.errors import CONFIG, DATA, NOT_FINITE, STOPPED, ConfigError, printable
from trainer.redact import redact
from trainer.run_dir import refuse_unreadable, stored_config
from trainer.tools.report.comm import Exchange, read_comm
from trainer.tools.report.lines import Lines, number, parse, read_object
from trainer.tools.report.metrics import Metric, read_metrics
from trainer.tools.report.step_times import RankTimes, read_step_times

FILES = ("metrics.jsonl", "config.yaml", "summary.json", "events.jsonl", "logs", ".lock")  # one of them makes a run
PLACES = ("trainer.run_dir", "trainer.resume")
MOST_KEYS = 5000  # of a config
MOST_EVENTS = 1000  # of a kind, the newest
MOST_ADVICE = 100
ENDS = ("stop", "crash")
STARTS = ("start", "resume", "restart")
OPEN, REFUSED = "running or killed", "refused"
STATES = {"max_steps": "finished", "signal": "stopped by a signal", NOT_FINITE: "diverged", REFUSED: REFUSED}


@dataclass
class Run:
    """A run as its files describe it."""

    folder: Path
    name: str
    metrics: dict[str, Metric]
    last_step: int
    ranks: RankTimes
    exchanges: list[Exchange]
    events: list[dict[str, Any]]  # in the order of the files; the launcher's come last
    advice: list[dict[str, Any]]
    config: dict[str, Any]  # dotted key -> value, without secrets
    summary: dict[str, Any]
    notes: list[str]  # one line for each thing that is missing or left out

    @property
    def state(self) -> str:
        """How the run ended, in a few words."""
        ours = [event for event in self.events if event["event"] in (*STARTS, *ENDS)]
        last = ours[-1] if ours else {}
        if last.get("event") in STARTS:  # a summary is of an earlier attempt
            return OPEN
        reason = str(self.summary.get("stopped") or last.get("reason") or "")
        if reason == "error" or (not reason and last):
            return "crashed"
        return STATES.get(reason, f"finished: {printable(reason)[:120]}") if reason else OPEN

    @property
    def ending(self) -> str:
        """The run's state with its reason or error; "" if `state` says everything in a few words."""
        return f"{self.state}: {self.error}" if self.error else self.state if ": " in self.state else ""

    @property
    def error(self) -> str:
        """The error that ended the run; "" for any other end."""
        crashes = [event["error"] for event in self.events if event["event"] == "crash" and "error" in event]
        failed = self.state in ("crashed", STATES[NOT_FINITE])
        return printable(str(self.summary.get("error") or (crashes or [""])[-1]))[:300] if failed else ""


def read_run(folder: Path, name: str, most: int, spans: int = 128) -> Run:
    """Read the folder of a run. A curve keeps `most` points, per-rank times `spans` spans of steps.

    Raises:
        ConfigError: The folder holds no run, or can't be read.
    """
    refuse_unreadable(folder)
    if not folder.is_dir():
        raise ConfigError(f"RUN={folder}: is no folder; give the folder of a run, as in runs/NAME")
    if not any((folder / file).exists() for file in FILES):
        raise ConfigError(f"RUN={folder}: holds no file of a run; give a folder that has metrics.jsonl")
    metrics = read_metrics(folder / "metrics.jsonl", most)
    ranks, ranks_note = read_step_times(folder / "step_times.jsonl", spans)
    exchanges, comm_note = read_comm(folder / "comm.jsonl")
    events, events_note = read_events(folder)
    advice, advice_note = read_advice(folder / "advice.jsonl")
    config, config_note = read_config(folder / "config.yaml")
    summary, summary_note = read_object(folder / "summary.json")
    notes = [metrics.note, config_note, summary_note, events_note, ranks_note, comm_note, advice_note]
    notes += [
        f"{name}: {metric.bad:,} of {metric.count:,} values are not finite"
        for name, metric in metrics.by_name.items()
        if metric.bad
    ]
    optional = ("step_times.jsonl: is missing", "comm.jsonl: is missing", "advice.jsonl: is missing")
    optional += ("advice.jsonl: has no line yet",)  # a run without advice
    notes = [note for note in notes if note and note not in optional]
    shown = metrics.by_name
    return Run(folder, name, shown, metrics.last_step, ranks, exchanges, events, advice, config, summary, notes)


def of_job(name: str, folder: Path, config: Mapping[str, Any], code: int, wrote: bool) -> Run:
    """Read the run of a sweep's job by its exit code, and by whether it wrote files into its folder.

    A job that was refused wrote none, and the folder may have those of an earlier run.
    """
    if wrote:
        run = read_run(folder, name, 1, 1)
    else:
        run = Run(folder, name, {}, 0, RankTimes(1), [], [], [], {}, {}, [])
    run.config = keys_of(config)
    if code and run.state == OPEN:
        stopped = REFUSED if code in (CONFIG, DATA) else "signal" if code in (STOPPED, 130) else "error"
        run.summary = {**run.summary, "stopped": stopped}
    return run


def read_events(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the run's events and the launcher's failures, and a note on what is missing."""
    lines = Lines(folder / "events.jsonl")
    events = [line for line in lines if isinstance(line.get("event"), str)]
    note = lines.note
    kept, seen = [], Counter[str]()
    for event in reversed(events):
        seen[event["event"]] += 1
        if seen[event["event"]] <= MOST_EVENTS:
            kept.append(event)
    if left_out := len(events) - len(kept):
        note = "; ".join(filter(None, [note, f"events.jsonl: the {left_out} oldest events are left out"]))
    return kept[::-1] + read_failures(folder / "logs" / "events.jsonl"), note


def read_failures(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_bytes()[-(1 << 22) :].splitlines()
    except OSError:
        return []
    failures = []
    for line in text[-MOST_EVENTS:]:
        found = parse(line) or parse(line.replace(b'"step": null', b'"step": 0', 1))
        if found and found.get("failed"):
            last = str(found["failed"]).rstrip().splitlines()[-1][:300]
            facts = {key: found.get(key) for key in ("time", "step", "attempt", "rank")}
            failures.append({**facts, "event": "failure", "error": last})
    return failures


def read_advice(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the newest advice of each name, and a note on what is missing. `times` counts its lines."""
    lines, found = Lines(path), dict[str, dict[str, Any]]()
    for line in lines:
        name = str(line.get("name"))[:80]
        if name in found or len(found) < MOST_ADVICE:
            found[name] = {**line, "name": name, "times": found.get(name, {}).get("times", 0) + 1}
    return list(found.values()), lines.note


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """Return the config by dotted keys, with stars for secrets, and a note on what is missing."""
    try:
        found = yaml.safe_load(stored_config(path))
    except FileNotFoundError:
        return {}, f"{path.name}: is missing"
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ConfigError) else getattr(error, "strerror", None) or "no YAML"
        return {}, f"{path.name}: can't be read ({reason})"
    if not isinstance(found, Mapping):
        return {}, f"{path.name}: can't be read (no keys)"
    keys = keys_of(found)
    note = f"{path.name}: has more than {MOST_KEYS} keys; the others are left out" if len(keys) >= MOST_KEYS else ""
    return keys, note


def keys_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's leaves by dotted keys, with stars for secrets."""
    keys: dict[str, Any] = {}
    flatten("", config, keys)
    return {key: redact({key: value})[key] for key, value in keys.items()}


def flatten(key: str, value: Any, into: dict[str, Any], depth: int = 0) -> None:
    """Put the leaves of nested mappings into `into`, up to `MOST_KEYS`: a stranger's YAML may repeat its parts."""
    if len(into) >= MOST_KEYS:
        return
    if isinstance(value, Mapping) and value and depth < 20:
        for part, inner in value.items():
            flatten(f"{key}.{part}".lstrip("."), inner, into, depth + 1)
    else:
        into[key] = value if isinstance(value, (str, int, float, bool, type(None))) else str(value)[:1000]


def names_of(folders: list[Path]) -> list[str]:
    """Return the folders' names, with as much of the path as makes them distinct."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(folder) for folder in folders]


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Return the keys in which the configs differ, with each run's value; None for a missing key.

    Keys that name a run, or the checkpoint that it resumed from, are left out. Runs without a config don't count.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in PLACES)
    differ = [key for key in keys if len({repr(run.config.get(key)) for run in runs if run.config}) > 1]
    return {key: [run.config.get(key) for run in runs] for key in differ}


def best_of(run: Run, name: str) -> tuple[float, int] | None:
    """Return the best value of a metric and its step; None if it is unknown whether larger is better."""
    metric, better = run.metrics[name], direction(run, name)
    at = (None, metric.high, metric.low)[better]
    return (at.value, at.step) if at and number(at.value) == at.value else None


def direction(run: Run, name: str) -> int:
    """Return 1 if larger values are better, -1 if smaller ones are, 0 if it is unknown.

    The summary's `best` states the direction of its own metric.
    """
    watched = run.summary.get("best")
    stated = str(watched.get("metric", "")) if isinstance(watched, Mapping) else ""
    if stated in (name, f"max {name}"):
        return 1 if stated != name else -1
    return usually(name)


def usually(name: str) -> int:
    """Return what `direction` returns for a metric that no run states."""
    return 1 if name.endswith("_per_s") else usual(name)
