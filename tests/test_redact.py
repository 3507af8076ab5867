"""Names of secrets, and the parts of values, URLs and commands that are hidden."""

import base64
import json
import os
from functools import partial
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from support.messages import refuses

from trainer.config.check import check_type
from trainer.errors import printable
from trainer.redact import HIDDEN, is_secret, redact, redact_argument, redact_text, redacted_keys, remember

SIGNED = "https://h/a-{0..9}.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t"


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
    with refuses("recipe.api_key=***"):
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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET http://bob:s3cr3t@h:9/x?token=s3cr3t failed", "GET http://***@h:9/x?*** failed"),
        (
            "retries exceeded with url: /x?token=s3cr3t/api (Caused by",
            "retries exceeded with url: /x?*** (Caused by",
        ),
        ("api_key=s3cr3t, lr=0.1", "api_key=***, lr=0.1"),
        ("AWS_SECRET_ACCESS_KEY='s3 cr3t' lr=0.1", "AWS_SECRET_ACCESS_KEY=*** lr=0.1"),
        ('{"token": "s3cr3t", "step": 3}', '{"token": ***, "step": 3}'),
        ("{'Authorization': 'Basic s3cr3t', 'a': 1}", "{'Authorization': ***, 'a': 1}"),
        ("Authorization: Bearer s3cr3t", "Authorization: ***"),
        ("sent bearer s3cr3ts3cr3ts3cr3t", "sent bearer ***"),
        ("wandb said: bad key s3cr3t_of_wandb; try again", "wandb said: bad key ***; try again"),
        ("loss_per_token=0.5, max_tokens=3, lr=0.1 ok?", "loss_per_token=0.5, max_tokens=3, lr=0.1 ok?"),
        ("recipe.hub_token=s3:cr3t: no such key; give", "recipe.hub_token=***: no such key; give"),
        ("is hidden, a secret; add hub_token=VALUE", "is hidden, a secret; add hub_token=VALUE"),
    ],
)
def test_free_text(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t_of_wandb")
    monkeypatch.setenv("PWD", os.getcwd())
    assert redact_text(f"{os.getcwd()}/a") == f"{os.getcwd()}/a"
    monkeypatch.setenv("HF_TOKEN", "ok")  # too short to be told from other words
    assert redact_text(text) == shown


def test_the_secrets_of_a_config_are_hidden_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a user's client has the value without its key."""
    monkeypatch.setattr("trainer.redact.GIVEN", set())
    store = {"password": "pw of-two", "headers": {"Authorization": "Bearer s3cr3t-head"}, "name": "public-name"}
    remember(
        {"api_key": "s3cr3t-key", "store": store, "url": "postgres://me:s3cr3t-url@h/x", "secret": ["s3cr3t-item"]}
    )
    text = "403 for s3cr3t-key, s3cr3t-head, s3cr3t-url and s3cr3t-item; a bearer of public-name at h/x"
    assert redact_text(text) == "403 for ***, ***, *** and ***; a bearer of public-name at h/x"


def test_a_user_and_password_as_http_sends_them() -> None:
    sent = base64.b64encode(b"bob:s3cr3t").decode()
    assert redact_text(f"bad header Basic {sent}.") == "bad header Basic ***."
    for plain in ("basic authentication failed", "Basic block", "a basic test of BasicBlock"):
        assert redact_text(plain) == plain


@pytest.mark.parametrize("text", ["a" * 300_000, "a." * 150_000, "?" + "sig" * 100_000, "token=" * 50_000])
def test_a_long_line_takes_as_long_as_it_is(text: str) -> None:
    """Quadratic patterns took minutes for a URL of 100 kB; the time limit of all tests is the measure."""
    assert len(redact_text(text)) <= len(text)
    assert len(redact_argument(text)) <= len(text)


KEY = "-----BEGIN KEY-----\nENVs3cr3tAAAA+/=\n  ENVs3cr3tBBBB\n-----END KEY-----\n"
PASSWORD = 'p@ss/s3cr3t"&\u00fc'


@pytest.mark.parametrize(
    "write",
    [
        str,
        repr,
        ascii,
        json.dumps,
        partial(json.dumps, ensure_ascii=False),
        quote,
        partial(quote, safe=""),
        quote_plus,
        lambda value: value.replace("\n", "?"),  # as `printable` does
        lambda value: " | ".join(value.splitlines()),
        lambda value: base64.b64encode(f"user:{value}".encode()).decode(),
        lambda value: base64.urlsafe_b64encode(f"us?r:{value}".encode()).decode().rstrip("="),
    ],
)
def test_secrets_are_hidden_however_a_library_writes_them(write, monkeypatch):
    monkeypatch.setenv("DEPLOY_PRIVATE_KEY", KEY)
    monkeypatch.setattr("trainer.redact.GIVEN", set())
    remember({"password": PASSWORD, "private_key": KEY.replace("ENV", "CFG")})
    for value in (KEY, KEY.replace("ENV", "CFG"), PASSWORD):
        shown = redact_text(f"step 3: could not connect with {write(value)}; trying again")
        assert shown.startswith("step 3: could not connect with ") and shown.endswith("; trying again")
        assert "s3cr3t" not in shown and write("ENVs3cr3tBBBB")[:14] not in shown and HIDDEN in shown


def test_the_password_of_a_url_in_any_variable_is_hidden_and_the_shells_folder_is_not(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgres://app:s3cr3tDB@db:5432/prod")
    monkeypatch.setenv("PWD", "/removed/folder")
    assert redact_text("login with s3cr3tDB failed in /removed/folder") == "login with *** failed in /removed/folder"


def test_a_password_that_is_no_utf_8_is_hidden_as_text_and_as_bytes(monkeypatch):
    sent = b"b\xffad_bytes"  # Latin-1
    monkeypatch.setenv("X_PASSWORD", value := os.fsdecode(sent))
    for text in (value, printable(value), repr(value), repr(sent), quote(sent), json.dumps(value)):
        assert "ad_bytes" not in redact_text(f"login with {text} failed")
    assert redact_text(base64.b64encode(b"user:" + sent).decode()) == HIDDEN


def test_a_password_that_is_a_key_or_a_projects_folder_leaves_messages_readable(monkeypatch, tmp_path):
    (folder := tmp_path / "kitchen").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("POSTGRES_PASSWORD", "trainer")
    monkeypatch.setenv("REDIS_PASSWORD", "kitchen")
    line = f"echelon --config-dir {folder} trainer.resume=ckpt/r"
    assert redact_text(line) == line
    assert redact_text("POSTGRES_PASSWORD=trainer") == "POSTGRES_PASSWORD=***"
