"""A machine and a workload of round numbers, for tests of the cost model."""

from dataclasses import replace
from typing import Any

from trainer.cost.machine import CodecCost, Link, Machine
from trainer.cost.setup import Setup
from trainer.cost.workload import Choice, Prediction, Workload
from trainer.tools.cost_model.predict import predict
from trainer.tools.cost_model.read import read

MIB = 1 << 20
FAST = Link(0.0, 1e15, 0.0)
SLOW = Link(0.0, 1e6, 0.0)  # a megabyte a second
CODECS = {
    name: CodecCost(0.0, 0.0)
    for name in ["none", "bf16", "fp16", "int8", "topk", "dgc", "sign", "powersgd", "blocksparse"]
}
# Ten square layers, 1 MiB of gradients each. A sample takes 0.1 s forward and 0.2 s backward.
WORKLOAD = Workload((MIB // 4,) * 10, 0.1, 0.2, 0.0, 0.01, 0.0, 0.0, 1000.0, 16.0 * 10 * MIB / 4)


def machine(ranks: int = 2, per_node: int = 1, across: Link = SLOW, cores: float = 2.0, **changes: Any) -> Machine:
    made = Machine(ranks, per_node, cores, FAST, across, CODECS, None, 1e9)
    return replace(made, **changes)


def choose(callbacks: dict[str, dict[str, Any]] | None = None, **settings: Any) -> Choice:
    return Choice(callbacks or {}, {key.replace("__", "."): value for key, value in settings.items()})


def setup(own: Machine, choice: Choice | None = None, batch: int = 4, **changes: Any) -> Setup:
    return read(own, replace(WORKLOAD, **changes), choice or choose(), batch)


def predicted(own: Machine, choice: Choice | None = None, batch: int = 4, **changes: Any) -> Prediction:
    return predict(own, replace(WORKLOAD, **changes), choice or choose(), batch)
