"""Creates the folder of a run, and starts the log in it."""

import contextlib
import io
import itertools
import json
import logging
import os
import platform
import re
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainer.checkpoint import locate
from trainer.checkpoint.locate import CHECKPOINTED
from trainer.checkpoint.lock import is_lock
from trainer.checkpoint.manifest import Damaged
from trainer.errors import NOT_FINITE, ConfigError, printable, refuse_remote
from trainer.files import Appended, make_folder, refuse_folder, remove_unused, special
from trainer.log import Lines, Terminal, log, set_handlers
from trainer.other_words import RENAMED, now_compared

if TYPE_CHECKING:
    from trainer.plan import Plan


MOST_CONFIG = 4 << 20  # the largest config.yaml that is read, in bytes
OF_RUNS = ("recipe", "callbacks", "optimizer", "schedule", "trainer", "data")  # keys that every config.yaml has
WRITTEN = ("logs", "tensorboard", "export", "profile")  # subfolders of a run's folder


def make_run_dir(plan: "Plan", name: str) -> Path:
    """Create the run's folder: the given one, or the resumed run's, or a new `runs/<name>-<time>`.

    Raises:
        ConfigError: The folder, or that of its checkpoints, can't be written, or holds another run or other files. No
            new folder is left behind.
    """
    try:
        return _choose_run_dir(plan, name)
    except ConfigError:
        remove_unused()
        raise


def _choose_run_dir(plan: "Plan", name: str) -> Path:
    options, resumed = plan.options, plan.resumed
    root = Path(options.checkpoint.dir)
    make_writable("trainer.checkpoint.dir", root)
    given = options.run_dir or _run_of(resumed, plan.manifest, root)
    if given is None:
        name = re.sub("[^A-Za-z0-9._-]+", "-", name).lstrip(".-")
        return make_new(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", root)
    folder = Path(given)
    refuse_no_folder(folder)
    refuse_astray(folder)
    saved = root / folder.name
    restarted = int(os.environ.get("ECHELON_ATTEMPT", "0")) > 0
    goes_on = resumed is not None and (
        not options.run_dir or resumed.parent.name == folder.name or _same(resumed.parent, saved)
    )
    again = options.resume == "auto" or restarted or goes_on
    ended, saves = has_ended(folder), (folder / CHECKPOINTED).exists()
    if (ended or saves or (folder / "metrics.jsonl").exists()) and not again:
        raise ConfigError(
            f"trainer.run_dir={given}: holds a run already; resume it with trainer.resume=auto, or give another folder"
        )
    if locate.checkpoints(saved) and (resumed is None or not _same(resumed.parent, saved)):
        raise ConfigError(
            f"trainer.run_dir={given}: {saved} holds checkpoints of a run of this name; resume with "
            "trainer.resume=auto, or give another trainer.run_dir or trainer.checkpoint.dir"
        )
    if again and not goes_on and (ended or saves):  # else it would start at step 0 and cut off the old files
        raise ConfigError(
            f"trainer.run_dir={given}: holds a run that has {'ended' if ended else 'written checkpoints'}, and {saved} "
            "has no checkpoint of it; give the trainer.checkpoint.dir of that run, or another trainer.run_dir"
        )
    make_writable("trainer.checkpoint.dir", saved)
    make_writable("trainer.run_dir", folder)
    return folder


def nothing_left(plan: "Plan", folder: Path) -> str:
    """Return the stop reason if the run in this folder is complete, so that a resume has nothing left to do, else "".

    A run is complete if its last checkpoint, summary and export exist, and a resume would end before another step.
    """
    resumed, manifest, root = plan.resumed, plan.manifest, Path(plan.options.checkpoint.dir)
    if resumed is None or not _same(resumed.parent, root / folder.name):
        return ""
    step = manifest["step"]
    try:
        summary = json.loads((folder / "summary.json").read_text())
        whole = summary["steps"] >= step and summary.get("export", "") is not None
        stopped = summary["stopped"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, or not a run's
        return ""
    if not whole or not isinstance(stopped, str) or stopped in ("error", "signal", NOT_FINITE):
        return ""
    made = manifest.get("decisions", {})
    ending = [name for name, callback in plan.callbacks.items() if callback.has_ended(made.get(name))]
    epochs, steps = plan.options.max_epochs, plan.options.max_steps
    if plan.max_steps is not None and step >= plan.max_steps:
        by_epochs = epochs is not None and (steps is None or plan.max_steps < steps)
        way = f"a trainer.max_epochs above {epochs:g}" if by_epochs else f"a trainer.max_steps above {step}"
    elif ending:
        way = f"another setting of callbacks.{ending[0]}"
    else:
        return ""
    reason = "" if stopped == "max_steps" else f" ({printable(stopped)[:300]})"
    text = "nothing to do: %s has finished at step %d%s, and stays as it is; %s would resume it"
    log.info(text, folder, summary["steps"], reason, way)
    return stopped


def has_ended(folder: Path) -> bool:
    """Return whether the run has a final summary. A summary of a crash does not count."""
    try:
        return json.loads((folder / "summary.json").read_text()).get("stopped") not in ("error", NOT_FINITE)
    except FileNotFoundError:
        return False
    except (ValueError, AttributeError):
        return True


def _run_of(resumed: Path | None, manifest: Mapping[str, Any], root: Path) -> str | None:
    """Return the folder of the run that wrote the checkpoint, if the checkpoint is among that run's checkpoints.

    The manifest is not trusted.

    Raises:
        ConfigError: The folder lies outside of the current one, and holds no run.
    """
    if resumed is None:
        return None
    given = manifest["run_dir"]
    folder = Path(given)
    try:
        own = _same(resumed.parent, root / folder.name)
        own = own or (is_run(folder) and _same(locate.noted_in(folder) or folder, resumed.parent))
    except (OSError, ValueError):  # a name that no file can have
        own = False
    if own:
        if (folder.is_absolute() or ".." in folder.parts) and not is_run(folder):
            raise ConfigError(
                f"trainer.run_dir={folder}: the checkpoint names this folder, which holds no run; give another "
                "trainer.run_dir"
            )
        return given
    log.info("resume: the checkpoint's run is not in %s; the run continues in a new folder", printable(given)[:200])
    return None


def is_run(folder: Path) -> bool:
    """Return whether the folder holds a run."""
    started = is_lock(folder / ".lock") or (folder / "logs" / "events.jsonl").is_file()
    return started or any((folder / "logs").glob("rank*.log"))


def find_checkpoint(given: str, key: str) -> Path:
    """Return the given checkpoint, or the newest one of the given run.

    Raises:
        ConfigError: There is none.
    """
    refuse_remote(key.partition("=")[0], given)
    path = Path(given)
    try:
        saved = locate.noted_in(path) or path
        newest = locate.newest(saved, reads=True) if locate.checkpoints(saved, reads=True) else None
    except Damaged as error:
        raise ConfigError(f"{key}: {error}; give another checkpoint") from None
    if newest is None and saved is not path:
        raise ConfigError(f"{key}: the run's checkpoints were in {saved}, where there are none; give a checkpoint")
    return Path(os.path.realpath(newest or path))


def refuse_unreadable(folder: Path) -> None:
    """Refuse a folder given as RUN if something in it can't be read. A missing folder is left to the caller.

    Raises:
        ConfigError: Permission is denied, or a pipe, a socket or a device stands in for one of the run's files.
    """
    key = f"RUN={printable(str(folder))}"
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (folder / "config.yaml").stat()
    except OSError as error:
        raise ConfigError(f"{key}: can't be read: {error.strerror}; give a folder that you may read") from None
    if found := special(folder) or special(folder / "logs"):
        name = printable(found.name)
        raise ConfigError(f"{key}: {name} is a pipe, a socket or a device, and no run writes one; remove it")


def stored_config(file: Path) -> io.StringIO:
    """Return the text of a run's config.yaml.

    Raises:
        OSError: It can't be read.
        ConfigError: It is larger than any run's, or has aliases, with which ten lines can expand to a billion keys.
        ValueError: It is not text.
    """
    with file.open("rb") as content:
        text = content.read(MOST_CONFIG + 1).decode()
    if len(text) > MOST_CONFIG:
        raise ConfigError(f"is larger than {MOST_CONFIG >> 20} MiB")
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
        raise ConfigError("has aliases (*NAME), which no run writes")
    return io.StringIO(rename_keys(text))


def rename_keys(text: str) -> str:
    """Return the text of a config with today's names for what an earlier version wrote. Nothing else of it changes."""
    root, found = yaml.compose(text, yaml.SafeLoader), list[tuple[yaml.Node, str]]()
    for old, new in RENAMED.items():
        *path, name = old.split(".")
        node = root
        for part in path:
            node = entries(node).get(part, (None, None))[1]
        if name in (own := entries(node)):
            found.append((own[name][0], new.rpartition(".")[2]))
    _, accept = entries(entries(root).get("trainer", (None, None))[1]).get("accept", (None, None))
    if isinstance(accept, yaml.SequenceNode):
        found += [(item, now_compared(item.value)) for item in accept.value if isinstance(item, yaml.ScalarNode)]
    for node, new in sorted(found, key=lambda each: -each[0].start_mark.index):
        text = text[: node.start_mark.index] + new + text[node.end_mark.index :]
    return text


def entries(node: yaml.Node | None) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """Return the keys and values of a mapping, by key; empty for any other node."""
    return {key.value: (key, value) for key, value in node.value} if isinstance(node, yaml.MappingNode) else {}


def refuse_cut(stored: Any) -> None:
    """Refuse a config that a power loss or a full disk has truncated.

    Raises:
        ConfigError: It lacks a key that every run's config has.
    """
    if missing := [name for name in OF_RUNS if name not in (stored or ())]:
        raise ConfigError(f"has no {', '.join(missing)}")


def refuse_no_folder(folder: Path) -> None:
    """Refuse a run's folder that is a file or can't be created, because of a file in its path or too long a name."""
    key = f"trainer.run_dir={folder}"
    try:
        is_file = not stat.S_ISDIR(folder.stat().st_mode)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{key}: can't be a folder: {reason}; give another one") from None
    if is_file:
        raise ConfigError(f"{key}: is a file; give a folder, or leave this out")


def refuse_astray(folder: Path) -> None:
    """Refuse a folder that is neither new nor a run's, or has links through which the run would write elsewhere."""
    key = f"trainer.run_dir={folder}"
    if not str(folder).isprintable():
        raise ConfigError(f"{printable(key)}: has an unprintable character, such as a newline; leave it out")
    if folder.name in ("", ".."):
        raise ConfigError(f"{key}: has no name, and the folder of checkpoints needs one; give runs/NAME")
    if folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir()) and not is_run(folder):
        raise ConfigError(f"{key}: holds files that are not a run's; give another trainer.run_dir")
    for path in (*folder.glob("*"), *(path for name in WRITTEN for path in (folder / name).rglob("*"))):
        if path.is_symlink():
            raise ConfigError(f"{key}: {path} is a link, and the run would write to its target; give another folder")


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def make_new(stem: Path, root: Path) -> Path:
    """Create a folder of this name, with a number appended if the name is taken."""
    make_writable("trainer.run_dir", stem.parent)
    for n in itertools.count(1):
        folder = stem.with_name(f"{stem.name}-{n}") if n > 1 else stem
        with contextlib.suppress(FileExistsError):
            make_folder(folder, exist_ok=False)
            if not locate.checkpoints(root / folder.name):
                return folder
            folder.rmdir()
    raise AssertionError("unreachable")


def make_writable(key: str, folder: Path) -> None:
    """Create the folder that `key` names.

    Raises:
        ConfigError: The folder can't be written.
    """
    refuse_remote(key, folder)
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{key}={folder}: can't be written: {error.strerror}; give another folder") from None


def make_parent(key: str, file: Path) -> None:
    """Create the folder of the file that `key` names.

    Raises:
        ConfigError: The file is a folder, or its folder can't be written.
    """
    refuse_folder(key, file)
    make_writable(key, file.parent)


def start_log(run_dir: Path, rank: int) -> None:
    """Log to logs/rank<rank>.log. Rank 0 also logs to the terminal; other ranks redirect all output to the file."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    path = run_dir / "logs" / f"rank{rank}.log"
    if rank:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        handlers: list[logging.Handler] = [logging.StreamHandler()]
    else:
        handlers = [LogFile(path), Terminal()]
    for handler in handlers:
        if not isinstance(handler, Terminal):
            handler.setFormatter(Lines("%(asctime)s %(levelname)s %(message)s"))
    set_handlers(*handlers)


def empty_log() -> None:
    """Empty the log file that this process began, so that a refused run leaves no folder behind."""
    for handler in log.handlers:
        if isinstance(handler, LogFile) and handler.is_new:
            with contextlib.suppress(OSError):
                os.truncate(handler.file.path, 0)


class LogFile(logging.Handler):
    """A log handler that tolerates a full disk."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file, self.is_new = Appended(path), not path.exists()

    def emit(self, record: logging.LogRecord) -> None:
        self.file.write(f"{self.format(record)}\n".encode())

    def close(self) -> None:
        self.file.close()
        super().close()


def versions() -> dict[str, str]:
    """List the versions on which numbers may depend."""
    import numpy
    import torch

    from trainer import __version__

    return {
        "echelon": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
