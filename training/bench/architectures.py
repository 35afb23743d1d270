"""Every architecture of ``model.arch`` on MovieLens-100K, beside tuned peers on the same rows.

    python -m tessera.training.bench.architectures --data FOLDER/ml-100k --out FOLDER [--minutes N]

80/10/10 in the order of time, label rating >= 4 (``mmoe`` and ``ple`` learn rating = 5 beside it).  What
held-out rows know is measured both ways (``data.features_until``): every earlier rating (``row``), or
those that were trained on (``train``).  Training rows know the same either way, so one training serves
both.

Every architecture is trained with each of its settings, to the end of its last epoch.  The one with the best validation AUC, the mean of both ways, is trained with more seeds.  The
logistic regression's ``C`` and LightGBM's leaves and rounds are chosen likewise among `INVERSE_L2` and
`LEAVES` times `ROUNDS`, and both are given every set of features that a setting has.  The test rows
choose nothing.

± is a standard error by drawing users (`tessera.training.bench.clustered`): the test rows are of fewer
than 200.  The differences to the peers are those of pairs.

Runs are kept in ``--out``: the script goes on where it was stopped.  It writes ``architectures.md``
there and prints it.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.training.bench import peers
from tessera.training.bench.architecture_settings import (
    ARCHITECTURES,
    FEATURES,
    SEVERAL_LABELS,
    model_and_train,
    settings_of,
)
from tessera.training.bench.clustered import Values, mean_aucs, user_weights
from tessera.training.bench.harness import arguments, machine
from tessera.training.bench.trials import Scored, Trials, train_and_score
from tessera.training.config import ExperimentConfig
from tessera.training.data.config import DataConfig
from tessera.training.data.dataset import DatasetView, DataSplits, View
from tessera.training.data.opening import open_data
from tessera.training.typed_config import to_plain

WAYS = ("row", "train")

INVERSE_L2 = (0.0001, 0.0003, 0.001, 0.003, 0.01)
LEAVES = (7, 15)
ROUNDS = (100, 300)


class Bench:
    """The runs, the data in both ways, and what the config files need of this machine.

    Args:
        data: MovieLens' folder.
        out: the folder of the runs.
        work: a folder for what is not kept.
        minutes: see `Trials`.
    """

    def __init__(self, data: Path, out: Path, work: Path, minutes: float | None) -> None:
        self.trials = Trials(out, minutes=minutes)
        self._data, self._work = data, work

    def data_section(
        self, features: Sequence[str], labels: Sequence[str], way: str
    ) -> dict[str, Any]:
        """The section ``data`` of a config."""
        return {
            "format": "movielens",
            "path": str(self._data),
            "cache_dir": str(self._work / "cache"),
            "split": "time",
            "features": tuple(features),
            "labels": tuple(labels),
            "features_until": way,
        }

    def splits(self, features: Sequence[str], labels: Sequence[str], way: str) -> DataSplits:
        """The rows, whose held-out ones know what ``way`` says."""
        section = self.data_section(features, labels, way)
        return open_data(DataConfig(**section), progress=False)

    def run(self, arch: str, setting: str, seed: int) -> Scored | None:
        """One training, scored on the held-out rows of both ways; None if the time is up."""
        name, keys = settings_of(arch)[setting]
        features = FEATURES[name]
        labels = ("positive", "top") if arch in SEVERAL_LABELS else ("positive",)
        plain = model_and_train(arch, features, keys, seed)
        config = ExperimentConfig.from_plain(
            {"data": to_plain(self.data_section(features, labels, "row")), **plain}, name=arch
        )

        def train() -> Scored:
            views: dict[str, View] = {}
            for way in WAYS:
                splits = self.splits(features, labels, way)
                views |= {f"{way} valid": splits.valid, f"{way} test": splits.test}
            return train_and_score(config, views, self._work / "run")

        what = {"arch": arch, "setting": setting, "seed": seed}
        return self.trials.scored({**what, "config": {**plain, "features": features}}, train)

    def peer_runs(self) -> dict[str, dict[str, Scored]]:
        """Every setting of the peers, by the peer's name."""
        linear = {f"C={c:g}": partial(peers.logistic_regression, inverse_l2=c) for c in INVERSE_L2}
        boosted = {
            f"{leaves} leaves, {rounds} rounds": partial(
                peers.lightgbm, leaves=leaves, rounds=rounds
            )
            for leaves, rounds in itertools.product(LEAVES, ROUNDS)
        }
        found: dict[str, dict[str, Scored]] = {"logistic regression": {}, "LightGBM": {}}
        for name, features in FEATURES.items():
            for own, settings in zip(found.values(), (linear, boosted), strict=True):
                for setting, peer in settings.items():
                    scored = self._peer(f"{setting}, {name}", features, peer)
                    if scored is not None:
                        own[f"{setting}, {name}"] = scored
        return found

    def _peer(self, setting: str, features: Sequence[str], peer: Peer) -> Scored | None:
        def fit() -> Scored:
            rows = self._plain_rows(features)
            held_out = {name: own for name, own in rows.items() if name != "train"}
            scores = peer(rows["train"], functools.reduce(peers.joined, held_out.values()))
            bounds = np.cumsum([len(own.labels) for own in held_out.values()])[:-1]
            return Scored(
                dict(zip(held_out, np.split(scores, bounds), strict=True)),
                {name: own.labels.astype(np.float64) for name, own in held_out.items()},
            )

        return self.trials.scored({"peer": setting, "features": list(features)}, fit)

    @functools.cache  # noqa: B019 - there is one bench in a process
    def _plain_rows(self, features: Sequence[str]) -> dict[str, peers.Plain]:
        """``train``, and the held-out rows of both ways, by way and split."""
        ways = {way: self.splits(features, ["positive"], way) for way in WAYS}
        views = {
            f"{way} {part}": getattr(splits, part)
            for way, splits in ways.items()
            for part in ("valid", "test")
        }
        plain = {name: peers.plain(view) for name, view in views.items()}
        return {"train": peers.plain(ways["row"].train), **plain}

    def test_users(self) -> npt.NDArray[np.int64]:
        """``[n]``: the user of every test row."""
        view = self.splits(("user",), ("positive",), "row").test
        assert isinstance(view, DatasetView), "data that can be read by number"
        rows = view.dataset.batch(view.slice(0, len(view)))
        users: npt.NDArray[np.int64] = rows.sparse_features.values().numpy()
        return users


Peer = Callable[[peers.Plain, peers.Plain], peers.Scores]


def valid_auc(scored: Scored) -> float:
    """What settings are chosen by."""
    return float(np.mean([scored.auc(f"{way} valid") for way in WAYS]))


def best(found: Mapping[str, Scored]) -> tuple[str, Scored]:
    """The setting that is best on the validation rows."""
    return max(found.items(), key=lambda item: valid_auc(item[1]))


def table(
    models: Mapping[str, Sequence[Scored]], chosen: Mapping[str, str], users: npt.NDArray[np.int64]
) -> str:
    """The results.

    Args:
        models: the runs by name.
        chosen: by peer, the one of these names that it has; its AUC is taken off the others'.
        users: ``[n]``, of the test rows.
    """
    weights = np.concatenate([np.ones((1, len(users))), user_weights(users)])
    less_peers = "".join(f" less {peer}'s |" for peer in chosen)
    lines = [
        f"{machine()}. Test rows: {len(users)}, of {len(np.unique(users))} users.",
        "",
        f"| features until | model | validation AUC | test AUC |{less_peers} mean logits | runs |",
        f"| --- | --- | --- | --- |{' --- |' * len(chosen)} --- | --- |",
    ]
    for way in WAYS:
        test = f"{way} test"
        draws = {
            name: mean_aucs(runs[0].labels[test], [run.scores[test] for run in runs], weights)
            for name, runs in models.items()
        }
        for name, runs in models.items():
            valid = np.mean([run.auc(f"{way} valid") for run in runs])
            own = _with_error(draws[name])
            less = [
                "" if name == peer else _with_error(draws[name] - draws[peer], sign="+")
                for peer in chosen.values()
            ]
            joined = ""
            if len(runs) > 1:
                mean: Values = np.mean([run.scores[test] for run in runs], axis=0)
                joined = f"{Scored({test: mean}, runs[0].labels).auc(test):.4f}"
            cells = [f"`{way}`", name, f"{valid:.4f}", own, *less, joined, str(len(runs))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _with_error(draws: Values, sign: str = "") -> str:
    """The first value, which is of all rows as they are, and the spread of the others."""
    return f"{draws[0]:{sign}.4f} ± {np.std(draws[1:], ddof=1):.4f}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="MovieLens' folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and results")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each architecture; default 5")
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES), help="default: all")
    parser.add_argument(
        "--minutes", type=float, help="begin no run after so many; default: no limit"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(args.data.absolute(), args.out, Path(work), args.minutes)
        models: dict[str, list[Scored]] = {}
        chosen: dict[str, tuple[str, str]] = {}
        for arch in args.only or ARCHITECTURES:
            tried = {setting: bench.run(arch, setting, 0) for setting in settings_of(arch)}
            known = {setting: scored for setting, scored in tried.items() if scored is not None}
            if known:
                setting, scored = best(known)
                name = f"`{arch}`, {setting} (of {len(known)})"
                models[name], chosen[name] = [scored], (arch, setting)
        peer_names = {}
        for peer, found in bench.peer_runs().items():
            setting, scored = best(found)
            peer_names[peer] = f"{peer}, {setting} (of {len(found)})"
            models[peer_names[peer]] = [scored]
        for seed in range(1, args.seeds):
            for name, (arch, setting) in chosen.items():
                if (again := bench.run(arch, setting, seed)) is not None:
                    models[name].append(again)
        text = table(models, peer_names, bench.test_users())
    (args.out / "architectures.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
