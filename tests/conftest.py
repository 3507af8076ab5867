"""What holds for every test: one thread, no network, nothing left behind (processes, environment, process groups)."""

import contextlib
import gc
import importlib.util
import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import changed, forked, ranks
from support.faults import watched
from xdist.scheduler import LoadScopeScheduling

# Before torch and transformers are imported; processes that a test starts inherit both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_STATE_HOME"] = os.path.join(
    tempfile.gettempdir(), f"echelon-tests-{os.geteuid()}"
)  # the key that signs configs

if importlib.util.find_spec("hypothesis"):  # its wheels are of one Python: scripts/gpu_wheels.sh leaves it out
    from hypothesis import settings

    settings.register_profile("echelon", deadline=None, derandomize=True, database=None)
    settings.load_profile("echelon")

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as Echelon and monai set it; read at cuBLAS's first call
FROZEN = [0]  # the number of modules at each freeze
LOADED = 200  # modules after which those that are there are frozen again
GRACE_S = 3.0  # for processes that are just ending
SHARED = ("resource_tracker", "forkserver", "torch_shm_manager", "compile_worker")
ROOT = Path(__file__).parents[1]
WORKERS = 3  # many tests wait
SOURCES = (  # these parse all sources
    "tests/test_complexity.py", "tests/test_layers.py", "tests/test_rng.py", "tests/test_timeouts.py",
    "tests/docs/test_cards.py", "tests/docs/test_docstrings.py", "tests/docs/test_words.py",
)  # fmt: skip
LIGHTNING = ("tests/recipes/test_lightning", "tests/metrics/test_metric_objects.py")  # these import torchmetrics
MONAI = ("tests/recipes/test_segmentation.py", "tests/recipes/test_scans.py")
TRANSFORMERS = (
    "tests/recipes/test_huggingface", "tests/checkpoint/test_pretrained.py", "tests/config/test_targets.py",
    "tests/config/test_training_arguments.py", "tests/scripts/bench/one_gpu/test_measure.py",
    "tests/scripts/bench/one_gpu/test_turns.py",
    "tests/security/test_targets.py",
)  # fmt: skip
SHARING = (SOURCES, LIGHTNING, MONAI, TRANSFORMERS)  # beginnings of files
CHOICE = pytest.StashKey[changed.Choice]()
FEW = 100  # functions of tests: sooner in one process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--changed", action="store_true", help="run only the tests that what differs from the main branch can affect"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run a suite in several processes. Single files run in this one, which starts sooner."""
    option = config.option
    if option.changed and "PYTEST_XDIST_WORKER" not in os.environ:
        config.stash[CHOICE] = changed.choose()
    given = option.numprocesses is not None or option.collectonly or option.usepdb or option.capture == "no"
    if given or "PYTEST_XDIST_WORKER" in os.environ:
        return
    some = (
        config.args_source is not pytest.Config.ArgsSource.TESTPATHS or option.keyword or getattr(option, "lf", False)
    )
    some = some or (option.changed and config.stash[CHOICE].functions < FEW)
    if option.markexpr == "faults" or (option.markexpr == config.getini("addopts")[-1] and not some):
        option.numprocesses, option.dist = WORKERS, "load"


@pytest.hookimpl
def pytest_configure_node(node: Any) -> None:
    choice = node.config.stash.get(CHOICE, None)
    node.workerinput["choice"] = None if choice is None or choice.files is None else sorted(choice.files)


def pytest_configure(config: pytest.Config) -> None:
    if (files := getattr(config, "workerinput", {}).get("choice")) is not None:
        config.stash[CHOICE] = changed.Choice(set(files), "")


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"--changed: {config.stash[CHOICE].said}"] if CHOICE in config.stash else []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if CHOICE in config.stash and (files := config.stash[CHOICE].files) is not None and collection_path.suffix == ".py":
        return collection_path.relative_to(ROOT).as_posix() not in files or None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and CHOICE in session.config.stash:
        session.exitstatus = pytest.ExitCode.OK  # the change affects none


class Together(LoadScopeScheduling):
    """Gives one worker all tests of a file, since they share runs and imports, and those of files that share more."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((str(starts) for starts in SHARING if file.startswith(starts)), file)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Forget a scope that is done: after each test, xdist counts what its node has of every scope."""
        super().mark_test_complete(node, item_index, duration)
        scopes = self.assigned_work[node]
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(scopes[scope].values()):
            del scopes[scope]


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """xdist's own groups of tests have no effect with pytest 9.2: they need a node id that can be changed."""
    return Together(config, log)


def pytest_collection_finish() -> None:
    gc.set_threshold(50_000, 20, 20)  # a collection goes through the objects of all tests before
    freeze_modules()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    links = re.findall(r"^\[\w+\]: \.\./(\S+)$", (ROOT / "docs" / "reliability.md").read_text(), re.MULTILINE)
    named = {ROOT / link for link in links}
    for item in items:
        if item.path in named and not item.get_closest_marker("soak"):
            item.add_marker("faults")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Of tests/faults, also where they ran in processes of their own."""
    recovered = [
        f"{seconds:6.1f}  {report.nodeid.partition('::')[2]}"
        for report in terminalreporter.stats.get("passed", ())
        for seconds in dict(report.user_properties).get("recovered", ())
    ]
    if recovered:
        terminalreporter.section("seconds from a fault to the next step")
        terminalreporter.write_line("\n".join(recovered))


def freeze_modules() -> None:
    """Keep collections of garbage from going through the modules that tests have loaded."""
    if len(sys.modules) > FROZEN[-1] + LOADED:
        if FROZEN[-1]:  # else there is no garbage yet
            gc.collect()
        gc.freeze()
        FROZEN.append(len(sys.modules))


def children() -> set[int]:
    """Child processes, but for those that are kept for the session; empty where there is no /proc."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            found |= set(map(int, file.read_text().split()))
    found |= {process.pid for process in list(forked.RUNNING) if process.poll() is None}
    return found - {process.pid for process, _ in (*ranks.PEERS, *forked.SERVERS.values())}


def command(pid: int) -> str:
    """Empty for a process that has ended, and for the helpers that serve a whole Python process."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
    forked_runs = {process.pid for process in list(forked.RUNNING)}  # whose server's own command names `forkserver`
    return "" if pid not in forked_runs and any(name in line for name in SHARED) else line


def environment() -> dict[str, str]:
    """Without what pytest, torch.compile and Lightning set for themselves."""
    own = (
        "PYTEST_CURRENT_TEST",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "TORCHINDUCTOR_",
        "_TORCHINDUCTOR_",
        "TRITON_",
        "KMP_",
    )
    return {key: value for key, value in os.environ.items() if not key.startswith(own)}


@pytest.fixture
def looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What runs would leave in /tmp has a place of its own, and those in the test's folder are watched."""
    with tempfile.TemporaryDirectory() as folder, watched(tmp_path):
        monkeypatch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(autouse=True)
def in_its_folder(nothing_left_behind: None, request: pytest.FixtureRequest) -> None:
    """A test that asks for `tmp_path` runs there."""
    if "tmp_path" in request.fixturenames:
        request.getfixturevalue("monkeypatch").chdir(request.getfixturevalue("tmp_path"))


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of Echelon's log, as they come."""
    found: list[str] = []
    own = logging.getLogger("echelon")
    monkeypatch.setattr(own, "handle", lambda record: found.append(record.getMessage()))
    monkeypatch.setattr(own, "level", logging.INFO)
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that leaks fails, and what it leaked is removed, so that the next test does not fail for it.

    What fixtures of a wider scope hold is not a leak: they are set up before this one.
    """
    freeze_modules()
    processes, variables = children(), environment()
    log = logging.getLogger("echelon")
    log.propagate = True  # to caplog: a run in this process keeps its lines to itself
    while log.handlers:  # of a run in this process that failed
        log.handlers.pop().close()
    yield
    leaks = []
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        leaks.append("a process group")
    if children() - processes:
        gc.collect()
    deadline = time.monotonic() + GRACE_S
    while (left := [pid for pid in children() - processes if command(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        leaks.append(f"process {pid}: {command(pid)}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if environment() != variables:
        changed = {key for key, _ in environment().items() ^ variables.items()}
        leaks.append(f"environment variables {sorted(changed)}")
        for key in changed:
            os.environ.pop(key, None)
        os.environ.update({key: value for key, value in variables.items() if key in changed})
    assert not leaks, f"left behind: {'; '.join(leaks)}"
