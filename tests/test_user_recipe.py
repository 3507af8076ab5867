"""The recipe of the README, from a folder outside the checkout, in under 30 lines."""

import json

from support.blocks import blocks
from support.cli import ROOT, run


def test_it_trains_validates_and_resumes(tmp_path):
    files = {block.title: block.text for block in blocks("README.md") if block.title}
    assert list(files) == ["mine/recipe.py"] and len(files["mine/recipe.py"].splitlines()) < 30
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.py").write_text(files["mine/recipe.py"])
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "text.md").write_text((ROOT / "docs" / "design.md").read_text())
    words = ["recipe=mine/recipe.py", "recipe.text=docs", "batch=256", "trainer.run_dir=runs/mine"]
    done = run([*words, "trainer.max_steps=20"], tmp_path)
    assert done.code == 0, done.err
    first = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    assert first["val/loss"] < 5.5  # of 256 equally likely bytes: 5.545
    done = run([*words, "trainer.resume=ckpt/last.pt", "trainer.max_steps=60"], tmp_path)
    assert done.code == 0, done.err
    again = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    assert (again["steps"], again["samples"]) == (60, 60 * 256)
    assert again["val/loss"] < first["val/loss"]
