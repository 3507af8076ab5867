"""Checks the parameters and return values of a recipe's methods."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from trainer.errors import ConfigError
from trainer.log import log
from trainer.recipe import Optional, Recipe

MISSING = object()  # replaces the loss if `recipe.loss` raised
METRICS = "a dict of name -> (sum, count), two numbers"
ONE_NUMBER = "a tensor of one number, the mean over the batch"
# Part of the text of an error in a backward pass, or of DDP -> the mistake in the recipe, and the fix.
IN_PLACE = "modified by an inplace operation"
MISTAKES = {
    "backward through the graph a second time": "its graph is freed already; keep tensors of earlier batches by "
    "detach(), and leave backward() to the trainer",
    IN_PLACE: "a tensor that the backward pass needs was changed in place; write x = x + y instead of x += y, and on "
    "several ranks call model(...) once",
    "mark a variable ready only once": "two backward passes reach the same parameters; call model(...) once, and leave "
    "backward() to the trainer",
}
SPREADS = "trainer.devices=N trains on several devices"
WRAPPERS = {  # class -> the attribute that has the model, what to use instead
    "OptimizedModule": ("_orig_mod", "'+callbacks=[compile]' compiles the model"),
    "DataParallel": ("module", SPREADS),
    "DistributedDataParallel": ("module", SPREADS),
}
UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")  # DDP's text; the group has parameters' indices


class CheckedLoss:
    """`recipe.loss` with a check of its value. Once a value has passed, `compute` is `recipe.loss` itself.

    Args:
        weight: Counts the items of a batch. A loss over no items needs no gradient.
        defers: A callback steps weights during a pass, so an in-place change may not be the recipe's.
        elsewhere: Parameters of the recipe outside of the model, by id.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        weight: Callable[[Any], int],
        defers: bool = False,
        elsewhere: Mapping[int, str] | None = None,
    ) -> None:
        self.loss, self.weight, self.defers, self.elsewhere = loss, weight, defers, elsewhere or {}
        self.compute: Callable[[nn.Module, Any], Tensor] = self._check

    def _check(self, model: nn.Module, batch: Any) -> Tensor:
        try:
            loss = self.loss(model, batch)
        except AttributeError as error:
            wrapped = getattr(model, "module", None)
            if error.obj is model and hasattr(wrapped, error.name or ""):
                raise ConfigError(
                    f"recipe.loss(): uses model.{error.name}, which {type(model).__name__} lacks; call model(...) "
                    "itself, so that ranks average its gradients"
                ) from None
            raise
        check_loss(loss)
        refuse_trained_elsewhere(loss, self.elsewhere)
        if torch.is_grad_enabled() and not loss.requires_grad:
            if self.weight(batch):
                raise without_gradient(loss)
            return loss
        self.compute = self.loss
        return loss

    def explain(self, error: Exception, loss: Any, model: nn.Module) -> ConfigError | None:
        """Return the mistake in the recipe that caused `error` in a pass; None if `loss` itself raised it.

        `loss` is the unchecked value of a call after the first, or `MISSING`, and `model` the argument of that call.
        """
        text = str(error)
        if unused := UNUSED.search(text):
            return ConfigError(f"recipe.loss(): {unused_parameters(unused[1], model)}")
        if loss is MISSING or isinstance(error, ConfigError):
            return None
        if not is_one_number(loss):
            return not_one_number(loss)
        if "does not require grad" in text and not loss.requires_grad:
            return without_gradient(loss)
        if self.defers and IN_PLACE in text:
            return None
        mistake = next((mistake for part, mistake in MISTAKES.items() if part in text), None)
        return ConfigError(f"recipe.loss(): {mistake}") if mistake else None


def parameters_elsewhere(recipe: Any, model: nn.Module) -> dict[int, str]:
    """Return the parameters in the recipe's attributes that are not the model's: id -> name."""
    known, found = set(map(id, model.parameters())), dict[int, str]()
    for name, value in getattr(recipe, "__dict__", {}).items():
        own = value.named_parameters() if isinstance(value, nn.Module) else [("", value)]
        found |= {id(p): f"{name}.{inner}".rstrip(".") for inner, p in own if isinstance(p, nn.Parameter)}
    return {key: name for key, name in found.items() if key not in known}


def refuse_trained_elsewhere(loss: Tensor, elsewhere: Mapping[int, str]) -> None:
    """Refuse a loss that has a gradient for a parameter that no optimizer steps."""
    ahead, seen = [loss.grad_fn] if elsewhere else [], set[Any]()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
        if name := elsewhere.get(id(getattr(node, "variable", None))):
            raise ConfigError(
                f"recipe.{name}: gets a gradient from the loss, and is no parameter of the model, so no optimizer "
                "steps it; let model() return a module that has it, or freeze it by requires_grad_(False)"
            )


def is_one_number(value: Any) -> bool:
    """Return whether a value is a tensor of one real number. A complex one would lose its imaginary part."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def check_loss(loss: Any) -> None:
    if not is_one_number(loss):
        raise not_one_number(loss)


def not_one_number(loss: Any) -> ConfigError:
    return refusal("loss", loss, ONE_NUMBER + hint(loss))


def hint(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], Tensor) and value[0].numel() == 1:
        return ", such as its first item"
    return "; a function without `return` gives None" if value is None else ""


def without_gradient(loss: Tensor) -> ConfigError:
    return refusal("loss", loss, "a loss with a gradient, without detach() or no_grad()", " without a gradient")


def unused_parameters(numbers: str, model: nn.Module) -> str:
    names = [name for name, p in getattr(model, "module", model).named_parameters() if p.requires_grad]
    own = [names[i] for i in map(int, numbers.split()) if i < len(names)]
    more = f" and {len(own) - 3} more" if len(own) > 3 else ""
    return (
        f"does not use {', '.join(own[:3])}{more}, and other ranks wait for the gradients; use them in every loss, "
        "freeze them by requires_grad_(False), or give trainer.ddp.find_unused_parameters=true"
    )


def refuse_other_parameters(recipe: Any) -> None:
    """Refuse a method that can't be called with the arguments in trainer/recipe.py."""
    for name, expected in (vars(Recipe) | vars(Optional)).items():
        method = getattr(recipe, name, None)
        if name.startswith("_") or not inspect.isfunction(expected) or not callable(method):
            continue
        if other := other_parameters(method, expected):
            raise ConfigError(f"recipe.{name}{other}")


def other_parameters(method: Callable[..., Any], expected: Callable[..., Any]) -> str:
    """Return how a bound method's parameters differ from the expected ones; empty if it can be called alike."""
    names = list(inspect.signature(expected).parameters)[1:]
    try:
        own = inspect.signature(method)
    except (TypeError, ValueError):  # a function in C has no signature
        return ""
    try:
        own.bind(*names)
    except TypeError:
        takes = ", ".join(map(str, own.parameters))
        return f"({takes}): is called with ({', '.join(names)}); give it these parameters"
    return ""


def refuse_no_tensors(model: nn.Module) -> None:
    """Refuse a model whose state has anything but tensors, for example from `get_extra_state`."""
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"recipe.model(): its state_dict has {name}, which is {describe(value)}, and checkpoints have tensors "
                "alone; let get_extra_state return a tensor, or keep the value in a buffer"
            )


def build_model(recipe: Any) -> nn.Module:
    """Call `recipe.model`, and unwrap a model that is already compiled or distributed."""
    model = unwrapped(recipe.model())
    if not isinstance(model, nn.Module):
        raise refusal("model", model, "an nn.Module")
    refuse_wrapped_parts(model)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ConfigError(
                f"recipe.model(): {name} has no shape yet, as in nn.LazyLinear; call the model on a sample in model(), "
                "or give the layer its sizes"
            )
    return model


def unwrapped(model: Any) -> Any:
    """Remove the wrapper of torch.compile, DataParallel or DDP, whose parameter names would end up in checkpoints."""
    name = type(model).__name__
    if name == "FullyShardedDataParallel" or any("FSDPModule" in kind.__name__ for kind in type(model).__mro__):
        raise ConfigError(
            "recipe.model(): returned a model that FSDP has cut; return it whole, '+callbacks=[shard]' cuts"
        )
    if name not in WRAPPERS:
        return model
    inner, instead = WRAPPERS[name]
    log.warning("recipe.model(): is wrapped in %s, which is taken off; %s", name, instead)
    return unwrapped(getattr(model, inner))


def refuse_wrapped_parts(model: nn.Module) -> None:
    """Refuse TorchScript, and a wrapper inside the model, whose names would get into checkpoints."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ConfigError("recipe.model(): is TorchScript, which callbacks can't change; return the nn.Module itself")
    for name, part in model.named_modules():
        kind = type(part).__name__
        if kind in WRAPPERS:
            fix = f"leave it out, {SPREADS}"
            if kind == "OptimizedModule":
                fix = f"call model.{name}.compile() instead of torch.compile(model.{name})"
            raise ConfigError(
                f"recipe.model(): {name} is wrapped in {kind}, whose names a checkpoint would have; {fix}"
            )


def refuse_untrained(model: nn.Module) -> None:
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        has = f"all {len(parameters)} parameters are frozen" if parameters else "the model has no parameters"
        raise ConfigError(f"recipe.model(): {has}; return one with parameters that require a gradient")


def refuse_complex(model: nn.Module, key: str, why: str) -> None:
    name = next((name for name, p in model.named_parameters() if p.requires_grad and p.is_complex()), None)
    if name is not None:
        raise ConfigError(f"{key}: {why}, and {name} is complex; leave it out, or keep the weight as two real ones")


def check_metrics(found: Any, method: str = "metrics") -> dict[str, tuple[Tensor, int]]:
    """Return what `recipe.metrics` or a similar method returned, with counts as plain ints."""
    if not isinstance(found, Mapping):
        raise refusal(method, found, METRICS)
    checked = {}
    for name, pair in found.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise refusal(method, pair, METRICS, f" for {name!r}")
        total, count = pair
        if not isinstance(total, Tensor):
            total = total if (number := number_of(total)) is None else torch.tensor(number, dtype=torch.float64)
        if not is_one_number(total):
            raise refusal(method, total, METRICS, f" as the sum of {name!r}")
        items = number_of(count)
        if items is None or items != items // 1:
            raise refusal(method, count, METRICS, f" as the count of {name!r}")
        if items < 0:
            raise ConfigError(
                f"recipe.{method}(): returned {count} as the count of {name!r}; return the number of items, 0 or more"
            )
        checked[name] = total, int(items)
    return checked


def number_of(value: Any) -> float | None:
    """Return a number, an array or a tensor of one number as an int or a float; None for any other value."""
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if getattr(value, "size", None) == 1 or (isinstance(value, Tensor) and value.numel() == 1):
        return number_of(value.item())
    return None


def weight_of(recipe: Any) -> Callable[[Any], int] | None:
    return partial(count_items, recipe.weight) if hasattr(recipe, "weight") else None


def count_items(weight: Callable[[Any], Any], batch: Any) -> int:
    count = weight(batch)
    try:
        items = int(count)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last for several numbers
        items = -1
    if items < 0 or items != count:
        given = count if isinstance(count, int | float) else f"a value of type {type(count).__name__}"
        raise ConfigError(f"recipe.weight(): returned {given}; return the number of items, an int of 0 or more")
    return items


def call_summary(recipe: Any) -> dict[str, float]:
    found = recipe.summary() if hasattr(recipe, "summary") else {}
    expected = "a dict of name -> number"
    if not isinstance(found, Mapping):
        raise refusal("summary", found, expected)
    for name, value in found.items():
        if not isinstance(value, Real):
            raise refusal("summary", value, expected, f" for {name!r}")
    return {str(name): value if isinstance(value, int | float) else float(value) for name, value in found.items()}


def check_rates(recipe: Any) -> None:
    for name in ("tokens_per_sample", "flops_per_sample"):
        value = getattr(recipe, name, None)
        if value is not None and not isinstance(value, Real):
            raise ConfigError(f"recipe.{name}: is {describe(value)}; make it a number, or a method with @property")


def try_summary(recipe: Any, rank: int, each: Callable[[Any], list[Any]]) -> None:
    """Call `recipe.summary` on rank 0; raise on every rank if it fails: DistError on the others. A collective."""
    failure = None
    try:
        if rank == 0:
            call_summary(recipe)
    except Exception as error:
        failure = error  # the other ranks wait in `each`
    failed = each(failure is not None)[0]
    if failure:
        raise failure
    if failed:
        raise DistError("rank 0 failed in recipe.summary()")


def refusal(method: str, value: Any, expected: str, where: str = "") -> ConfigError:
    return ConfigError(f"recipe.{method}(): returned {describe(value)}{where}; return {expected}")


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {'complex ' if value.is_complex() else ''}tensor of shape {tuple(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object of it"
    if isinstance(value, Mapping) and not value:
        return "an empty dict"
    return "None" if value is None else f"a value of type {type(value).__name__}"
