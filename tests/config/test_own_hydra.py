"""S5: Hydra's own settings in a config import nothing, and none of its plugins, loggings or packages is taken."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainer.config.compose import compose
from trainer.config.folders import CONF
from trainer.errors import ConfigError

STRANGER = "from pathlib import Path\nPath('mark').mkdir()\nclass X: pass\n"
BUILT = ("callbacks", "hydra_logging", "job_logging", "launcher", "sweeper")  # from names, by Hydra itself


def hydras_settings() -> list[str]:
    from hydra.conf import HydraConf

    names = {field.name for field in dataclasses.fields(HydraConf)} - {"defaults"}
    return sorted(names, key=lambda name: (name not in BUILT, name))


@pytest.fixture
def hydra_of_a_stranger(tmp_path, monkeypatch) -> Callable[..., None]:
    """Composes a config, with a stranger's package in the working folder, and asserts that nothing imports it."""
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "__init__.py").write_text(STRANGER)
    (tmp_path / "my" / "recipe").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["echelon"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # `compose` sets both

    def composed(*words: str, refused: str | None = None, **files: Any) -> None:
        for name, content in files.items():
            path = Path("my", *name.split("__")).with_suffix(".yaml")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("# @package _global_\n" + OmegaConf.to_yaml(OmegaConf.create(content)))
        with pytest.raises(ConfigError, match=refused) if refused else contextlib.suppress(ConfigError):
            compose(["--config-dir", "my", *words], [CONF, Path("my")])
        assert "stranger" not in sys.modules and not Path("mark").exists() and not Path("multirun.yaml").exists()

    return composed


NAMES = (
    '{_target_: stranger.X, x: {_target_: stranger.X, "()": stranger.X}, handlers: {h: {"()": stranger.X}}, version: 1,'
    " root: {handlers: [h]}}"
)


@pytest.mark.parametrize("key", hydras_settings())
def test_no_key_of_hydras_own_imports_a_name(hydra_of_a_stranger, key: str) -> None:
    """Each gets a stranger's names, as an argument and in a file, for a run of each value."""
    hydra_of_a_stranger("-m", "batch=8,16", f"++hydra.{key}={NAMES}")
    hydra = {key: OmegaConf.create(NAMES)}
    hydra_of_a_stranger("-m", "batch=8,16", "recipe=mine", recipe__mine={"defaults": ["bert_tiny"], "hydra": hydra})


LOGGING = {"version": 1, "handlers": {"h": {"()": "stranger.X"}}, "root": {"handlers": ["h"]}}
CALLS = {"x": {"_target_": "stranger.X"}}


@pytest.mark.parametrize("way", ["group", "primary", "plugin"])
@pytest.mark.parametrize("key", ["callbacks", "job_logging", "hydra_logging"])
def test_names_in_a_users_file_of_hydras_settings_are_refused(hydra_of_a_stranger, key: str, way: str) -> None:
    """In a recipe, in a config that `-cn` names, and as a choice of Hydra's own group."""
    value = CALLS if key == "callbacks" else LOGGING
    refused = rf"^hydra\.{key}: may name code that Hydra would run; leave it out"
    mine: dict[str, Any] = {"defaults": ["bert_tiny"], "hydra": {key: value}}
    if way == "primary":
        mine = {"defaults": ["config", "_self_"], "hydra": {key: value}}
        return hydra_of_a_stranger("-cn", "mine", refused=refused, mine=mine)
    if way == "plugin":
        Path("my", "hydra", key).mkdir(parents=True)
        Path("my", "hydra", key, "mine.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(value)))
        return hydra_of_a_stranger(f"hydra/{key}=mine", refused=refused)
    return hydra_of_a_stranger("recipe=mine", refused=refused, recipe__mine=mine)


@pytest.mark.parametrize("scheme", ["pkg", "structured"])
@pytest.mark.parametrize("way", ["word", "primary", "sweep", "defaults"])
def test_a_package_in_hydras_searchpath_is_refused(hydra_of_a_stranger, scheme: str, way: str) -> None:
    place, refused = f"{scheme}://stranger", rf"^hydra\.searchpath=\[{scheme}://stranger\]: would import a package"
    if way == "primary":
        mine = {"defaults": ["config"], "hydra": {"searchpath": [place]}}
        hydra_of_a_stranger("-cn", "mine", refused=refused, mine=mine)
    elif way == "sweep":
        hydra_of_a_stranger("-m", "batch=8", f"++hydra.overrides.hydra=['hydra.searchpath=[{place}]']", refused=refused)
    else:
        words = ["--info", "defaults"] if way == "defaults" else []
        hydra_of_a_stranger(f"hydra.searchpath=['{place}']", *words, refused=refused)


@pytest.mark.parametrize("kind", ["sweeper", "launcher"])
def test_what_hydras_plugins_would_build_is_refused(hydra_of_a_stranger, kind: str) -> None:
    word = f"++hydra.{kind}.x={{_target_: stranger.X}}"
    hydra_of_a_stranger("-m", "batch=8", word, refused=rf"^hydra\.{kind}\.x: changes nothing here; leave it out$")


def test_a_sweep_sets_no_callback_of_hydras(hydra_of_a_stranger) -> None:
    params = {"batch": "8", "+hydra.callbacks.x": "{_target_: stranger.X}"}
    mine = {"defaults": ["bert_tiny"], "hydra": {"mode": "MULTIRUN", "sweeper": {"params": params}}}
    hydra_of_a_stranger("recipe=mine", recipe__mine=mine, refused="^hydra.callbacks: may name code")
