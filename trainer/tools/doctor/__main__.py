"""echelon doctor: examines this machine, and under a launcher all machines, before a run."""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer import timeouts
from trainer.errors import ConfigError, printable, require
from trainer.files import refuse_folder
from trainer.launch.pool import Pool, fork
from trainer.process.arguments import ArgumentParser
from trainer.process.environment import Place, detect
from trainer.process.exit import run_guarded
from trainer.tools.doctor import disk, gpus, machine, network, software
from trainer.tools.doctor.finding import ERROR, Finding
from trainer.tools.doctor.report import Merged, differences, document, lines, merge, verdict

DESCRIPTION = """Examines this machine: processor, memory, devices, links, network, disk, limits, versions.
Under torchrun, srun or mpirun, and with --devices N, it examines all ranks, connects them, and reports what differs.
Each line has a subject, its value, the consequence and the fix. Exit code 0: training can start; 1: an error would
end it."""


def examine(place: Place, folder: Path) -> Iterator[Finding]:
    """Yield the findings of this rank; the first rank of each machine examines disks and links."""
    yield from machine.examine(place.world, place.local_world)
    yield from software.examine()
    yield from network.examine(place.local_world, place.world // place.local_world)
    yield from gpus.examine(first=place.local_rank == 0)
    if place.local_rank == 0:
        yield from disk.examine(folder)


def run_rank(place: Place, folder: Path, json_file: Path | None, limit_s: float) -> int:
    """Examine as one rank; rank 0 reports for all. Return the exit code, the same on all ranks."""
    own = list(examine(place, folder))
    if place.world == 1:
        return show({0: own}, [], 1, json_file)
    try:
        from trainer.tools.doctor.ranks import meet

        meeting, rows, about = meet(place, own, limit_s, folder)
    except (ConfigError, ImportError) as error:  # ImportError: of torch, which has a finding of its own
        alone = Finding("ranks", f"rank {place.rank} reached no other rank: {error}", ERROR)
        if place.local_rank:  # the first rank of the machine shows its facts
            own = [finding for finding in own if finding.level == ERROR]
        return show({place.rank: own}, [alone], place.world, json_file if place.rank == 0 else None)
    code = meeting.agree("code", show(rows, about, place.world, json_file) if rows else None)
    meeting.leave()
    return 1 if code is None else code


def show(rows: dict[int, list[Finding]], about: list[Finding], world: int, json_file: Path | None) -> int:
    """Print the report of these ranks, with findings `about` all of them. Return the exit code."""
    every, merged = tuple(sorted(rows)), merge(rows)
    tried = {rank for each in merged if each.finding.subject.startswith("TMPDIR") for rank in each.ranks}
    firsts = tuple(sorted(tried)) or every  # on each machine one rank tries disks
    merged += [Merged(finding, every) for finding in (*differences(rows), *about)]
    for line in (*lines(merged, every, firsts), f"{world} rank(s) on {len(firsts)} machine(s): {verdict(merged)}"):
        print(printable(line), flush=True)
    made = document(merged, rows)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(made, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"--json={json_file}: {error.strerror}; name a file in a folder that exists") from None
    return 0 if made["ok"] else 1


def start_ranks(place: Place, *args: Any) -> int:
    """Fork this machine's ranks, and return the worst of their exit codes. torch is loaded once, for all."""
    with suppress(ImportError):
        import torch  # noqa: F401
    with (
        tempfile.TemporaryDirectory(prefix="echelon-doctor-") as private,
        Pool(place, Path(private), lambda own: fork(own, lambda place: run_rank(place, *args))) as pool,
    ):
        codes = pool.wait(peers_s=float("inf"))  # a rank waits for its peers no longer than its own limit
    for rank, code in codes.items():
        if code < 0:
            name = signal.Signals(-code).name
            print(f"error    rank {rank}: ended by {name}; see the kernel's log", flush=True)
    return max(1 if code < 0 else code for code in codes.values())


def run(devices: int | None, folder: Path, json_file: Path | None, timeout: float) -> int:
    """Examine as the ranks that a launcher started, or start `devices` ranks."""
    require("--devices", devices, at_least=1)
    require("--timeout", timeout, above=0)
    refuse_folder("--json", json_file)
    place, args = detect(os.environ, devices or "auto"), (folder, json_file, timeout)
    if place.starts:
        return start_ranks(place, *args)
    if place.launcher or devices in (None, 1):
        return run_rank(place, *args)
    if network.loopback(devices).level == ERROR:  # they could not connect: one process reports so
        return run_rank(Place(local_world=devices), *args)
    return start_ranks(Place(0, devices, 0, devices, starts=True), *args)


def main() -> int:
    parser = ArgumentParser(
        prog="echelon doctor", description=DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--devices", type=int, help="ranks to start on this machine, as trainer.devices does")
    parser.add_argument("--folder", type=Path, default=Path(), help="the folder of the run, whose disk is tested")
    parser.add_argument("--json", type=Path, dest="json_file", metavar="FILE", help="writes all findings as JSON, too")
    parser.add_argument(
        "--timeout", type=float, default=timeouts.MEET_S, metavar="S", help="seconds to wait for a rank (%(default)s)"
    )
    arguments = vars(parser.parse_args())
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a rank that does not come is reported in words
    return run_guarded(lambda: run(**arguments))


if __name__ == "__main__":
    sys.exit(main())
