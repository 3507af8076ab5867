"""Low-rank adaptation of a model of transformers, by peft."""

import importlib.util
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch import nn

from trainer.config.check import check_values
from trainer.config.schema import option_parameters
from trainer.errors import ConfigError, nearest
from trainer.log import log

KEY = "recipe.lora"
FIELDS = (  # of peft's LoraConfig; the others take objects, data, or what peft itself fills in
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save", "bias", "use_rslora",
    "use_dora", "init_lora_weights", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern",
    "fan_in_fan_out", "task_type",
)  # fmt: skip
KEPT = ".modules_to_save.default"  # in the names of trained copies of whole modules
STARTS = (True, False, "gaussian", "orthogonal")  # others change the base weights, which an adapter's folder lacks


def check_lora(given: Mapping[str, Any]) -> None:
    """Check the names and types of the settings.

    Raises:
        ConfigError: peft is missing, or a setting is wrong.
    """
    if not importlib.util.find_spec("peft"):
        raise ConfigError(f"{KEY}: needs the package peft; pip install 'peft>=0.18,<0.22'")
    from peft import LoraConfig

    known = option_parameters(LoraConfig)
    check_values(KEY, given, {name: known[name] for name in FIELDS})
    if (start := given.get("init_lora_weights", True)) not in STARTS:
        raise ConfigError(
            f"{KEY}.init_lora_weights={start}: changes the base weights, so the exported adapter would not fit the "
            f"model's folder; give {', '.join(map(str, STARTS)).lower()}"
        )
    for name in ("r", "lora_alpha"):
        if given.get(name, 1) < 1:
            raise ConfigError(f"{KEY}.{name}={given[name]}: must be at least 1")


def adapted(model: nn.Module, given: Mapping[str, Any], missing: Collection[str]) -> nn.Module:
    """Return the model with adapters. Only these train, with the biases and modules that the settings name.

    Hu et al. 2021, arXiv:2106.09685: W x + (lora_alpha / r) B A x, where B begins as zero and A at random.

    Args:
        missing: Names of weights that the model's folder lacks, which are random.

    Raises:
        ConfigError: A setting names no module of the model, or a random weight would neither train nor be exported.
    """
    from peft import LoraConfig, get_peft_model

    refuse_unmatched(model, given)
    with warnings.catch_warnings(record=True) as caught:
        try:
            made: Any = get_peft_model(model, LoraConfig(**deepcopy(dict(given))))  # type: ignore[arg-type] a model of transformers
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{KEY}: {' '.join(str(error).split()).partition('. ')[0]}") from None
    for warning in caught:
        if not issubclass(warning.category, FutureWarning | DeprecationWarning):  # transformers' of itself
            log.warning("%s: %s", KEY, warning.message)
    exported = {name.replace(KEPT, "") for name, _ in made.named_parameters() if KEPT in name}
    if lost := sorted({name.rpartition(".")[0] for name in missing if f"base_model.model.{name}" not in exported}):
        raise ConfigError(
            f"{KEY}: the folder of recipe.model has no weights of {', '.join(lost)}, which would stay random; give "
            f"'{KEY}.modules_to_save=[{','.join(lost)}]'"
        )
    trained, whole = (sum(p.numel() for p in made.parameters() if p.requires_grad or kind) for kind in (False, True))
    log.info("%s: %s of %s parameters are trained", KEY, f"{trained:,}", f"{whole:,}")
    return made


def refuse_unmatched(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a module's name that the model lacks: peft takes it if another name matches."""
    names = [name for name, _ in model.named_modules() if name]
    layers = {name.rpartition(".")[2] for name, module in model.named_modules() if is_matrix(module)}
    for field in ("target_modules", "modules_to_save"):
        for key, ending in patterns(field, given.get(field)):
            if not any(re.fullmatch(ending, name) for name in names):
                raise ConfigError(f"{key}: the model has no such module; {nearest(key.partition('=')[2], layers)}")


def patterns(field: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield what a setting names, as a message shows it, and as a pattern of whole names. A text is one itself."""
    key = f"{KEY}.{field}"
    if isinstance(value, str):
        yield f"{key}={value}", ".*" if value == "all-linear" else value
    for name in value if isinstance(value, list) else ():
        yield f"{key}={name}", rf"(.*\.)?{re.escape(name)}"


def is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.dim() >= 2 and not list(module.children())


def merged(model: Any) -> Any:
    """Return a copy of the model in which the adapters are added to the weights. Cost: the memory of the model.

    If a weight with an adapter is tied to another one, as a head to an embedding, both are untied: they differ then.
    """
    made = deepcopy(model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in made.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    for p, shared in names.items():
        if len(shared) > 1 and any(".base_layer." in name for name in shared):
            made.config.tie_word_embeddings = False
            for name in shared[1:]:
                module, _, last = name.rpartition(".")
                setattr(made.get_submodule(module), last, nn.Parameter(p.detach().clone(), requires_grad=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the weights that were tied
        return made.merge_and_unload()
