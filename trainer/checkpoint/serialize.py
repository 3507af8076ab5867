"""Stores nested dicts of tensors and plain values as safetensors and strict JSON: bit-exact, and without pickle."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.checkpoint.manifest import Damaged, opened
from trainer.checkpoint.safetensors_buffer import DTYPES
from trainer.errors import ConfigError
from trainer.optim.probe import kept_of, put_kept

STATE = "state.json"
STATE_BYTES = 256 << 20  # a larger file is refused
SECTION = re.compile(r"[A-Za-z0-9_-]{1,99}")  # a section's name, which becomes a file name


@dataclass(frozen=True)
class Part:
    """The slice of a tensor that one rank has.

    `tensor` has the whole tensor's sizes except along `dimension`, where it begins at `start`; or it has no dimensions.
    """

    tensor: Any
    shape: tuple[int, ...]
    start: int = 0
    dimension: int = 0

    @property
    def stop(self) -> int:
        return self.start + (self.tensor.shape[self.dimension] if self.shape else 1)


def load_state(
    folder: Path, names: Collection[str], wanted: Callable[[str], bool] = lambda section: True
) -> dict[str, Any]:
    return dict(load_sections(folder, names, wanted))


def load_sections(
    folder: Path, names: Collection[str], wanted: Callable[[str], bool]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the `wanted` sections, each read when it is requested, from the files in `names`, the manifest's.

    Tensors that were stored once come back as one CPU tensor, and any kind of dict as a dict.

    Raises:
        Damaged: A file has content that no `Snapshot` writes.
    """
    path = folder / STATE
    try:
        for section, value in read_json(folder, STATE, names).items():
            if wanted(section):
                yield section, decode(value, _read_tensors(folder, names, section))
        for name in sorted(names):
            section = name.removesuffix(".json")
            if name not in (STATE, section) and wanted(section):
                path = folder / name
                value = read_json(folder, name, names)[section]
                yield section, decode(value, _read_tensors(folder, names, section))
    except Damaged:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise Damaged(f"{path}: can't be read as a state ({type(error).__name__}: {error})") from error


def rank_section(rank: int) -> str:
    return f"rank-{rank:05d}"


def is_rank_section(name: str) -> bool:
    return name.startswith("rank-")


ELEMENTWISE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")  # state with the parameter's shape


def optimizer_state(optimizer: Optimizer, module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the live state of each parameter that `optimizer` trains, by its name in `module`, without settings.

    Numbers of its group or of the optimizer that change with steps are included.
    """
    trained = _trained(optimizer, module)
    return {name: {**optimizer.state.get(p, {}), **kept_of(optimizer, own)} for name, (p, own) in trained.items()}


def load_optimizer_state(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore a copy of `optimizer_state` in its own dtypes, whereas torch would cast to the parameter's.

    Raises:
        ConfigError: The names or shapes differ from those of the parameters that `optimizer` trains.
    """
    trained = _trained(optimizer, module)
    both = {"missing": trained.keys() - state.keys(), "unknown": state.keys() - trained.keys()}
    if wrong := [f"{len(names)} {kind} ({', '.join(sorted(names)[:3])})" for kind, names in both.items() if names]:
        raise ConfigError(
            f"trainer.resume: parameters of the checkpoint's optimizer state: {' and '.join(wrong)}; resume with the"
            " model and optimizer that were saved, or take the weights alone: trainer.init_from"
        )
    for name, (parameter, group) in trained.items():
        on_device = bool(group.get("fused") or group.get("capturable") or "t0" in group)  # t0: ASGD, maybe in a proxy
        own = dict(state[name])
        put_kept(optimizer, group, own)
        for key, value in own.items():
            if key in ELEMENTWISE and isinstance(value, Tensor) and value.shape != parameter.shape:
                raise ConfigError(
                    f"trainer.resume: the optimizer state {key} of {name} has shape {tuple(value.shape)}, and the "
                    f"parameter {tuple(parameter.shape)}; give another one, or trainer.init_from for the weights alone"
                )
        optimizer.state[parameter] = _place(own, "", parameter, on_device)


class Pack:
    """The tensors of one section by name, in the order of `encode`'s calls."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.names: dict[tuple[Any, ...], str] = {}  # by their memory

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        """Encode `value` as JSON. An object whose one key begins with $ represents a value that JSON lacks."""
        if isinstance(value, Tensor):
            return {"$tensor": self.add(value, path)}
        if isinstance(value, Part):
            name, shape = self.add(value.tensor, path), list(value.shape)
            return {"$part": [name, shape, value.dimension, value.start, value.stop]}
        if isinstance(value, dict):
            if not all(type(key) in (str, int) for key in value):
                raise TypeError(f"state {'/'.join(path)}: keys {list(value)} can't be saved; make each a str or an int")
            items = [(key, self.encode(item, (*path, str(key)))) for key, item in value.items()]
            plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
            return dict(items) if plain else {"$dict": items}
        if type(value) in (list, tuple):
            listed = [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
            return listed if type(value) is list else {"$tuple": listed}
        if type(value) is float and not math.isfinite(value):
            return {"$float": str(value)}
        if value is None or type(value) in (str, bool, int, float):
            return value
        raise TypeError(
            f"state {'/'.join(path)}: a {type(value).__qualname__} can't be saved; make it a tensor or a plain value"
        )

    def add(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        data = tensor.detach()
        lazy = data.layout != torch.strided or data.is_meta or data.is_conj() or data.is_neg()
        if lazy or type(data) is not Tensor or data.dtype not in DTYPES:
            raise TypeError(
                f"state {'/'.join(path)}: a {data.dtype} {type(data).__name__} in {data.layout} layout can't be saved"
            )
        key = (data.device, data.data_ptr() or id(tensor), data.dtype, data.shape, data.stride())
        if key not in self.names:
            name = "/".join(path[1:]) or path[0]
            while name in self.tensors or name == "__metadata__":  # a key with "/" in it, or safetensors' own
                name += "_"
            self.tensors[name] = data
            self.names[key] = name
        return self.names[key]


def read_json(folder: Path, name: str, names: Collection[str]) -> Any:
    if name not in names:
        raise ValueError("its manifest does not name it")
    with opened(folder, name) as file:
        return strict_json(file, STATE_BYTES)


def _read_tensors(folder: Path, names: Collection[str], section: str) -> dict[str, Tensor]:
    if not SECTION.fullmatch(section):
        raise ValueError(f"section {section!r}")
    if (name := f"{section}.safetensors") not in names:
        return {}
    with opened(folder, name) as file:
        # Copied because safetensors maps the file, which may be truncated.
        return {name: tensor.clone() for name, tensor in load_file(file).items()}


def decode(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Invert `Pack.encode`, with `tensors[name]` for each tensor."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [("$tensor", name)]:
            return tensors[name]
        case [("$part", [name, list(shape), start])]:  # rows, as up to format 3
            return _part(tensors[name], shape, 0, start, start + math.prod(tensors[name].shape[:1]))
        case [("$part", [name, list(shape), dimension, start, stop])]:
            return _part(tensors[name], shape, dimension, start, stop)
        case [("$float", "inf" | "-inf" | "nan" as text)]:
            return float(text)
        case [("$tuple", list(items))]:
            return tuple(decode(item, tensors) for item in items)
        case [("$dict", list(items))]:
            return {key: decode(item, tensors) for key, item in items}
    if any(key.startswith("$") for key in value):
        raise ValueError(f"unknown kind {list(value)}")
    return {key: decode(item, tensors) for key, item in value.items()}


def _part(tensor: Any, shape: list[Any], dimension: Any, start: Any, stop: Any) -> Part:
    part = Part(tensor, tuple(shape), start, dimension)
    numbers = all(type(number) is int for number in (*shape, dimension, start, stop))
    if not numbers or not 0 <= dimension < len(shape) == len(tensor.shape) or part.stop != stop:
        raise ValueError(f"a part of {shape} from {start} to {stop} along dimension {dimension}")
    return part


def strict_json(path: Path, most: int) -> Any:
    """Parse JSON; raise ValueError for more than `most` bytes, for NaN, and for a duplicate key."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"larger than {most} bytes")
    return json.loads(content, parse_constant=_refuse, object_pairs_hook=_unique)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _trained(optimizer: Optimizer, module: nn.Module) -> dict[str, tuple[nn.Parameter, dict[str, Any]]]:
    """Return each parameter of the optimizer, with its group, by name. User code may have replaced parameters."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    named = {name: (p, groups[p]) for name, p in module.named_parameters() if p in groups}
    fix = "keep the parameters of the start, and set their values, as by p.data.copy_(other)"
    if others := len(groups) - len(named):
        raise ConfigError(
            f"optimizer: trains {others} parameters that the model has no more, as of a replaced layer; {fix}"
        )
    if not optimizer.state.keys() <= groups.keys():
        raise ConfigError(f"optimizer: keeps state of parameters that it trains no more; {fix}")
    return named


def _place(value: Any, key: str, parameter: nn.Parameter, on_device: bool) -> Any:
    """Copy `value` to the device on which the optimizer expects it, in the parameter's memory format.

    With `on_device`, scalars are on the device too, as in ASGD or in a fused or capturable optimizer. Others keep
    "step" on the host, and so does NAdam its mu_product.
    """
    if isinstance(value, dict):
        return {k: _place(v, k, parameter, on_device) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_place(v, key, parameter, on_device) for v in value)
    if not isinstance(value, Tensor):
        return value
    if key == "step" or (parameter.dim() and not value.dim()):
        if not on_device:
            return value.to("cpu", copy=True)
        return value.to(parameter.device, torch.float32 if key == "step" else value.dtype, copy=True)
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(parameter.device, copy=True)
