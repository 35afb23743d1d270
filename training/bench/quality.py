"""How good the trained models are, against peers trained here on the same rows.

    python -m tessera.training.bench.quality --data FOLDER --out FOLDER [--only criteo movielens generated]

``--data`` holds ``criteo_sample_14584.tsv`` (rows in Criteo's own format) and ``ml-100k/``.

* criteo: stratified 5-fold cross-validation, `FOLD_SEED`.  The settings of
  ``configs/criteo_sample.yaml``, its number of training steps included, and the ``C`` of the tuned
  logistic regression were chosen on inner splits of the folds' training rows.  The folds' test rows
  were not unseen meanwhile: four early candidates were scored on them, and this script had run with
  an earlier setting (AUC .7400) before the one in use was chosen.  The AUC is thus not a blind one.
  One choice serves all folds, so a test row of one fold was among the inner
  rows of others, for every model alike.  LightGBM's settings were not searched.
* movielens: 80/10/10 in the order of time; settings and ``C`` chosen on the validation rows; three
  seeds, as one seed's luck is as large as the differences between good settings.
* generated: a million rows of ``tessera datagen``; the truth is the generating model's own AUC on the
  same test rows.  Settings chosen on the validation rows.
* int8: each of the last two, and the first fold's model, packaged, and fp32 against int8 on the
  validation rows, as ``package-model`` measures it.

Writes ``quality.json`` and ``quality.md`` into ``--out`` and prints the latter.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold

from tessera.training.bench import peers
from tessera.training.bench.harness import arguments, machine
from tessera.training.config import SHIPPED_CONFIGS, load_config
from tessera.training.data.datagen import generate, probabilities_path
from tessera.training.data.dataset import DatasetView, DataSplits
from tessera.training.data.opening import open_data
from tessera.training.trainer.run import train

FOLDS, FOLD_SEED = 5, 0
TUNED_C = {"criteo": 0.05, "movielens": 0.003}
GENERATED_ROWS, GENERATED_SEED = 1_000_000, 0


@dataclass
class Section:
    """One data set's outcome: AUC and seconds by model, and what had to hold.

    ``auc`` has a number for each fold (one where there are no folds); ``int8_loss`` is the AUC of fp32
    less that of int8, on the same rows.
    """

    name: str
    auc: dict[str, list[float]] = field(default_factory=dict)
    int8_loss: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    verdicts: dict[str, bool] = field(default_factory=dict)

    def add(self, model: str, score: Callable[[], float]) -> None:
        """One more fold of ``model``: call ``score`` for its AUC."""
        start = time.perf_counter()
        self.auc.setdefault(model, []).append(score())
        self.seconds[model] = self.seconds.get(model, 0) + time.perf_counter() - start
        print(f"{self.name}: {model}: {self.auc[model][-1]:.5f}", file=sys.stderr, flush=True)

    def mean(self, model: str) -> float:
        """The mean over folds."""
        return float(np.mean(self.auc[model]))

    def standard_error(self, model: str) -> float:
        """The standard error of the mean over folds; 0 where there is one fold."""
        aucs = self.auc[model]
        return float(np.std(aucs, ddof=1) / np.sqrt(len(aucs))) if len(aucs) > 1 else 0.0

    def less(self, model: str, other: str) -> tuple[float, float] | None:
        """How much higher the mean AUC is than another's, and that difference's standard error.

        The folds are the same for both, so that the error is that of pairs: what makes a fold hard
        for both does not count.  None of the same model, of one fold alone, and where the numbers of folds differ.
        """
        own, theirs = np.array(self.auc[model]), np.array(self.auc[other])
        if model == other or len(own) != len(theirs) or len(own) < 2:
            return None
        pairs = own - theirs
        return float(np.mean(pairs)), float(np.std(pairs, ddof=1) / np.sqrt(len(pairs)))


def train_model(config_name: str, overrides: list[str], run: Path) -> float:
    """Train one of the shipped configs; AUC of its best checkpoint on the test rows."""
    config = load_config(SHIPPED_CONFIGS / f"{config_name}.yaml", overrides)
    result = train(config, run, progress=False)
    assert result.final is not None
    return float(result.final["test"]["auc"])


def open_run(config_name: str, overrides: list[str]) -> DataSplits:
    return open_data(load_config(SHIPPED_CONFIGS / f"{config_name}.yaml", overrides).data)


def int8_loss(run: Path) -> float:
    """AUC that packaging costs, as the packager measures it on the run's validation rows."""
    package = run / "model.pt"
    program = [sys.executable, "-m", "tessera"]
    subprocess.run(
        [*program, "package-model", str(run), "--out", str(package)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    shown = subprocess.run(
        [*program, "inspect", str(package), "--json"], check=True, capture_output=True
    )
    evaluation = json.loads(shown.stdout)["evaluation"]
    return float(evaluation["fp32"]["auc"]) - float(evaluation["packaged"]["auc"])


def add_regressions(section: Section, known: peers.Plain, unknown: peers.Plain) -> None:
    """Logistic regressions on ``known``, scored on ``unknown``: as they come, and tuned."""
    for name, inverse_l2 in (("C=1", 1.0), ("C tuned", TUNED_C[section.name])):
        peer = partial(peers.logistic_regression, inverse_l2=inverse_l2)
        section.add(f"logistic regression, {name}", partial(_auc, peer, known, unknown))


def measure_criteo(data: Path, work: Path) -> Section:
    section = Section("criteo")
    lines = (data / "criteo_sample_14584.tsv").read_bytes().splitlines(keepends=True)
    labels = np.array([line[:1] == b"1" for line in lines])
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=FOLD_SEED)
    for number, (train_rows, test_rows) in enumerate(folds.split(labels, labels)):
        files = [work / f"criteo-{number}-{part}.tsv" for part in ("train", "test")]
        for file, rows in zip(files, (train_rows, test_rows), strict=True):
            file.write_bytes(b"".join(lines[row] for row in rows))
        # The number of epochs is settled, so no row is held out to choose one by: validation
        # looks at the training rows, and takes the last epoch, which knows them best.
        overrides = [f"data.path={files[0]}", f"data.valid_path={files[0]}"]
        overrides += [f"data.test_path={files[1]}", "data.split=time"]
        run = work / f"criteo-{number}"
        section.add("tessera", partial(train_model, "criteo_sample", overrides, run))
        splits = open_run("criteo_sample", overrides)
        known, unknown = peers.plain(splits.train), peers.plain(splits.test)
        add_regressions(section, known, unknown)
        section.add("LightGBM", partial(_auc, peers.lightgbm, known, unknown))
        if number == 0:
            section.int8_loss = int8_loss(run)
    tessera, boosted = section.mean("tessera"), section.mean("LightGBM")
    section.verdicts = {
        "at least .743, the logistic regression of the record": tessera >= 0.743,
        **{
            f"at least the {name}": tessera >= section.mean(name)
            for name in ("logistic regression, C=1", "logistic regression, C tuned")
        },
        "within a standard error of LightGBM": tessera
        >= boosted - section.standard_error("LightGBM"),
    }
    return section


def measure_movielens(data: Path, work: Path) -> Section:
    section = Section("movielens")
    overrides = [f"data.path={data / 'ml-100k'}", f"data.cache_dir={work / 'cache'}"]
    for seed in range(3):
        seeded = [*overrides, f"train.seed={seed}"]
        run = work / f"movielens-{seed}"
        section.add("tessera", partial(train_model, "movielens", seeded, run))
    splits = open_run("movielens", overrides)
    add_regressions(section, peers.plain(splits.train), peers.plain(splits.test))
    section.int8_loss = int8_loss(work / "movielens-0")
    section.verdicts = {
        f"beats the logistic regression, {name} (mean of 3 seeds)": section.mean("tessera")
        > section.mean(f"logistic regression, {name}")
        for name in ("C=1", "C tuned")
    }
    return section


def measure_generated(_data: Path, work: Path) -> Section:
    section = Section("generated")
    file = work / "generated.tsv"
    generate(file, rows=GENERATED_ROWS, seed=GENERATED_SEED, probabilities=True, progress=False)
    overrides = [f"data.path={file}"]
    run = work / "generated"
    section.add("tessera", partial(train_model, "generated", overrides, run))
    test = open_run("generated", overrides).test
    assert isinstance(test, DatasetView), "data that can be read by number"
    probability = np.load(probabilities_path(file), mmap_mode="r")[test.slice(0, len(test))]
    section.add("truth", lambda: float(roc_auc_score(test.labels(), probability)))
    section.int8_loss = int8_loss(run)
    gap = section.mean("truth") - section.mean("tessera")
    section.verdicts = {"within .01 of the truth": gap <= 0.01}
    return section


def _auc(
    peer: Callable[[peers.Plain, peers.Plain], peers.Scores],
    known: peers.Plain,
    unknown: peers.Plain,
) -> float:
    return float(roc_auc_score(unknown.labels, peer(known, unknown)))


def report(sections: list[Section]) -> str:
    lines = [
        f"{machine()}.",
        "",
        "| data | model | AUC | standard error | less Tessera's, by pairs of folds | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for section in sections:
        for model, aucs in section.auc.items():
            error = f"{section.standard_error(model):.4f}" if len(aucs) > 1 else ""
            pairs = section.less(model, "tessera")
            less = "" if pairs is None else f"{pairs[0]:+.4f} ± {pairs[1]:.4f}"
            lines.append(
                f"| {section.name} | {model} | {section.mean(model):.4f} | {error} | {less} |"
                f" {section.seconds[model]:.0f} |"
            )
    lines += ["", "| data | what had to hold | does it |", "| --- | --- | --- |"]
    for section in sections:
        for what, holds in section.verdicts.items():
            lines.append(f"| {section.name} | {what} | {'yes' if holds else 'no'} |")
        if section.int8_loss is not None:
            kept = "yes" if section.int8_loss < 0.0005 else "no"
            lines.append(
                f"| {section.name} | int8 loses under .0005 AUC ({section.int8_loss:+.6f}) | {kept} |"
            )
    return "\n".join(lines) + "\n"


MEASURES = {
    "criteo": measure_criteo,
    "movielens": measure_movielens,
    "generated": measure_generated,
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the real samples")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--only", nargs="+", choices=list(MEASURES), default=list(MEASURES), help="default: all"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        sections = [MEASURES[name](args.data.absolute(), Path(work)) for name in args.only]
    plain = [asdict(section) for section in sections]
    (args.out / "quality.json").write_text(json.dumps(plain, indent=1))
    text = report(sections)
    (args.out / "quality.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
