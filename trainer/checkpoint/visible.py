"""A checkpoint that rank 0 has chosen, as this process sees it: a network file system may show it later."""

import time
from pathlib import Path
from typing import Any

from trainer.checkpoint.manifest import Damaged, verify

VISIBLE_S = 70.0  # NFS remembers for up to 60 s what a folder holds, and what it doesn't
EVERY_S = 0.5


def see(checkpoint: Path, sha256: str, hashes: bool) -> tuple[dict[str, Any], str]:
    """Its manifest; or why it can't be seen, which is told after `VISIBLE_S` only. `sha256` is the manifest's own;
    with `hashes` those of all files are compared, as rank 0 has done, for another node may read other bits."""
    deadline = time.monotonic() + VISIBLE_S
    while True:
        try:
            manifest = verify(checkpoint, hashes)
            if manifest["sha256"] == sha256:
                return manifest, ""
            why = f"{checkpoint}: another one of this name"
        except (Damaged, OSError) as error:
            why = str(error)
        if time.monotonic() > deadline:
            return {}, why
        time.sleep(EVERY_S)
