"""Signs the config of a run, so that its owner's tools can trust its permissions. Foreign configs have no signature.

The key is a file that only the user can read, like an ssh key. A signature is valid for one path, so that a run that
was moved, or that somebody has sent back, counts as foreign.
"""

import hmac
import os
import secrets
import stat
from pathlib import Path

from trainer.config.options import DataOptions
from trainer.files import write_whole
from trainer.log import log

NAME = ".signature"  # next to config.yaml
KEY_BYTES = 32
CACHE = {"cache_dir": DataOptions.cache_dir, "cache_gb": DataOptions.cache_gb}  # files are deleted there
UNTRUSTED = {"trainer": {"allow_targets": []}, "data": {"allow_pipe": False, **CACHE}}  # for a foreign config's values


class UnusableKey(OSError):
    """There is a key, but others may know it. The message names the file and the fix."""


def sign(config: Path) -> None:
    """Write the signature of a config. Without a key, the config stays unsigned, and tools ask."""
    try:
        write_whole(config.with_name(NAME), _signature(config, make=True).encode())
    except UnusableKey as error:
        log.warning("%s; resume, evaluate, predict and export of this run need trainer.allow_targets", error)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        pass


def is_own(config: Path) -> bool:
    """Return whether this user wrote the config at this path, and nobody has changed it."""
    try:
        return hmac.compare_digest(config.with_name(NAME).read_text(), _signature(config, make=False))
    except (OSError, ValueError, TypeError, RuntimeError):
        return False


def _signature(config: Path, make: bool) -> str:
    place = os.fsencode(os.path.realpath(config))
    return hmac.new(_key(make), place + b"\0" + config.read_bytes(), "sha256").hexdigest()


def _key(make: bool) -> bytes:
    """Return the user's key, which no other user can have read, guessed or written; UnusableKey if one could."""
    file = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "echelon" / "key"
    if make and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = file.with_name(f"key-{secrets.token_hex(8)}")
        draft.touch(0o600)
        draft.write_bytes(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(draft, file)
        except FileExistsError:  # another run has made it
            pass
        except OSError:  # a file system without hard links
            draft.rename(file)
        draft.unlink(missing_ok=True)
    if not stat.S_ISREG(file.lstat().st_mode):
        raise UnusableKey(f"{file}: is no regular file; remove it, and the next run makes a key")
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        about = os.fstat(descriptor)
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise UnusableKey(f"{file}: belongs to another user, or others may read it; remove it")
        if about.st_size != KEY_BYTES:
            raise UnusableKey(f"{file}: has {about.st_size} bytes instead of {KEY_BYTES}; remove it")
        return opened.read()
