"""Compares the cost model with the committed measurements of `scripts.bench.comm`: predicts each row of each table.

    python -m scripts.bench.cost_model [--json FILE]

A table's rows `no-communication` and `all-reduce-alone` give the compute time and the link, docs/measurements/codecs.md
the codecs, and `nothing-reduced` the trainer's own time. No other row is read before its prediction. Rows of torch's
hooks, which no config chooses, are left out. It takes about 5 seconds.
"""

import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scripts.bench.codecs import shapes as bert_shapes
from scripts.bench.comm.rank import SEQUENCE, SIZES, VOCABULARY
from scripts.bench.comm.rows import ROWS, Row
from scripts.bench.harness import Goal, Report, at_most, parser
from scripts.bench.harness import Row as Cells
from scripts.command import command
from trainer.cost.machine import CodecCost, Link, Machine
from trainer.cost.messages import elements
from trainer.cost.workload import Choice, Workload
from trainer.tools.cost_model.predict import predict

DOCS = Path(__file__).parents[2] / "docs" / "measurements"
CORES = 2  # of the machine of all tables
SPLIT = {"10M": (0.365, 0.602, 0.033), "30M": (0.329, 0.615, 0.056)}  # forward, backward, optimizer, of a step
OTHER_S = 0.0166  # median of what the rows `nothing-reduced` on 2 hosts take longer than `no-communication`
LATENCY_S = 1e-4  # of gloo between network namespaces
FITTED = "10M, 2 hosts"  # the next three were fitted on these tables alone
COPY = CodecCost(2e-10, 2e-10)  # of gradients into a bucket and back, in memory that no cache holds
CPU = 3.0  # processor seconds of a byte on the wire, times what its process is charged, because interrupts run as well
JITTER = 0.05  # of a rank's passes


class Table(NamedTuple):
    """A table of docs/measurements/comm.md: row -> column -> number."""

    model: str
    hosts: int
    rate: str
    rows: dict[str, dict[str, float]]

    def __str__(self) -> str:
        return f"{self.model}, {self.hosts} hosts, {self.rate}"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("| \n").split("|")]


def tables(text: str) -> Iterator[Table]:
    pattern = r"^\*\*(\w+), (\d) hosts, (\w+);.*\*\*\n\n((?:\|.*\n)+)"
    for model, hosts, rate, body in re.findall(pattern, text, flags=re.MULTILINE):
        head, _, *lines = body.splitlines()
        names = cells(head)[1:]
        rows = {}
        for line in lines:
            name, *values = cells(line)
            rows[name] = {key: float(value) for key, value in zip(names, values) if value}
        yield Table(model, int(hosts), rate, rows)


def codecs(text: str) -> dict[str, CodecCost]:
    """Read the codecs' costs: seconds for a byte, of two ranks' means. A copy is 6.38 ms for 97.4 MB."""
    size, copy_ms = (float(x) for x in re.findall(r"gradients, ([\d.]+) MB.*a copy: ([\d.]+) ms", text)[0])
    found = {"none": COPY}
    for line in text.splitlines():
        name, _, _, decode, mean, *_ = [*cells(line), *[""] * 5][:6]
        if name in {"bf16", "fp16", "int8", "topk", "dgc", "sign", "powersgd", "blocksparse"}:
            unit = copy_ms / 1e3 / size / 1e6
            one = 0.0 if decode == "-" else float(decode) * unit
            found[name] = CodecCost(float(mean) * unit - 2 * one, one)
    return found


def shapes(model: str) -> list[tuple[int, ...]]:
    width, layers = SIZES[model].hidden, SIZES[model].layers
    head = [(width, width), (width,), (width,), (width,), (VOCABULARY,)]
    return [*bert_shapes(width, layers, VOCABULARY, SEQUENCE), *head]


def machine(table: Table, costs: dict[str, CodecCost]) -> Machine:
    alone, size = table.rows["all-reduce-alone"], 4 * elements(shapes(table.model))
    sent = 2 * (table.hosts - 1) / table.hosts * size
    link = Link(LATENCY_S, sent * alone["steps/s"], CPU * alone["CPU s a step"] / (2 * sent))
    return Machine(table.hosts, 1, CORES / table.hosts, link, link, costs, None, 1e9, background=False)


def workload(table: Table, row: Row) -> Workload:
    step_s, samples = 1 / table.rows["no-communication"]["steps/s"], SIZES[table.model].batch
    forward, backward, optimizer = (share * step_s for share in SPLIT[table.model])
    other_s = OTHER_S if row.run == "echelon" and table.hosts <= CORES else 0.0
    own = shapes(table.model)
    return Workload(
        tuple(map(math.prod, own)), forward / samples, backward / samples, 0.0, optimizer, other_s, 0.0, 0.0,
        16.0 * elements(own), tuple(own), jitter=JITTER,
    )  # fmt: skip


def choice(row: Row) -> Choice:
    settings = {} if row.bucket_mib is None else {"trainer.ddp.bucket_mib": row.bucket_mib}
    return Choice(row.callbacks, settings)


def compare(table: Table, costs: dict[str, CodecCost]) -> list[Cells]:
    made = []
    for name, cell in table.rows.items():
        row = ROWS[name]
        if row.run not in ("ddp", "echelon") or row.hook or name == "nothing-reduced":
            continue
        samples, measured_s = SIZES[table.model].batch * table.hosts, 1 / cell["steps/s"]
        found = predict(machine(table, costs), workload(table, row), choice(row), samples)
        made.append({
            "part": str(table), "row": name, "measured, s": measured_s, "predicted, s": found.step_s,
            **{f"{part}": found.parts[part] for part in ("compute", "communication", "codec")},
            "error, %": (found.step_s / measured_s - 1) * 100,
            "MB, error, %": (found.sent_bytes / 1e6 / cell["formula"] - 1) * 100,
        })  # fmt: skip
    return made


def median_error(rows: list[Cells]) -> float:
    return statistics.median(abs(row["error, %"]) for row in rows)


def goals(compared: list[list[Cells]]) -> list[Goal]:
    """Return the median errors: of each table, of the tables that the constants were fitted on, and of all others."""
    made = [at_most(f"{rows[0]['part']}: median error, percent", 10, median_error(rows)) for rows in compared]
    rows = [row for part in compared for row in part]
    fitted = [row for row in rows if row["part"].startswith(FITTED)]
    others = [row for row in rows if not row["part"].startswith(FITTED)]
    for name, part in ((f"all {FITTED}", fitted), ("all other tables", others), ("all tables", rows)):
        made.append(at_most(f"{name}, {len(part)} rows: median error, percent", 10, median_error(part)))
    return made


def main() -> int:
    args = parser("cost_model", __doc__).parse_args()
    costs = codecs((DOCS / "codecs.md").read_text())
    with Report(args.json, None) as report:
        report.tables = [compare(table, costs) for table in tables((DOCS / "comm.md").read_text())]
        report.goals = goals(report.tables)
    return 0


if __name__ == "__main__":
    command(main)
