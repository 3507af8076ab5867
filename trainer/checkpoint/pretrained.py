"""Loads only weights, for `trainer.init_from`: a checkpoint, a safetensors or torch.save file, a Hugging Face folder.

No code named by a file is run, because torch's files are read by its unpickler for tensors and plain values.
"""

import mmap
import re
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer.checkpoint import adapters
from trainer.checkpoint.manifest import FILE, MANIFEST, Damaged, verify
from trainer.checkpoint.parts import open_parts, read_all
from trainer.checkpoint.serialize import strict_json
from trainer.errors import ConfigError, printable
from trainer.log import log

INDEX, BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
INDEX_BYTES = 64 << 20
HEADER_BYTES, NAME_BYTES = 4 << 20, 1 << 10  # most bytes of a safetensors header, for metadata and for each weight
ALLOCATION = re.compile(rb"c(__builtin__|builtins)\nbytearray\n")  # in a pickle: allocates any number of bytes
FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
WRAPPINGS = ("state_dict", "model_state_dict", "model")  # names that programs give the model's part of a saved object


def weights_files(source: str) -> list[Path]:
    """Find the files that `trainer.init_from` refers to; raise ConfigError if there are none."""
    key, path = f"trainer.init_from={source}", Path(source)
    if path.is_file() and path.suffix in FILES:
        return [path]
    for name in (INDEX, "model.safetensors", BIN_INDEX, "pytorch_model.bin", adapters.WEIGHTS):
        if (path / name).is_file():
            return _shards(path, name, key) if name in (INDEX, BIN_INDEX) else [path / name]
    if (path / MANIFEST).is_file():
        return [path / MANIFEST]  # a checkpoint whose ranks had parts of the weights
    raise ConfigError(
        f"{key}: no such checkpoint, .safetensors, .pt, .pth or .bin file, or Hugging Face folder; give one of these"
    )


def refuse_astray_index(folder: Path, key: str) -> None:
    """Refuse an index that is malformed or names files outside its folder, which transformers would read."""
    for name in (INDEX, BIN_INDEX):
        if (folder / name).is_file():
            _shards(folder, name, key)


def _shards(folder: Path, index: str, key: str) -> list[Path]:
    try:
        names = sorted(set(strict_json(folder / index, INDEX_BYTES)["weight_map"].values()))
        if wrong := [name for name in names if not FILE.fullmatch(name)]:
            raise ValueError(f"{wrong[0]!r} is not the name of a file in this folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{key}: {index}: not an index ({error}); download it again") from None
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ConfigError(f"{key}: {missing[0]} is missing, which {index} names; download it again")
    return [folder / name for name in names]


def load_weights(module: nn.Module, source: str) -> None:
    """Load the weights at `trainer.init_from` into the model.

    Raises:
        ConfigError: The weights can't be read, or belong to another model.
    """
    key, files, own = f"trainer.init_from={source}", weights_files(source), list(module.state_dict())
    weights: dict[str, Tensor] = {}
    try:
        configs = [Path(source) / name for name in ("config.json", adapters.CONFIG)]  # only Hugging Face's folders
        if Path(source).is_dir() and not any(config.is_file() for config in configs):
            manifest = verify(files[0].parent)
            if files[0].name == MANIFEST:
                files, sections = [], open_parts(files[0].parent, manifest["files"], manifest.get("world", 0))
                weights = read_all(sections.get("model", {}))
        for file in files:
            weights |= _read(file, own)
    except Damaged as error:
        raise ConfigError(f"{key}: {error}; give a whole checkpoint, or a file of weights alone") from None
    if files and files[0].name == adapters.WEIGHTS:
        weights = adapters.with_base(module, weights, files[0].parent, key)
    put_weights(module, weights, key)
    log.info("weights from %s", ", ".join(map(str, files or [source])))


def _read(file: Path, own: list[str]) -> dict[str, Tensor]:
    try:
        _refuse_other_kind(file)
        if file.suffix == ".safetensors":
            _refuse_names(file, HEADER_BYTES + NAME_BYTES * len(own))
            return unwrapped(load_file(file), own)
        _refuse_bomb(file)
        return unwrapped(torch.load(file, "cpu", weights_only=True), own)
    except Exception as error:  # the bytes may be anything
        text = " ".join(str(error).split())
        code = re.search(r"GLOBAL (\S+)", text)  # torch's message surrounds this name with many sentences
        why = f"asks for {code[1]}, which is not a weight" if code else text.partition(". ")[0] or type(error).__name__
        raise Damaged(f"{file}: {printable(why)}") from None


def _refuse_other_kind(file: Path) -> None:
    """Refuse a file whose first bytes don't match its suffix, because torch and safetensors would not say so."""
    with file.open("rb") as content:
        start = content.read(16)
    torchs = start.startswith((b"PK", b"\x80"))  # a zip file, or a pickle as before torch 1.6
    if torchs if file.suffix != ".safetensors" else start[8:9] == b"{":
        return
    if start and all(b >= 0x20 or b in b"\t\r\n" for b in start):
        kind = f"is text that begins with {start.decode(errors='replace').split(chr(10))[0].strip()!r}"
    else:
        kind = f"begins with the bytes {start[:4].hex()}" if start else "is empty"
    wanted = "safetensors" if file.suffix == ".safetensors" else "torch.save"
    raise ValueError(f"{kind}, and is no file of {wanted}")


def _refuse_names(file: Path, most: int) -> None:
    """Refuse a safetensors file with far more names than the model has, since a million take a minute to load."""
    with file.open("rb") as content:
        if (size := int.from_bytes(content.read(8), "little")) > most:
            raise ValueError(f"its header has {size:,} bytes, and at most {most:,} fit this model")


def _refuse_bomb(file: Path) -> None:
    """Refuse a torch.save file that would need far more memory than its size."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > file.stat().st_size:
                raise ValueError("is compressed, and torch.save compresses nothing")
            pickles = [archive.read(entry) for entry in entries if entry.filename.endswith(".pkl")]
        asks = any(map(ALLOCATION.search, pickles))
    else:  # torch's older format, pickles and then numbers
        with file.open("rb") as content, mmap.mmap(content.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            asks = ALLOCATION.search(mapped) is not None
    if asks:
        raise ValueError("asks for a bytearray, which is not a weight")


def unwrapped(found: Any, own: list[str]) -> dict[str, Tensor]:
    """Return the weights in an object that some program saved, under the model's names `own`; else raise ValueError."""
    for _ in WRAPPINGS:  # limits the levels, because an object may contain itself
        inner = [w for w in WRAPPINGS if isinstance(found, Mapping) and isinstance(found.get(w), Mapping)]
        found = found[inner[0]] if inner else found
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError("is not a dict of tensors by name")

    prefix = find_prefix(list(found), set(own))
    if left_out := [name for name in found if not name.startswith(prefix)]:
        log.info("weights: only %s* is loaded; left out: %s", printable(prefix), printable(", ".join(left_out)))
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def find_prefix(names: list[str], own: set[str]) -> str:
    """Find the prefix that a wrapper has added to the names: DDP, torch.compile, an attribute of a LightningModule.

    It is the one whose removal turns the most of `names` into the model's `own`; empty if two are equally good.
    """
    starts = (name[: len(name) - len(rest)] for name in names for rest in endings(name) if rest in own)
    first, second = (*Counter(starts).most_common(2), ("", 0), ("", 0))[:2]
    return first[0] if first[1] > second[1] else ""


def endings(name: str) -> list[str]:
    """Split `a.b.c` into `a.b.c`, `b.c`, `c`."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def put_weights(module: nn.Module, weights: Mapping[str, Tensor], key: str) -> None:
    """Copy the weights into the model.

    Raises:
        ConfigError: The weights belong to another model; this one is unchanged. The message begins with `key`.
    """
    own = module.state_dict()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    given = {id(p) for name, p in parameters.items() if name in weights}  # a tied parameter needs only one of its names
    missing = [name for name in own if name not in weights and id(parameters.get(name)) not in given]
    unknown = [name for name in weights if name not in own]
    other = [
        f"{name} {form(weights[name])} instead of {form(own[name])}"
        for name in own
        if name in weights and form(weights[name]) != form(own[name])
    ]
    if missing or unknown or other:
        examples = printable(", ".join([*missing[:3], *unknown[:3], *other[:3]]))
        raise ConfigError(
            f"{key}: {len(missing)} weights are missing, {len(unknown)} are unknown, {len(other)} have another shape "
            f"or dtype ({examples}, ...); give weights of this model"
        )
    module.load_state_dict(weights, strict=False)


def form(value: Any) -> str:
    """Describe the shape, and the dtype unless it is a float, because only floats are converted."""
    if not isinstance(value, Tensor):
        return ""  # a module's extra state, which may be anything
    kind = "" if value.is_floating_point() else f" {value.dtype}"
    place = f" {value.layout}" if value.layout != torch.strided else " on meta" if value.is_meta else ""
    return f"{tuple(value.shape)}{kind}{place}".replace("torch.", "")
