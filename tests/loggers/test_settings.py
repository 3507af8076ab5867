"""The settings that loggers show are those of the run's config.yaml, by dotted key."""

from support.runs import make

from trainer.loggers.settings import settings_of


def test_the_config_by_dotted_keys(tmp_path):
    trainer = make()
    made = settings_of(trainer)  # in Python: no config
    assert made["batch"] == 12 and made["trainer.max_steps"] == 4 and made["trainer.clip_norm"] == "null"
    file = trainer.run_dir / "config.yaml"
    file.write_text("batch: 8\nrecipe: {token: '***', widths: [1, 2], dropout: 1.0e-05, none: null}\n")
    assert settings_of(trainer) == {
        "batch": 8, "recipe.token": "***", "recipe.widths": "[1, 2]", "recipe.dropout": 1e-5, "recipe.none": "null"
    }  # fmt: skip
    trainer.close()
