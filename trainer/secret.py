"""Keeps secrets out of what is printed and stored: values of keys that are named as such, and signed URLs' queries."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HIDDEN = "***"
SECRET = re.compile(
    r"(?i)(?<!mask_)(?<!cls_)(?<!sep_)(?<!pad_)(?<!bos_)(?<!eos_)(?<!unk_)(?<!per_)token$|"
    r"(^|_)(secret|password|passwd|passphrase|credentials?)(_|$)|(api|access|private|auth|secret)_?key(_id)?$"
)
URL = re.compile(r"""(\w+://[^\s?'"]*)\?([^\s'"]*)""")  # and its query
SIGNATURE = re.compile(r"(?i)(sig|token|secret|credential|password|auth|key)[^=&]*=")  # in such a query
PAIR = re.compile(r"""(\w+)(\s*[:=]\s*)("[^"]*"|'[^']*'|[^,{}[\]]+)""")  # in a value such as {a: 1, b: [c]}


def is_secret(key: str) -> bool:
    return SECRET.search(key.rpartition(".")[2]) is not None


def without_secrets(config: Any) -> Any:
    """A copy of a config, with stars for each secret that is given."""
    if isinstance(config, Mapping):
        return {
            key: HIDDEN if is_secret(str(key)) and value not in (None, "") else without_secrets(value)
            for key, value in config.items()
        }
    if isinstance(config, list):
        return [without_secrets(item) for item in config]
    return without_signatures(config) if isinstance(config, str) else config


def without_signatures(text: str) -> str:
    """Without the query of each URL that is signed by it."""
    return URL.sub(lambda url: f"{url[1]}?{HIDDEN}" if SIGNATURE.search(url[2]) else url[0], text)


def secrets(config: Any, key: str = "") -> list[str]:
    """Keys for which a stored config has stars."""
    items = config.items() if isinstance(config, Mapping) else enumerate(config) if isinstance(config, list) else ()
    if isinstance(config, list) and any(map(is_hidden, config)):
        return [key]
    found = [name for part, value in items for name in secrets(value, f"{key}.{part}".lstrip("."))]
    return [key] if is_hidden(config) else found


def is_hidden(value: Any) -> bool:
    return value == HIDDEN or (isinstance(value, str) and f"?{HIDDEN}" in value)


def word_without_secrets(word: str) -> str:
    """An argument as it was typed."""
    key, equals, _ = word.partition("=")
    if equals and is_secret(key):
        return f"{key}={HIDDEN}"
    word = PAIR.sub(lambda found: f"{found[1]}{found[2]}{HIDDEN}" if is_secret(found[1]) else found[0], word)
    return without_signatures(word)


def remove_with_secrets(file: Path) -> None:
    """A record of Hydra's, where one of its lines has a secret."""
    lines = file.read_text().splitlines()
    if lines != list(map(word_without_secrets, lines)):
        file.unlink()
