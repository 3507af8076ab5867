"""A fresh copy of the checkout, with an environment as the first call of scripts/train makes it; or its wheel alone."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import yaml

from support.cli import LAUNCHERS, ROOT

COMMANDS = {"echelon": "trainer.main", "torchrun": "torch.distributed.run"}
# Of every recipe of conf/, so that a command of a page takes seconds.
TINY = {"hidden": 16, "layers": 2, "heads": 2, "sequence": 16, "vocab": 300, "val_fraction": 0.002}
STEPS = {"max_steps": 8, "validate_every": "4 steps"}


def copy(folder: Path) -> None:
    """Copy all files that a commit of the working tree would have."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def install(folder: Path) -> None:
    """Make `.venv` with the packages of this environment, and the stamp by which scripts/train knows it."""
    venv.create(folder / ".venv", symlinks=True)
    borrow(folder / ".venv", str(folder))
    for name, module in COMMANDS.items():
        file = folder / ".venv" / "bin" / name
        file.write_text(f"#!{folder}/.venv/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        file.chmod(0o755)
    stamp = 'echo "$(cat "$PWD/pyproject.toml" "$PWD/constraints.txt" | cksum) $PWD recipes,test" >.venv/echelon.stamp'
    subprocess.run(["bash", "-c", stamp], cwd=folder, check=True)


def borrow(environment: Path, *first: str) -> None:
    """Give an environment the packages of this one, all but editable installs."""
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "packages.pth").write_text("\n".join([*first, *(path for path in sys.path if "site-packages" in path)]))


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the checkout."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("echelon_trainer-*.whl"))


def shrink(folder: Path) -> None:
    """Give the recipes of a copy tiny models and few steps."""
    for file in (folder / "conf" / "recipe").glob("*.yaml"):
        config = yaml.safe_load(file.read_text())
        if "recipe" in config:  # else it is another recipe's
            own = config["recipe"]
            own |= {key: value for key, value in TINY.items() if isinstance(own.get(key), int | float)}
        config |= {"batch": 16, "micro_batch": None}
        config["trainer"] = config.get("trainer", {}) | STEPS
        if "override /schedule: recipe" not in file.read_text():  # its own has no warm-up to shorten
            config.setdefault("schedule", {})["warmup"] = "2 steps"
        file.write_text(f"# @package _global_\n# Tiny\n{yaml.safe_dump(config, sort_keys=False)}")


def environment(folder: Path, home: Path) -> dict[str, str]:
    """Return the environment of a shell in which the copy's own is active."""
    hidden = ("PYTHONPATH", "ECHELON_", "PYTEST_", *LAUNCHERS)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    path = f"{folder}/.venv/bin:{os.environ['PATH']}"
    return kept | {"PATH": path, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "OMP_NUM_THREADS": "1"}
