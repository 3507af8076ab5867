"""How a printed command calls Echelon."""

import sys

import pytest

from trainer.process.calling import ROOT, echelon, this_python

BIN = "checkout/.venv/bin"


@pytest.mark.parametrize(
    ("executable", "here", "path", "called"),
    [
        ("python", "checkout", "", ".venv/bin/{}"),
        ("python", "elsewhere", BIN, "{}"),
        ("python3", "elsewhere", BIN, "{}"),
        ("python", "elsewhere", "usr/bin", "TMP/checkout/.venv/bin/{}"),
        ("python", "elsewhere", "", "TMP/checkout/.venv/bin/{}"),
        ("python", BIN, "", "./{}"),
    ],
)
def test_how_a_printed_command_calls_python_and_echelon(executable, here, path, called, tmp_path, monkeypatch):
    """Of an environment that needn't be active, whose python is a link to the system's."""
    for folder in ("usr/bin", BIN, "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("python", "echelon"):
        (tmp_path / "usr/bin" / name).touch(mode=0o755)
    (tmp_path / BIN / "echelon").touch(mode=0o755)
    for name in ("python", "python3"):
        (tmp_path / BIN / name).symlink_to(tmp_path / "usr/bin/python")
    monkeypatch.setattr(sys, "executable", str(tmp_path / BIN / executable))
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path / here)
    python, script = (called.replace("TMP", str(tmp_path)).format(name) for name in ("python", "echelon"))
    assert this_python() == python and echelon() == [script]
    (tmp_path / BIN / "echelon").unlink()
    assert echelon() == [python, "-m", "trainer.main"]


def test_a_checkout_is_called_in_its_folder(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert echelon()[1:] == ["-m", "trainer.main"]
