"""Counts what a BERT keeps between forward and backward, and its FLOPs, under each policy of activation_checkpoint.

    python -m scripts.bench.activations [--quick] [--json FILE]

Kept bytes are those of all storages on the device that exist after the forward pass, but for parameters and buffers.
The model is that of recipes/bert.py with random tokens, in float32 on a CPU and in bf16 autocast on a GPU. With dropout
a CPU has no fused attention, so it keeps matrices of sequence x sequence. Times are medians over rounds; on a CPU that
others use, they mean little. The bench takes about a minute on a CPU core.
"""

import statistics
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from recipes.bert import Bert
from scripts.bench.harness import Report, Row, parser
from scripts.command import command
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.comm.ranks import Ranks
from trainer.parallel.warmup import time_pass
from trainer.process.environment import Place

MIB = 2**20
ADAMW = 16  # bytes of a parameter: float32 weight, gradient and two moments
ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "every=2": {"every": 2},
    "selective": {"policy": "selective"},
    "budget=0.6": {"budget": 0.6},
    "full": {"policy": "full"},
    "offload": {"policy": "offload"},
}


class Live(TorchDispatchMode):
    """Knows which of the storages that operations have made still exist."""

    def __init__(self, owned: Iterable[Tensor], device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.owned = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in owned}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device.type:
                storage = tensor.untyped_storage()
                weak = StorageWeakRef(storage)
                if weak.cdata not in self.owned:
                    self.made[weak.cdata] = weak, storage.nbytes()
        return result

    def bytes(self) -> int:
        return sum(nbytes for weak, nbytes in self.made.values() if not weak.expired())


def kept_bytes(model: nn.Module, forward: Callable[[], Tensor], device: torch.device) -> int:
    """Return the bytes that the graph of a scalar keeps, with the scalar."""
    with Live([*model.parameters(), *model.buffers()], device) as live:
        loss = forward()
        kept = live.bytes()
    del loss
    return kept


def measure(device: torch.device, quick: bool, rounds: int, dropout: float) -> list[Row]:
    layers, hidden, sequence, batch = (2, 64, 32, 2) if quick else (6, 256, 128, 16)
    recipe, data = task(layers, hidden, sequence, batch, dropout, device)
    part = f"{layers} layers, hidden {hidden}, sequence {sequence}, batch {batch}, dropout {dropout:g}"
    rows = [
        {"part": part, "activation_checkpoint": name, **count(recipe, data, knobs, device, rounds)}
        for name, knobs in ROWS.items()
        if name != "offload" or device.type == "cuda"
    ]
    kept, flops = rows[0]["kept, MiB"], rows[0]["FLOPs, of plain"]
    for row in rows:
        row |= {"kept, of plain": row["kept, MiB"] / kept, "FLOPs, of plain": row["FLOPs, of plain"] / flops}
    return rows


def task(
    layers: int, hidden: int, sequence: int, batch: int, dropout: float, device: torch.device
) -> tuple[Bert, dict[str, Tensor]]:
    recipe = Bert(vocab=2048, sequence=sequence, hidden=hidden, layers=layers, heads=4, dropout=dropout)
    return recipe, {
        "input_ids": torch.randint(2048, (batch, sequence), device=device),
        "positions": torch.arange(recipe.masked, device=device).expand(batch, -1),
        "labels": torch.randint(2048, (batch, recipe.masked), device=device),
    }


def count(recipe: Bert, data: dict[str, Tensor], knobs: dict[str, Any], device: torch.device, rounds: int) -> Row:
    """Return the bytes, FLOPs and milliseconds of a pass under these knobs; without any, of plain training."""
    torch.manual_seed(0)
    model, ranks = recipe.model().to(device).train(), Ranks(Place(), device.type, "auto", 60.0)
    autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()

    def forward() -> Tensor:
        with autocast:
            return recipe.loss(model, data)

    def run() -> None:
        forward().backward()

    if knobs:
        trainer: Any = SimpleNamespace(recipe=recipe, device=device, module=model, ranks=ranks, callbacks={})
        callback = ActivationCheckpoint(**knobs)
        callback.wrap_model(trainer, model)
        callback.rehearse(trainer, lambda _: run(), data)
    with FlopCounterMode(display=False) as counter:
        run()
    kept = kept_bytes(model, forward, device)
    return {
        "kept, MiB": kept / MIB,
        "kept, of plain": 1.0,
        "with weights and AdamW, MiB": (kept + ADAMW * sum(p.numel() for p in model.parameters())) / MIB,
        "FLOPs, of plain": float(counter.get_total_flops()),
        "ms": statistics.median(time_pass(run, ranks) for _ in range(rounds)) * 1000,
    }


def main() -> None:
    args = parser("activations", __doc__, "a tiny model: seconds", "passes that are timed; without it 3").parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    with Report(args.json, ("torch", "transformers")) as report:
        for dropout in (0.0, 0.1):
            report.add(measure(device, args.quick, args.rounds or 3, dropout))


if __name__ == "__main__":
    command(main)
