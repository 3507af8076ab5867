"""Sends numbers, media and settings to an MLflow server. A resume continues the same MLflow run."""

import json
import os
import re
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from trainer.context import Context
from trainer.errors import ConfigError
from trainer.files import write_json
from trainer.log import log
from trainer.loggers.sender import Sender, SendingLogger
from trainer.loggers.settings import Value, settings_of
from trainer.metrics.media import Histogram, Image
from trainer.redact import redact_urls

MOST_PARAMS, MOST_TEXT = 100, 6000  # of a request; of a value, by MLflow's limits
# URI schemes of artifacts. With others, a server could name a file on this machine, or another run's artifacts.
REMOTE = ("mlflow-artifacts", "http", "https", "s3", "gs", "wasbs", "abfss", "hdfs", "dbfs", "ftp", "sftp")
PASSES = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED")
# `Sender` retries by itself, and the terminal shows only our lines.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MLflow(SendingLogger):
    """Logs to an MLflow server from rank 0. A separate thread makes the requests.

    Args:
        uri: The server's address; null: MLFLOW_TRACKING_URI.
        experiment: The run's experiment, which is created if it is missing.
        name: The run's name; null: the name of its folder.
    """

    def __init__(self, uri: str | None = None, experiment: str = "echelon", name: str | None = None) -> None:
        if find_spec("mlflow") is None:
            raise ConfigError("callbacks.mlflow: needs the package mlflow; pip install 'mlflow-skinny>=3.5,<4'")
        if not (uri or os.environ.get("MLFLOW_TRACKING_URI")):
            raise ConfigError(
                "callbacks.mlflow.uri=null: and MLFLOW_TRACKING_URI is not set; give the server's address, as in "
                "callbacks.mlflow.uri=http://HOST:5000"
            )
        self.uri, self.experiment, self.name = uri, experiment, name
        self.run_id = ""  # empty until the server has the run
        self.artifacts = ""  # URI of the run's files; empty: they are left out

    def on_fit_start(self, trainer) -> None:
        if trainer.rank == 0:
            for name, value in ENVIRONMENT.items():
                if name not in os.environ:
                    os.environ[name] = value
                    trainer.undo.callback(os.environ.pop, name, None)

    def begin(self, trainer: Context) -> Sender:
        sender, name = Sender("mlflow", is_away), self.name or trainer.run_dir.name
        sender.put(partial(self._start, trainer.run_dir / "mlflow.json", name, settings_of(trainer)))
        return sender

    def _start(self, file: Path, name: str, settings: dict[str, Value]) -> None:
        """Resume the run that `file` names, or create one."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self.client = MlflowClient(self.uri)
        known: dict[str, str] = {}
        run_id = json.loads(file.read_text())["run_id"] if file.exists() else ""
        if run_id:
            try:
                known = self.client.get_run(run_id).data.params
                self.client.update_run(run_id, "RUNNING")
            except MlflowException as error:
                if is_away(error):
                    raise
                log.warning("mlflow: %s: the server has no such run (%s); a new one begins", file, error.error_code)
                run_id = ""
        if not run_id:
            experiment = self.client.get_experiment_by_name(self.experiment)
            id_ = experiment.experiment_id if experiment else self.client.create_experiment(self.experiment)
            run_id = self.client.create_run(id_, run_name=name).info.run_id
            write_json(file, {"run_id": run_id})
        self._log_settings(run_id, settings, known)
        self.run_id, self.artifacts = run_id, self._artifacts_of(run_id)
        log.info("mlflow      run %s of %s", run_id, redact_urls(self.client.tracking_uri))

    def _artifacts_of(self, run_id: str) -> str:
        """Return where the run's files go; empty for a path on this machine, which no server may choose."""
        found = self.client.get_run(run_id).info.artifact_uri or ""
        if not urlsplit(self.client.tracking_uri).scheme.startswith("http") or urlsplit(found).scheme in REMOTE:
            return found
        log.warning(
            "mlflow: the server keeps files in %s, which would be a place of this machine; texts, images and "
            "histograms are left out; start the server with --artifacts-destination FOLDER",
            redact_urls(found) or "no place",
        )
        return ""

    def _log_settings(self, run_id: str, settings: dict[str, Value], known: dict[str, str]) -> None:
        """Log settings as parameters. MLflow's are immutable, so a value that a resume changes becomes a tag."""
        from mlflow.entities import Param, RunTag

        values = {valid(key): str(value)[:MOST_TEXT] for key, value in settings.items()}
        new = [Param(key, value) for key, value in values.items() if key not in known]
        for i in range(0, len(new), MOST_PARAMS):
            self.client.log_batch(run_id, params=new[i : i + MOST_PARAMS], synchronous=True)
        changed = {key: value for key, value in values.items() if known.get(key, value) != value}
        tags = [RunTag(f"resumed.{key}", value[: MOST_TEXT - 1000]) for key, value in changed.items()]
        self.client.log_batch(run_id, tags=tags[:MOST_PARAMS], synchronous=True)

    def log_numbers(self, numbers: dict[str, float], step: int, seconds: float) -> None:
        from mlflow.entities import Metric

        if self.run_id:
            metrics = [Metric(valid(name), value, int(seconds * 1000), step) for name, value in numbers.items()]
            self.client.log_batch(self.run_id, metrics=metrics, synchronous=True)

    def log_item(self, name: str, item: str | Image | Histogram, step: int) -> None:
        """Log text, PNG or counts as a file of the run: NAME/step-00000010.png."""
        if not self.artifacts:
            return
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        ending = "txt" if isinstance(item, str) else "png" if isinstance(item, Image) else "json"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, f"step-{step:08d}.{ending}")
            if isinstance(item, Image):
                file.write_bytes(item.png)
            else:
                file.write_text(item if isinstance(item, str) else json.dumps(item._asdict()))
            place = get_artifact_repository(self.artifacts, tracking_uri=self.client.tracking_uri)
            place.log_artifact(str(file), valid(name))

    def end(self, failed: bool, stopped: bool) -> None:
        if self.run_id:
            self.client.set_terminated(self.run_id, "FAILED" if failed else "KILLED" if stopped else "FINISHED")


def valid(name: str) -> str:
    """Return the name as MLflow accepts it: a path of valid file names."""
    parts = re.sub(r"[^\w\-. :/]", "_", name).split("/")
    return "/".join(part if part.strip(". ") else "_" * max(len(part), 1) for part in parts)


def is_away(error: Exception) -> bool:
    return isinstance(error, OSError) or getattr(error, "error_code", "") in PASSES
