"""A config counts as the user's own if this user's run has written it, where it lies, and nobody has changed it."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from trainer.config.signature import NAME, is_own, sign


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = tmp_path / "runs" / "r" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("trainer: {allow_targets: [mine]}\n")
    return file


def test_a_signed_config_is_the_users_own(config):
    assert not is_own(config) and not Path(os.environ["XDG_STATE_HOME"]).exists()  # a question makes no key
    sign(config)
    assert is_own(config)
    key = Path(os.environ["XDG_STATE_HOME"], "echelon", "key")
    assert (key.stat().st_mode & 0o777, os.listdir(key.parent)) == (0o600, ["key"])
    config.with_name(NAME).unlink()
    sign(config)  # with the same key
    assert is_own(config)


def test_a_home_without_hard_links_has_a_key_as_well(config, monkeypatch):
    """As of SMB, exFAT, FUSE: a draft of the key stayed at each run, and no run was signed."""
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    for _ in range(2):
        sign(config)
        assert is_own(config)
    key = Path(os.environ["XDG_STATE_HOME"], "echelon", "key")
    assert (key.stat().st_mode & 0o777, os.listdir(key.parent)) == (0o600, ["key"])


def test_a_changed_or_moved_config_is_a_strangers(config, tmp_path):
    sign(config)
    moved = config.parent.rename(tmp_path / "runs" / "other")
    assert not is_own(moved / "config.yaml")
    moved.rename(config.parent)
    config.write_text("trainer: {allow_targets: [stranger]}\n")
    assert not is_own(config)


@pytest.mark.parametrize("signature", ["", "0" * 64, "\xff\xfe", None])
def test_a_forged_signature_does_not_hold(config, signature):
    sign(config)
    config.with_name(NAME).unlink()
    if signature is not None:
        config.with_name(NAME).write_text(signature)
    assert not is_own(config)


def test_another_users_signature_does_not_hold(config, tmp_path, monkeypatch):
    sign(config)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    assert not is_own(config)
    other = tmp_path / "x" / "config.yaml"
    other.parent.mkdir()
    other.write_text("")
    sign(other)  # makes a key
    assert is_own(other) and not is_own(config)


@pytest.mark.parametrize("wrong", ["mode", "link", "owner", "empty", "short", "pipe", "folder"])
def test_a_key_that_others_can_read_or_know_is_named_and_not_used(config, wrong, caplog):
    sign(config)
    key = Path(os.environ["XDG_STATE_HOME"], "echelon", "key")
    if wrong == "mode":
        key.chmod(0o640)
    elif wrong == "owner" and os.geteuid():
        pytest.skip("only root gives files away")
    elif wrong == "owner":
        os.chown(key, 1234, -1)
    elif wrong in ("empty", "short"):
        key.write_bytes(b"abc" if wrong == "short" else b"")
    else:
        key.rename(key.with_name("elsewhere"))
        make = {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda file: os.symlink("elsewhere", file)}[wrong]
        make(key)
    assert not is_own(config)
    config.with_name(NAME).unlink()
    sign(config)
    assert not is_own(config) and not config.with_name(NAME).exists()
    assert [record.getMessage().startswith(f"{key}: ") for record in caplog.records] == [True]
    assert "remove it" in caplog.text and "trainer.allow_targets" in caplog.text
