"""The folders of configs: Echelon's own conf/, and a user's of --config-dir."""

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.annotated import as_yaml
from trainer.errors import ConfigError, printable, refuse_empty
from trainer.files import special

HOME = Path(__file__).parents[2]
PACKAGE = Path(__file__).parents[1]
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else HOME / "conf"  # in a wheel, in a checkout
PRIMARY = CONF / "config.yaml"
TYPED = {
    "recipe": "recipe=NAME",
    "callbacks": "+callbacks=[NAME,...]",
    "optimizer": "optimizer=NAME",
    "schedule": "schedule=NAME",
    "nccl": "nccl=NAME",
    "tuned": "+tuned=NAME, as echelon tune has written it",
}


@contextlib.contextmanager
def naming_defaults(argv: Sequence[str]) -> Iterator[None]:
    """Let an error say "(the default)" after the value of a key that the command did not set."""
    try:
        yield
    except ConfigError as error:
        error.args = (name_default(str(error), argv),)
        raise


def name_default(text: str, argv: Sequence[str]) -> str:
    import yaml

    if (start := re.match(r"([\w.]+)=([^\s:]*): ", text)) is None:
        return text
    key, value = start.groups()
    typed = {word.lstrip("+~").partition("=")[0] for word in argv}
    found: Any = yaml.safe_load(PRIMARY.read_text())
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    parents = {key.rsplit(".", n)[0] for n in range(key.count(".") + 1)}
    if typed & parents or found is None or as_yaml(found) != value:
        return text
    return f"{key}={value} (the default){text[start.end(2) :]}"


def choices(group: str, folders: list[Path]) -> dict[str, Path]:
    return {path.stem: path for folder in folders for path in sorted((folder / group).glob("*.yaml"))}


def config_dirs(arguments: list[str]) -> list[Path]:
    names = [b for a, b in itertools.pairwise(arguments) if a in ("--config-dir", "-cd")]
    names += [a.partition("=")[2] for a in arguments if a.startswith("--config-dir=")]
    for name in names:
        refuse_empty("--config-dir", name)
        if not Path(name).is_dir():
            raise ConfigError(f"--config-dir {name}: is not a folder; give the one that holds recipe/NAME.yaml")
        if found := special(Path(name), "**/*.yaml"):
            raise ConfigError(f"--config-dir {name}: {printable(str(found))} is no file; put a YAML file there")
        refuse_hidden(Path(name))
    if len(names) > 1:
        raise ConfigError(
            f"--config-dir {names[1]}: is a second --config-dir, and only one is read; put all files in one folder"
        )
    return [Path(name) for name in names]


def refuse_hidden(folder: Path) -> None:
    """Refuse a user's YAML file that has the name of one of Echelon's, which Hydra would silently read instead.

    Raises:
        ConfigError: There is one, with different content.
    """
    for own in sorted(CONF.rglob("*.yaml")):
        file = own.relative_to(CONF)
        if (folder / file).is_file() and (folder / file).read_bytes() != own.read_bytes():
            fix = "move its keys to recipe/NAME.yaml" if own == PRIMARY else "rename it"
            raise ConfigError(f"--config-dir {folder}: {file} has the name of Echelon's own, which hides it; {fix}")
