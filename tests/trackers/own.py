"""Trackers of a user's, which a config names."""

from __future__ import annotations

import json


class Lines:
    """Appends what it is told to a file."""

    def __init__(self, run, name="lines.txt"):
        self.path = run.folder / name
        self.begun = (run.state or {}).get("begun", str(run.from_step))
        self.tell("open", run.from_step, run.state, run.config["train.epochs"])

    def tell(self, *words):
        with self.path.open("a") as stream:
            stream.write(json.dumps(words) + "\n")

    def state(self):
        return {"begun": self.begun}

    def log(self, step, metrics):
        self.tell("log", step, sorted(metrics))

    def summarize(self, metrics):
        self.tell("summary", metrics["best/step"], sorted(metrics))

    def close(self, status):
        self.tell("close", status)


class Breaks(Lines):
    """Fails at the third row."""

    rows = 0

    def log(self, step, metrics):
        self.rows += 1
        if self.rows == 3:
            raise RuntimeError("the server\nis gone")
        super().log(step, metrics)


class Incomplete:
    """Has no methods."""

    def __init__(self, run):
        pass


def fails(run):
    """Cannot be made."""
    raise ValueError("no such place")
