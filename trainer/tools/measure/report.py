"""Collects a bench's measurements: as lines on the terminal, as JSON, and as the cost model's `Machine`."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.cost.machine import CodecCost, Link, Machine, to_json
from trainer.tools.measure.collectives import FITTED, Row, with_shares

HEAD = f"{'collective':<15}{'bytes':>12}{'us':>14}{'algbw MB/s':>12}{'busbw MB/s':>12}{'CPU us':>12}"
NO_LINK = Link(0.0, math.inf, 0.0)
UNITS = {"bytes_per_s": (1e6, "MB/s"), "flop_per_s": (1e12, "TFLOP/s"), "samples_per_s": (1.0, "samples/s")}


@dataclass
class Report:
    """The numbers of a bench, and a line for each part that could not be measured."""

    shows: bool  # this rank prints
    per_node: int = 1
    rows: list[Row] = field(default_factory=list)
    fits: dict[tuple[str, str], Link] = field(default_factory=dict)  # by level and collective
    codecs: dict[str, CodecCost] = field(default_factory=dict)
    numbers: dict[str, Mapping[str, float]] = field(default_factory=dict)  # of the other parts
    missed: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        if self.shows:
            print(text, flush=True)

    def miss(self, line: str) -> None:
        self.missed.append(line)
        self.say(f"\n{line}")

    def add_row(self, row: Row) -> None:
        self.rows.append(row)
        rates = f"{row.algbw / 1e6:>12.2f}{row.busbw / 1e6:>12.2f}{row.cpu_seconds * 1e6:>12.1f}"
        self.say(f"{row.collective:<15}{row.bytes:>12}{row.seconds * 1e6:>14.1f}{rates}")

    def add_fit(self, level: str, collective: str, link: Link) -> None:
        self.fits[level, collective] = link
        self.say(f"{collective:<15}{'fit: latency':>12}{link.latency_s * 1e6:>14.1f}{link.bytes_per_s / 1e6:>24.2f}")

    def add_codecs(self, codecs: dict[str, CodecCost]) -> None:
        self.codecs = codecs
        self.say(f"\n{'codec':<15}{'ns for a byte of gradient':>26}{'and for each rank':>20}")
        for name, cost in codecs.items():
            self.say(f"{name:<15}{cost.encode_s_per_byte * 1e9:>26.3f}{cost.decode_s_per_byte * 1e9:>20.3f}")

    def add_numbers(self, part: str, numbers: Mapping[str, float]) -> None:
        """Add rates, whose names end with the unit, as in `write_bytes_per_s`."""
        self.numbers[part] = numbers
        self.say("")
        for name, value in numbers.items():
            end, (scale, unit) = next((end, shown) for end, shown in UNITS.items() if name.endswith(end))
            self.say(f"{part:<15}{name.removesuffix(end).rstrip('_'):<20}{value / scale:>18.2f} {unit}")

    def link(self, level: str, missing: Link) -> Link:
        """Return the link of a level; `missing` if it was not measured."""
        found = self.fits.get((level, FITTED))
        if found is None:
            return missing
        return with_shares(found, *(self.fits.get((level, name), found) for name in ("all_gather", "reduce_scatter")))

    def machine(self, ranks: int, cores: float, memory: float | None, backend: str) -> Machine:
        """Return the cost model's machine. A level that was not measured gets the link of all ranks, or none."""
        every = self.link("all", NO_LINK)
        inside, across = (self.link(level, every) for level in ("inside", "across"))
        disk = self.numbers.get("disk", {}).get("write_bytes_per_s", math.inf)
        background = backend != "gloo"
        return Machine(ranks, self.per_node, cores, inside, across, self.codecs, memory, disk, background)

    def as_json(self, about: Mapping[str, Any], machine: Machine | None) -> dict[str, Any]:
        """Return all numbers. Rates are in bytes/s or FLOP/s; null is an infinite rate."""
        fits = [
            {
                "level": level, "collective": name, "latency_s": link.latency_s,
                "bytes_per_s": None if math.isinf(link.bytes_per_s) else link.bytes_per_s,
                "cpu_s_per_byte": link.cpu_s_per_byte,
            }
            for (level, name), link in self.fits.items()
        ]  # fmt: skip
        return {
            **about,
            "machine": to_json(machine) if machine else None,
            "collectives": [asdict(row) for row in self.rows],
            "fits": fits,
            **self.numbers,
            "not_measured": self.missed,
        }
