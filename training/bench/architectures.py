"""Every architecture of ``model.arch`` on MovieLens-100K, beside tuned peers on the same rows.

    python -m tessera.training.bench.architectures --data FOLDER/ml-100k --out FOLDER [--seeds N]

80/10/10 in the order of time.  The settings are those of ``configs/movielens.yaml``, which were chosen
for ``dlrm`` on the validation rows, with the keys of `KEYS`, and of the `SETTINGS` the one that is best
on the validation rows with the first seed; nothing else was searched.  A setting whose loss diverges
is left out.  Each run's best epoch is chosen on the validation rows.  The regression's
``C`` and LightGBM's leaves and rounds are chosen on the validation rows among `INVERSE_L2` and
`LEAVES` times `ROUNDS`.  The test rows choose nothing.

Writes ``architectures.md`` into ``--out`` after every round of all architectures, then with the peers,
and prints it.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score

from tessera.training.bench import peers
from tessera.training.bench.harness import arguments, machine
from tessera.training.config import SHIPPED_CONFIGS, load_config
from tessera.training.data.opening import open_data
from tessera.training.trainer.loop import DivergedError
from tessera.training.trainer.run import train

KEYS: dict[str, list[str]] = {
    "dlrm": [],
    "dlrm_dcn": [],
    "deepfm": [],
    "mmoe": [],
    "ple": [],
    "din": ["model.attention={history: item}", "model.sequence_length=20"],
    "sasrec": ["model.sequence=history", "model.candidate=item", "model.sequence_length=20"],
}
SETTINGS: dict[str, list[str]] = {
    "SGD": [],
    "Adagrad": [
        "model.embedding_init=0.05",
        "train.dense_optimizer.learning_rate=0.002",
        "train.embedding_optimizer={name: rowwise_adagrad, learning_rate: 0.05}",
    ],
}
"""How the tables are trained: as ``movielens.yaml`` does it, or by row-wise Adagrad."""

WITHOUT_BOTTOM = ("mmoe", "ple", "din", "sasrec")
"""The architectures that take the dense values as they are."""
WITHOUT_TOP = ("mmoe", "ple")
"""The architectures with towers in the place of a top MLP."""

INVERSE_L2 = (0.001, 0.003, 0.01, 0.03, 0.1)
LEAVES = (7, 15, 31)
ROUNDS = (100, 300)


@dataclass
class Found:
    """The AUC of a model on the validation and the test rows, by seed, and seconds of training."""

    valid: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Place:
    """MovieLens' folder, that of its prepared rows, and one for configs and runs."""

    data: Path
    cache: Path
    work: Path


def config_of(arch: str, setting: str, seed: int, place: Place) -> Path:
    """The shipped config, as a file, without the keys that ``arch`` has not."""
    text = (SHIPPED_CONFIGS / "movielens.yaml").read_text(encoding="utf-8")
    gone = ["dense_layers:"] if arch in WITHOUT_BOTTOM else []
    gone += ["over_layers:"] if arch in WITHOUT_TOP else []
    lines = [line for line in text.splitlines() if not line.strip().startswith(tuple(gone))]
    text = "\n".join(lines).replace("arch: dlrm", f"arch: {arch}").replace("path: ml-100k", "")
    path = place.work / f"{arch}.yaml"
    path.write_text(text + "\n", encoding="utf-8")
    keys = [*KEYS[arch], *SETTINGS[setting], f"train.seed={seed}"]
    keys += [f"data.path={place.data}", f"data.cache_dir={place.cache}"]
    keys += ["run.report=false", "run.tensorboard=false"]
    config = load_config(path, keys)
    path.write_text(config.to_yaml(), encoding="utf-8")
    return path


def train_once(found: Found, arch: str, setting: str, seed: int, place: Place) -> None:
    config = load_config(config_of(arch, setting, seed, place))
    begin = time.perf_counter()
    final = train(config, place.work / f"{arch}-{setting}-{seed}", progress=False).final
    assert final is not None
    found.seconds += time.perf_counter() - begin
    found.valid.append(float(final["valid"]["auc"]))
    found.test.append(float(final["test"]["auc"]))
    print(
        f"{arch}, {setting}, seed {seed}: validation AUC {found.valid[-1]:.4f},"
        f" test AUC {found.test[-1]:.4f}",
        flush=True,
    )


def best_setting(arch: str, place: Place) -> tuple[str, Found]:
    """The setting that is best on the validation rows, with its run of the first seed."""
    found: dict[str, Found] = {}
    for setting in SETTINGS:
        own = Found()
        try:
            train_once(own, arch, setting, 0, place)
        except DivergedError as error:
            print(f"{arch}, {setting}: {error}", flush=True)
        else:
            found[setting] = own
    return max(found.items(), key=lambda item: item[1].valid[0])


def measure_peers(config: Path) -> dict[str, Found]:
    """The peers with the settings that are best on the validation rows."""
    splits = open_data(load_config(config).data, progress=False)
    rows = {name: peers.plain(getattr(splits, name)) for name in ("train", "valid", "test")}
    both = peers.joined(rows["valid"], rows["test"])
    half = len(rows["valid"].labels)

    def scored(scores: peers.Scores, into: dict[str, Found], setting: str) -> None:
        into[setting] = Found(
            valid=[float(roc_auc_score(rows["valid"].labels, scores[:half]))],
            test=[float(roc_auc_score(rows["test"].labels, scores[half:]))],
        )

    linear: dict[str, Found] = {}
    for inverse_l2 in INVERSE_L2:
        scores = peers.logistic_regression(rows["train"], both, inverse_l2=inverse_l2)
        scored(scores, linear, f"logistic regression, C={inverse_l2:g}")
    boosted: dict[str, Found] = {}
    for leaves, rounds in itertools.product(LEAVES, ROUNDS):
        scores = peers.lightgbm(rows["train"], both, leaves=leaves, rounds=rounds)
        scored(scores, boosted, f"LightGBM, {leaves} leaves, {rounds} rounds")
    return dict(max(own.items(), key=lambda item: item[1].valid[0]) for own in (linear, boosted))


def table(found: dict[str, Found]) -> str:
    """The results as a table, with the machine's line."""
    lines = [
        f"{machine()}.",
        "",
        "| model | validation AUC | test AUC | runs | seconds a run |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, own in found.items():
        runs = len(own.test)
        seconds = f"{own.seconds / runs:.0f}" if own.seconds else ""
        lines.append(f"| {name} | {_mean(own.valid)} | {_mean(own.test)} | {runs} | {seconds} |")
    return "\n".join(lines) + "\n"


def _mean(values: list[float]) -> str:
    """The mean and, of several, its standard error."""
    mean = f"{np.mean(values):.4f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {np.std(values, ddof=1) / np.sqrt(len(values)):.4f}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="MovieLens' folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each architecture; default 5")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(args.data.absolute(), Path(folder) / "cache", Path(folder))
        chosen = {arch: best_setting(arch, place) for arch in KEYS}
        found = {f"`{arch}`, {setting}": own for arch, (setting, own) in chosen.items()}
        for seed in range(1, args.seeds):
            for arch, (setting, own) in chosen.items():
                train_once(own, arch, setting, seed, place)
            (args.out / "architectures.md").write_text(table(found))
        found |= measure_peers(config_of("dlrm", "SGD", 0, place))
    (args.out / "architectures.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
