"""Composes configs with Hydra, and explains Hydra's errors in one line."""

import contextlib
import difflib
import io
import itertools
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.folders import PRIMARY, TYPED, choices
from trainer.config.own_code import own_name, replace_file, trust
from trainer.config.own_hydra import composed_once, own_hydra
from trainer.config.schema import knobs
from trainer.config.training_arguments import expand
from trainer.config.user_yaml import checked_files
from trainer.errors import ConfigError, nearest, printable
from trainer.other_words import our_key
from trainer.redact import redact_argument

NAME = 120  # most characters of a run's name
CONFIGS = ("--config-dir", "--config-path", "--config-name")  # Hydra's options


class Job(NamedTuple):
    config: Any
    recipe: str
    argv: list[str]  # the arguments that produce this config, for display
    messages: Sequence[tuple[int, str]] = ()  # lines for the log, each with its level


def refuse_options(arguments: list[str]) -> None:
    """Refuse Hydra's options that would look for other configs, or change nothing."""
    for option, equals, _ in (word.partition("=") for word in arguments):
        if (option == "-cd" and equals) or (option.startswith("--config-") and option not in CONFIGS):
            raise ConfigError(f"{option}: can't be shortened here; --config-dir FOLDER adds your configs")
        if option in ("--config-path", "-cp"):
            raise ConfigError(f"{option}: would replace Echelon's configs; --config-dir FOLDER adds yours")
        if option in ("--package", "-p") and not any(word.split("=")[0] in ("--cfg", "-c") for word in arguments):
            raise ConfigError(f"{option}: only chooses what --cfg prints; leave it out, or give --cfg job")


def compose(arguments: list[str], folders: list[Path], primary: Path = PRIMARY) -> list[Job]:
    """Compose the config of each job with Hydra: groups, overrides, multirun. No job if Hydra only prints something.

    `primary` is the file with every key and the groups to compose.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    jobs = list[Job]()
    flags = [word for folder in folders[1:] for word in ("--config-dir", str(folder))]

    def collect(config: DictConfig) -> None:
        chosen = HydraConfig.get()
        overrides: Any = OmegaConf.to_container(chosen.overrides.task)  # unresolved: they may hold ${...}
        argv = [redact_argument(word) for each in overrides if (word := as_typed(each, typed))]
        recipe = dict(chosen.runtime.choices).get("recipe") or own_name(typed)
        composed: Any = OmegaConf.to_container(config, resolve=True)
        if primary == PRIMARY:
            trust(composed)
        jobs.append(Job(composed, recipe, [*flags, *argv]))

    refuse_options(arguments)
    expanded, lines = expand(arguments)
    expanded, typed = replace_file(expanded)
    words = merge_callbacks([normalize(word, folders) for word in expanded], primary)
    sys.argv[1:] = sorted(words, key=is_override)  # argparse takes positional arguments in one piece only
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises the errors that it would print
    stderr, places = io.StringIO(), [folder / group for folder in folders[1:] for group in ("", "hydra", *TYPED)]
    try:
        with contextlib.redirect_stderr(stderr), composed_once(words, places), own_hydra(), checked_files():
            hydra.main(version_base="1.3", config_path=str(primary.parent), config_name=primary.stem)(collect)()
    except SystemExit as stop:
        if stop.code:
            raise ConfigError(in_our_words(stderr.getvalue().strip().rpartition("error: ")[2])) from None
        raise
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(explain(error, folders)) from None
    sys.argv[1:] = map(redact_argument, sys.argv[1:])  # loggers such as wandb store it
    sys.stderr.write(stderr.getvalue())
    of_optimizer = (fit_optimizer(job.config, job.argv, folders) for job in jobs)
    warnings = ([(logging.WARNING, text) for text in texts] for texts in of_optimizer)
    return [job._replace(messages=[*lines, *own]) for job, own in zip(jobs, warnings, strict=True)]


def in_our_words(said: str) -> str:
    """Explain argparse's error about an unknown option, which often belongs to another trainer."""
    if not (option := re.fullmatch(r"unrecognized arguments: (--?([\w.-]+).*)", said)):
        return f"{said}; see --help"
    fix = our_key(option[2]) or "give settings as KEY=VALUE, without --"
    return f"{option[1]}: there is no such option; {fix}; see --help"


def own_words(job: Job, jobs: list[Job]) -> list[str]:
    """Return the overrides of a job that not all jobs share."""
    common = set(job.argv).intersection(*(other.argv for other in jobs))
    return [word for word in job.argv if word not in common]


def told_apart(job: Job, jobs: list[Job]) -> str:
    """Name a job by its recipe and the overrides that not all jobs share, for example bert_tiny-lr-0.001."""
    own = [word.lstrip("+~").partition("=") for word in own_words(job, jobs)]
    pairs = [(key.rpartition(".")[2], value) for key, _, value in own if key != "recipe"]
    words = (re.sub("[^A-Za-z0-9._-]+", "-", word) for word in (job.recipe, *itertools.chain(*pairs)))
    words = (word.rstrip("-") if re.match(r"-[.\d]", word) else word.strip("-") for word in words)  # a sign stays
    return "-".join(filter(None, words))[:NAME]


def fit_optimizer(config: Mapping[str, Any], argv: list[str], folders: list[Path]) -> list[str]:
    """Remove values that a typed `optimizer=NAME` does not accept, unless they are typed as well.

    Return a message for each value that the recipe's YAML sets for the optimizer.
    """
    from omegaconf import OmegaConf

    words = [word.partition("=") for word in argv if is_override(word)]
    name = next((value for key, _, value in words if key == "optimizer"), "")
    paths, node = choices("optimizer", folders), config.get("optimizer")
    if name not in paths or not isinstance(node, dict):
        return []
    files: dict[str, Any] = {key: OmegaConf.to_container(OmegaConf.load(path)) for key, path in paths.items()}
    typed = {key.split(".")[1] for key, _, _ in words if key.startswith("optimizer.")}
    others = {key for file in files.values() for key in file} - typed
    return [*leave_out(node, name, files[name], others), *kept_by_recipe(node, name, files[name], typed)]


def leave_out(node: dict[str, Any], name: str, own: Mapping[str, Any], others: set[str]) -> list[str]:
    """Reset or remove each value that the optimizer does not accept; return a message for each.

    Only keys in `others`, of any optimizer's YAML, are removed; the check refuses the rest.
    """
    target, lines = str(node.get("_target_")), []
    if not target.startswith("trainer.optim.") or target != own["_target_"]:
        return []
    known = knobs("optimizer", target, ())
    for key in sorted(others & node.keys() - {"_target_", "_partial_", "groups"}):
        if key not in known or isinstance(node[key], list) != isinstance(own.get(key, node[key]), list):
            value = node.pop(key)
            text = f"optimizer.{key}={value}: the recipe's YAML sets this, and optimizer={name} can't take it"
            lines.append(f"{text}; it is left out")
            node.update({key: own[key]} if key in own else {})
    return lines


def kept_by_recipe(node: Mapping[str, Any], name: str, own: Mapping[str, Any], typed: set[str]) -> list[str]:
    """Return a message for each value of a typed `optimizer=NAME` that the recipe's YAML replaces."""
    lines = []
    for key, value in own.items():
        found = node.get(key, value)
        if found != value and key not in typed and "${" not in str(value):
            text = f"optimizer.{key}={found}: the recipe's YAML sets this, and optimizer={name} has {value}"
            lines.append(f"{text}; give optimizer.{key}=VALUE to choose")
    return lines


def as_typed(override: str, typed: Mapping[str, str]) -> str:
    """Return what the user typed for an override; empty if nothing."""
    original = original_override(override)
    return typed.get(override, typed.get(original, original))


def original_override(override: str) -> str:
    """Undo the changes that `normalize` and, in a multirun, Hydra have made to an override."""
    if override.startswith("~"):
        return override.removesuffix("=null")
    if not {'"', "'"} & set(override):
        override = override.replace("\\ ", " ")  # a multirun escapes spaces, and keeps quotes
    return re.sub(r"\$\\{.*?\\}", lambda found: re.sub(r"\\(.)", r"\1", found[0]), override.removeprefix("++"))


def explain(error: Exception, folders: list[Path]) -> str:
    from hydra.errors import MissingConfigException, OverrideParseException
    from yaml import MarkedYAMLError

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        known = choices(group, folders)
        if not group:
            return f"--config-name {name}: the only name is config; leave --config-name out, and choose a recipe=NAME"
        return f"{group}={name}: there is no such {group.removesuffix('s')}; {nearest(name, known)}"
    if isinstance(error, OverrideParseException):
        if not error.override.isprintable() and any("\udc80" <= c <= "\udcff" for c in error.override):
            name = sys.getfilesystemencoding()
            reason = f"has bytes that this process does not read as text, since its locale has {name}"
            return f"{printable(error.override.removeprefix('++'))}: {reason}; set LC_ALL=C.UTF-8"
        word = redact_argument(error.override.removeprefix("++"))
        if re.fullmatch(r"[\w.+]+", word):
            return f"{word}: has no value; write {word}=VALUE, without spaces around ="
        shell, text = "'+callbacks=[a,b]'", "'recipe.text=\"a(b).txt\"'"
        return (
            f"{word}: can't be read as KEY=VALUE; quote it for the shell, as in {shell}, and text twice, as in {text}"
        )
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark):
        return f"{mark.name}: line {mark.line + 1}, column {mark.column + 1}: {error.problem}; correct the YAML there"
    text = " ".join(str(error).split()) or "defaults: can't be read; write entries as '- override /optimizer: sgd'"
    if merged := re.search("In '(.*?)': .*Cannot merge DictConfig with ListConfig", text):
        return (
            f"{merged[1]}.yaml: has a list where keys are due; write 'callbacks: {{NAME: {{_target_: ...}}}}', or "
            "choose callbacks by '+callbacks=[NAME]'"
        )
    if several := re.search("Ambiguous value for argument '(.*?)' ", text):
        word = redact_argument(several[1].removeprefix("++"))
        key, _, values = word.partition("=")
        return f"{word}: one run takes one value; 'echelon -m {word}' makes a run of each, {key}=[{values}] is a list"
    if "does not support sweep type" in text:
        return "-m: interval() is for samplers, which Echelon has none of; give values, as KEY=0.1,0.2, or range(1,4)"
    if absent := re.search("delete from config. '(.*)' does not exist", text):
        group, _, name = absent[1].partition(".")
        near = difflib.get_close_matches(name, choices(group, folders).keys() - {name}, 1)
        return f"~{absent[1]}: is not in this run; {f'did you mean ~{group}.{near[0]}?' if near else 'leave this out'}"
    reason, _, key = text.partition(" full_key: ")  # OmegaConf's
    return f"{key.split()[0]}: {reason}; give a value, or a key that is there" if key else f"{reason}; see --help"


def is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


def normalize(word: str, folders: list[Path]) -> str:
    """Convert an argument to Hydra's form.

    Hydra accepts any key as a new one, because `check` has better messages. `callbacks=[...]` and `+callbacks=[...]`
    mean the same, and may name a default callback. So do `tuned=NAME` and `+tuned=NAME`.
    """
    key, equals, value = word.partition("=")
    name = key.lstrip("+")
    if word in ("~trainer", "~data"):
        raise ConfigError(f"{word}: every run needs these settings; leave this out, and give {word[1:]}.KEY=VALUE")
    if not equals or not name or word[0] in "-~" or re.search("[@/]", name) or name.startswith("hydra."):
        return word
    if name == "callbacks":
        if value in ("null", "[]", ""):
            raise ConfigError(
                f"{word}: would change nothing, since the default callbacks stay; '~callbacks.progress' leaves one out"
            )
        return f"callbacks={value if '[' in value else f'[{value}]'}"
    if name == "tuned":
        known = choices(name, folders)
        if unknown := [each for each in value.split(",") if each not in known]:
            fix = f"{nearest(unknown[0], known)}; --config-dir FOLDER names the folder that has tuned/"
            raise ConfigError(f"tuned={unknown[0]}: there is no such file; {fix}")
        return f"+tuned={value}"
    if any((folder / name).is_dir() for folder in folders):
        if value == "null":
            raise ConfigError(f"{word}: a run needs one {name}; there are {', '.join(choices(name, folders))}")
        if value.startswith("["):
            raise ConfigError(
                f"{word}: a run has one {name}; give {name}=NAME, or 'echelon -m {name}={value.strip('[]')}' for a run "
                "of each"
            )
        return word
    return f"++{name}={value}"


def merge_callbacks(words: list[str], primary: Path = PRIMARY) -> list[str]:
    """Merge all lists of callbacks into one, without default ones, because Hydra would use only the last."""
    given = [re.findall(r"\[([^][]*)\]", word) for word in words if word.startswith("callbacks=")]
    if not given or [] in given:  # no list, or one that Hydra will refuse
        return words
    default = re.findall(r"^  - callbacks/(\w+)", primary.read_text(), re.MULTILINE)
    lists = []
    for several in itertools.product(*given):  # each may be a sweep
        names = [name.strip() for name in ",".join(several).split(",")]
        lists.append(f"[{','.join(dict.fromkeys(name for name in names if name and name not in default))}]")
    return [f"callbacks={','.join(lists)}", *(word for word in words if not word.startswith("callbacks="))]
