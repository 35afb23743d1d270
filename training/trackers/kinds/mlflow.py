"""``mlflow``: a run of an MLflow experiment, in a local folder or on a tracking server."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tessera.errors import UserError
from tessera.training.trackers.tracker import Status, TrackedRun, Tracker, TrackerConfig, tracker
from tessera.users_code import first_line

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

PARAMS_AT_ONCE = 100
"""What MLflow takes in a call."""
LONGEST_PARAM = 500
"""Characters that every store of MLflow takes."""

_STATUS: Mapping[Status, str] = {
    "finished": "FINISHED",
    "interrupted": "KILLED",
    "failed": "FAILED",
}


class _Mlflow:
    def __init__(self, client: MlflowClient, uri: str, run_id: str) -> None:
        self._client = client
        self._uri = uri
        self._run_id = run_id

    def state(self) -> Mapping[str, str]:
        return {"uri": self._uri, "run_id": self._run_id}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415 - an extra

        now_ms = int(time.time() * 1000)
        points = [Metric(name, value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=points)

    def summarize(self, metrics: Mapping[str, float]) -> None:
        self.log(int(metrics["best/step"]), metrics)

    def close(self, status: Status) -> None:
        self._client.set_terminated(self._run_id, _STATUS[status])


@tracker
@dataclass(frozen=True, kw_only=True)
class MlflowTracker(TrackerConfig):
    """A run of an MLflow experiment, with the config as its parameters.

    Attributes:
        uri: a folder, in which ``mlflow.db`` is MLflow's database, or the URI of a tracking server;
            None: that of the environment variable ``MLFLOW_TRACKING_URI``, or else the folder
            ``mlruns``.
        experiment: the experiment's name; it is made if it is not there.
    """

    name: ClassVar[str] = "mlflow"
    module: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"

    uri: str | None = None
    experiment: str = "tessera"

    def open(self, run: TrackedRun) -> Tracker:
        """See `TrackerConfig.open`; a run that goes on keeps its place and its id."""
        # Nothing is sent anywhere but to the store; the user's own setting wins.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow.tracking import MlflowClient  # noqa: PLC0415 - an extra, and slow to import

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # tells of each table
        state = run.state or {}
        uri = state.get("uri") or self._settled_uri()
        try:
            client = MlflowClient(tracking_uri=uri)
            if "run_id" in state:
                client.update_run(state["run_id"], status="RUNNING")
                return _Mlflow(client, uri, state["run_id"])
            found = client.get_experiment_by_name(self.experiment)
            number = (
                client.create_experiment(self.experiment) if found is None else found.experiment_id
            )
            run_id = client.create_run(number, run_name=run.name).info.run_id
            _log_params(client, run_id, run.config)
        except Exception as error:
            raise UserError(
                f"run.trackers: mlflow at {uri}: {first_line(error)}; mend that, or leave mlflow out"
            ) from error
        return _Mlflow(client, uri, run_id)

    def _settled_uri(self) -> str:
        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
        if "://" in uri or uri.startswith(("file:", "databricks")):
            return uri
        folder = Path(uri).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{folder / 'mlflow.db'}"


def _log_params(client: MlflowClient, run_id: str, config: Mapping[str, str]) -> None:
    from mlflow.entities import Param  # noqa: PLC0415 - an extra

    params = [Param(key, value[:LONGEST_PARAM]) for key, value in config.items()]
    for begin in range(0, len(params), PARAMS_AT_ONCE):
        client.log_batch(run_id, params=params[begin : begin + PARAMS_AT_ONCE])
