"""Hides secrets in text that is printed or stored: values of keys with secret-like names, and parts of URLs.

Each pattern runs in linear time, because a message may contain megabytes of untrusted text.
"""

import base64
import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "***"  # replaces a secret
# A name denotes a secret if it has one of these words, or ends like this, with or without `_` between its words.
WORDS = {"secret", "secrets", "password", "passwords", "passphrase", "passwd", "pwd", "credential", "credentials"}
WORDS |= {"cookie", "cookies", "dsn", "sas"}
KEYS = ("apikey", "accesskey", "accountkey", "privatekey", "authkey", "secretkey")
TOKENS = ("token", "hftokens", "hubtokens", "apitokens", "authtokens", "accesstokens")  # others are counted
ENDS = (*TOKENS, *KEYS, *(f"{key}id" for key in KEYS), "auth", "authorization", "bearer", "connectionstring")
MARKS = {"mask", "cls", "sep", "pad", "bos", "eos", "unk", "per"}  # before `token`: one of text
CAMEL = re.compile("(?<=[a-z0-9])(?=[A-Z])")  # where apiKey would have a `_`
USER = re.compile(r"""(://)[^\s/?#'"]*@""")  # and password, of a URL
QUERY = re.compile(r"""\?([^\s'"]*)""")  # of a URL, or of a part of one
SIGNATURE = re.compile(r"(?i)sig|token|secret|credential|password|pwd|auth|key")  # in a name of a query
PAIR = re.compile(r"""(?<![\w-])([\w-]+)(['"]?\s*[:=]\s*)("[^"]*"|'[^']*'|[^,{}[\]]+)""")  # of {a: 1, b: [c]}


# In free text: name=value, a "name": of JSON or of a dict, a header, a token of one.
ASSIGNED = re.compile(
    r"""(?<![\w.-])([\w.-]+)(=|['"]\s*:\s*)("[^"\n]*"|'[^'\n]*'|[^\s,;&'"(){}[\]]+?(?=:?(?:[\s,;&'"(){}[\]]|$)))"""
)
HEADER = re.compile(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?)(?:(?:basic|bearer|token)\s+)?[^\s'\"]+")
BEARER = re.compile(r"(?i)\b(bearer\s+)[A-Za-z0-9._~+/=-]{16,}")
BASIC = re.compile(r"(?i)\b(basic\s+)([A-Za-z0-9+/]{4,}={0,2})")
PASSWORD = re.compile(r"""://[^\s/?#'":@]*:([^\s/?#'"]*)@""")  # of a URL
ENCODED = re.compile(r"[A-Za-z0-9+/_-]{12,}={0,2}")  # what may be base64
FOLDERS = ("PWD", "OLDPWD")  # the shell's variables, no passwords
KEYS_OF_OURS = {"echelon", "trainer", "recipe", "recipes", "callbacks", "optimizer", "schedule", "accumulate"}
SHORTEST = 6  # characters of a value to search for; a shorter one may be part of any word
SCHEMES = ("bearer", "basic", "token", "digest")  # before the secret of a header of authorization
GIVEN: set[str] = set()  # the secrets in this process's configs


def is_secret(key: str) -> bool:
    words = re.findall("[a-z0-9]+", CAMEL.sub("_", key.rpartition(".")[2]).lower())
    if words[-1:] == ["token"] and not MARKS.isdisjoint(words[-2:]):
        return False
    return not WORDS.isdisjoint(words) or "".join(words).endswith(ENDS)


def redact(config: Any) -> Any:
    """Return a copy of a config with each secret replaced by stars."""
    if isinstance(config, Mapping):
        return {
            key: HIDDEN if is_secret(str(key)) and value not in (None, "") else redact(value)
            for key, value in config.items()
        }
    if isinstance(config, list):
        return [redact(item) for item in config]
    return redact_urls(config) if isinstance(config, str) else config


def redact_urls(text: str) -> str:
    """Hide the user and password of each URL, and the query that signs it."""
    text = USER.sub(rf"\1{HIDDEN}@", text)
    return QUERY.sub(lambda query: f"?{HIDDEN}" if _is_signed(query[1]) else query[0], text)


def _is_signed(query: str) -> bool:
    names = (part.partition("=")[0] for part in query.split("&") if "=" in part)
    return any(SIGNATURE.search(name) for name in names if re.fullmatch(r"[\w.%-]*", name))


def remember(config: Any, secret: bool = False) -> None:
    """Let `redact_text` hide the config's secrets anywhere, because an error may show a value without its key."""
    for key, value in children(config):
        hidden = secret or (isinstance(key, str) and is_secret(key))
        if isinstance(value, str):
            GIVEN.update(value.split() if hidden else PASSWORD.findall(value))
        remember(value, hidden)


def redact_text(text: str) -> str:
    """Hide the secrets in a log line, a message or a traceback: those in URLs, headers and named values.

    It also hides the secrets of the run's config, and the values of environment variables with secret-like names. Paths
    and names that every message needs stay. Each line of such a value is hidden, and so are its escaped,
    percent-encoded and base64 forms.
    """
    text = HEADER.sub(rf"\1{HIDDEN}", redact_urls(text))
    text = BASIC.sub(_hide_basic, BEARER.sub(rf"\1{HIDDEN}", text))
    text = ASSIGNED.sub(_hide, text)
    own = _own(frozenset(GIVEN), frozenset(os.environ.items()))
    found = [form for form, value in own.items() if form in text and not _is_public(value)]
    for form in sorted(found, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return ENCODED.sub(partial(_hide_encoded, {*own.values()}), text) if own else text


def _is_public(value: str) -> bool:
    """Return whether a value is a path, or a word such as the project's name that also occurs in keys and paths."""
    folders = ""
    with contextlib.suppress(FileNotFoundError):  # somebody has deleted the folder
        folders = os.getcwd()
    return value in KEYS_OF_OURS or value in folders.split("/") or os.path.exists(value)


@lru_cache(1)  # for each line of a log
def _own(given: frozenset[str], environment: frozenset[tuple[str, str]]) -> dict[str, str]:
    """Map each printed form of a secret to the secret.

    In the environment, secrets are the lines of secret variables (a private key has several) and passwords in URLs.
    """
    secret = [value for name, value in environment if is_secret(name) and name not in FOLDERS]
    passwords = {word for _, value in environment if "://" in value for word in PASSWORD.findall(value)}
    known = given | passwords.union(secret, *(map(str.strip, value.splitlines()) for value in secret))
    values = (value for value in known if len(value) >= SHORTEST and value.lower() not in SCHEMES)
    return {form: value for value in values for form in _forms(value)}


def _forms(value: str) -> set[str]:
    """Return the forms in which libraries print a value: raw, repr, JSON, percent-encoded, bytes, and `printable`."""
    sent = _bytes(value)
    escaped = (repr(value), ascii(value), json.dumps(value), json.dumps(value, ensure_ascii=False), repr(sent)[1:])
    shown = "".join(c if c.isprintable() else "?" for c in value)
    return {value, shown, quote(sent), quote(sent, ""), quote_plus(sent), *(text[1:-1] for text in escaped)}


def _bytes(value: str) -> bytes:
    """Return the bytes of a value; one from the environment may not be UTF-8."""
    try:
        return value.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return value.encode(errors="replace")


def _hide_encoded(own: set[str], found: re.Match[str]) -> str:
    """Hide base64 of a text that contains a secret, such as USER:PASSWORD."""
    try:
        usual = found[0].replace("-", "+").replace("_", "/")
        sent = base64.b64decode(usual + "=" * (-len(usual) % 4))
    except ValueError:
        return found[0]
    return HIDDEN if any(_bytes(value) in sent for value in own) else found[0]


def _hide_basic(found: re.Match[str]) -> str:
    """Hide a user and password as HTTP encodes them; English words never decode to such text."""
    try:
        sent = base64.b64decode(found[2], validate=True)
    except ValueError:
        return found[0]
    return f"{found[1]}{HIDDEN}" if b":" in sent and sent.isascii() else found[0]


def _hide(found: re.Match[str]) -> str:
    is_hidden = is_secret(found[1]) and found[3] != "VALUE"  # of a hint
    return f"{found[1]}{found[2]}{HIDDEN}" if is_hidden else found[0]


def children(node: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a mapping, or of a list by index; other config nodes have none."""
    return node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()


def redacted_keys(config: Any, key: str = "") -> list[str]:
    """Return the keys whose values are stars in a stored config."""
    if isinstance(config, list) and any(map(is_hidden, config)):
        return [key]
    found = [name for part, value in children(config) for name in redacted_keys(value, f"{key}.{part}".lstrip("."))]
    return [key] if is_hidden(config) else found


def is_hidden(value: Any) -> bool:
    return value == HIDDEN or (isinstance(value, str) and (f"?{HIDDEN}" in value or f"://{HIDDEN}@" in value))


def redact_argument(word: str) -> str:
    """Hide the secrets of a command's argument."""
    key, equals, _ = word.partition("=")
    if equals and is_secret(key):
        return f"{key}={HIDDEN}"
    word = PAIR.sub(lambda found: f"{found[1]}{found[2]}{HIDDEN}" if is_secret(found[1]) else found[0], word)
    return redact_urls(word)
