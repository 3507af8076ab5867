"""Hands a running job over to a result of `trainer.tools.tune`, at a checkpoint of the job.

The tool writes a request into the folder of the run. Rank 0 takes it when it saves; the run then stops as for a signal,
with a checkpoint. The process that the user started becomes the same command with `+tuned=NAME`, which resumes. If that
command fails before its first checkpoint, the process becomes the old command again.
"""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import HIDDEN, STOPPED
from trainer.files import write_json
from trainer.log import log
from trainer.process.calling import SAME
from trainer.process.environment import Place

REQUEST, TAKEN, REFUSED = "tuned.json", "tuned-taken.json", "tuned-refused.json"
TRIED = "tuned-tried.json"  # in the folder of the run from the new command's start to its first checkpoint
TRYING = "ECHELON_TUNED_TRIED"  # path of that file, for the new command
SEVERAL = "ECHELON_SEVERAL_RUNS"  # set if one command runs several jobs, and can't become another command
ENDED = frozenset({0, STOPPED, 129, 130, 143})  # exit codes of a run that has done its work, or that a signal ended
FAILED = "echelon: the result of echelon tune failed before a checkpoint; the run goes on as it was"
command: list[str] = []  # that this process is about to become


def ask(run_dir: Path, name: str, folder: Path, keys: Sequence[str], ranks: int) -> None:
    """Ask a run to take a result over.

    Args:
        folder: Of configs; it has tuned/NAME.yaml.
        keys: Settings of the result, which the run's own arguments would override.
        ranks: For which the result is proven.
    """
    write_json(run_dir / REQUEST, {"name": name, "folder": str(folder.resolve()), "keys": list(keys), "ranks": ranks})


def set_aside(run_dir: Path, since: float) -> None:
    """Set aside a request to an earlier start of the run, which may have had other arguments.

    For rank 0, once `config.yaml`, with which a search compares, is that of this start.

    Args:
        since: The time at which the command of these ranks began. They keep a later request, also one that ranks of an
            earlier attempt have taken, unless there is a newer one.
    """
    request, taken = run_dir / REQUEST, run_dir / TAKEN
    for file in (taken, request):
        if file.exists() and file.stat().st_mtime < since:
            file.replace(run_dir / REFUSED)
            log.warning("%s: is older than this start of the run, and is set aside; give +tuned=NAME", file)
    if taken.exists():
        taken.replace(run_dir / REFUSED if request.exists() else request)


def take(run_dir: Path, place: Place, argv: Sequence[str] | None) -> bool:
    """Return whether the run stops for a request. For rank 0, once a request is there.

    A run goes on if the process that the user started can't become another command. Rank 0 calls this at a checkpoint,
    so a result that was taken over before has worked.
    """
    with contextlib.suppress(OSError):
        (run_dir / TRIED).unlink()
    request = run_dir / REQUEST
    if not request.exists():
        return False
    why = hindrance(request, place, argv)
    try:
        if not why:  # written while the run can still go on: the disk may be full
            write_json(request, {**json.loads(request.read_text()), "command": way_back(run_dir, argv or ())})
            request.replace(run_dir / TAKEN)
            log.info("%s: the run stops here, and goes on with a result of echelon tune", request)
            return True
    except OSError as error:
        why = f"it can't be written: {error.strerror}"
    with contextlib.suppress(OSError):  # else it is refused again at the next checkpoint
        request.replace(run_dir / REFUSED)
    log.warning("%s: is not taken over (%s); stop the run, and give +tuned=NAME", request, why)
    return False


def hindrance(request: Path, place: Place, argv: Sequence[str] | None) -> str:
    """Return why the run's command can't become one with the result; empty if it can."""
    if place.launcher not in ("", "echelon"):
        return f"{place.launcher} started this run, and would start it again as it was"
    if argv is None or SEVERAL in os.environ:
        return "the run is not the only one of its command"
    if hidden := next((word for word in argv if HIDDEN in word), ""):
        return f"{hidden} hides a value, which another command would lack"
    try:
        wanted = json.loads(request.read_text())
        file = Path(folder_of(argv) or wanted["folder"]) / "tuned" / f"{wanted['name']}.yaml"
        ranks = wanted["ranks"]
    except (OSError, ValueError, KeyError, TypeError):
        return "it is no request of echelon tune"
    if ranks != place.world:
        return f"the result is proven for {ranks} rank(s), and the run has {place.world}"
    return "" if file.is_file() else f"the run's --config-dir has no {file}"


def folder_of(argv: Sequence[str]) -> str:
    """Return the folder of configs that the run's command names; empty without one."""
    return next((folder for word, folder in itertools.pairwise(argv) if word == "--config-dir"), "")


def prepare(run_dir: Path, argv: Sequence[str]) -> None:
    """Let `go_on` replace this process, if the run has stopped for a request."""
    try:
        wanted = json.loads((run_dir / TAKEN).read_text())
        (run_dir / TAKEN).replace(run_dir / TRIED)
    except FileNotFoundError:
        return
    except OSError as error:
        print(f"echelon: {error.filename}: {error.strerror}; start the run again with +tuned=NAME", file=sys.stderr)
        return
    words = without(argv, ("tuned", *wanted["keys"]))
    if not folder_of(words):
        words += ["--config-dir", wanted["folder"]]  # at the end: the first word may be `resume`
    command[:] = [*SAME, *words, f"+tuned={wanted['name']}", *same(run_dir)]
    os.environ[TRYING] = str((run_dir / TRIED).resolve())


def way_back(run_dir: Path, argv: Sequence[str]) -> list[str]:
    """Return the arguments that go on with the run as it was."""
    return [*without(argv, ()), *same(run_dir)]


def same(run_dir: Path) -> list[str]:
    return [f"trainer.run_dir={run_dir}", "trainer.resume=auto"]


def without(argv: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the arguments of a run without these keys, and without the run's folder and checkpoint."""
    left_out = {"trainer.resume", "trainer.run_dir", *keys}
    return [word for word in argv if word.partition("=")[0].lstrip("+") not in left_out]


def go_on() -> None:
    """Replace this process by the command that `prepare` has made, if any."""
    if command:
        become(command)


def go_back(code: int) -> None:
    """Replace this process by the command before it, if this one tries a result and fails before its first checkpoint.

    Args:
        code: With which this process would end.
    """
    tried = Path(os.environ.pop(TRYING, ""))
    if code in ENDED or tried.name != TRIED:
        return
    try:
        words = json.loads(tried.read_text())["command"]
        tried.replace(tried.with_name(REFUSED))
    except (OSError, ValueError, KeyError):  # the file has gone: there was a checkpoint
        return
    print(FAILED, file=sys.stderr)
    become([*SAME, *words])


def become(words: list[str]) -> None:
    """Replace this process by a command; one that the system refuses leaves this process to its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(words[0], words)
    except OSError as error:
        print(f"echelon: {words[0]}: can't be started: {error.strerror}", file=sys.stderr)
