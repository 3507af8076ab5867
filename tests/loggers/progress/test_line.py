"""What a line has room for: the step and what the run does always, a bar, percentage and epoch in 80 columns."""

import re

import pytest

from trainer.loggers.progress.line import MOST_BAR, Moment, arrange, describe, epoch_of

METRICS = {
    "train/loss": 2.34567, "train/lr": 1.5e-4, "perf/samples_per_s": 158_029.0, "perf/tokens_per_s": 20_227_712.0,
    "perf/mfu": 0.4321, "perf/peak_memory_gib": 61.74, "time/step": 2.0, "time/communication": 0.46,
}  # fmt: skip
LONG = Moment(25_000, 1_000_000, "3/10", "", METRICS, 3600.0, 140_400.0)
SHORT = Moment(1200, 6000, "2/10", "", METRICS | {"perf/samples_per_s": 1580.0}, 60.0, 300.0)


def drawn(moment: Moment, columns: int) -> str:
    head, bar, tail = arrange(moment, columns)
    return " ".join(filter(None, [head, "-" * bar, tail]))


@pytest.mark.parametrize(
    ("moment", "columns", "line"),
    [
        (LONG, 20, r"step 25000/1000000"),
        (LONG, 40, r"step 25000/1000000 2%  loss 2\.346"),
        (LONG, 60, r"step 25000/1000000 -{20} 2%  loss 2\.346"),
        (LONG, 80, r"step 25000/1000000 -{20} 2%  loss 2\.346  1 day, 15:00:00 left"),
        (
            LONG,
            120,
            r"step 25000/1000000 -{12} 2%  epoch 3/10  loss 2\.346  158,029 samples/s  20,.*  1 day, 15:00:00 left",
        ),
        (
            LONG,
            200,
            r"step .* lr 1\.50e-04 .*  mfu 43\.2%  peak 61\.7 GiB  communication 23%  1:.* elapsed  1 day, 15:.*",
        ),
        (SHORT, 40, r"step 1200/6000 -+ 20%  loss 2\.346"),
        (SHORT, 80, r"step 1200/6000 -{10,} 20%  loss 2\.346  1,580 samples/s  0:05:00 left"),
        (SHORT, 100, r"step 1200/6000 -{10,} 20%  epoch 2/10  loss 2\.346  1,580 samples/s  0:05:00 left"),
        (SHORT._replace(doing="validating 3/12"), 40, r"step 1200/6000 20%  validating 3/12"),
        (SHORT._replace(doing="validating 3/12"), 80, r"step .* 20%  epoch 2/10  validating 3/12  0:05:00 left"),
        (SHORT._replace(step=6000, doing="writing"), 40, r"step 6000/6000 -{10,} 100%  writing"),
        (SHORT._replace(step=6000), 80, r"step 6000/6000 -+ 100%  epoch 2/10  loss 2\.346  1,580 samples/s"),
        (SHORT._replace(metrics={}, left_s=None), 80, r"step 1200/6000 -{20} 20%  epoch 2/10  0:01:00 elapsed"),
        (
            SHORT._replace(last=None, left_s=None),
            80,
            r"step 1200 epoch 2/10  loss 2\.346  1,580 samples/s  20,227,712 tokens/s",
        ),
        (SHORT._replace(last=None, epoch="", left_s=None), 40, r"step 1200 loss 2\.346  1,580 samples/s"),
    ],
)
def test_what_a_terminal_has_room_for(moment, columns, line):
    assert re.fullmatch(line, drawn(moment, columns)), drawn(moment, columns)


@pytest.mark.parametrize("moment", [LONG, SHORT, SHORT._replace(doing="writing"), SHORT._replace(epoch="", last=None)])
def test_no_line_is_wider_than_the_terminal(moment):
    least = len(f"step {moment.step}/{moment.last}" if moment.last else f"step {moment.step}")
    for columns in range(least + 1 + len(moment.doing), 300):
        line = drawn(moment, columns)
        assert len(line) <= columns and moment.doing in line and "-" * (MOST_BAR + 1) not in line


@pytest.mark.parametrize(
    ("samples", "in_epoch", "last", "shown"),
    [
        (0, 96, 200, "1/3"), (1, 96, 200, "1/3"), (96, 96, 200, "1/3"), (97, 96, 200, "2/3"), (200, 96, 200, "3/3"),
        (200, 96, None, "3"), (200, None, 200, ""),
    ],
)  # fmt: skip
def test_the_epoch(samples, in_epoch, last, shown):
    assert epoch_of(samples, in_epoch, last) == shown


def test_the_numbers_of_a_line():
    numbers = {
        "train/loss": 2.34567, "train/lr": 1.5e-4, "train/grad_norm": 3.0, "perf/samples_per_s": 1234.6,
        "perf/tokens_per_s": 158029.0, "perf/mfu": 0.4321, "perf/peak_rss_gib": 1.26,
    }  # fmt: skip
    assert describe(numbers) == "loss 2.346  lr 1.50e-04  1,235 samples/s  158,029 tokens/s  mfu 43.2%  peak 1.3 GiB"


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ({"data": 0.5, "communication": 0.25}, "  data 12%"),
        ({"data": 0.25, "communication": 0.9}, "  communication 22%"),
        ({"validation": 2.0}, "  validation 50%"),
        ({"data": 0.03}, ""),
    ],
)
def test_the_largest_part_of_a_step_that_computes_nothing(parts, shown):
    times = {f"time/{name}": seconds for name, seconds in parts.items()}
    assert describe({"train/loss": 1.0, "time/step": 4.0, "time/forward": 3.0, **times}) == f"loss 1{shown}"
    assert describe({"train/loss": 1.0, "time/step": 0.0}) == "loss 1"
