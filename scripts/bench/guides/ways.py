"""The ways to train that the rows compare: overrides of Echelon, and bare loops that Echelon has no override for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.comm.rows import Row
from trainer.config.compose import compose
from trainer.config.folders import CONF

FOLDER = Path(__file__).parent / "conf"  # of the recipe
UNLIMITED = "unlimited"


@dataclass(frozen=True)
class Way(Row):
    """A way to train.

    Attributes:
        run: echelon, alone, each_reduced or memory.
        words: Overrides of Echelon.
        timed: Steps.
        lead: Steps before these.
        cores: What a rank computes with, as parts of a core; empty: all that it gets.
        limited: Whether the link has the bench's rate.
    """

    words: tuple[str, ...] = ()
    timed: int = 6
    lead: int = 5
    cores: tuple[float, ...] = ()
    limited: bool = True

    @property
    def learns(self) -> bool:
        return any("overlap" in word for word in self.words)

    @property
    def warm(self) -> int:
        return self.lead


def echelon(*words: str, **more: Any) -> Way:
    return Way("echelon", words=words, **more)


def memory(*words: str) -> Way:
    return Way("memory", words=words)


def topk(density: float) -> Way:
    codec = "callbacks.grad_compress.codec=topk"
    return echelon("+callbacks=[grad_compress]", codec, f"callbacks.grad_compress.density={density}")


def unequal(*words: str) -> Way:
    """Two ranks, of which one has half the speed; shares have followed the speeds after seven steps."""
    return echelon("batch=32", "micro_batch=2", *words, timed=4, lead=8, cores=(0.5, 1.0), limited=False)


HALF = "callbacks.grad_compress.codec=fp16"
POLICY = "callbacks.activation_checkpoint"
WAYS: dict[str, Way] = {
    "one rank": Way("alone"),
    "DDP": echelon(),
    "one bucket": echelon("trainer.ddp.bucket_mib=10000"),
    "fp16": echelon("+callbacks=[grad_compress]", HALF),
    "overlap": echelon("+callbacks=[overlap]"),
    "everything": echelon("+callbacks=[overlap,grad_compress]", HALF),
    "each reduced": Way("each_reduced", timed=3),
    "accumulate": echelon("batch=40", "micro_batch=5", "accumulate=4", timed=3),
    **{f"bucket {mib}": echelon(f"trainer.ddp.bucket_mib={mib}") for mib in (1, 5, 25, 125)},
    **{f"topk {share}": topk(round(1 - share / 100, 2)) for share in (90, 95, 99)},
    "unequal": unequal(),
    "hetero_batch": unequal("+callbacks=[hetero_batch]", "callbacks.hetero_batch.every=2"),
    "activations": memory(),
    "every=2": memory("+callbacks=[activation_checkpoint]", f"{POLICY}.every=2"),
    "full": memory("+callbacks=[activation_checkpoint]", f"{POLICY}.policy=full"),
}


def config_of(words: tuple[str, ...]) -> dict[str, Any]:
    """Compose the config of a way, without observers, which would print and write."""
    (job,) = compose([f"--config-dir={FOLDER}", "recipe=tokens", *words], [CONF, FOLDER])
    kept = {
        k: v
        for k, v in job.config["callbacks"].items()
        if not v["_target_"].startswith(("trainer.monitors.", "trainer.loggers."))
    }
    return {**job.config, "callbacks": kept}
