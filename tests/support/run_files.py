"""Synthetic files of runs, in the formats that callbacks write: curves by formula, with noise of a fixed seed."""

import json
import math
import random
from pathlib import Path
from typing import Any

PARTS = {
    "data": 0.4e-3, "upload": 0.2e-3, "forward": 3.1e-3, "backward": 5.9e-3, "communication": 2.2e-3,
    "optimizer": 0.8e-3, "callbacks": 0.1e-3, "checkpoint": 0.05e-3, "validation": 0.3e-3,
}  # fmt: skip

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def synthetic_run(
    folder: Path, logged: int = 200, every: int = 50, ranks: int = 4, seed: int = 0, lr: float = 1e-3, **config: Any
) -> Path:
    """All files of a run, with `logged` lines of steps."""
    noise = random.Random(seed)

    def about(value: float, share: float = 0.05) -> float:
        return value * (1 + share * noise.gauss(0, 1))

    metrics, times, comm = [], [], []
    for n in range(1, logged + 1):
        step, part = n * every, n / logged
        each = [
            {p: max(0.0, about(s * (1.3 if r == 2 and p == "data" else 1))) for p, s in PARTS.items()}
            for r in range(ranks)
        ]
        for rank in each:
            rank["step"] = sum(rank.values())
        times.append({"step": step, "steps": every, "ranks": each})
        mean = {f"time/{p}": sum(rank[p] for rank in each) / ranks for p in (*PARTS, "step")}
        loss = 2.1 + 8.0 * math.exp(-6 * part * lr / 1e-3) + noise.gauss(0, 0.06)
        metrics.append({
            "step": step, "samples": step * 256, "seconds": round(step * 0.0131, 3), "train/loss": loss,
            "train/lr": lr * min(1.0, 10 * part) * (1 - part), "train/grad_norm": about(1.0 + math.exp(-5 * part), 0.2),
            **mean, "time/slowest_rank": float(noise.choice([2, 2, 2, 0])), "time/spread": abs(about(0.06, 0.4)),
            "perf/samples_per_s": 256 / mean["time/step"], "perf/peak_memory_gib": 31.5,
            "comm/mib_per_step": 212.0, "comm/seconds_per_step": about(4.1e-3), "comm/busbw_mib_s": about(52_000),
            "gpu/utilisation": min(1.0, about(0.86)), "gpu/power_w": about(540), "gpu/temperature_c": about(61, 0.02),
            "gpu/memory_gib": 38.2, "gpu/sm_mhz": about(1700, 0.02), "host/cpu": about(0.31, 0.1),
            "host/ram_gib": about(61, 0.01),
        })  # fmt: skip
        if n % 20 == 0:
            at = {"step": step, "samples": step * 256, "seconds": round(step * 0.0131, 3)}
            metrics.append({**at, "val/loss": loss + 0.1, "val/accuracy": 0.2 + 0.6 * part})
        for rank in range(ranks):
            for bucket, size in enumerate((1 << 20, 25 << 20, 25 << 20)):
                seconds = about(size / 30e9)
                comm.append({
                    "step": step, "rank": rank, "collective": "all_reduce", "bucket": bucket, "bytes": size,
                    "count": every, "seconds": seconds, "algbw": size / seconds, "busbw": 1.5 * size / seconds,
                })  # fmt: skip
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "step_times.jsonl", times)
    write_lines(folder / "comm.jsonl", comm)
    write_lines(folder / "events.jsonl", events(logged * every, ranks))
    write_about(folder, logged * every, ranks, {"lr": lr}, seed, config)
    return folder


def events(last: int, ranks: int) -> list[dict[str, Any]]:
    """The lines of a run of `last` steps, which skips a step and restarts once."""
    began, start = 1_790_000_000.0, {"ranks": ranks, "device": "cuda"}
    lines: list[dict[str, Any]] = [{"time": began, "step": 0, "event": "start", **start}]
    written = {"event": "checkpoint", "seconds": 1.4, "stall": 0.03, "bytes": 1 << 30}
    lines += [{"time": began + at * 0.0131, "step": at, **written} for at in (last * n // 5 for n in range(1, 5))]
    lines.append({"time": began + 60, "step": last // 2, "event": "skip", "first": last // 2, "why": "loss not finite"})
    lines.append({"time": began + 70, "step": last * 3 // 5, "event": "restart", "attempt": 1, **start})
    lines.append({"time": began + 140, "step": last, "event": "stop", "reason": "max_steps", "seconds": last * 0.0131})
    return lines


def write_about(
    folder: Path, last: int, ranks: int, optimizer: dict[str, Any], seed: int, config: dict[str, Any]
) -> None:
    """Write an advice, the config and the summary."""
    write_lines(folder / "advice.jsonl", [{
        "step": last // 3, "name": "communication", "value": 0.35, "limit": 0.3,
        "text": "exposed communication is 0.35 of compute, and 0.3 is the limit: overlap it, or send less",
        "config": "+callbacks=[overlap]",
    }])  # fmt: skip
    own = {"batch": 256, "optimizer": optimizer, "trainer": {"max_steps": last, "seed": seed}, **config}
    (folder / "config.yaml").write_text(json.dumps(own))  # JSON is YAML
    summary = {"stopped": "max_steps", "steps": last, "ranks": ranks, "device": "NVIDIA H100 80GB HBM3"}
    (folder / "summary.json").write_text(json.dumps({**summary, "precision": "bf16"}))


def long_metrics(file: Path, steps: int) -> None:
    """A metrics.jsonl with a line for each step. Step `steps // 3` has a spike of 99."""
    noise = random.Random(0)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lines:
        for step in range(1, steps + 1):
            loss = 99.0 if step == steps // 3 else 2 + 8 / (1 + step / 5e4) + 0.2 * noise.random()
            lines.write(
                f'{{"step": {step}, "samples": {64 * step}, "seconds": {step / 80:.3f}, "train/loss": {loss:.16g}, '
                f'"train/lr": {1e-3 * (1 - step / (steps + 1)):.16g}, "train/grad_norm": {noise.random() + 0.5:.16g}, '
                f'"perf/samples_per_s": {5000 + 100 * noise.random():.16g}, "perf/peak_memory_gib": 31.5, '
                f'"time/step": 0.0125, "time/forward": 0.004, "time/backward": 0.0085}}\n'
            )


def hostile_run(folder: Path) -> Path:
    """Each text that a file may have is HTML."""
    folder.mkdir()
    keys = {"step": 5, "train/loss": 1.0, HOSTILE: 2.0, f"val/{HOSTILE}": 3.0}
    write_lines(folder / "metrics.jsonl", [keys, {**keys, "step": 6, f"time/{HOSTILE}": 1.0}])
    event = {"step": 5, "time": 1, "reason": HOSTILE, "error": HOSTILE, "why": HOSTILE}
    events = [{**event, "event": kind} for kind in ("start", "crash", HOSTILE)]
    write_lines(folder / "events.jsonl", [*events, {**event, "event": "start", "ranks": HOSTILE, "device": HOSTILE}])
    write_lines(folder / "logs" / "events.jsonl", [{**event, "failed": HOSTILE, "rank": HOSTILE}])
    write_lines(folder / "advice.jsonl", [{"step": 1, "name": HOSTILE, "text": HOSTILE, "config": HOSTILE}])
    call = {"step": 1, "rank": HOSTILE, "collective": HOSTILE, "count": 1, "seconds": 1, "bytes": 1}
    write_lines(folder / "comm.jsonl", [{**call, "bucket": HOSTILE}])
    times = {"step": 1, "steps": 1, "ranks": [{"step": 1.0, HOSTILE: 1.0, "forward": 0.5}]}
    write_lines(folder / "step_times.jsonl", [times])
    (folder / "config.yaml").write_text(json.dumps({HOSTILE: HOSTILE, "a": {"b": [HOSTILE]}}))
    summary = {"stopped": HOSTILE, "error": HOSTILE, "device": HOSTILE, "ranks": 1, "steps": 6}
    (folder / "summary.json").write_text(json.dumps({**summary, "best": {"metric": HOSTILE, "value": HOSTILE}}))
    return folder
