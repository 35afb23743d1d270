"""Runs TorchEasyRec's `tzrec.train_eval` as a whole program on Tessera, beside TorchRec itself where it is installed.

    python training/bench/torcheasyrec_train.py --checkout ~/TorchEasyRec [--ranks 2] [--only dlrm]

The package `tzrec` is copied and moved as by `torcheasyrec_tests.py`, whose head says what it needs. A small data set is
drawn from a seed (Parquet files: ids of which some tell the label, bags of ids, numbers), and each of the models of `MODELS` is
trained on it for one epoch, saved, and evaluated by the program itself, from its command line and a configuration file.

One edit is made for both libraries: TorchEasyRec's own planner, which is made of the private parts of TorchRec's, gives its
place to the library's `EmbeddingShardingPlanner`, which is told to keep tables whole and to update them in the backward pass. Weights and seeds are the same in both (`program_observer.py`), and the
losses of all steps are compared, and the AUC that the program prints.

The exit status is 1 if a run with Tessera fails, or trains otherwise than with TorchRec.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tessera.training.bench.program_list import Program
from tessera.training.bench.program_rewrite import HOME, LIBRARY, moved
from tessera.training.bench.torcheasyrec_tests import copy_package
from tessera.training.bench.torchrec_programs import RTOL, Outcome, difference, run

ROWS, FILES, BATCH = 8192, 2, 256
IDS = {"user": 1000, "item": 300, "tags": 50}  # how many ids each feature has
NUMBERS = ("price", "age")
_PLANNER = """
def create_planner(device, batch_size, model, **_):
    \"\"\"The library's own planner, for whole tables that the backward pass updates.\"\"\"
    from torchrec.distributed.comm import get_local_size
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

    topology = Topology(
        world_size=dist.get_world_size(),
        compute_device=device.type,
        local_world_size=get_local_size(),
    )
    constraints = {
        config.name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
        for module in model.modules()
        if hasattr(module, "embedding_bag_configs")
        for config in module.embedding_bag_configs()
    }
    return EmbeddingShardingPlanner(
        topology=topology, batch_size=batch_size, constraints=constraints
    )
"""
_GROUP = """
    feature_groups {{ group_name: "{name}" {features} group_type: DEEP }}"""
_CONFIG = """
train_input_path: "data/train-*.parquet"
eval_input_path: "data/eval-*.parquet"
model_dir: "run"
train_config {{
    sparse_optimizer {{ adagrad_optimizer {{ lr: 0.05 }} constant_learning_rate {{ }} }}
    dense_optimizer {{ adam_optimizer {{ lr: 0.01 }} constant_learning_rate {{ }} }}
    num_epochs: 1
}}
eval_config {{ }}
data_config {{
    batch_size: {batch} dataset_type: ParquetDataset label_fields: "label" num_workers: 1
    fg_mode: FG_NONE shuffle: false
}}
{features}
model_config {{{groups}
    {model}
    num_class: 1
    metrics {{ auc {{ }} }}
    losses {{ binary_cross_entropy {{ }} }}
}}
"""
_DENSE, _SPARSE = " ".join(NUMBERS), " ".join(IDS)
MODELS = {
    "dlrm": (
        {"dense": _DENSE, "sparse": _SPARSE},
        "dlrm { dense_mlp { hidden_units: [16, 8] } final { hidden_units: [32, 16] } }",
    ),
    "deepfm": (
        {"wide": _SPARSE, "fm": _SPARSE, "deep": f"{_SPARSE} {_DENSE}"},
        "deepfm { deep { hidden_units: [32, 16] } final { hidden_units: [16] } wide_embedding_dim: 4 }",
    ),
    "multi_tower": (
        {"buyers": "user age", "goods": "item tags price"},
        """multi_tower {
            towers { input: 'buyers' mlp { hidden_units: [16] } }
            towers { input: 'goods' mlp { hidden_units: [16] } }
            final { hidden_units: [16] }
        }""",
    ),
}
"""By name: the groups of features, and the model in TorchEasyRec's words."""


def configuration(name: str) -> str:
    """The text of the configuration file that trains the model of that name."""
    groups, model = MODELS[name]
    features = [
        f'id_feature {{ feature_name: "{feature}" num_buckets: {count} embedding_dim: 8 }}'
        for feature, count in IDS.items()
    ]
    features += [f'raw_feature {{ feature_name: "{number}" }}' for number in NUMBERS]
    return _CONFIG.format(
        batch=BATCH,
        features="\n".join(f"feature_configs {{ {feature} }}" for feature in features),
        groups="".join(
            _GROUP.format(
                name=group, features=" ".join(f'feature_names: "{one}"' for one in members.split())
            )
            for group, members in groups.items()
        ),
        model=model,
    )


def write_data(folder: Path, seed: int = 0) -> None:
    """Writes `FILES` files for training and as many for evaluation, of `ROWS` rows together each.

    `user` and `item` are int64, `tags` lists of 0 to 3 int64, `price` and `age` float32 and `label` int32, which is 1 with
    a chance that grows with hidden weights of the ids and with `age`.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(count, generator=generator) for name, count in IDS.items()}
    folder.mkdir()
    for part in [f"{use}-{number}" for use in ("train", "eval") for number in range(FILES)]:
        rows = ROWS // FILES
        user, item = (
            torch.randint(IDS[name], (rows,), generator=generator) for name in ("user", "item")
        )
        lengths = torch.randint(0, 4, (rows,), generator=generator)
        tags = torch.randint(IDS["tags"], (int(lengths.sum()),), generator=generator)
        price, age = torch.rand(2, rows, generator=generator)
        bags = torch.zeros(rows).index_add_(
            0, torch.repeat_interleave(lengths), weights["tags"][tags]
        )
        logits = weights["user"][user] + weights["item"][item] + bags / 2 + 2 * age - 1
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        columns = {
            "user": pa.array(user.numpy()),
            "item": pa.array(item.numpy()),
            "tags": pa.ListArray.from_arrays(
                pa.array(offsets.int().numpy()), pa.array(tags.numpy())
            ),
            "price": pa.array(price.numpy()),
            "age": pa.array(age.numpy()),
            "label": pa.array(torch.bernoulli(torch.sigmoid(logits), generator=generator).int().numpy()),
        }  # fmt: skip
        pq.write_table(pa.table(columns), folder / f"{part}.parquet")


def with_planner(source: str) -> str:
    """TorchEasyRec's `main.py` with the library's planner in the place of its own.

    Raises:
        ValueError: it imports the planner in another way than known.
    """
    line = "from tzrec.utils.plan_util import create_planner, get_default_sharders\n"
    if source.count(line) != 1:
        raise ValueError(f"main.py of the checkout does not say {line.strip()!r} once")
    return source.replace(line, "from tzrec.utils.plan_util import get_default_sharders\n").replace(
        "\n\ndef _create_features(", f"\n\n{_PLANNER}\n\ndef _create_features(", 1
    )


def train(checkout: Path, name: str, library: str, ranks: int, keep: Path | None) -> Outcome:
    """Trains and evaluates one model with one library; the last line of the outcome has its AUC."""
    program = Program(
        name=name,
        folder="",
        module="tzrec.train_eval",
        arguments=("--pipeline_config_path", "model.config"),
    )
    with tempfile.TemporaryDirectory(prefix="torcheasyrec-train-") as temporary:
        scratch = Path(temporary)
        copy_package(checkout, scratch, library)
        main_file = scratch / "tzrec" / "main.py"
        edited = with_planner(main_file.read_text(encoding="utf-8"))
        main_file.write_text(moved(edited) if library == HOME else edited, encoding="utf-8")
        write_data(scratch / "data")
        (scratch / "model.config").write_text(configuration(name), encoding="utf-8")
        try:
            found = run(program, scratch, library, ranks, 900)
            results = scratch / "run" / "train_eval_result_v2.txt"
            auc = (
                json.loads(results.read_text().splitlines()[-1])["auc"]
                if results.exists()
                else None
            )
        finally:
            if keep is not None:
                shutil.copytree(scratch, keep / f"{name}-{ranks}-{library}", dirs_exist_ok=True)
    last_line = f"AUC {auc:.4f}" if auc is not None else found.last_line
    return Outcome(
        status=found.status, seconds=found.seconds, losses=found.losses, last_line=last_line
    )


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Runs TorchEasyRec's train_eval on Tessera.")
    parser.add_argument("--checkout", type=Path, required=True, help="a checkout of TorchEasyRec")
    parser.add_argument("--ranks", type=int, default=1, help="processes (1)")
    parser.add_argument("--only", default="", help="train models whose names have this text")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the copies and their output")
    arguments = parser.parse_args()
    good = True
    print("| model | ranks | steps | here | TorchRec | largest difference of losses |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in [name for name in MODELS if re.search(arguments.only, name)]:
        outcomes = {
            library: train(arguments.checkout, name, library, arguments.ranks, arguments.keep)
            for library in [HOME, *([LIBRARY] if find_spec(LIBRARY) else [])]
        }
        ours, theirs = outcomes[HOME], outcomes.get(LIBRARY)
        good &= ours.status == "runs"
        apart = ""
        if theirs is not None and theirs.status == "runs":
            largest = difference(ours.losses, theirs.losses)
            good &= largest <= RTOL
            apart = f"{largest:.0e}"
        said = [f"{one.status}, {one.last_line[:200]}" if one else "" for one in (ours, theirs)]
        steps = len(ours.losses[0]) if ours.losses else 0
        print(
            f"| {name} | {arguments.ranks} | {steps} | {' | '.join(said)} | {apart} |", flush=True
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
