"""Values of keys that are named like secrets: the recipe gets them, no file and no line of a run has them."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.cli import PYTHONPATH, TOY, Result, run

from trainer.config.check import check_node, check_type, check_values, stage_node
from trainer.config.redact import is_secret, redact, redact_argument, redacted_keys
from trainer.config.schema import Knob
from trainer.data.shards.discover import find_shards
from trainer.errors import ConfigError, DataError
from trainer.tools.export import read_config

RECIPE = """
from pathlib import Path
from safetensors.torch import save_file
from toy_recipe import Toy

class Private(Toy):
    def __init__(self, hub_token: str, store: dict, source: str, proxy: str, **rest):
        super().__init__(**rest)
        assert (hub_token, store["password"], store["user"]) == ("s3cr3t-one", "s3cr3t-two", "me"), hub_token
        assert proxy == "pipe:curl https://u:s3cr3t@h/x", proxy
        assert source == "https://h/a-{0..9}.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t", source

    def export(self, model, folder):
        save_file(model.state_dict(), folder / "weights.safetensors")
"""
SIGNED = "https://h/a-{0..9}.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t"
WORDS = [
    *TOY, "trainer.allow_targets=[toy_recipe,private]", "recipe._target_=private.Private", "trainer.run_dir=runs/r",
    "recipe.hub_token=s3cr3t-one", "recipe.store={user: me, password: s3cr3t-two}", "trainer.devices=2",
    f"recipe.source='{SIGNED}'", "recipe.proxy='pipe:curl https://u:s3cr3t@h/x'",
]  # fmt: skip
TRUSTED = "trainer.allow_targets=[toy_recipe,private]"

SECRET = (
    "token hf_token recipe.hub_token api_key apiKey OPENAI_API_KEY secret aws_secret_access_key access_key_id password "
    "db_password client_secret passphrase Authorization Proxy-Authorization bearer auth basic_auth pwd db_pwd cookie "
    "session_cookies dsn sentry_dsn connection_string connectionString sas sas_url hf_tokens X-Api-Key developer_token "
    "account_key myPassword credentials"
)
PLAIN = (
    "tokenizer tokens tokens_per_sample max_tokens new_tokens loss_per_token mask_token padToken key key_id monkey "
    "keep_every vocab secretary author kansas"
)


@pytest.mark.parametrize("name", SECRET.split())
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", PLAIN.split())
def test_other_names(name: str) -> None:
    assert not is_secret(name)


def test_configs_and_words() -> None:
    config: dict[str, Any] = {
        "a": {"password": 7, "token": None, "b": [{"api_key": "x", "c": "y"}]},
        "secret": {"d": 1},
    }
    stored = redact(config)
    assert stored == {"a": {"password": "***", "token": None, "b": [{"api_key": "***", "c": "y"}]}, "secret": "***"}
    assert redacted_keys(stored) == ["a.password", "a.b.0.api_key", "secret"] and config["a"]["password"] == 7
    for word, shown in (
        ("recipe.hub_token=a,b", "recipe.hub_token=***"),
        ("recipe.store={user: me, password: x y}", "recipe.store={user: me, password: ***}"),
        ("+a={b: [{token: 'x,y'}], c: 1}", "+a={b: [{token: ***}], c: 1}"),
        ("a={x-api-key: x, 'Authorization': 'Bearer y'}", "a={x-api-key: ***, 'Authorization': ***}"),
        ("optimizer.lr=1e-3", "optimizer.lr=1e-3"),
        ("~callbacks.progress", "~callbacks.progress"),
    ):
        assert redact_argument(word) == shown
    with pytest.raises(ConfigError, match=r"recipe\.api_key=\*\*\*: must be int, not str"):
        check_type("recipe.api_key", "s3cr3t", int)


def test_queries_of_signed_urls() -> None:
    """Azure's, Amazon's, Google's; a version of an object is no secret."""
    plain = "https://h/a.tar?versionId=3"
    for url in (
        SIGNED,
        "https://h/a.tar?sv=1&sig=s3cr3t",
        "gs://b/a.tar?x-goog-credential=s3cr3t",
        "s3://b/a?key=s3cr3t",
    ):
        hidden = f"{url.partition('?')[0]}?***"
        stored = redact({"shards": url, "several": [plain, url], "n": 1})
        assert stored == {"shards": hidden, "several": [plain, hidden], "n": 1}
        assert redacted_keys(stored) == ["shards", "several"]
        assert redact_argument(f"recipe.shards='{url}'") == f"recipe.shards='{hidden}'"
        assert redact_argument(f"recipe.shards=['{plain}','{url}']") == f"recipe.shards=['{plain}','{hidden}']"
        assert "s3cr3t" not in redact_argument(f"recipe.shards=[{url},{plain}]")
    assert redact([plain]) == [plain] and redact_argument(f"a={plain}") == f"a={plain}"


def test_users_and_passwords_in_urls() -> None:
    for text, hidden in (
        ("pipe:curl -s https://u:s3cr3t@h/x -o -", "pipe:curl -s https://***@h/x -o -"),
        ("http://me:s3cr3t@proxy", "http://***@proxy"),
        ("postgres://u:s3cr3t@h:5432/db?sslmode=on", "postgres://***@h:5432/db?sslmode=on"),
        ("redis://:s3cr3t@h", "redis://***@h"),
        ("mongodb+srv://u:s3@cr3t@h/x", "mongodb+srv://***@h/x"),
        ("https://s3cr3t@h/a b.tar?sig=s3cr3t", "https://***@h/a b.tar?***"),
    ):
        assert redact({"a": [text]}) == {"a": [hidden]} and redacted_keys({"b": hidden}) == ["b"]
        assert redact_argument(f"recipe.a='{text}'") == f"recipe.a='{hidden}'"
    for plain in ("hf://datasets/a@main/b.tar", "https://h/@me", "me@h", "(?P<key>.*)=", "s3://b/a.tar?versionId=3"):
        assert redact(plain) == plain and redacted_keys({"a": plain}) == []


def test_a_value_is_printed_without_them() -> None:
    """Where its key is mistyped, or its type is another."""
    store = {"user": "me", "password": "s3cr3t"}
    told = r"^a\.stor=\{'user': 'me', 'password': '\*\*\*'\}: no such key"
    with pytest.raises(ConfigError, match=told):
        check_values("a", {"stor": store}, {"store": Knob(dict)})
    with pytest.raises(ConfigError, match=r"^a\.shrads=https://h/a-\{0\.\.9\}\.tar\?\*\*\*: no such key"):
        check_values("a", {"shrads": SIGNED}, {"shards": Knob(str)})
    with pytest.raises(ConfigError, match=r"^a=https://\*\*\*@h: must be int, not str"):
        check_type("a", "https://u:s3cr3t@h", int)
    for call in (lambda: check_node("recipe", store, ()), lambda: stage_node("data.map.0", store)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert "s3cr3t" not in str(caught.value)


def test_a_line_about_a_pattern_has_none() -> None:
    for pattern in ("https://h/a{0.tar?sig=s3cr3t", "ftp://u:s3cr3t@h/a.tar?sig=s3cr3t", "HTTP://h/{a,b}?token=s3cr3t"):
        with pytest.raises(DataError) as caught:
            find_shards(pattern)
        assert "s3cr3t" not in str(caught.value)


def private(words: list[str], cwd: Path, command: list[str] | None = None, **env: str) -> Result:
    return run(words, cwd, command, PYTHONPATH=f"{cwd}{os.pathsep}{PYTHONPATH}", TMPDIR=str(cwd / "tmp"), **env)


def test_a_run_keeps_its_secrets_to_itself(tmp_path: Path) -> None:
    """In no file that stays, no line, and no argument of a rank; a resume and an export go on as always."""
    (tmp_path / "private.py").write_text(RECIPE)
    (tmp_path / "tmp").mkdir()
    for steps in (2, 4):
        result = private([*WORDS, f"trainer.max_steps={steps}", "trainer.resume=auto"], tmp_path)
        assert result.code == 0, result.err
        assert "s3cr3t" not in result.out + result.err and "recipe.hub_token=***" in result.out
        assert "'recipe.source='\"'\"'https://h/a-{0..9}.tar?***" in result.out
    assert "ckpt/r/step-00000002 at step 2" in result.out
    files = [path for folder in ("runs", "ckpt", "tmp") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if b"s3cr3t" in path.read_bytes()]
    config = OmegaConf.load(tmp_path / "runs" / "r" / "config.yaml")
    assert (config.recipe.hub_token, config.recipe.store) == ("***", {"user": "me", "password": "***"})

    export = [sys.executable, "-m", "trainer.tools.export", "ckpt/last.pt", "out", TRUSTED]
    refused = private([], tmp_path, export)
    assert (refused.code, refused.err) == (
        78,
        "echelon: CHECKPOINT=ckpt/last.pt: runs/r/config.yaml has no recipe.hub_token, recipe.store.password, "
        "recipe.source, recipe.proxy, as a secret; add recipe.hub_token=VALUE\n",
    )
    given = ["recipe.hub_token=s3cr3t-one", "recipe.store.password=s3cr3t-two", f"recipe.source={SIGNED}"]
    given += ["recipe.proxy=pipe:curl https://u:s3cr3t@h/x"]
    assert private(given, tmp_path, export).code == 0
    assert (tmp_path / "out" / "weights.safetensors").exists()


def test_values_of_the_environment_are_compared_and_secrets_among_them_hidden(tmp_path: Path) -> None:
    """`${oc.env:NAME}` is resolved once, as a run begins: a resume with another value tells both."""
    (tmp_path / "private.py").write_text(RECIPE)
    words = [*WORDS[:-3], *WORDS[-2:], "recipe.hub_token=${oc.env:HUB}", "optimizer.lr='${oc.decode:${oc.env:LR}}'"]
    for steps, rate in ((2, "0.01"), (4, "0.02")):
        given = [*words, "trainer.devices=1", f"trainer.max_steps={steps}", "trainer.resume=auto"]
        result = private(given, tmp_path, HUB="s3cr3t-one", LR=rate)
        assert result.code == 0, result.err
    assert "optimizer.lr was 0.01 and is 0.02" in result.out
    config = OmegaConf.load(tmp_path / "runs" / "r" / "config.yaml")
    assert (config.recipe.hub_token, config.optimizer.lr) == ("***", 0.02)
    files = [path for folder in ("runs", "ckpt") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert not [path for path in files if b"s3cr3t" in path.read_bytes()]


def test_an_export_reads_no_variable_that_a_config_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config may be a stranger's, who would find the value in what is exported."""
    monkeypatch.setenv("S3CR3T", "s3cr3t")
    (tmp_path / "config.yaml").write_text("recipe: {vocab: '${oc.env:S3CR3T}'}")
    settings = read_config(tmp_path / "config.yaml", ["recipe.cache=here"], "CHECKPOINT=x")
    assert settings["recipe"] == {"vocab": "${oc.env:S3CR3T}", "cache": "here"}


def test_what_hydra_would_write_of_a_multirun_goes(tmp_path: Path) -> None:
    words = ["-m", "batch=12,24", "recipe.hub_token=s3cr3t-one", "+recipe.store={password: s3cr3t-two}"]
    result = private([*TOY, *words], tmp_path)
    assert (result.code, result.err) == (
        78,
        "echelon: recipe.hub_token=***: no such key; there are depth, dropout, dtype, samples, width\n",
    )
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
