"""Handwritten digits, 1797 real images of 8 x 8 pixels, as shards of PNG: what scikit-learn ships with itself.

They are the test set of UCI's "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998), in 17 grey
values. Every fifth is for validation. The same people wrote both parts.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recipes.cache import build_once, root
from trainer.data.shards.writer import write_shards
from trainer.errors import ConfigError

EVERY = 5  # of so many digits, the last is for validation
LARGEST = 16  # grey value
PER_SHARD = 500


def shards(split: str) -> list[Path]:
    """Return the shards of `split`, and write them into the user's cache folder if they are missing.

    Raises:
        ConfigError: scikit-learn is missing, or the folder can't be written.
    """
    folder = root() / "digits"
    build_once(folder, "digits", Path.is_dir, _write, f"XDG_CACHE_HOME={folder.parent.parent}")
    return sorted(folder.glob(f"{split}-*.tar"))


def _write(folder: Path) -> None:
    for split in ("train", "val"):
        write_shards(samples(split), folder, split, PER_SHARD)


def samples(split: str) -> Iterator[dict[str, Any]]:
    """Yield the digits of `split`, each as a grey PNG and its class."""
    from PIL import Image

    try:
        from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports] not in every environment
    except ImportError:
        raise ConfigError(
            "recipe.train=null: the digits come with scikit-learn; pip install 'scikit-learn>=1.7,<2', or give "
            "shards or a folder of images"
        ) from None
    found: Any = load_digits()
    for i, (pixels, label) in enumerate(zip(found.images, found.target, strict=True)):
        if (i % EVERY == EVERY - 1) == (split == "val"):
            png = io.BytesIO()
            Image.fromarray(np.round(pixels * (255 / LARGEST)).astype(np.uint8)).save(png, "PNG")
            yield {"__key__": f"{i:04d}", "png": png.getvalue(), "cls": int(label)}
