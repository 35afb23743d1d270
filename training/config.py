"""`ExperimentConfig`: everything that a training run is made of, as one validated value.

A YAML file has one section per field of `ExperimentConfig`; ``key=value`` overrides change
single keys (``train.epochs=3``).  What a run folder and a checkpoint store is the resolved
config: every default filled in and every data path absolute.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.average_config import AverageConfig
from tessera.training.config_source import ConfigSource, apply_overrides, read_yaml
from tessera.training.data.config import DataConfig
from tessera.training.first_order_config import FirstOrderOptimizerConfig
from tessera.training.models.config import ModelConfig
from tessera.training.trackers.tracker import TrackerConfig, parse_trackers
from tessera.training.typed_config import build, differing_keys, to_plain, to_yaml

SHIPPED_CONFIGS = Path(__file__).parent / "configs"

FREE_ON_RESUME = (
    "run",
    "data.cache_dir",
    "data.follow.idle_s",
    "data.follow.max_steps",
    "data.follow.poll_s",
    "data.follow.settle_s",
    "data.workers",
    "train.checkpoint_every_steps",
    "train.keep_checkpoints",
    "train.cuda_graphs",
    "train.device",
    "train.pipeline",
    "train.sharding",
)
"""Keys (or sections) that may change when a run is resumed: they touch no number of it (but for
the order of sums, which the number of ranks, the device and the sharding change)."""

MAX_SEED = 2**63 - 1  # torch takes a bit more; ranks add their offset
MAX_THREADS = 4096  # OpenMP crashes where it gets no more


@dataclass(frozen=True, kw_only=True)
class DenseOptimizerConfig:
    """The torch optimizer of everything but the embedding tables.

    Attributes:
        name: ``adam``, ``adamw`` (weight decay apart from the gradient), ``adagrad`` or ``sgd``,
            each with torch's other settings.
        learning_rate: its peak; see `ScheduleConfig`.
        weight_decay: as that optimizer means it (decoupled in ``adamw``, L2 in the others).
    """

    name: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check.positive(self, "learning_rate")
        check.not_negative(self, "weight_decay")


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptimizerConfig:
    """The optimizer fused into the backward pass of the embedding tables.

    Attributes:
        name: which one.  ``sgd`` keeps no state; ``rowwise_adagrad`` one number per row, a mean
            of squares; ``adagrad`` and ``lion`` one per weight; ``adam`` and ``lamb`` two;
            ``partial_rowwise_adam`` and ``partial_rowwise_lamb`` one per weight and one per row;
            ``lars_sgd`` one per weight, its momentum.  docs/optimizers.md has their formulas.
        learning_rate: its peak; see `ScheduleConfig`.
        eps: added to the denominator; None: 1e-8.  ``sgd``, ``lars_sgd`` and ``lion`` have none.
        weight_decay: a row that a batch touches first shrinks by ``learning_rate *
            weight_decay`` of itself.
    """

    name: Literal[
        "rowwise_adagrad",
        "adagrad",
        "sgd",
        "adam",
        "partial_rowwise_adam",
        "lamb",
        "partial_rowwise_lamb",
        "lars_sgd",
        "lion",
    ] = "rowwise_adagrad"
    learning_rate: float = 0.02
    eps: float | None = None
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check.positive(self, "learning_rate eps")
        check.not_negative(self, "weight_decay")
        if self.eps is not None and self.name in {"sgd", "lars_sgd", "lion"}:
            raise UserError(f"eps={self.eps}: {self.name} has no eps; leave it out")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The factor on all learning rates, by step.

    Attributes:
        kind: what follows the warm-up: ``constant`` 1, or a ``linear`` or ``cosine`` decay that
            ends with the last step of the last epoch.
        warmup_steps (steps): steps over which the factor rises linearly to 1; 0: none.
        final_factor: where a decay ends; None: 0.  ``constant`` has none.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_factor: float | None = None

    def __post_init__(self) -> None:
        check.not_negative(self, "warmup_steps")
        if self.kind == "constant":
            remedy = (
                "a constant schedule has no end value; leave it out or set kind to linear or cosine"
            )
            check.allowed(self, "final_factor", lambda _: False, remedy)
        check.allowed(
            self, "final_factor", lambda value: 0 <= value <= 1, "give a factor from 0 to 1"
        )

    def factor(self, *, step: int, total_steps: int) -> float:
        """The factor on the learning rates of step ``step`` (from 0) of ``total_steps``.

        Warm-up ends with factor 1 at step ``warmup_steps``; a decay reaches ``final_factor`` at
        the last step.
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant":
            return 1.0
        final = self.final_factor or 0.0
        decay_steps = max(1, total_steps - 1 - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / decay_steps)
        left = 1.0 - done if self.kind == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
        return final + (1.0 - final) * left


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig:
    """How models for retrieval are evaluated: each user's best items of all items of the training rows.

    Attributes:
        k: how many items a user is given.
        exclude_known: whether items that the user has in the training rows are left out of them; it
            needs a ``data.user_id``.
    """

    k: int = 10
    exclude_known: bool = True

    def __post_init__(self) -> None:
        check.at_least_one(self, "k")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the model is trained, evaluated and kept.

    Attributes:
        batch_size (samples): samples in a training step, of all ranks together.
        eval_batch_size (samples): samples in a batch of an evaluation, of all ranks together.
        epochs (epochs): passes over the training rows.
        dense_optimizer: see `DenseOptimizerConfig`.
        embedding_optimizer: see `EmbeddingOptimizerConfig`.
        first_order_optimizer: None, in which case first-order weights are updated as the tables are, or see
            `FirstOrderOptimizerConfig`.
        schedule: see `ScheduleConfig`.
        eval_every_steps (steps): evaluate on the validation rows every so many steps, besides at the
            end of epochs; None: only there.
        eval_every_epochs (epochs): evaluate at the end of every so many epochs and of the last one.
        metric: what the best checkpoint is chosen by: the highest ``auc`` (of several binary
            labels the mean) or the lowest ``log_loss`` on the validation rows; that is the loss
            of all labels by their weights, also of those of the task regression.  For models for
            retrieval also the highest ``recall`` or ``ndcg``; see `RetrievalConfig`.
        retrieval: see `RetrievalConfig`.
        label_weights: by label, what its loss counts in the sum that is trained; 1 where it is not
            named.
        positive_weights: by binary label, what a row with label 1 counts in its loss where one
            with label 0 counts 1.  Other weights than 1 shift the predictions: they are then no
            longer calibrated.
        average: None, or an average of the weights that is evaluated and packaged in their place; see
            `AverageConfig`.
        patience (evaluations): stop after so many evaluations in a row without a better metric; None: never.
        checkpoint_every_steps (steps): write a checkpoint every so many steps, besides after each
            evaluation; None: only there.
        keep_checkpoints (checkpoints): how many of the newest checkpoints stay, besides the best one.
        log_every_steps (steps): write the mean training loss every so many steps.
        seed: of the initial weights, the order of the rows and dropout.
        threads (threads): CPU threads of torch; None: as many as torch takes.  Sums are split among
            them, so another number may change the last bits of a run.
        device: where the model is; with ``cuda`` and several ranks each takes the GPU of its
            ``LOCAL_RANK``.  On a GPU sums are not added in a fixed order, and a resumed run draws
            other random numbers for dropout.
        sharding: how tables are spread over several ranks: as the planner chooses (``auto``), or
            all by one strategy, such as ``table_wise``, ``row_wise`` or ``column_wise``.  It has no
            effect on one rank.
        precision: what layers compute in, also in evaluations; weights stay float32.  ``tf32`` (GPUs):
            matrix products round their inputs to 10 bits.  ``bf16``: all is bfloat16 but batch norms and
            the logits' layers, on GPUs pooled vectors, too.
        cuda_graphs: whether a GPU is given layers as recorded graphs, which is faster where it waits for
            the CPU; layers then must not decide by values, such as ``if x.max() > 1``.
        pipeline: what overlaps with a step: the copy of the next batch to the device
            (``plain``), also the travel of its ids to the ranks that hold their rows
            (``sparse_dist``), also bringing its rows from host memory into a cache on the GPU
            (``prefetch``; tables are then kept in host memory).  ``auto``: ``sparse_dist`` on several
            GPUs if the model can be traced, else ``plain``.  The numbers of a run are the same.
    """

    batch_size: int = 1024
    eval_batch_size: int = 8192
    epochs: int = 1
    dense_optimizer: DenseOptimizerConfig = DenseOptimizerConfig()
    embedding_optimizer: EmbeddingOptimizerConfig = EmbeddingOptimizerConfig()
    first_order_optimizer: FirstOrderOptimizerConfig | None = None
    schedule: ScheduleConfig = ScheduleConfig()
    eval_every_steps: int | None = None
    eval_every_epochs: int = 1
    metric: Literal["auc", "log_loss", "recall", "ndcg"] = "auc"
    retrieval: RetrievalConfig = RetrievalConfig()
    label_weights: dict[str, float] = field(default_factory=dict)
    positive_weights: dict[str, float] = field(default_factory=dict)
    average: AverageConfig | None = None
    patience: int | None = None
    checkpoint_every_steps: int | None = None
    keep_checkpoints: int = 1
    log_every_steps: int = 50
    seed: int = 0
    threads: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    sharding: str = "auto"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    cuda_graphs: bool = False
    pipeline: Literal["auto", "plain", "sparse_dist", "prefetch"] = "auto"

    def __post_init__(self) -> None:
        check.at_least_one(self, "batch_size eval_batch_size epochs keep_checkpoints threads")
        check.at_least_one(self, "eval_every_epochs eval_every_steps patience")
        check.at_least_one(self, "checkpoint_every_steps log_every_steps")
        check.not_negative(self, "seed")
        if self.cuda_graphs and self.device == "cpu":
            raise UserError("cuda_graphs=True: it is for GPUs; leave it out, or set device=cuda")
        for name in ("label_weights", "positive_weights"):
            for label, weight in getattr(self, name).items():
                if not 0 < weight < math.inf:
                    raise UserError(f"{name}.{label}={weight}: give a number above 0")
        check.allowed(self, "seed", lambda value: value <= MAX_SEED, f"give at most {MAX_SEED}")
        check.allowed(
            self, "threads", lambda value: value <= MAX_THREADS, f"give at most {MAX_THREADS}"
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run is called and which of its optional files are written.

    Attributes:
        name: the first part of the default run folder; None: the config file's name.
        tensorboard: whether TensorBoard event files are written; ``trackers`` may name it, too.
        trackers: where the numbers of the run go besides: ``tensorboard``, ``mlflow``, ``wandb``
            (offline) or ``pkg.module:Class``, a class of the user's; each a name, or a mapping of
            one name to its settings: ``{mlflow: {experiment: ads}}``.
        report: whether the HTML report is written at the end.
    """

    name: str | None = None
    tensorboard: bool = True
    trackers: tuple[Any, ...] = ()
    report: bool = True

    def __post_init__(self) -> None:
        if self.name is not None and (not self.name or "/" in self.name):
            raise UserError(f"name={self.name!r}: give a folder's name without '/'")
        parse_trackers("trackers", self.trackers)

    def settled_trackers(self) -> dict[str, TrackerConfig]:
        """The trackers by name, that of the key ``tensorboard`` among them."""
        named = parse_trackers("run.trackers", self.trackers)
        if not self.tensorboard or "tensorboard" in named:
            return named
        return parse_trackers("run.trackers", ("tensorboard",)) | named


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """A whole experiment; see the section classes for their keys."""

    data: DataConfig
    model: ModelConfig
    train: TrainConfig = TrainConfig()
    run: RunConfig = RunConfig()

    def resolved(self, base: Path) -> ExperimentConfig:
        """This config with relative data paths taken from the folder ``base``."""
        return dataclasses.replace(self, data=self.data.resolved(base))

    def to_plain(self) -> dict[str, Any]:
        """Dicts, lists and scalars; `from_plain` is the inverse."""
        return dict(to_plain(self))

    def to_yaml(self) -> str:
        """The text of a config file that means this config."""
        return to_yaml(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any], *, name: str) -> ExperimentConfig:
        """The config that `to_plain` gave; ``name`` stands for its place in error messages.

        Raises:
            ConfigError: a key or value is not (or no longer) valid.
        """
        return build(cls, _upgraded(ConfigSource(values=values, origins={(): name})))


_DATA_KEYS_BEFORE_FORMATS = {
    *("format", "path", "valid_path", "test_path", "cache_dir", "split", "split_seed", "strict"),
    *("valid_fraction", "test_fraction", "workers", "positive_rating", "max_history"),
}

_MODEL_KEYS_SINCE = {"embedding_dropout", "batch_norm", "concat", "first_order", "fm"}
"""The keys of a DLRM that a resolved config of before 0.7 did not hold."""


def _upgraded(source: ConfigSource) -> ConfigSource:
    """The source as this version writes it.

    Every resolved config of before 0.7, also one of a DLRM, held the two keys of the cross
    network, and every one of before formats of data had keys of their own held those of both.  A
    config that a person wrote holds them only if they are meant.
    """
    values = dict(source.values)
    model = values.get("model")
    cross = {"dcn_num_layers", "dcn_low_rank_dim"}
    if isinstance(model, dict) and model.get("arch") == "dlrm":
        own = {item.name for item in dataclasses.fields(ModelConfig.variants.find("dlrm"))}
        if set(model) == (own - _MODEL_KEYS_SINCE) | cross:
            values["model"] = {key: value for key, value in model.items() if key not in cross}
    data = values.get("data")
    if isinstance(data, dict) and set(data) == _DATA_KEYS_BEFORE_FORMATS:
        own = {item.name for item in dataclasses.fields(DataConfig.variants.find(data["format"]))}
        values["data"] = {key: value for key, value in data.items() if key in own}
    return dataclasses.replace(source, values=values)


def load_config(
    path: Path, overrides: Sequence[str] = (), *, base: Path | None = None
) -> ExperimentConfig:
    """Read a config file, apply ``key=value`` overrides and resolve its paths.

    Args:
        path: the YAML file.
        overrides: e.g. ``["train.epochs=3", "data.path=clicks.tsv"]``; values are YAML.
        base: the folder that relative data paths are taken from, those of the file as well as
            those of overrides; None: the working directory.

    Raises:
        ConfigError: a key or value is wrong; the message names it, its place and the remedy.
        OSError: the file cannot be read.
    """
    source = apply_overrides(_upgraded(read_yaml(path)), overrides)
    return build(ExperimentConfig, source).resolved(base or Path.cwd())


def find_config(name: str) -> Path:
    """The file ``name``, or else the config of that name that comes with Tessera.

    Raises:
        UserError: there is neither.
    """
    path = Path(name)
    if path.exists():
        return path
    shipped = SHIPPED_CONFIGS / f"{name}.yaml"
    if "/" not in name and shipped.exists():
        return shipped
    known = ", ".join(sorted(found.stem for found in SHIPPED_CONFIGS.glob("*.yaml")))
    raise UserError(
        f"--config {name}: no such file, nor a config that comes with Tessera ({known})"
    )


def resume_conflicts(stored: ExperimentConfig, given: ExperimentConfig) -> list[str]:
    """Dotted keys that differ and whose change would make a resumed run another run."""
    return [
        key
        for key in differing_keys(stored.to_plain(), given.to_plain())
        if not any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME)
    ]
