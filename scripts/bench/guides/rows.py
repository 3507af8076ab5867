"""The rows of the table: what guides claim, what is compared for it, and why the numbers differ."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scripts.bench.guides.ways import WAYS
from scripts.bench.harness import Turn

Round = Mapping[str, Turn]  # way -> what its turn gave
Rounds = Sequence[Round]
Show = Callable[[Rounds], str]


@dataclass(frozen=True)
class Row:
    """A claim.

    Attributes:
        claimed: As the guides have it.
        why: The reason why a measured value differs.
        ways: Names in `WAYS`, the measured one first, the other after it.
        show: Makes the measured value of the rounds that have all ways.
        lacks: The reason why the row can't be measured here.
        words: Overrides that the row shows, if it measures none.
    """

    claimed: str
    why: str
    ways: tuple[str, ...] = ()
    show: Show | None = None
    lacks: str = ""
    words: tuple[str, ...] = ()

    def config(self) -> tuple[str, ...]:
        return WAYS[self.ways[0]].words if self.ways else self.words

    def complete(self, rounds: Rounds) -> Rounds:
        return [each for each in rounds if {*self.ways} <= each.keys()]

    def measured(self, rounds: Rounds) -> str:
        if self.show is None:
            return f"not measured: {self.lacks}"
        whole = self.complete(rounds)
        return self.show(whole) if whole else "not measured yet"


def spread(values: list[float], unit: str = "") -> str:
    """Show a median with the extremes of the rounds."""
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def times(own: str, other: str, key: str, rounds: Rounds) -> list[float]:
    return [each[other][key] / each[own][key] for each in rounds]


def faster(own: str, other: str, scale: float = 1.0) -> Show:
    return lambda rounds: spread([scale * each for each in times(own, other, "seconds", rounds)])


def fewer_bytes(own: str, other: str) -> Show:
    def show(rounds: Rounds) -> str:
        sent = statistics.median(times(own, other, "sent", rounds))
        return f"{faster(own, other)(rounds)}, with 1/{sent:.1f} of the bytes"

    return show


def waiting(own: str, alone: str = "one rank") -> Show:
    """Show the share of a step that one rank without communication does not take."""
    return lambda rounds: spread([100 * (1 - each) for each in times(own, alone, "seconds", rounds)], " %")


def less_memory(own: str, other: str) -> Show:
    def show(rounds: Rounds) -> str:
        kept, whole = (100 * (1 - 1 / times(own, other, key, rounds)[0]) for key in ("kept", "whole"))
        slower = spread(times(other, own, "seconds", rounds))
        return f"{kept:.0f} % of activations, {whole:.0f} % with weights and AdamW; a pass takes {slower} times as long"

    return show


def against(claimed: str, own: str, other: str, why: str, scale: float = 1.0) -> Row:
    return Row(claimed, why, (own, other), faster(own, other, scale))


def preset(name: str) -> Row:
    return Row(
        "faster than NCCL's defaults", "The presets set NCCL's transport, and gloo reads none of it.",
        lacks="no NCCL between nodes here", words=(f"nccl={name}",),
    )  # fmt: skip


LIMIT = "DDP waits for a share of its step that the row above has, and no method saves more than that."
SHARDED = "Small buckets cost a latency each, and one bucket has nothing left to hide behind the backward pass."
ROWS: dict[str, Row] = {
    "DataParallel": Row(
        "1.8 times one device, by 4",
        "One process copies the model to all devices and collects their outputs in each step.",
        lacks="torch.nn.DataParallel needs several GPUs; on a CPU it is the module alone",
    ),
    "DDP instead of DataParallel": against(
        "more than 1.8 times one device, by 4", "DDP", "one rank",
        "Two ranks can give 2 at most, and the link takes its share.", 2.0,
    ),
    "communication, before": Row(
        "38 % of a step", "The link is shaped to come near the claim.", ("DDP", "one rank"), waiting("DDP"),
    ),
    "communication, after": Row(
        "9 % of a step", "Two cores compute, encode and send, so what is saved on the link is partly paid in CPU time.",
        ("everything", "one rank"), waiting("everything"),
    ),
    "compression": against("1.47 times", "fp16", "DDP", LIMIT),
    "overlap": against(
        "1.65 times", "overlap", "DDP", "DDP hides communication behind the backward pass already."
    ),
    "overlap, against none": against(
        "1.65 times", "overlap", "one bucket",
        "The baseline of this row reduces all gradients after the backward pass, as a plain loop does.",
    ),
    "everything": against("1.94 times", "everything", "DDP", LIMIT),
    "everything, against no overlap": against(
        "1.94 times", "everything", "one bucket", "The baseline is the slower one, as in the row of overlap.",
    ),
    "accumulation": against(
        "faster, by one reduction a step", "accumulate", "each reduced",
        "The gain is that of three reductions of four, so it grows as the link gets slower.",
    ),
    **{
        f"buckets of {mib} MiB": against(
            "1.8 to 1.5 s, 1 to 125 MiB: 1.20 times, reported as 37 %", f"bucket {mib}", "bucket 1", SHARDED
        )
        for mib in (5, 25, 125)
    },
    **{
        f"top-k, {share} % sparse": Row(
            "faster by sending less", "Each value comes with an index, and ranks gather where they would reduce.",
            (f"topk {share}", "DDP"), fewer_bytes(f"topk {share}", "DDP"),
        )
        for share in (90, 95, 99)
    },
    "dynamic batches": against(
        "1.24 times", "hetero_batch", "unequal",
        "A rank of half the speed allows 1.5 times; 1.24 is the most at 0.68 of the speed.",
    ),
    **{
        f"activation checkpointing, {name}": Row(
            "40 % less memory", "The share follows from how many blocks are recomputed, not from the method.",
            (name, "activations"), less_memory(name, "activations"),
        )
        for name in ("every=2", "full")
    },
    **{f"nccl={name}": preset(name) for name in ("ethernet", "infiniband", "sharp")},
}  # fmt: skip
