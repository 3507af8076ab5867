"""S1 and S2: pickles where weights, checkpoints or samples belong. Whatever would run makes a folder: there is none."""

import ast
import io
import os
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.cli import PYTHONPATH, ROOT, toy
from support.messages import refuses
from support.sources import trees
from support.untrusted import Payload, one_line, payload, sharded
from torch import nn

from trainer.checkpoint.commit import commit
from trainer.checkpoint.manifest import Damaged
from trainer.checkpoint.pretrained import load_weights
from trainer.checkpoint.serialize import load_state
from trainer.errors import ConfigError


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it has run"


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "a.safetensors"])
@pytest.mark.parametrize("saved", [True, False])
def test_a_pickle_is_no_weights(tmp_path: Path, mark: Path, name: str, saved: bool) -> None:
    """As torch.save wraps it, and bare."""
    path = tmp_path / name
    if saved:
        torch.save({"weight": torch.zeros(2, 2), "bias": Payload(mark)}, path)
    else:
        path.write_bytes(payload(mark))
    with refuses("trainer.init_from", "whole", "checkpoint") as error:
        load_weights(nn.Linear(2, 2), str(path))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    if not name.endswith(".safetensors"):
        assert "asks for posix.mkdir" in str(error.value)
    assert not mark.exists()


def test_what_a_file_names_reaches_no_terminal_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"\x80\x02cos\x1b[2J\nsystem\n.")
    save_file({"w\x1b[2J": torch.zeros(1)}, tmp_path / "a.safetensors")
    for name, said in (("a.pt", "asks for os?[2J.system, which"), ("a.safetensors", "(weight, bias, w?[2J, ...)")):
        with pytest.raises(ConfigError) as error:
            load_weights(nn.Linear(2, 2), str(tmp_path / name))
        assert said in str(error.value) and str(error.value).isprintable()


@pytest.mark.slow
def test_the_command_says_so_in_one_line(tmp_path: Path, mark: Path) -> None:
    (tmp_path / "a.pt").write_bytes(payload(mark))
    result = toy(["trainer.init_from=a.pt", "trainer.max_steps=1"], tmp_path, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    assert one_line(result, 78).startswith("echelon: trainer.init_from=a.pt: a.pt: asks for posix.mkdir, which is not")
    assert not mark.exists()


def test_a_pickle_in_a_checkpoint(tmp_path: Path, mark: Path) -> None:
    """With a manifest that vouches for it."""
    evil, state = memoryview(payload(mark)), memoryview(b'{"model": {"weight": {"$tensor": "weight"}}}')
    checkpoint = commit(tmp_path / "run", 1, {"state.json": state, "model.safetensors": evil}, {})
    with pytest.raises(Damaged, match=r"state\.json: can't be read as a state"):
        load_state(checkpoint, ["state.json", "model.safetensors"])
    with pytest.raises(ConfigError, match=r"model\.safetensors: .*; give a whole checkpoint"):
        load_weights(nn.Linear(2, 2), str(checkpoint))
    with pytest.raises(Damaged):
        load_state(commit(tmp_path / "run", 2, {"state.json": evil}, {}), ["state.json"])
    assert not mark.exists()


def test_a_pickle_in_a_shard_is_left_out(tmp_path: Path, mark: Path) -> None:
    """Of each extension that webdataset would unpickle, by itself or by torch."""
    saved, evil = io.BytesIO(), payload(mark)
    torch.save(Payload(mark), saved)
    members = {
        7: ("pyd", evil),
        8: ("pickle", evil),
        9: ("x.pkl", evil),
        10: ("PTH", saved.getvalue()),
        11: ("pt", evil),
    }
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i in range(96):
            for extension, content in [("cls", str(i).encode()), *([members[i]] if i in members else [])]:
                info = tarfile.TarInfo(f"{i:03d}.{extension}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    result = sharded(tmp_path, "a.tar")
    assert result.code == 0, result.err
    told = (tmp_path / "runs" / "r" / "quarantine.jsonl").read_text().splitlines()
    assert len(told) == 5 and all("unpickling can run any code" in line for line in told)
    assert not mark.exists()


WATCH = """
import os, pickle, traceback

def watched(name, real):
    def call(*args, **kwargs):
        with open(os.environ["SEEN"], "a") as file:
            file.write(f"{name}: {''.join(traceback.format_stack(limit=4))}")
        return real(*args, **kwargs)
    return call

for name in ("load", "loads", "_load", "_loads"):
    setattr(pickle, name, watched(name, getattr(pickle, name)))
"""


@pytest.mark.slow
def test_a_run_and_its_resume_unpickle_nothing(tmp_path: Path) -> None:
    """Two ranks, with a callback that keeps something of its own on each. Data workers send pickles to their parent."""
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    seen = tmp_path / "seen"
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PYTHONPATH}", "SEEN": str(seen)}
    words = ["trainer.devices=2", "+callbacks=[grad_compress,ema]", "data.workers=0", "trainer.run_dir=runs/r"]
    for steps in (2, 4):
        result = toy([*words, f"trainer.max_steps={steps}", "trainer.resume=auto"], tmp_path, **env)
        assert result.code == 0, result.err
    assert "resumed from" in result.out
    assert not seen.exists(), seen.read_text()


MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {"exec", "os.system", "os.popen", "torch.save", "torch.jit.load", "yaml.load", "yaml.unsafe_load"}
ARGUMENTS = {("shell", True), ("allow_pickle", True), ("weights_only", False), ("trust_remote_code", True)}


def dotted(node: ast.AST) -> str:
    """Return a name with its attributes, as in a.b.c; empty for another expression."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def runs_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return bool({alias.name for alias in node.names} & MODULES)
    if isinstance(node, ast.ImportFrom):
        return node.module in MODULES
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func)
    given = {(keyword.arg, getattr(keyword.value, "value", None)) for keyword in node.keywords}
    unsafe_load = name == "torch.load" and ("weights_only", True) not in given
    unsafe_eval = name == "eval" and "{'__builtins__': {}}" not in ast.unparse(node)  # config's, of annotations
    of_objects = name.startswith("dist.") and "object" in name  # torch's collectives that send pickles
    return name in CALLS or bool(given & ARGUMENTS) or unsafe_load or unsafe_eval or of_objects


LAUNCH = ROOT / "trainer" / "launch" / "function.py"  # a function, for processes of its own: in memory and back
TESTING = ROOT / "trainer" / "testing" / "ranks.py"  # results of a test's own ranks, in a folder of its own
LIGHTNING = ROOT / "recipes" / "lightning" / "recipe.py"  # writes a checkpoint of Lightning's, and reads none that way


def test_the_source_names_nothing_that_unpickles_or_runs_text() -> None:
    sources = trees("trainer") | trees("recipes") | trees("echelon")
    assert {LAUNCH, LIGHTNING, TESTING} <= sources.keys()
    for path, tree in sources.items():
        found = [ast.unparse(node) for node in ast.walk(tree) if runs_text(node)]
        assert not found or path in (LAUNCH, LIGHTNING, TESTING), path
    assert runs_text(ast.parse("import pickle").body[0])
    for text in (
        "torch.load(x)", "torch.load(x, weights_only=False)", "eval(x)", "dist.all_gather_object(a, b)",
        "run(x, shell=True)", "np.load(x, allow_pickle=True)",
    ):  # fmt: skip
        assert runs_text(ast.parse(text, mode="eval").body), text
    assert not runs_text(ast.parse("torch.load(x, weights_only=True)", mode="eval").body)
