"""Compares the cost model with published scaling results: BERT base on V100s, BERT large on TPUs.

    python -m scripts.bench.published [--json FILE]

A single device's speed is taken from the publication, links from data sheets; the rest is predicted. It takes a second.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from scripts.bench.codecs import shapes
from scripts.bench.harness import Report, parser
from scripts.bench.harness import Row as Cells
from scripts.command import command
from trainer.cost.machine import Link, Machine
from trainer.cost.workload import Choice, Workload
from trainer.tools.cost_model.predict import predict
from trainer.tools.scale.machines import NETWORK_LATENCY, NVLINK_LATENCY, PRESETS

Shapes = list[tuple[int, ...]]
WORDS = 30528  # of the vocabulary
FORWARD = 1 / 3  # of a sample's seconds
VIEW = {"trainer.ddp.gradient_as_bucket_view": True}
LATE = {**VIEW, "trainer.ddp.bucket_mib": 1e4}  # one bucket, all-reduced after the backward pass


@dataclass(frozen=True)
class Case:
    """A published series: samples a second of `alone` ranks, which is predicted for other numbers of ranks."""

    name: str
    source: str
    machine: Machine  # of one node
    shapes: Shapes
    per_rank: int
    alone: float  # samples a second of a rank without communication
    settings: Mapping[str, Any]
    measured: dict[int, float]  # ranks -> samples a second
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def bert(width: int, layers: int) -> Shapes:
    head = [(width, width), (width,), (width,), (width,), (WORDS,)]
    return [*shapes(width, layers, WORDS), *head]


def node(ranks: int, inside: float, across: float) -> Machine:
    return Machine(
        ranks, ranks, 8.0, Link(NVLINK_LATENCY, inside, 0.0), Link(NETWORK_LATENCY, across, 0.0), {}, None, 1e9
    )


DLPERF = "Oneflow-Inc/DLPerf, NVIDIADeepLearningExamples/PyTorch/BERT/README.md, commit 28a48de"
V100 = PRESETS["8xv100-1x100g"].machine
CASES = [
    Case("BERT base, V100, fp32, 32 a GPU", DLPERF, V100, bert(768, 12), 32, 119.6, LATE,
         {8: 921.32, 16: 1499.4, 32: 2885.81}),
    Case("BERT base, V100, fp32, 48 a GPU", DLPERF, V100, bert(768, 12), 48, 121.94, LATE,
         {8: 928.01, 16: 1584.32, 32: 3039.3}),
    Case("BERT base, V100, fp16, 64 a GPU", DLPERF, V100, bert(768, 12), 64, 444.51, LATE,
         {8: 3251.7, 16: 4936.92, 32: 9331.72}),
    Case("BERT base, V100, fp16, 96 a GPU", DLPERF, V100, bert(768, 12), 96, 462.35, LATE,
         {8: 3287.12, 16: 5426.07, 32: 10349.12}),
    # 16 chips take 82.8 h for 10^6 steps of 512 samples. A chip has links of 656 Gbit/s to its neighbours in a
    # square torus, whose rows and columns reduce one after the other (Ying et al. 2018, arXiv:1811.06992).
    *(
        Case("BERT large, TPU v3, 32 a chip", "You et al. 2019, arXiv:1904.00962, table 1", node(side, 82e9, 82e9),
             bert(1024, 24), 32, 512e6 / (82.8 * 3600) / 16, VIEW, {side * side: rate}, {"hierarchical": {}})
        for side, rate in (
            (8, 2048 * 250e3 / (21.4 * 3600)), (16, 8192 * 62.5e3 / (390.5 * 60)), (32, 32768 * 15.625e3 / (101.2 * 60))
        )
    ),
]  # fmt: skip


def compare(case: Case) -> list[Cells]:
    made, own = [], tuple(map(math.prod, case.shapes))
    for ranks, published in case.measured.items():
        machine = replace(case.machine, ranks=ranks)
        work = Workload(
            own, FORWARD / case.alone, (1 - FORWARD) / case.alone, 0.0, 0.0, 0.0, 0.0, 0.0, 16.0 * sum(own),
            tuple(case.shapes),
        )  # fmt: skip
        found = predict(machine, work, Choice(case.callbacks, case.settings), case.per_rank * ranks)
        rate, linear = case.per_rank * ranks / found.step_s, case.alone * ranks
        made.append({
            "part": f"{case.name}: {case.source}", "ranks": ranks,
            "published, samples/s": published, "predicted, samples/s": rate,
            "published, of linear": published / linear, "predicted, of linear": rate / linear,
            "error, %": (rate / published - 1) * 100,
        })  # fmt: skip
    return made


def main() -> int:
    args = parser("published", __doc__).parse_args()
    with Report(args.json, None) as report:
        for _, cases in itertools.groupby(CASES, lambda case: case.name):
            report.add([row for case in cases for row in compare(case)])
    return 0


if __name__ == "__main__":
    command(main)
