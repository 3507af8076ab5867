"""Any files give a page and a comparison: a stranger's, a damaged disk's, another version's."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.tools.compare import as_object, blocks, columns, watched
from trainer.tools.report.page import make_page
from trainer.tools.report.run import read_run

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    10**18,
    10**400,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    "1",
    "<b>",
]
SCALARS = st.one_of(st.sampled_from(ODD), st.text(max_size=4), st.floats())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=6,
)
KEYS = {
    "metrics.jsonl": ["samples", "seconds", "train/loss", "val/loss", "time/step", "time/data", "perf/mfu", "<b>"],
    "events.jsonl": ["time", "event", "seconds", "stall", "bytes", "error", "why", "reason", "ranks", "device"],
    "logs/events.jsonl": ["time", "failed", "attempt", "rank"],
    "step_times.jsonl": ["steps", "ranks"],
    "comm.jsonl": ["rank", "collective", "bucket", "level", "bytes", "count", "seconds", "algbw", "busbw"],
    "advice.jsonl": ["name", "text", "value", "limit", "config"],
}  # fmt: skip
RANKS = st.lists(st.dictionaries(st.sampled_from(["step", "data", "forward", "communication"]), SCALARS), max_size=3)
EVENTS = st.sampled_from(["start", "stop", "crash", "resume", "checkpoint", "skip", "<b>"])
KNOWN = {"ranks": st.one_of(RANKS, VALUES), "event": st.one_of(EVENTS, VALUES), "steps": st.one_of(st.just(2), VALUES)}


def lines(keys: list[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    line = st.fixed_dictionaries({}, optional={key: KNOWN.get(key, VALUES) for key in keys})
    steps = st.one_of(st.integers(0, 100), st.sampled_from(ODD))
    return st.lists(st.builds(lambda step, line: {"step": step, **line}, steps, line), max_size=6)


FILES = st.fixed_dictionaries({name: lines(keys) for name, keys in KEYS.items()})
OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("stopped", "error", "steps", "ranks", "device", "seconds"), VALUES),
        "best": st.one_of(VALUES, st.fixed_dictionaries({"metric": VALUES, "value": VALUES, "step": VALUES})),
        "trainer": st.one_of(VALUES, st.fixed_dictionaries({"max_steps": VALUES})),
    },
)


@pytest.mark.slow
@settings(max_examples=60)
@given(FILES, OBJECTS, OBJECTS, st.binary(max_size=20))
def test_any_files_give_a_page(files, summary, config, torn):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        for file, content in files.items():
            (folder / file).write_bytes("".join(f"{json.dumps(line)}\n" for line in content).encode() + torn)
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "config.yaml").write_text(json.dumps(config))
        runs = [read_run(folder, "a", 3, 2), read_run(folder, "b", 3, 2)]
        for shown in (runs, runs[:1]):
            page = make_page(shown)
            assert page.count("<script") == 2 and "<b></b>" not in page
            json.dumps(as_object(shown), default=str)
        found = columns(runs, watched(runs), everything=True)
        assert all(isinstance(text, str) and len(column.cells) == 2 for column in found for text in column.cells)
        assert [column for block in blocks(found, found[0], 80) for column in block] == found
