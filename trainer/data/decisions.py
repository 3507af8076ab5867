"""Stores a callback's decisions about the split of later steps, so that a resume repeats them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.annotated import fits
from trainer.errors import ConfigError
from trainer.files import Appended, write_whole


class Decision(NamedTuple):
    samples: int  # the run's position when it was made
    position: int  # the position from which it applies, beyond all samples that were loaded when it was made
    value: dict[str, Any]  # JSON values


class Decisions:
    """The decisions of a run: equal on all ranks, and a pure function of the position.

    A checkpoint has the decisions up to its step. The file also has later ones, so that a resume repeats the run bit
    for bit.

    Args:
        path: The file to which rank 0 writes each decision as a line.
        made_with: The settings on which decisions depend. Decisions that were made with others are dropped.
    """

    def __init__(self, path: Path, rank: int, made_with: Mapping[str, Any]) -> None:
        self.file, self.rank, self.made_with = Appended(path), rank, dict(made_with)
        self.made: list[Decision] = []
        self.replaced: bytes | None = None  # the file's content without lines of dropped decisions

    def begin(self, manifest: Mapping[str, Any], name: str, broadcast: Callable[[Any], Any]) -> None:
        """Load the decisions of a checkpoint, then later ones from the file. A collective.

        Args:
            manifest: The checkpoint's manifest; empty for a new run.
            name: The callback that decides.
            broadcast: Returns rank 0's value on every rank.
        """
        saved, samples = manifest.get("decisions", {}).get(name), manifest.get("samples", 0)
        resumed = fits(saved, dict) and saved.get("made_with") == self.made_with
        made = [*(saved["made"] if resumed and fits(saved.get("made"), list) else [])]
        made += broadcast([] if self.rank else self._read(samples, samples + 1 if resumed else samples))
        if not all(fits(decision, tuple[int, int, dict]) for decision in made):
            raise ConfigError(f"trainer.resume: the checkpoint has no valid decisions of {name}; resume from another")
        self.made = [Decision(*decision) for decision in made]

    def _read(self, samples: int, start: int) -> list[list[Any]]:
        """Read the decisions in the file that were made at position `start` or later."""
        lines = self.file.path.read_bytes().splitlines(keepends=True) if self.file.path.exists() else []
        later: list[list[Any]] = []
        kept: list[bytes] = []
        for line in lines:
            decision = parsed(line)
            own = decision is not None and decision.pop("made_with") == self.made_with
            if decision and (own or decision["samples"] <= samples):
                kept.append(line)
            if decision and own and decision["samples"] >= start:
                later.append([decision.pop("samples"), decision.pop("position"), decision])
        self.replaced = None if kept == lines else b"".join(kept)
        return later

    def follows(self, samples: int) -> bool:
        """Return whether the decision at `samples` repeats one of the interrupted run."""
        return bool(self.made) and samples <= self.made[-1].samples

    def at(self, position: int) -> dict[str, Any] | None:
        """Return the decision in force at `position`, None before the first one."""
        return next((d.value for d in reversed(self.made) if d.position <= position), None)

    def made_by(self, samples: int) -> dict[str, Any] | None:
        """Return the last decision that was made up to `samples`, even if it is not in force yet."""
        return next((d.value for d in reversed(self.made) if d.samples <= samples), None)

    def add(self, samples: int, position: int, value: dict[str, Any]) -> None:
        """Add a decision that applies from `position` on. Decisions that no later step needs are dropped."""
        self.made.append(Decision(samples, position, value))
        while len(self.made) > 1 and self.made[1].position <= samples:
            del self.made[0]
        if self.rank == 0:
            if self.replaced is not None:
                write_whole(self.file.path, self.replaced)
                self.replaced = None
            line = {"samples": samples, "position": position, **value, "made_with": self.made_with}
            self.file.write(f"{json.dumps(line)}\n".encode())

    def state(self) -> dict[str, Any]:
        """Return JSON values for a checkpoint's manifest."""
        return {"made_with": self.made_with, "made": [list(decision) for decision in self.made]}

    def close(self) -> None:
        self.file.close()


def parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line, or return None if a killed process has left it unfinished."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    kinds = {"samples": int, "position": int, "made_with": dict}
    valid = line.endswith(b"\n") and fits(found, dict) and all(fits(found.get(key), kinds[key]) for key in kinds)
    return found if valid else None


def refuse_fixed_split(key: str, lockstep: bool, order: Any) -> None:
    """Refuse strategies and data whose split the callback `key` can't change.

    Args:
        lockstep: Forward passes communicate.
        order: The order of the samples; None: the recipe yields batches.
    """
    name = key.removeprefix("callbacks.")
    if lockstep:
        raise ConfigError(
            f"{key}: a forward pass communicates with this sharding, so every rank must run the same number; "
            f"leave {name} or the sharding out"
        )
    if order is None:
        raise ConfigError(
            f"{key}: recipe.data('train') is an iterable of batches, whose size is fixed; return a dataset or "
            f"shards, or leave {name} out"
        )
