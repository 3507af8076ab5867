"""Sends numbers, media and settings to Weights & Biases, or keeps them offline. A resume continues the same run."""

import html
import json
import netrc
import os
import secrets
import tempfile
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from trainer.context import Context
from trainer.errors import ConfigError, printable
from trainer.files import write_json
from trainer.log import log
from trainer.loggers.sender import Sender, SendingLogger
from trainer.loggers.settings import Value, settings_of
from trainer.metrics.media import Histogram, Image
from trainer.timeouts import LOGGER_S


class WandB(SendingLogger):
    """Logs to Weights & Biases from rank 0. A separate thread makes the calls; wandb uploads in its own process.

    If the server does not answer at the start, the run is kept offline, in `wandb/` in the run's folder.

    Args:
        project: The run's project.
        entity: User or team; null: the account's default.
        name: The run's name; null: the name of its folder.
        mode: `offline` sends nothing; `wandb sync FOLDER` does so later.
    """

    def __init__(
        self,
        project: str = "echelon",
        entity: str | None = None,
        name: str | None = None,
        mode: Literal["online", "offline"] = "online",
    ) -> None:
        if find_spec("wandb") is None:
            raise ConfigError("callbacks.wandb: needs the package wandb; pip install 'wandb>=0.20,<0.32'")
        self.project, self.entity, self.name = project, entity, name
        self.mode: Literal["online", "offline"] = mode
        self.run: Any = None  # wandb's

    def begin(self, trainer: Context) -> Sender:
        sender = Sender("wandb", lambda error: False)
        sender.put(partial(self._start, trainer.run_dir, settings_of(trainer)))
        return sender

    def _start(self, folder: Path, settings: dict[str, Value]) -> None:
        """Resume the run that the folder's wandb.json names, or create one."""
        import wandb

        file = folder / "wandb.json"
        run_id = json.loads(file.read_text())["run_id"] if file.exists() else secrets.token_hex(4)
        write_json(file, {"run_id": run_id})

        def init(mode: Literal["online", "offline"]) -> Any:
            return wandb.init(
                project=self.project, entity=self.entity, name=self.name or folder.name, id=run_id, dir=str(folder),
                config=settings, mode=mode, resume="allow" if mode == "online" else None, reinit="create_new",
                settings=wandb.Settings(console="off", silent=True, init_timeout=LOGGER_S),
            )  # fmt: skip

        mode = self.mode
        if mode == "online" and not has_key(wandb.setup().settings):
            log.warning("wandb: no API key is known (WANDB_API_KEY, or wandb login); the run is kept offline")
            mode = "offline"
        try:
            self.run = init(mode)
        except wandb.Error as error:
            if mode == "offline":
                raise
            reason = printable(" ".join(str(error).split()))[:200]
            log.warning("wandb: %s; training continues, and the run is kept offline", reason)
            wandb.teardown()  # its process holds the run's id
            self.run, mode = init("offline"), "offline"
        offline = f"offline; wandb sync {Path(self.run.dir).parent} sends it"
        log.info("wandb       %s", offline if mode == "offline" else self.run.url)

    def log_numbers(self, numbers: dict[str, float], step: int, seconds: float) -> None:
        self._log(numbers, step)  # with wandb's own clock

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self.run is not None and step >= self.run.step:  # else a resume repeats a step that the server has
            self.run.log(values, step=step)

    def log_item(self, name: str, item: str | Image | Histogram, step: int) -> None:
        import wandb

        if isinstance(item, str):
            self._log({name: wandb.Html(f"<pre>{html.escape(item)}</pre>", inject=False)}, step)
        elif isinstance(item, Histogram):
            self._log({name: wandb.Histogram(np_histogram=(item.counts, item.edges))}, step)  # pyright: ignore
        else:
            with tempfile.NamedTemporaryFile(suffix=".png") as file:
                file.write(item.png)
                file.flush()
                self._log({name: wandb.Image(file.name)}, step)

    def end(self, failed: bool, stopped: bool) -> None:
        if self.run is not None:
            if stopped:
                self.run.mark_preempting()
            self.run.finish(exit_code=int(failed or stopped))


def has_key(settings: Any) -> bool:
    """Return whether wandb knows an API key; without one it would prompt on a terminal."""
    if settings.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        known = netrc.netrc(os.environ.get("NETRC"))
        return known.authenticators(urlsplit(settings.base_url).hostname or "") is not None
    return False
