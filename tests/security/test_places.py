"""S3 and S4: URLs that are commands, names and links that lead elsewhere. Nothing outside is run, read or written."""

import io
import json
import logging
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.cli import environment, toy
from support.messages import refuses
from support.untrusted import one_line, sharded
from toy_recipe import Toy

from trainer.checkpoint.commit import commit
from trainer.checkpoint.lock import lock, unlock
from trainer.checkpoint.manifest import Damaged, verify
from trainer.checkpoint.serialize import load_state
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.data.sampling.order import Ref
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.reader import ShardReader
from trainer.data.shards.writer import write_shards
from trainer.errors import ConfigError, DataError
from trainer.process.environment import Place
from trainer.tools.export import export
from trainer.trainer import Trainer

RUN = {"run_dir": "runs/r", "samples": 0, "world": 1, "buckets": [], "ddp": {}}
RUN["identity"] = {"model": "", "optimizer": "", "data": ""}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def outside() -> dict[str, bytes | None]:
    """What is beside the current folder."""
    parent = Path.cwd().parent
    found = [path for path in parent.rglob("*") if not path.is_relative_to(Path.cwd()) and path != Path.cwd()]
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


def make(name: str = "run", **options: Any) -> Trainer:
    checkpoint = CheckpointOptions(dir=options.pop("dir", "ckpt"))
    given = Options(**{"max_steps": 2, "checkpoint": checkpoint, **options})
    return Trainer(Toy(), batch=12, options=given, data=DataOptions(0), place=Place(), name=name)


@pytest.mark.parametrize("shards", [pytest.param("a.tar|mkdir mark", marks=pytest.mark.slow), "$(mkdir mark)"])
def test_a_command_is_no_shard(shards: str) -> None:
    said = one_line(sharded(Path.cwd(), shards, WDS_SECURE="0"), 71)
    assert said.startswith(f"echelon: {shards}: no such file")
    assert not Path("mark").exists()


@pytest.mark.parametrize("shards", ["pipe:mkdir mark", pytest.param("pipe:mkdir mark #a.tar", marks=pytest.mark.slow)])
def test_no_program_is_run_unless_it_may_be(shards: str) -> None:
    said = one_line(sharded(Path.cwd(), shards, WDS_SECURE="0"), 78)
    assert said.startswith(
        f"echelon: data.allow_pipe=false (the default): {shards} is a program, and programs are not run; "
    )
    assert not Path("mark").exists()


STRANGER = """
class Recipe:
    model = loss = export = None
    def data(self, split):
        return "pipe:mkdir mark"
"""


def test_the_config_beside_a_checkpoint_runs_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its recipe was read, and found harmless."""
    make(run_dir="runs/r").fit()
    config = OmegaConf.create(toy(["--cfg", "job"], Path.cwd()).out)
    config.recipe, config.data.allow_pipe = {"_target_": "stranger.Recipe"}, True
    OmegaConf.save(config, "runs/r/config.yaml")
    Path("stranger.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    with refuses("data.allow_pipe=false", "mkdir", "program", "programs", "data.allow_pipe=true"):
        export("ckpt/last.pt", Path("out"), ["trainer.allow_targets=[stranger]"])
    assert not Path("mark").exists()


@pytest.mark.slow
def test_what_would_rewrite_a_url_does_nothing() -> None:
    write_shards(({"__key__": str(i), "cls": i} for i in range(96)), Path(), "a", per_shard=96)
    env = {"GOPEN_REWRITE": "a-000000=pipe:mkdir mark #", "USE_AIS_FOR": "a", "WDS_CACHE": "cache", "WDS_SECURE": "0"}
    result = sharded(Path.cwd(), "a-000000.tar", **env)
    assert result.code == 0, result.err
    assert not Path("mark").exists() and not Path("cache").exists()


def test_webdataset_is_told_to_be_careful(monkeypatch: pytest.MonkeyPatch) -> None:
    from webdataset import gopen as open_url
    from webdataset import utils

    monkeypatch.setattr(utils, "enforce_security", False)
    write_shards([{"__key__": "0", "cls": 0}], Path(), "a", per_shard=1)
    assert utils.enforce_security
    with pytest.raises(ValueError, match="pipe"):
        open_url("pipe:mkdir mark", "rb")
    assert not Path("mark").exists()


def test_names_in_a_tar_are_never_used_as_files() -> None:
    secret = Path("../secret.bin")
    secret.write_bytes(b"private")
    with tarfile.open("a.tar", "w") as tar:
        for name in ("../../up.bin", str(secret.resolve()), "/tmp/x/../y.bin", "a\n\x1b[2J.bin", "~/x.bin"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"own"))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            info = tarfile.TarInfo(f"link{kind.decode()}.bin")
            info.type, info.linkname = kind, str(secret.resolve())
            tar.addfile(info)
    before = outside()
    reader = ShardReader(Index.open([Path("a.tar")]))
    assert [reader.read(Ref(0, 0, i))["bin"] for i in range(reader.index.counts[0])] == [b"own"] * 5
    assert outside() == before
    assert sorted(os.listdir()) == ["a.tar", "a.tar.idx"]


def test_an_index_that_is_no_file_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    write_shards([{"__key__": "0", "cls": 7}], Path(), "a", per_shard=1)
    (shard,) = find_shards("a-*.tar")
    for make_odd in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        make_odd(f"{shard}.idx")
        assert ShardReader(Index.open([shard])).read(Ref(0, 0, 0))["cls"] == 7
        assert "its index can't be read; indexing it again" in caplog.text
        os.unlink(f"{shard}.idx")


@pytest.mark.parametrize("name", ["state.json", "model.safetensors"])
def test_a_link_in_a_checkpoint_is_not_read(name: str) -> None:
    """Nor a file that the manifest doesn't name."""
    make(run_dir="runs/r").fit()
    path = Path("ckpt/r/step-00000002", name)
    names = verify(path.parent)["files"].keys()
    assert load_state(path.parent, names)["model"]
    with pytest.raises(Damaged, match=r"state\.json: can't be read as a state"):
        load_state(path.parent, names - {name})
    path.rename(f"../{name}")
    path.symlink_to(Path("..", name).resolve())
    with pytest.raises(Damaged, match=rf"{name}: is a symbolic link"):
        load_state(path.parent, names)
    with pytest.raises(ConfigError, match=rf"{name}: is a symbolic link"):
        make(run_dir="runs/s", resume="ckpt/r/step-00000002")


def test_the_name_of_a_run_stays_in_its_folder() -> None:
    before = outside()
    for name in ("../../up", "/abs", "..", "a/../../b", "a b\n\x1b"):
        trainer = make(name=name)
        trainer.fit()
        assert trainer.run_dir.parent == Path("runs") and re.fullmatch(
            "[A-Za-z0-9_-][A-Za-z0-9._-]*", trainer.run_dir.name
        )
    assert outside() == before


@pytest.mark.parametrize("run_dir", [".", "..", "runs/..", "/"])
def test_a_folder_without_a_name_is_refused(run_dir: str) -> None:
    before = outside()
    with refuses("trainer.run_dir", "runs/NAME"):
        make(run_dir=run_dir)
    assert outside() == before


@pytest.mark.parametrize("run_dir", ["../elsewhere/r", "ABSOLUTE"])
def test_a_checkpoint_can_not_send_a_run_elsewhere(run_dir: str) -> None:
    """Where it says that its run's folder is, nothing is made. A run that is there goes on."""
    make(run_dir=run_dir.replace("ABSOLUTE", str(Path("../elsewhere/r").resolve()))).fit()
    Path("../elsewhere").rename("../moved")
    before = outside()
    with pytest.raises(
        ConfigError, match=r": the checkpoint names this folder, which holds no run; give another trainer\.run_dir"
    ):
        make(resume="ckpt/r")
    assert outside() == before
    Path("../moved").rename("../elsewhere")
    again = make(resume="ckpt/r", max_steps=3)
    again.fit()
    assert again.step == 3


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "logs/rank0.log",
        "metrics.jsonl",
        "summary.tmp",
        "export/model.bin",
        "export/a/b",
        "tensorboard/a",
    ],
)
def test_nothing_is_written_through_links_in_a_runs_folder(name: str) -> None:
    make(run_dir="runs/r").fit()
    Path("../precious").write_text("precious")
    path = Path("runs/r", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(Path("../precious").resolve())
    with pytest.raises(ConfigError, match=rf"runs/r/{name} is a link, and the run would write to its target"):
        make(resume="ckpt/r", max_steps=3)
    assert Path("../precious").read_text() == "precious"


def test_nothing_is_written_through_a_lock(caplog: pytest.LogCaptureFixture) -> None:
    Path("../precious").write_text("precious")
    Path("run").mkdir()
    Path("run/.lock").symlink_to(Path("../precious").resolve())
    with caplog.at_level(logging.WARNING, "echelon"):
        lock(Path("run"))
    unlock(Path("run"))
    assert Path("../precious").read_text() == "precious" and "can't be locked" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"run_dir": 1}, {"run_dir": None}, {"samples": -1}, {"samples": "1"}, {"world": 10**12}, {"world": 0},
        {"identity": []}, {"identity": {}}, {"buckets": 1}, {"ddp": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_of_something_else_is_refused(wrong: dict[str, Any]) -> None:
    manifest = {key: value for key, value in {**RUN, **wrong}.items() if value is not None}
    commit(Path("ckpt/r"), 1, {"state.json": memoryview(b"{}")}, manifest)
    with refuses("trainer.resume", "valid"):
        make(resume="ckpt/r")


def test_the_manifest_of_a_run_is_not() -> None:
    commit(Path("ckpt/r"), 1, {"state.json": memoryview(b"{}")}, RUN)
    with refuses("trainer.resume", "'trainer.accept=[data]'"):
        make(resume="ckpt/r")


def test_a_shard_that_is_no_file_is_refused() -> None:
    os.mkfifo("a.tar")
    with refuses("a.tar", "'a.tar/*.tar'", kind=DataError):
        Index.open([Path("a.tar")])


@pytest.mark.slow
@pytest.mark.parametrize(("own", "careful"), [({}, "True"), ({"WDS_SECURE": "0"}, "False")])
def test_in_a_command_webdataset_is_careful(own: dict[str, str], careful: str) -> None:
    code = (
        "import sys, trainer.main as command; sys.argv[1:] = ['--version']\n"
        "command.exit_process = print; command.main()\n"
        "from webdataset import utils; print(utils.enforce_security)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=environment(**own), capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[-1] == careful


def test_a_running_job_takes_no_program_from_its_folder() -> None:
    """Whoever may write there leaves requests by all the names that a job once obeyed."""
    words = ["trainer.run_dir=runs/r", "trainer.max_steps=6", "trainer.checkpoint.every_steps=2", "trainer.resume=auto"]
    assert toy([*words, "trainer.max_steps=2"], Path.cwd()).code == 0
    evil = Path("evil/tuned/x.yaml")
    evil.parent.mkdir(parents=True)
    evil.write_text(
        "# @package _global_\ntrainer: {allow_targets: [subprocess]}\n"
        "callbacks: {evil: {_target_: subprocess.call, args: [mkdir, mark]}}\n"
    )
    request = {
        "name": "x",
        "folder": str(evil.parents[1].resolve()),
        "keys": [],
        "ranks": 1,
        "command": ["mkdir", "mark"],
    }
    for name in ("tuned.json", "tuned-taken.json", "tuned-tried.json"):
        Path("runs/r", name).write_text(json.dumps(request))
    done = toy(words, Path.cwd())
    assert done.code == 0 and not Path("mark").exists(), done.err
    assert json.loads(Path("runs/r/summary.json").read_text())["steps"] == 6
