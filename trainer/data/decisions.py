"""Decisions about the split of later steps: made during a run, written to a file, and repeated on a resume."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.annotated import fits
from trainer.errors import ConfigError
from trainer.files import Appended, write_whole


class Decision(NamedTuple):
    samples: int  # the run's position when the decision was made
    position: int  # the position from which it applies, beyond everything that was loaded when it was made
    value: dict[str, Any]  # JSON values


class Decisions:
    """The decisions of a run, equal on all ranks: once made, they are a pure function of the position.

    A checkpoint has the decisions up to its step. The file also has later ones, so that a resume that follows them
    repeats the run bit for bit.

    Args:
        path: The file to which rank 0 writes each decision as a line.
        made_with: The settings on which decisions depend. Decisions that were made with others are dropped.
    """

    def __init__(self, path: Path, rank: int, made_with: Mapping[str, Any]) -> None:
        self.file, self.rank, self.made_with = Appended(path), rank, dict(made_with)
        self.made: list[Decision] = []
        self.replaced: bytes | None = None  # the file's content without lines of other decisions

    def begin(self, manifest: Mapping[str, Any], name: str, first: Callable[[Any], Any]) -> None:
        """Load the decisions of a checkpoint, then later ones from the file. A collective.

        Args:
            manifest: The checkpoint's manifest; empty for a new run.
            name: Name of the callback that decides.
            first: Returns rank 0's value on every rank.

        Raises:
            ConfigError: The checkpoint's decisions are malformed.
        """
        saved, samples = manifest.get("decisions", {}).get(name), manifest.get("samples", 0)
        goes_on = fits(saved, dict) and saved.get("made_with") == self.made_with
        made = [*(saved["made"] if goes_on and fits(saved.get("made"), list) else [])]
        made += first([] if self.rank else self._later(samples, samples + 1 if goes_on else samples))
        for one in made:
            if not fits(one, tuple[int, int, dict]):
                raise ConfigError(f"trainer.resume: the checkpoint has no valid decisions of {name}; take another one")
        self.made = [Decision(*one) for one in made]

    def _later(self, samples: int, least: int) -> list[list[Any]]:
        """Read the decisions in the file that were made at position `least` or later."""
        lines = self.file.path.read_bytes().splitlines(keepends=True) if self.file.path.exists() else []
        later: list[list[Any]] = []
        kept: list[bytes] = []
        for line in lines:
            one = parsed(line)
            own = one is not None and one.pop("made_with") == self.made_with
            if one and (own or one["samples"] <= samples):
                kept.append(line)
            if one and own and one["samples"] >= least:
                later.append([one.pop("samples"), one.pop("position"), one])
        self.replaced = None if kept == lines else b"".join(kept)
        return later

    def follows(self, samples: int) -> bool:
        """Return whether the decision at `samples` repeats one of the interrupted run."""
        return bool(self.made) and samples <= self.made[-1].samples

    def at(self, position: int) -> dict[str, Any] | None:
        """Return the decision in force at `position`; None before the first one."""
        return next((one.value for one in reversed(self.made) if one.position <= position), None)

    def made_by(self, samples: int) -> dict[str, Any] | None:
        """Return the last decision that was made up to `samples`, whether or not it is in force yet."""
        return next((one.value for one in reversed(self.made) if one.samples <= samples), None)

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
        """Return JSON values, for a checkpoint's manifest."""
        return {"made_with": self.made_with, "made": [list(one) for one in self.made]}

    def close(self) -> None:
        self.file.close()


def parsed(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None for one that a killed process has left unfinished."""
    try:
        one = json.loads(line)
    except ValueError:
        return None
    kinds = {"samples": int, "position": int, "made_with": dict}
    valid = line.endswith(b"\n") and fits(one, dict) and all(fits(one.get(key), kind) for key, kind in kinds.items())
    return one if valid else None


def refuse_fixed_split(key: str, lockstep: bool, order: Any) -> None:
    """Refuse strategies and data whose split a callback can't change.

    Args:
        key: The callback's key.
        lockstep: Forward passes communicate.
        order: The order of the samples; None: the recipe yields batches.

    Raises:
        ConfigError: The message has the reason and the fix.
    """
    name = key.removeprefix("callbacks.")
    if lockstep:
        raise ConfigError(
            f"{key}: a forward pass communicates with this sharding, so every rank must make as many; "
            f"leave {name} or the sharding out"
        )
    if order is None:
        raise ConfigError(
            f"{key}: recipe.data('train') is an iterable, which cuts the batches itself; return a dataset or "
            f"shards, or leave {name} out"
        )
