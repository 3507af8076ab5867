"""Makes parameter groups and the optimizer."""

import difflib
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.comm.slices import is_sharded
from trainer.config.parameter_groups import NOT_SETTINGS, check_groups
from trainer.errors import ConfigError, nearest
from trainer.log import log
from trainer.optim.made import rate_of, refuse_unusable
from trainer.optim.probe import probe

Groups = Iterable[dict[str, Any]]
Make = Callable[[Groups], Optimizer]
OURS = ("freeze", "held")  # settings that optimizers do not have; held: frozen parameters stay in the optimizer


@dataclass(frozen=True)
class WithGroups:
    """A function that makes an optimizer, with `optimizer.groups`: settings for some of the parameters."""

    make: Make
    groups: Sequence[Mapping[str, Any]]

    def __call__(self, params: Groups) -> Optimizer:
        return self.make(params)


@dataclass(frozen=True)
class Rule:
    key: str  # the group in messages, such as optimizer.groups.0
    settings: dict[str, Any]
    names: list[str]  # of its parameters; for a tied one, the first of its names


class ParameterRules:
    """The settings of parameter groups, from `optimizer.groups` and then from `recipe.parameter_groups`.

    A parameter that matches several groups belongs to the first one. Parameters of groups with `freeze` are frozen.
    """

    def __init__(self, optimizer: Make, recipe: Any, module: nn.Module) -> None:
        self.rules: list[Rule] = []
        self.of: dict[str, Rule] = {}
        own = optimizer.groups if isinstance(optimizer, WithGroups) else ()
        check_groups("optimizer.groups", own)
        for i, group in enumerate(own):
            self._add(f"optimizer.groups.{i}", group, matched(f"optimizer.groups.{i}", group["match"], module))
        groups = recipe.parameter_groups(module) if hasattr(recipe, "parameter_groups") else []
        check_groups("recipe.parameter_groups()", groups, "params")
        for i, group in enumerate(groups):
            key = f"recipe.parameter_groups().{i}"
            self._add(key, group, listed(key, group["params"], module))
        self._freeze(module)

    def _add(self, key: str, group: Mapping[str, Any], found: list[str]) -> None:
        own = [name for name in found if name not in self.of]
        if found and not own:
            raise ConfigError(f"{key}: all its parameters are in groups before it; put it before them, or leave it out")
        rule = Rule(key, {name: value for name, value in group.items() if name not in NOT_SETTINGS}, own)
        self.rules.append(rule)
        self.of |= dict.fromkeys(own, rule)

    def _freeze(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        for rule in self.rules:
            own = [parameters[name] for name in rule.names]
            if rule.settings.get("freeze"):
                for p in own:
                    p.requires_grad_(False)
            elif own and not rule.settings.get("held") and not any(p.requires_grad for p in own):
                raise ConfigError(f"{rule.key}: all its parameters are frozen already; leave the group out")

    def described(self) -> list[dict[str, Any]] | None:
        """Return each group's settings and a digest of its names, which a resume compares; None without groups."""
        settings = [{k: v for k, v in rule.settings.items() if k != "held"} for rule in self.rules]
        return [{**own, "parameters": digest(r.names)} for own, r in zip(settings, self.rules, strict=True)] or None


def digest(names: list[str]) -> str:
    return f"{len(names)}, {hashlib.sha256(repr(names).encode()).hexdigest()[:12]}"


def matched(key: str, patterns: str | list[str], module: nn.Module) -> list[str]:
    """Return the names of the parameters that match, as in fnmatch, under any of a tied parameter's names."""
    first = {p: name for name, p in module.named_parameters()}
    names = {name: first[p] for name, p in module.named_parameters(remove_duplicate=False)}
    found: dict[str, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        own = [first for name, first in names.items() if fnmatchcase(name, pattern)]
        if not own:
            inner = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)}
            near = difflib.get_close_matches(pattern, [*names, *(f"{name}.*" for name in sorted(inner))], 3, 0.5)
            hint = (
                f"did you mean {' or '.join(near)}?" if near else f"the names begin with {', '.join(list(names)[:3])}"
            )
            raise ConfigError(f"{key}.match={pattern}: no parameter has such a name; {hint}")
        found |= dict.fromkeys(own)
    return list(found)


def listed(key: str, parameters: Iterable[nn.Parameter], module: nn.Module) -> list[str]:
    first = {p: name for name, p in module.named_parameters()}
    own = list(parameters)
    if other := [p for p in own if not isinstance(p, Tensor) or p not in first]:
        kind = f"a tensor of shape {tuple(other[0].shape)}" if isinstance(other[0], Tensor) else repr(other[0])
        raise ConfigError(f"{key}.params: has {kind}, which is no parameter of the model; take model.parameters()")
    return [first[p] for p in own]


def parameter_groups(module: nn.Module, rules: Sequence[Rule] = (), by_hidden: bool = False) -> list[dict[str, Any]]:
    """Group parameters by rule, and by whether they have two dimensions: others have no weight decay by default.

    Groups with a rule come last, and a rule with `held` is a single group. With `by_hidden`, each group states whether
    its matrices are hidden.
    """
    rule_of = {name: i for i, rule in enumerate(rules) for name in rule.names}
    hidden = hidden_matrices(module) if by_hidden else set[Tensor]()
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, p in module.named_parameters():
        i = rule_of.get(name, -1)
        if not p.requires_grad and (i < 0 or not rules[i].settings.get("held")):
            continue
        decays = p.dim() >= 2 or (i >= 0 and rules[i].settings.get("held", False))  # a held group is not divided
        settings: dict[str, Any] = {"hidden": p in hidden} if by_hidden else {}
        settings |= {} if decays else {"weight_decay": 0.0}
        settings |= {key: value for key, value in rules[i].settings.items() if key not in OURS} if i >= 0 else {}
        key = (i, not decays, not settings.get("hidden"))
        found.setdefault(key, {"params": [], **settings})["params"].append(p)
    return [found[key] for key in sorted(found)]


def hidden_matrices(module: nn.Module) -> set[Tensor]:
    """Return the matrices, except embeddings, weights tied to them, and the output head.

    The head is known only for models of transformers, which have `get_output_embeddings`.
    """
    others, matrices = set[Tensor](), {p for p in module.parameters() if p.dim() == 2}
    for part in module.modules():
        head = getattr(part, "get_output_embeddings", None)
        parts = (part if isinstance(part, nn.Embedding | nn.EmbeddingBag) else None, head() if callable(head) else None)
        others |= {p for inner in parts if isinstance(inner, nn.Module) for p in inner.parameters()}
    return set[Tensor](matrices) - others


def make_optimizer(optimizer: Make, module: nn.Module, rules: ParameterRules | None = None) -> Optimizer:
    """Make the optimizer of the module's parameter groups. Raise ConfigError if it can't be trained or saved."""
    make = optimizer.make if isinstance(optimizer, WithGroups) else optimizer
    by_hidden = getattr(make.func if isinstance(make, partial) else make, "by_hidden", False)
    groups = parameter_groups(module, rules.rules if rules else (), by_hidden)
    if not groups:
        raise ConfigError("recipe.model(): no parameter requires a gradient; unfreeze some parameters")
    made = tried(make, groups)
    refuse_unusable(made, groups)
    probe(made)
    for rule in rules.rules if rules else ():
        refuse_settings(rule, make, made, groups)
    for i, group in enumerate(made.param_groups):
        group["lr"] = rate_of(made, i) * group.pop("lr_scale", 1.0)
    if by_hidden and rules:
        names = {p: name for name, p in module.named_parameters()}
        rest = [p for group in made.param_groups if not group["hidden"] for p in group["params"]]
        matrices = ", ".join(names[p] for p in rest if p.dim() == 2)
        log.info("%s: AdamW steps %d parameters, of which are matrices: %s", type(made).__name__, len(rest), matrices)
    return made


def tried(make: Callable[..., Optimizer], groups: Groups, key: str = "optimizer", **settings: Any) -> Optimizer:
    try:
        return make(groups, **settings)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}" if settings else str(error)) from None
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; correct the keys {key}.*") from error


def refuse_settings(rule: Rule, make: Make, made: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Refuse a setting that the optimizer has no groups for, or a value that it would not accept for all parameters."""
    settings = {name: value for name, value in rule.settings.items() if name not in ("lr_scale", *OURS)}
    if other := settings.keys() - made.defaults.keys():
        name = sorted(other)[0]
        kind = type(made).__name__
        hint = nearest(name, {*made.defaults, "lr_scale", *OURS})
        raise ConfigError(f"{rule.key}.{name}={settings[name]}: {kind} has no such setting of a group; {hint}")
    settings.pop("hidden", None)
    for name, value in settings.items():
        if not is_like(value, default := made.defaults[name]):
            kind = "true or false" if isinstance(default, bool) else "a number"
            kind = f"{len(default)} numbers, as {tuple(default)}" if isinstance(default, list | tuple) else kind
            raise ConfigError(f"{rule.key}.{name}={value!r}: must be {kind}")
    if settings and settings.keys() <= inspect.signature(make).parameters.keys():
        tried(make, [{**group} for group in groups], rule.key, **settings)


def refuse_rows(optimizer: Optimizer, name: str, why: str) -> None:
    """Refuse parameters that are sharded by rows, as in stage 3 of `shard`. `name` is the optimizer's in the config."""
    if any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            f"optimizer={name}: {why}, and callbacks.shard.stage=3 gives each rank rows of them; use "
            "callbacks.shard.stage=2, or optimizer=adamw"
        )


def is_like(value: Any, default: Any) -> bool:
    """Return whether a value has the type of the optimizer's default. Any value matches null or a string."""
    if isinstance(default, list | tuple):
        same = isinstance(value, list | tuple) and len(value) == len(default)
        return same and all(map(is_number, value, default))
    if isinstance(default, bool):
        return isinstance(value, bool)
    return not isinstance(default, int | float) or is_number(value, default)


def is_number(value: Any, default: Any) -> bool:
    number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    return number or (value is None and default is None)
