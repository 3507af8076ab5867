"""Sections, titles and units of metrics: those that this repository writes, and a stranger's."""

import re

import pytest

from trainer.tools.report.names import KINDS, SECTIONS, TITLES, shown


@pytest.mark.parametrize(
    "name, section, kind, zero",
    [
        ("train/loss", "loss", "plain", False),
        ("val/accuracy", "loss", "plain", False),
        ("train/left_out", "loss", "count", False),
        ("perf/samples_per_s", "perf", "rate", True),
        ("perf/mfu", "perf", "share", True),
        ("perf/peak_memory_gib", "memory", "GiB", True),
        ("time/forward", "time", "seconds", True),
        ("time/slowest_rank", "time", "count", True),
        ("time/spread", "time", "share", True),
        ("comm/mib_per_step", "comm", "MiB", True),
        ("comm/busbw_mib_s", "comm", "MiB/s", True),
        ("gpu/power_w", "host", "W", True),
        ("gpu/sm_mhz", "host", "MHz", True),
        ("host/ram_gib", "memory", "GiB", True),
        ("mine", "other", "plain", False),
        ("<script>/x_gib", "other", "plain", False),
    ],
)
def test_how_a_metric_is_shown(name, section, kind, zero):
    found = shown(name)
    assert (found.section, found.kind, found.zero) == (section, kind, zero)


def test_every_title_has_a_known_section_and_kind():
    for name in TITLES:
        assert shown(name).section in SECTIONS and shown(name).kind in KINDS
        assert re.fullmatch(r"[\w]+/[\w]+", name)
