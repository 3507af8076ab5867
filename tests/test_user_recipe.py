"""The recipe of the README, from a folder outside the checkout, in under 40 lines."""

import json

from support.blocks import blocks
from support.cli import ROOT, run


def test_it_trains_validates_and_resumes(tmp_path):
    files = {block.title: block.text for block in blocks("README.md") if block.title}
    assert sum(len(text.splitlines()) for text in files.values()) < 40
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        assert "trainer." not in text
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "text.md").write_text((ROOT / "docs" / "design.md").read_text())
    words = ["--config-dir", "conf", "recipe=next_byte", "trainer.run_dir=runs/mine", "trainer.validate_every=null"]
    done = run([*words, "trainer.max_steps=20"], tmp_path)
    assert done.code == 0, done.err
    first = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    assert first["val/loss"] < 5.5  # of 256 equally likely bytes: 5.545
    done = run([*words, "trainer.resume=ckpt/last.pt", "trainer.max_steps=60"], tmp_path)
    assert done.code == 0, done.err
    again = json.loads((tmp_path / "runs/mine/summary.json").read_text())
    assert (again["steps"], again["samples"]) == (60, 60 * 256)
    assert again["val/loss"] < first["val/loss"]
    assert "The next byte of a folder of Markdown" in run(["--config-dir", "conf", "--help"], tmp_path).out
