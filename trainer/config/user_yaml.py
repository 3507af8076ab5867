"""Checks each YAML file that Hydra reads: its encoding, and numbers that YAML 1.1 would parse in another base."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

OTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")  # 010 is 8, and 1:30 is 90


@contextlib.contextmanager
def checked_files() -> Iterator[None]:
    """Check each file that Hydra reads inside the block."""
    from hydra._internal.config_repository import ConfigRepository
    from hydra.core.object_type import ObjectType

    load = ConfigRepository.load_config

    def checked(self: ConfigRepository, config_path: str) -> Any:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source and source.scheme() == "file":
            check_file(Path(source.path, source._normalize_file_name(config_path)))
        return load(self, config_path)

    ConfigRepository.load_config = checked
    try:
        yield
    finally:
        ConfigRepository.load_config = load


def check_file(path: Path) -> None:
    """Refuse a file that would be read differently from how it looks."""
    import yaml
    from omegaconf._utils import get_yaml_loader

    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}: line {line}: is not UTF-8; save the file as UTF-8") from None
    if text.startswith("\ufeff"):
        raise ConfigError(f"{path}: begins with a byte order mark, which hides '# @package'; save it as UTF-8 without")
    with contextlib.suppress(yaml.YAMLError):  # which Hydra raises, too
        for node in scalars(yaml.compose(text, Loader=get_yaml_loader())):
            number = node.tag.endswith((":int", ":float")) and node.style is None
            if number and OTHER_BASE.fullmatch(node.value) and node.value.strip("+-0_"):
                read = get_yaml_loader()("").construct_object(node)
                decimal = node.value.lstrip("+-0") if ":" not in node.value else "one decimal number"
                raise ConfigError(
                    f"{path}: line {node.start_mark.line + 1}: {node.value} would be read as {read}; "
                    f"write {decimal}, or quote a text"
                )


def scalars(node: Any) -> Iterator[Any]:
    if isinstance(node, tuple):
        for each in node:
            yield from scalars(each)
    elif isinstance(getattr(node, "value", None), list):
        for each in node.value:
            yield from scalars(each)
    elif node is not None:
        yield node
