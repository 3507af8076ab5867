"""Shards that a program writes: run as it is named, without a shell; one that fails, hangs or is cut gives no shard."""

import gzip
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.cli import environment
from support.faults import alive
from support.shards import samples

from trainer import timeouts
from trainer.config.options import DataOptions
from trainer.data.remote.download import download, shown
from trainer.data.remote.eviction import FOLDER
from trainer.data.shards.discover import find_shards
from trainer.data.shards.index import Index
from trainer.data.shards.writer import write_shards
from trainer.errors import ConfigError, DataError, UnavailableError

SHARDS, EACH = 3, 6


@pytest.fixture(autouse=True)
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(timeouts, "SERVER_PAUSES_S", (0.01, 0.02, 0.03))
    monkeypatch.setattr(timeouts, "FIRST_DOWNLOAD_S", 0.5)
    rng = random.Random(0)
    samples = ({"__key__": f"{i:03d}", "bin": rng.randbytes(40_000), "cls": i} for i in range(SHARDS * EACH))
    return write_shards(samples, Path("data"), "s", per_shard=EACH)


def opened(data: Any, **more: Any) -> Index:
    return Index.open(find_shards(data, DataOptions(allow_pipe=True, cache_dir="cache", **more)), workers=1)


def program(text: str) -> str:
    """Its first argument is a shard. `$n` is how often it was started."""
    count = 'echo $$ >> started; n=$(wc -l < started); n=$((n)); half() { head -c 100000 "$1"; }\n'
    Path("program").write_text(count + text)
    return "pipe:sh program data/s-000000.tar"


def started() -> list[int]:
    return [int(pid) for pid in Path("started").read_text().split()]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kept() -> list[str]:
    return sorted(
        path.name
        for path in Path("cache", FOLDER).iterdir()
        if path.suffix not in (".idx", ".TAG") and path.name != ".lock"
    )


def test_samples_are_those_of_the_files(shards: list[Path]) -> None:
    local = Index.open(shards)
    index = opened("pipe:cat data/s-{000000..000002}.tar")
    assert samples(index) == samples(local) and index.counts == local.counts
    assert [path.sha256 for path in index.shards] == [path.sha256 for path in local.shards] and len(kept()) == SHARDS
    Path("a.gz").write_bytes(gzip.compress(shards[0].read_bytes()))
    assert samples(opened(["pipe:cat a.gz", str(shards[1]), "pipe:gzip -dc a.gz"])) == samples(
        Index.open([shards[1]])
    ) + 2 * samples(Index.open(shards[:1]))


def test_refused_where_no_program_is_allowed() -> None:
    reason = r"^data\.allow_pipe=false: pipe:cat a\.tar is a program, and .*; .* set data\.allow_pipe=true, or "
    for data in ("pipe:cat a.tar", ["data/s-000000.tar", "pipe:cat a.tar"]):
        with pytest.raises(ConfigError, match=reason):
            find_shards(data)
    Path("pipe:cat a.tar").touch()
    assert find_shards("pipe:cat a.tar") == [Path("pipe:cat a.tar")]  # a file is a file, and is not run


@pytest.mark.parametrize("name", ["pipe:touch mark #.tar.gz", "pipe:touch mark.tar.xz"])
def test_a_file_is_never_run(name: str, shards: list[Path]) -> None:
    Path(name).write_bytes(gzip.compress(shards[0].read_bytes()))
    assert samples(opened(name)) == samples(Index.open(shards[:1]))
    assert not list(Path().glob("mark*"))


@pytest.mark.parametrize(
    "words", ["echo $(touch mark)", "echo `touch mark`", "echo a; touch mark", "echo a | touch mark", "echo a > mark"]
)
def test_no_shell_reads_it(words: str) -> None:
    with pytest.raises(DataError, match=r"pipe:echo .*: .* not a plain tar"):
        opened(f"pipe:{words}")
    assert not Path("mark").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [("", "names no program"), ("cat 'a", r"can't be split into words \(No closing quotation\); quote as")],
)
def test_what_is_no_command_is_one_line(words: str, reason: str) -> None:
    with pytest.raises(DataError, match=rf"^pipe:{words}: {reason}"):
        opened(f"pipe:{words}")


def test_a_program_that_is_not_there_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "SERVER_PAUSES_S", ())
    for words in ("no-such-program a", "./data a"):
        with pytest.raises(
            DataError, match=rf"^pipe:{words}: \[Errno \d+\] .*; give a shard that exists and may be read$"
        ):
            opened(f"pipe:{words}")


@pytest.mark.parametrize(
    "text",
    [
        'half "$1"; [ $n = 3 ] || exit 3; tail -c +100001 "$1"',  # after some
        'cat "$1"; [ $n = 3 ]',  # after all
        '[ $n = 3 ] || kill -9 $$; cat "$1"',
    ],
)
def test_a_failure_is_tried_again(text: str, shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "FIRST_DOWNLOAD_S", 20)
    assert samples(opened(program(text))) == samples(Index.open(shards[:1]))
    assert len(started()) == 3 and len(kept()) == 1


def test_one_that_always_fails_is_one_line() -> None:
    url = program('cat "$1"; echo first >&2; printf "last: \\033[2J https://u:pw@host/a?key=secret\\r\\n" >&2; exit 22')
    with pytest.raises(UnavailableError) as caught:
        opened(url + " https://u:pw@host/a?key=secret")
    told = "pipe:sh program data/s-000000.tar https://host/a: exit code 22 (last: ?[2J https://host/a), tried "
    assert str(caught.value).startswith(told) and str(caught.value).endswith(" s; check the program, then resume")
    assert len(started()) > 2 and kept() == []


def test_one_that_hangs_is_killed_with_what_it_started(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "SERVER_S", 2.0)  # also for the second to begin, on a busy machine
    monkeypatch.setattr(timeouts, "FIRST_DOWNLOAD_S", 20)
    url = program('half "$1"; if [ $n = 1 ]; then sleep 60 & echo $! > child; wait; fi; tail -c +100001 "$1"')
    assert samples(opened(url)) == samples(Index.open(shards[:1])) and len(started()) == 2
    wait_for(lambda: not alive(started()[0]) and not alive(int(Path("child").read_text())))


@pytest.mark.slow
def test_one_that_ends_its_output_and_not_itself_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "SERVER_S", 2.0)
    with pytest.raises(UnavailableError, match=r"closed its output, but did not end for 2 s, tried \d+ times"):
        opened(program('cat "$1"; exec >&-; sleep 60'))
    assert not any(map(alive, started()))


def test_a_slow_one_is_waited_for(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "SERVER_S", 2.0)
    url = program('for i in 0 1 2 3 4; do tail -c +$((i * 40000 + 1)) "$1" | head -c 40000; sleep 0.5; done\n'
                  'tail -c +200001 "$1"')  # fmt: skip
    assert samples(opened(url)) == samples(Index.open(shards[:1])) and len(started()) == 1


def test_what_is_another_each_time_is_refused() -> None:
    index = opened(program('[ $n = 1 ] || set -- data/s-000001.tar; cat "$1"'))
    index.shards[0].path.drop()
    with pytest.raises(ConfigError, match=r"changed since it was indexed; .* --cache-dir \S+ --allow-pipe 'pipe:sh p"):
        samples(index)


def test_endless_bytes_end() -> None:
    """At once: while the error is held, and its traceback with all that it names, nothing runs on."""
    options = DataOptions(allow_pipe=True, cache_dir="cache", cache_gb=0.001)
    [path] = find_shards(program("exec cat /dev/zero"), options)
    with pytest.raises(ConfigError, match=r"^data\.cache_gb=0\.001: pipe:sh program \S+ alone has ") as caught:
        path.open()
    assert caught.tb and not any(map(alive, started()))
    assert kept() == []


def test_who_wants_no_more_leaves_none_running() -> None:
    parts = download(program('half "$1"; sleep 60'), 1.0)
    next(parts)
    parts.close()
    assert not any(map(alive, started()))


def test_it_reads_nothing_of_ours() -> None:
    with pytest.raises(DataError, match="no end of archive at byte 0"):
        opened("pipe:cat")


@pytest.mark.slow
def test_kill_in_the_middle_of_unpacking(shards: list[Path]) -> None:
    """No command runs on, no part is taken for a shard, and the next start has all."""
    Path("a.gz").write_bytes(gzip.compress(shards[0].read_bytes()))
    program('head -c 150000 "$1"; [ $n = 1 ] && exec sleep 60; tail -c +150001 "$1"')
    words = [sys.executable, "-m", "trainer.tools.shards", "stat", "pipe:sh program a.gz", "--allow-pipe"]
    words += ["--cache-dir", "cache"]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: any(part.stat().st_size > 50_000 for part in Path("cache", FOLDER).glob(".part-*")))
            [pid] = started()
            wait_for(lambda: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"))
        finally:
            process.send_signal(signal.SIGKILL)
    wait_for(lambda: not alive(pid))
    assert [name[:6] for name in kept()] == [".part-"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)
    assert f"all: {EACH} samples" in done.stdout, done.stderr
    assert [len(name) for name in kept()] == [64]
    assert samples(opened("pipe:sh program a.gz")) == samples(Index.open(shards[:1])) and len(started()) == 2


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pipe:curl -s 'https://u:p@host:1/a?x=secret&b#c' -H x", "pipe:curl -s 'https://host:1/a' -H x"),
        ("pipe:sh -c \"curl 'http://h/a.tar?sig=secret' | cat\"", "pipe:sh -c \"curl 'http://h/a.tar' | cat\""),
        ("pipe:get --url=s3://k:v@b/a#secret -o -", "pipe:get --url=s3://b/a -o -"),
        ("pipe:cat a.tar", "pipe:cat a.tar"),
    ],
)
def test_urls_are_shown_without_secrets(command: str, expected: str) -> None:
    assert shown(command) == expected
