"""Echelon deletes and replaces only what it made itself, in every folder that a user can name."""

import gzip
import itertools
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from shard_recipe import write_points
from support.cli import ROOT, run
from support.messages import refuses

from recipes.cache import build_once
from trainer.annotated import kinds_of
from trainer.checkpoint.commit import begin, commit
from trainer.checkpoint.lock import Claim
from trainer.checkpoint.retention import retain
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.config.schema import constant
from trainer.config.targets import named_in_conf
from trainer.data.remote.eviction import FOLDER, MARKER, evict, make_folder
from trainer.data.shards.writer import write_shards
from trainer.errors import ConfigError
from trainer.process.temporary import sweep
from trainer.tools.tune.journal import Journal
from trainer.tools.tune.overlay import refuse_others

KEY = "0123456789abcdef" * 4
FILES = [
    *(".bashrc", ".netrc", "thesis.tex", ".part-thesis", f".part-{KEY[1:]}", KEY[1:], f"{KEY}0", KEY.upper()),
    *(f"{KEY}.bak", f"{KEY}.tmp", ".0123456789abcdef.tmp", ".echelon-0123.tmp", ".echelon-0123456789abcdef.tmp~"),
    *(
        ".tmpa1B2c3",
        "a.part",
        "p-000000.part",
        "x.partial",
        ".last.pt-other",
        ".best.pt-r",
        "events.txt",
        "__init__.py",
    ),
]
FOLDERS = [".tmp-mine", ".tmp-00000001", ".tmp-00000001-x", ".old-mine", ".old-step-1-1", ".trash-mine", ".trash-"]
RECIPE = """
from pathlib import Path
import torch
from shard_recipe import Tars

class Mine(Tars):
    def predict(self, model, batch):
        return {"y": model(batch["x"])}

    def export(self, model, folder):
        (folder / "model.txt").write_text("exported")
"""


def plant(folder: Path, links: bool = True) -> dict[str, Any]:
    """Put files of a user's into a folder, old ones, and links to others. Return what they are."""
    outside = Path("outside").absolute()
    (outside / "folder").mkdir(parents=True, exist_ok=True)
    (outside / "folder" / KEY).write_text("precious")
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("" if name == "__init__.py" else f"precious {name}" * 500)
    for name in FOLDERS:
        (folder / name).mkdir()
        (folder / name / "precious").write_text(name)
    if links:
        (folder / "link").symlink_to(outside / "folder" / KEY)
        (folder / ".link").symlink_to(outside / "folder")
        (folder / ".tmp-00000003-1").symlink_to(outside / "folder")
        (folder / ".trash-step-00000001-0a1b2c3d").symlink_to(outside / "folder")
        (folder / f".part-{'f' * 64}").symlink_to(outside / "folder" / KEY)
        (folder / ("f" * 64)).symlink_to(outside / "folder" / KEY)
    if not os.getuid():
        for name in FILES[::3]:
            os.chown(folder / name, 1234, 1234)
    own = [folder / name for name in (*FILES, *FOLDERS)] + [
        path for path in folder.iterdir() if path.is_symlink() and path.name != "last.pt"
    ]
    for path in own:
        os.utime(path, (1, 1), follow_symlinks=False)
    return look([*own, outside / "folder", outside / "folder" / KEY])


def look(paths: Any) -> dict[str, Any]:
    return {str(path): about(Path(path)) for path in paths}


def about(path: Path) -> Any:
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode):
        content: Any = sorted((each.name, each.read_bytes()) for each in path.iterdir())
    else:
        content = os.readlink(path) if path.is_symlink() else path.read_bytes()
    return stat.filemode(found.st_mode), found.st_uid, found.st_ino, content


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


# Where the test below puts a user's files: the folders that each key names, and those that runs and tools have anyway.
WRITTEN = {
    "trainer.run_dir": ["runs/r", "runs/r/logs", "runs/r/export"],
    "trainer.checkpoint.dir": ["ckpt", "ckpt/r"],
    "data.cache_dir": ["cache", f"cache/{FOLDER}", "home/.cache/echelon"],
    "recipe.cache": [],  # test_a_recipes_cache_replaces_what_it_built
}
FIXED = ["runs", "home", "out"]  # the second is the user's own; a stranger's config names it
READ = {"trainer.resume", "trainer.init_from"}  # keys of which nothing is written
READ |= {f"recipe.{name}" for name in ("text", "train", "val", "model", "data", "val_data")}


def path_keys() -> set[str]:
    """The keys that are paths: local ones of the options, by annotation, and those that recipes list as `paths`."""
    sections = {"trainer.": Options, "trainer.checkpoint.": CheckpointOptions, "data.": DataOptions}
    found = {
        f"{section}{name}"
        for section, options in sections.items()
        for name, kind in kinds_of(options).items()
        if "Local()" in str(kind)
    }
    recipes = (constant(target, "paths") or () for target in named_in_conf() if target.startswith("recipes."))
    return found | {f"recipe.{name}" for names in recipes for name in names}


def test_each_key_that_is_a_path_is_tried_or_only_read() -> None:
    assert path_keys() == WRITTEN.keys() | READ


def test_runs_and_tools_leave_a_users_files_alone() -> None:
    """Checkpoints are replaced, shards evicted, leftovers swept meanwhile; evaluate has a stranger's config."""
    cwd = Path.cwd()
    for path in write_points(Path("data")):
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    Path("mine.py").write_text(RECIPE)
    allow = "trainer.allow_targets=[mine,shard_recipe,toy_recipe]"
    words = ["--config-dir", str(ROOT / "tests/toy/conf"), "recipe=tars", "recipe._target_=mine.Mine", allow]
    words += ["recipe.shards='data/p-*.tar.gz'", "~callbacks.tensorboard", "trainer.run_dir=runs/r", "batch=12"]
    words += ["data.workers=0", "trainer.checkpoint.every_steps=1", "trainer.checkpoint.keep=2"]
    words += ["data.cache_dir=cache", "data.cache_gb=0.0001", "trainer.resume=auto", "trainer.validate_every=null"]
    assert run([*words, "trainer.max_steps=2"], cwd).code == 0
    planted: dict[str, Any] = {}
    for place in (*FIXED, *itertools.chain(*WRITTEN.values())):
        planted |= plant(Path(place), links=not place.startswith("runs/r"))
    del planted["runs/r/export/.tmpa1B2c3"]  # safetensors gives such names there, as the run exports
    Path("ckpt/best.pt").symlink_to(cwd / "outside")
    planted |= look(["ckpt/best.pt"])
    unused = Path("cache", FOLDER, KEY)
    unused.write_text("a shard of another run")
    for path in Path("cache", FOLDER).glob("[0-9a-f]*.idx"):
        path.with_suffix("").unlink()  # downloaded again
    done = run([*words, "trainer.max_steps=8"], cwd)
    assert done.code == 0, done.err
    assert look(planted) == planted
    assert len(list(Path("ckpt/r").glob("step-*"))) == 2 and not unused.exists()  # retained, evicted

    config = OmegaConf.load("runs/r/config.yaml")
    config.data.cache_dir, config.data.cache_gb = "~", 0.00001
    OmegaConf.save(config, "runs/r/config.yaml")
    for tool, *more in (["evaluate", "--split", "train"], ["predict", "--split", "train", "--output", "out/p.jsonl"]):
        done = run(["ckpt/last.pt", *more, allow], cwd, f"trainer.tools.{tool}", HOME=str(cwd / "home"))
        assert done.code == 0, done.err
    done = run(["ckpt/last.pt", "exported", allow], cwd, "trainer.tools.export", HOME=str(cwd / "home"))
    assert done.code == 0, done.err
    done = run(["report", "runs/r", "--out", "out/report.html"], cwd)
    assert done.code == 0, done.err
    assert look(planted) == planted and not Path("home", FOLDER).exists()
    assert list(Path("home/.cache/echelon/shards", FOLDER).iterdir())  # the default, of this user


def test_an_eviction_touches_shards_alone() -> None:
    """Names of ours go, whatever the sizes; links with such names stay, and so does what they lead to."""
    place = Path("cache", FOLDER)
    make_folder(place)
    planted = plant(place)
    for name in (KEY, f".part-{KEY}"):
        (place / name).write_text("a shard" * 1000)
    assert evict(place, 0, 0.0) == 0
    assert look(planted) == planted and not (place / KEY).exists() and not (place / f".part-{KEY}").exists()


@pytest.mark.parametrize("kind", ["files", "link", "marker"])
def test_a_folder_of_shards_that_echelon_did_not_make_is_refused(kind: str) -> None:
    place = Path("cache", FOLDER)
    place.parent.mkdir()
    planted = plant(Path("other"))
    if kind == "link":
        make_folder(Path("made"))
        place.symlink_to("../made")
    else:
        Path("other").rename(place)
        planted = {name.replace("other/", f"{place}/"): each for name, each in planted.items()}
    if kind == "marker":
        (place / MARKER).symlink_to("thesis.tex")
        planted |= look([place / MARKER])
    with pytest.raises(OSError, match="is a link; remove it" if kind == "link" else "no CACHEDIR.TAG of Echelon's"):
        make_folder(place)
    assert look(planted) == planted


def test_a_folder_of_shards_alone_is_marked_again() -> None:
    """A program that deletes old files has deleted the marker, which nobody reads."""
    place = Path("cache", FOLDER)
    make_folder(place)
    for name in (KEY, f"{KEY}.idx", f".part-{KEY}", ".lock"):
        (place / name).write_text("old")
    (place / MARKER).unlink()
    make_folder(place)
    assert (place / MARKER).is_file()
    (place / MARKER).unlink()
    (place / f"{KEY}.tex").write_text("precious")
    with pytest.raises(OSError, match=r"holds files, and no CACHEDIR\.TAG of Echelon's"):
        make_folder(place)
    assert not (place / MARKER).exists()


def test_checkpoints_delete_their_own_files_alone() -> None:
    """Also where a user has put files into a checkpoint, or has a folder or a link of a checkpoint's name."""
    run_dir = Path("ckpt/r")
    planted = plant(run_dir) | plant(Path("ckpt"))
    (run_dir / "step-00000003").mkdir()
    (run_dir / "step-00000003" / "thesis").write_text("precious")
    for step in (1, 2, 3, 4, 5):
        commit(run_dir, step, {"state.json": memoryview(b"{}")}, {"metrics": {}})
        if step == 1:
            (run_dir / "step-00000001" / "notes.txt").write_text("precious")
    retain(run_dir, 2, None, None)
    commit(run_dir, 6, {"state.json": memoryview(b"{}")}, {"metrics": {}})
    assert look(planted) == planted and (run_dir / "step-00000001" / "notes.txt").read_text() == "precious"
    assert [path.name for path in sorted(run_dir.glob("step-*"))] == [f"step-0000000{n}" for n in (1, 4, 5, 6)]
    aside = next(run_dir.glob(".bad-step-00000003-*"))
    assert (aside / "thesis").read_text() == "precious"


def test_a_replaced_checkpoint_with_a_users_file_stays() -> None:
    """Of one that has no other file, nothing stays, also if a process was killed before the deletion."""
    run_dir, content = Path("ckpt/r"), {"state.json": memoryview(b"{}")}
    for name in ("notes.txt", None):
        made = commit(run_dir, 1, content, {})
        if name:
            (made / name).write_text("precious")
        made = commit(run_dir, 1, content, {})
        begin(run_dir)
        assert sorted(path.name for path in made.iterdir()) == ["MANIFEST.json", "state.json"]
    (aside,) = run_dir.glob(".*step-*")
    assert aside.name.startswith(".abandoned-step-00000001-") and (aside / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize("odd", ["__init__.py", "logs/mine", "logs/rank0.txt", "empty/", "logs/link"])
def test_a_claim_that_wrote_nothing_removes_no_others_files(odd: str) -> None:
    """Empty ones, a folder, a link."""
    Path("outside").mkdir()
    for folder in (Path("ckpt/r"), Path("runs/r")):
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "rank0.log").touch()
    path = Path("runs/r", odd)
    path.mkdir() if odd.endswith("/") else path.symlink_to("/") if odd.endswith("link") else path.touch()
    Claim(Path("ckpt/r"), Path("runs/r")).close()
    assert os.path.lexists(path) and not Path("ckpt").joinpath("r").exists()


@pytest.mark.parametrize("key", ["trainer.run_dir", "trainer.checkpoint.dir"])
def test_a_lock_of_others_is_refused(key: str) -> None:
    place = Path("runs/r") if key == "trainer.run_dir" else Path("ckpt/r")
    place.mkdir(parents=True)
    (place / ".lock").write_text("precious")
    with pytest.raises(
        ConfigError, match=rf"^{key}=\S+: \S+/\.lock is a file that Echelon did not write; give another"
    ):
        Claim(Path("ckpt/r"), Path("runs/r"))
    assert (place / ".lock").read_text() == "precious"


def test_a_lock_that_a_power_loss_has_filled_with_zeros_is_ours() -> None:
    for place in (Path("runs/r"), Path("ckpt/r")):
        place.mkdir(parents=True)
        (place / ".lock").write_bytes(bytes(19))
    Claim(Path("ckpt/r"), Path("runs/r")).close()


def test_last_pt_of_others_stays() -> None:
    """A checkpoint of another trainer, say."""
    from trainer.checkpoint.commit import link

    made = commit(Path("ckpt/r"), 1, {"state.json": memoryview(b"{}")}, {})
    planted = {}
    for name in ("last.pt", ".best.pt-r"):
        Path("ckpt", name).write_text("precious")
        planted |= look([f"ckpt/{name}"])
    for name in ("last.pt", "best.pt"):
        with pytest.raises(FileExistsError, match="is no link to a checkpoint, and stays; rename it"):
            link(made, name)
    assert look(planted) == planted


@pytest.mark.parametrize("name", ["made", "made.partial"])
@pytest.mark.parametrize("kind", ["link", "folder", "link inside"])
def test_a_recipes_cache_replaces_what_it_built_alone(name: str, kind: str) -> None:
    planted = plant(Path("cache")) | plant(Path("others"))
    path = Path("cache", name)
    if kind == "link":
        path.symlink_to("../others")
    else:
        path.mkdir()
        (path / "a").symlink_to("../../others/thesis.tex") if kind == "link inside" else (path / "sub").mkdir()

    def write(partial: Path) -> None:
        partial.mkdir()
        (partial / "thesis.tex").write_text("built")

    with refuses("recipe.cache=cache", "Echelon's", "move"):
        build_once(Path("cache/made"), "test", lambda place: False, write)
    assert look(planted) == planted and os.path.lexists(path)


def test_a_recipes_cache_replaces_what_it_built() -> None:
    planted = plant(Path("cache"))
    for name in ("made", "made.partial"):
        Path("cache", name).mkdir()
        Path("cache", name, "a").write_text("damaged")
    build_once(Path("cache/made"), "test", lambda place: False, lambda partial: partial.mkdir())
    assert look(planted) == planted and list(Path("cache/made").iterdir()) == []


def test_shards_and_tuned_configs_replace_no_others_files() -> None:
    planted = plant(Path("out")) | plant(Path("conf/tuned"))
    for name in ("b.yaml", "b.jsonl"):
        Path("conf/tuned", name).write_text("precious: 1\n")
        planted |= look([f"conf/tuned/{name}"])
    write_shards([{"__key__": "a", "cls": 1}], Path("out"), "p", 1)
    with refuses("conf/tuned/b.yaml", "tune.name"):
        refuse_others(Path("conf"), "b")
    with refuses("conf/tuned/b.jsonl", "tune.name"):
        Journal(Path("conf/tuned/b.jsonl"), {})
    assert look(planted) == planted


def test_temporary_folders_of_others_stay() -> None:
    """A folder is swept if its run has marked it, on this host, and has ended."""
    planted = plant(Path("tmp"))
    for name in ("echelon-mine", "echelon-"):
        Path("tmp", name).mkdir()
        Path("tmp", name, "precious").touch()
    sweep(Path("tmp"))
    assert look(planted) == planted and all(
        Path("tmp", name, "precious").exists() for name in ("echelon-mine", "echelon-")
    )
    shutil.rmtree("tmp")
