"""Refuses a checkpoint of another run, and ranks, recipes and settings that are incompatible."""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.annotated import checked, fits
from trainer.callback import Callback, Role, overrides
from trainer.checks.callback import refuse_no_callback, refuse_other_hooks
from trainer.checks.recipe import refuse_other_parameters
from trainer.config.options import DataOptions, Options
from trainer.config.targets import in_conf, locate
from trainer.errors import ConfigError
from trainer.log import log
from trainer.other_words import now_compared
from trainer.process.environment import node_range

PASS = "epoch_samples"  # for an iterable of batches; each rank's own may have a different number
MOST_RANKS = 1 << 20  # the most ranks that a manifest may have


def stateful(callbacks: Mapping[str, Callback]) -> list[str]:
    """Return the callbacks that a resume compares.

    A checkpoint can be resumed with any layout, so callbacks that distribute the model are excluded. So are observers,
    which change no weights.
    """
    return [
        name for name, callback in callbacks.items() if not (observes(callback) or overrides(callback, "distribute"))
    ]


def identity_without_observers(manifest: Mapping[str, Any], callbacks: Mapping[str, Callback]) -> dict[str, Any]:
    """Return a checkpoint's identity by today's names, without the observers that older versions listed."""
    settings, saved = manifest.get("settings", {}), manifest["identity"]
    identity = {now_compared(str(key)): value for key, value in saved.items()}
    listed = identity.get("callbacks")
    if not isinstance(listed, list):
        return identity

    def observed(name: Any) -> bool:
        target = str(settings.get(f"callbacks.{name}._target_", ""))
        if name in callbacks:
            return observes(callbacks[name])
        kind: Any = locate("trainer.resume", target, ()) if in_conf(target) else None
        return isinstance(kind, type) and issubclass(kind, Callback) and observes(kind)

    return identity | {"callbacks": [name for name in listed if not observed(name)]}


def observes(callback: Callback | type[Callback]) -> bool:
    return callback.role in (Role.MEASURE, Role.OBSERVE)


def refuse_more(options: Options, world: int) -> None:
    if world > 1:
        return
    why = "a Trainer made in Python starts no other ranks"
    if node_range(options.nodes)[0] > 1:
        raise ConfigError(f"trainer.nodes={options.nodes}: {why}; use torchrun or srun, or leave this out")
    if options.devices not in ("auto", 1):
        raise ConfigError(
            f"trainer.devices={options.devices}: {why}; make it in a function, and leave this out for "
            f"launch(FUNCTION, devices={options.devices})"
        )


def refuse_no_functions(data: DataOptions) -> None:
    """Refuse non-functions in `data.decoders` and `data.map`; a config's names are already resolved."""
    for key, functions in (("data.decoders", data.decoders), ("data.map", data.map)):
        for number, function in enumerate(functions):
            checked(f"{key}.{number}", function, Callable[..., Any])


def refuse_incomplete(recipe: Any, callbacks: Mapping[str, Any]) -> None:
    if isinstance(recipe, type):
        raise ConfigError(f"recipe: is the class {recipe.__name__}, not an object of it; give {recipe.__name__}()")
    missing = [name for name in ("model", "data", "loss") if not callable(getattr(recipe, name, None))]
    if missing:
        has = f"recipe: {type(recipe).__name__} has no method {missing[0]!r}"
        raise ConfigError(f"{has}; define model, data and loss, as in trainer/recipe.py")
    refuse_other_parameters(recipe)
    for name, callback in callbacks.items():
        refuse_no_callback(f"callbacks.{name}", callback)
        refuse_other_hooks(name, callback)


def refuse_other_ranks(own: Mapping[str, Any], each: Callable[[Any], list[Any]]) -> None:
    """Refuse ranks with different arguments or data, because they would train apart, or hang."""
    first, *others = each(own)
    for rank, other in enumerate(others, start=1):
        for key in first | other:
            if other.get(key) != first.get(key):
                raise ConfigError(
                    f"{key} is {short(first.get(key))} on rank 0 and {short(other.get(key))} on rank {rank}; "
                    "start all ranks with the same arguments, on the same data"
                )


def settings_in_common(settings: Mapping[str, Any], callbacks: Mapping[str, Callback]) -> dict[str, Any]:
    """Return the settings that all ranks must share. Paths, interfaces and loggers may differ per node."""
    observe = (name for name, callback in callbacks.items() if getattr(callback, "role", None) is Role.OBSERVE)
    loggers = tuple(f"callbacks.{name}." for name in observe)
    common = {key: value for key, value in settings.items() if not key.startswith(("trainer.", "nccl.", *loggers))}
    return {key: "a path" if isinstance(value, str) and "/" in value else value for key, value in common.items()}


def refuse_other_manifests(manifest: Mapping[str, Any], key: str) -> None:
    """Refuse a manifest that is valid JSON but not written by a run, because it is not trusted."""
    kinds = {"run_dir": str, "samples": int, "world": int, "identity": dict, "buckets": list, "ddp": dict}
    wrong = [name for name, kind in kinds.items() if not fits(manifest.get(name), kind)]
    may = {"rank_states": list[str], "settings": dict, "versions": dict, "uneven": bool, "decisions": dict}
    wrong += [name for name, kind in may.items() if name in manifest and not fits(manifest[name], kind)]
    wrong += [name for name in ("model", "optimizer", "data") if name not in (manifest.get("identity") or ())]
    if wrong or not 0 <= manifest["samples"] < 1 << 62 or not 0 < manifest["world"] <= MOST_RANKS:
        raise ConfigError(
            f"{key}: its manifest has no valid {', '.join(wrong) or 'samples or world'}; "
            "give a checkpoint that Echelon wrote"
        )


def refuse_unmerged(callbacks: Mapping[str, Callback], manifest: Mapping[str, Any], world: int) -> None:
    """Refuse a resume on another number of ranks if a callback has no `merge_rank_states`."""
    for name in sorted(callbacks.keys() & set(manifest.get("rank_states", ()))):
        if not overrides(callbacks[name], "merge_rank_states"):
            raise ConfigError(
                f"callbacks.{name}: the checkpoint has states of {manifest['world']} rank(s), there are {world} now, "
                f"and {type(callbacks[name]).__name__} has no merge_rank_states; resume on {manifest['world']} "
                f"rank(s), define merge_rank_states, or leave {name} out"
            )


def refuse_other_recipe(recipe: Any, manifest: Mapping[str, Any], own: Mapping[str, Any], accept: list[str]) -> None:
    """Refuse another recipe's checkpoint by name, because the data's fingerprint means nothing to a user."""
    was, now = str(manifest.get("settings", {}).get("recipe._target_", "")).rpartition(".")[2], type(recipe).__name__
    if was not in ("", now) and own["data"] != manifest["identity"]["data"] and "data" not in accept:
        raise ConfigError(
            f"trainer.resume: the checkpoint was written with recipe {was}, and this run has recipe {now}; choose "
            f"recipe {was}, or start a new run with trainer.resume=null"
        )


def refuse_other_pass(was: Any, now: int, accepted: bool) -> None:
    """Refuse a pass over the iterable with another number of samples, because the run would start mid-pass."""
    text = (
        f"a pass over recipe.data('train') had {short(was)} samples in the checkpoint and has {now}, since a short "
        "last batch counts as a whole one"
    )
    if not accepted:
        raise ConfigError(
            f"trainer.resume: {text}; set batch and batch_size back, start a new run with a Dataset or drop_last=True, "
            "or accept other epochs by 'trainer.accept=[batch,data]'"
        )
    log.warning("resume: %s; epochs and the place in the data count by the new one", text)


def refuse_differences(saved: Mapping[str, Any], own: Mapping[str, Any], accept: list[str]) -> None:
    """Refuse a resume if a key present in both differs and is not in `accept`."""
    different = [key for key in own if key in saved and saved[key] != own[key]]
    for key in different:
        if key in accept:
            text = "resume: %s was %s and is %s, as accepted; the run won't repeat the interrupted one bit for bit"
            log.warning(text, key, saved[key], own[key])
    refused = [key for key in different if key not in accept]
    if refused:
        lines = "; ".join(
            f"{key} was {short(saved[key])} in the checkpoint and is {short(own[key])}" for key in refused
        )
        raise ConfigError(
            f"trainer.resume: {lines}; set this back, or accept it by 'trainer.accept=[{','.join(accept + refused)}]'"
        )


def short(value: Any) -> str:
    """Return the beginning of a hash, or of a text that may be a stranger's."""
    return value[: 12 if len(value) == 64 else 40] if isinstance(value, str) else str(value).replace("'", "")
