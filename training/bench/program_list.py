"""The TorchRec programs that `torchrec_programs.py` runs: where each is, and how it is made small.

Edits change sizes, devices and counts of steps, and are the same for both libraries.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of a checkout.

    Fields:
        name: How the report calls it.
        folder: What is copied of the checkout; a checkout without it has not the program.
        module: What `python -m` runs from the checkout's root. A path of a notebook
            (`NAME.ipynb`) is made a program first.
        arguments: The program's command line.
        tests: `module` is a file of unit tests.
        root: The folder of the checkout from which it runs.
        ranks: How many processes; each number is one run.
        edits: File in `folder`, pattern and replacement (as in `re.sub`). Each must match.
        driver: A program of our own that calls the checkout's, which is a library then.
        needs: Modules that the program imports and Tessera does not need.
        small: Is among those that Tessera's own tests run.
    """

    name: str
    folder: str
    module: str
    arguments: tuple[str, ...] = ()
    tests: bool = False
    root: str = "."
    ranks: tuple[int, ...] = (1,)
    edits: tuple[tuple[str, str, str], ...] = ()
    driver: str = ""
    needs: tuple[str, ...] = ()
    small: bool = False


def _words(line: str) -> tuple[str, ...]:
    return tuple(line.split())


def _small_golden(file: str) -> tuple[tuple[str, str, str], ...]:
    return (
        (file, r"num_embeddings: int = 1024\*\*2", "num_embeddings: int = 1000"),
        (file, r"embedding_dim: int = 128", "embedding_dim: int = 16"),
        (file, r"num_iterations: int = 1000", "num_iterations: int = 20"),
    )


_ON_CPU = (
    (r'backend="nccl"', 'backend="gloo"'),
    (r'torch\.device\(f"cuda:\{\w+\}"\)', 'torch.device("cpu")'),
    (r" *torch\.cuda\.set_device\(device\)\n", ""),
)
_NOTEBOOK_ON_CPU = (
    (r'backend=\\"nccl\\"', r'backend=\\"gloo\\"'),
    (r"\.cuda\(\)", ""),
    (r'\\"cuda\\"', r'\\"cpu\\"'),
)
_RETRIEVAL_ON_CPU = (
    (r'    assert torch\.cuda\.is_available\(\), "This example requires a GPU"\n', ""),
    (r'torch\.device\(f"cuda:\{\w+\}"\)', 'torch.device("cpu")'),
    (r" *torch\.cuda\.set_device\(device\)\n", ""),
    (r"num_embeddings: int = 1024 \* 1024", "num_embeddings: int = 5000"),
    (r"torch\.float16", "torch.float32"),
    (r"DataType\.FP16", "DataType.FP32"),
    (r"world_size: int = 2", "world_size: int = 1"),
)
_FAISS_ON_CPU = tuple(
    (file, r"Union\[faiss\.GpuIndexIVFPQ, faiss\.IndexIVFPQ\]", "faiss.IndexIVFPQ")
    for file in ("knn_index.py", "modules/two_tower.py")
)
_BERT = _words(
    "--dataset_name random --random_user_count 60 --random_item_count 20 --random_size 800"
    " --lr 0.001 --mask_prob 0.2 --weight_decay 0.00001 --train_batch_size 32 --val_batch_size 32"
    " --max_len 30 --emb_dim 32 --num_epochs 2"
)
_DLRM = _words(
    "--limit_train_batches 20 --limit_val_batches 4 --limit_test_batches 4 --learning_rate 0.01"
    " --over_arch_layer_sizes 16,1 --dense_arch_layer_sizes 16,8 --embedding_dim 8"
)
_RAY_SMALL = (
    ("train_torchrec.py", r"num_embeddings: int = 1024\*\*2", "num_embeddings: int = 1000"),
    ("train_torchrec.py", r"int\(1e4\)", "20"),
)
_RAY_DRIVER = """
import os
import shutil
import sys
import tempfile
from pathlib import Path

import ray
from torchx.runner import get_runner
from torchx.specs import AppState

if __name__ == "__main__":
    os.environ["PATH"] = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    context = ray.init(num_cpus=2, include_dashboard=True, dashboard_port=0)
    work = Path(tempfile.mkdtemp())  # torchx removes it
    shutil.copy("examples/ray/train_torchrec.py", work)
    with get_runner() as runner:
        job = runner.run_component(
            "dist.ddp",
            ["-j", "1x{ranks}", "--script", "train_torchrec.py"],
            "ray",
            {{"dashboard_address": context.dashboard_url}},
            workspace=work.as_uri(),
        )
        status = runner.wait(job, wait_interval=1)
        print("\\n".join(runner.log_lines(job, "train_torchrec", 0)))
    ray.shutdown()
    sys.exit(None if status.state == AppState.SUCCEEDED else f"the job ended as {{status.state}}")
"""
_MANY_HOT = ",".join(["3"] * 26)
_SIZES = ",".join(["100"] * 26)
_MLPERF_DRIVER = """
import torch
from {backend} import {cls}
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.random import RandomRecDataset

if __name__ == "__main__":
    backend = {cls}(
        num_embeddings_per_feature=[100] * 26, embedding_dim=8, dcn_num_layers=2,
        dcn_low_rank_dim=4, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1],
        debug=True,
    )
    backend.load("nowhere")
    batches = list(RandomRecDataset(
        keys=DEFAULT_CAT_NAMES, batch_size=16, hash_size=100, ids_per_feature=3,
        num_dense=len(DEFAULT_INT_NAMES), manual_seed=7, num_batches=3,
    ))
    for scores in {call}:
        value = torch.as_tensor(scores).double().sum().requires_grad_()
        value.backward()
    {end}
"""
_MLPERF = "recommendation/dlrm_v2/pytorch/python"
_MLPERF_MAIN_DRIVER = """
import json
import os
import runpy
import sys

import numpy

if __name__ == "__main__":
    os.environ["WORLD_SIZE"] = "{ranks}"
    sys.argv = ["quickgen.py", "--num-samples", "200", "--num-multihot-features",
                ",".join(["3"] * 26)]
    runpy.run_path("../tools/quickgen.py", run_name="__main__")
    sys.argv = ["main.py", "--profile", "dlrm-debug-pytorch", "--model-path", "nowhere",
                "--dataset-path", ".", "--scenario", "{scenario}", "--accuracy", "--threads", "1",
                "--user_conf", "../user.conf", "--samples-per-query-offline", "200",
                "--max-batchsize", "20", "--output", "output", "--duration", "1000",
                "--samples-to-aggregate-fix", "2"]
    runpy.run_path("main.py", run_name="__main__")
    import torch

    answers = json.load(open("mlperf_log_accuracy.json"))  # main.py goes to its output folder
    scores = {{
        answer["qsl_idx"]: numpy.frombuffer(bytes.fromhex(answer["data"]), numpy.float32)
        for answer in answers
    }}
    assert len(scores) == 100, len(scores)
    for place in sorted(scores):
        torch.tensor(scores[place]).double().sum().requires_grad_().backward()
"""

PROGRAMS = (
    Program(
        name="golden_training/train_dlrm",
        folder="examples/golden_training",
        module="examples.golden_training.train_dlrm",
        ranks=(1, 2),
        edits=_small_golden("train_dlrm.py"),
        small=True,
    ),
    Program(
        name="golden_training/train_dlrm_data_parallel",
        folder="examples/golden_training",
        module="examples.golden_training.train_dlrm_data_parallel",
        ranks=(1, 2),
        edits=_small_golden("train_dlrm_data_parallel.py"),
        small=True,
    ),
    Program(
        name="golden_training/tests",
        folder="examples/golden_training",
        module="examples.golden_training.tests.test_train_dlrm",
        tests=True,
        edits=_small_golden("train_dlrm.py"),
    ),
    Program(
        name="prediction",
        folder="examples/prediction",
        module="examples.prediction.predict_using_torchrec",
        edits=(("predict_using_torchrec.py", r"num_epochs = 10", "num_epochs = 1"),),
        small=True,
    ),
    Program(
        name="prediction/tests",
        folder="examples/prediction",
        module="examples.prediction.test_predict_using_torchrec",
        tests=True,
        edits=(
            ("test_predict_using_torchrec.py", r"torchrec\.github\.examples", "examples"),
            ("predict_using_torchrec.py", r"num_epochs = 10", "num_epochs = 1"),
        ),
    ),
    Program(
        name="transfer_learning",
        folder="examples/transfer_learning",
        module="examples.transfer_learning.train_from_pretrained_embedding",
        edits=(
            *(("train_from_pretrained_embedding.py", *edit) for edit in _ON_CPU),
            # torch 2.1 took the underscores away.
            ("train_from_pretrained_embedding.py", r'"_UntypedStorage"', '"UntypedStorage"'),
            (
                "train_from_pretrained_embedding.py",
                r"storage\._TypedStorage",
                "storage.TypedStorage",
            ),
            ("train_from_pretrained_embedding.py", r"2000000", "2000"),
            ("train_from_pretrained_embedding.py", r"nproc_per_node=8", "nproc_per_node=2"),
        ),
    ),
    Program(
        name="zch",
        folder="examples/zch",
        module="examples.zch.main",
        arguments=("--num_iters", "10"),
        small=True,
    ),
    Program(
        name="zch --use_mpzch",
        folder="examples/zch",
        module="examples.zch.main",
        arguments=("--num_iters", "10", "--use_mpzch"),
        small=True,
    ),
    Program(
        name="zch notebook",
        folder="examples/zch",
        module="examples/zch/zero_collision_hash_tutorial.ipynb",
    ),
    *(
        Program(
            name=f"bert4rec --mode {mode}",
            folder="examples/bert4rec",
            module="examples.bert4rec.bert4rec_main",
            arguments=(*_BERT, "--mode", mode),
            ranks=(1, 2),
            needs=("pandas",),
        )
        for mode in ("dmp", "ddp")
    ),
    *(
        Program(
            name=f"bert4rec/{tests}",
            folder="examples/bert4rec",
            module="examples.bert4rec." + tests.replace("/", "."),
            tests=True,
            edits=edits,
            needs=("pandas",),
        )
        for tests, edits in (
            ("data/tests/test_bert4rec_movielens_datasets", ()),
            ("dataloader/tests/test_bert4rec_movielens_dataloader", ()),
            ("models/tests/test_bert4rec", ()),
            (
                "tests/test_bert4rec_main",
                (("tests/test_bert4rec_main.py", r"torch\.cuda\.device_count\(\) < 2", "False"),),
            ),
        )
    ),
    Program(
        name="retrieval/two_tower_train",
        folder="examples/retrieval",
        module="examples.retrieval.two_tower_train",
        ranks=(1, 2),
        edits=(
            (
                "two_tower_train.py",
                r"num_embeddings: int = 1024\*\*2",
                "num_embeddings: int = 5000",
            ),
            ("two_tower_train.py", r"num_iterations: int = 100", "num_iterations: int = 20"),
            *_FAISS_ON_CPU,
        ),
        needs=("click", "faiss"),
    ),
    Program(
        name="retrieval/two_tower_retrieval",
        folder="examples/retrieval",
        module="examples.retrieval.two_tower_retrieval",
        edits=(*(("two_tower_retrieval.py", *edit) for edit in _RETRIEVAL_ON_CPU), *_FAISS_ON_CPU),
        needs=("click", "faiss"),
    ),
    Program(
        name="retrieval/tests",
        folder="examples/retrieval",
        module="examples.retrieval.tests.test_two_tower_train",
        tests=True,
        edits=(
            (
                "two_tower_train.py",
                r"num_embeddings: int = 1024\*\*2",
                "num_embeddings: int = 5000",
            ),
            *_FAISS_ON_CPU,
        ),
        needs=("click", "faiss"),
    ),
    Program(
        name="ray",
        folder="examples/ray",
        module="examples.ray.train_torchrec",
        ranks=(1, 2),
        edits=_RAY_SMALL,
    ),
    *(
        Program(
            name=f"ray, a job of torchx with {ranks} ranks",
            folder="examples/ray",
            module="program_driver",
            driver=_RAY_DRIVER.format(ranks=ranks),
            edits=_RAY_SMALL,
            needs=("ray", "torchx"),
        )
        for ranks in (1, 2)
    ),
    *(
        Program(
            name=f"ebc_benchmarks --mode {mode}",
            folder="benchmarks",
            root="benchmarks",
            module="ebc_benchmarks",
            arguments=("--cpu_only", "--mode", mode),
            edits=(
                (
                    "ebc_benchmarks.py",
                    r"num_emb if num_emb < 10000000 else int\(num_emb / reduction_degree\)",
                    "min(num_emb, 1000)",
                ),
                ("ebc_benchmarks.py", r"epochs: int = 100", "epochs: int = 1"),
                ("ebc_benchmarks.py", r"epochs=3", "epochs=1"),
                ("ebc_benchmarks.py", r"\[10, 100, 1000\]", "[10]"),
                ("ebc_benchmarks.py", r"\[128, 64, 32\]", "[128]"),
                ("ebc_benchmarks.py", r"\[4, 8, 16, 32, 64, 128\]", "[4, 128]"),
                ("ebc_benchmarks.py", r"\[4, 8, 16, 32, 64, 128, 256, .*\]", "[4, 1024]"),
                ("ebc_benchmarks_utils.py", r"dataset: IterableDataset\[Batch\],", r"\g<0>"),
            ),
        )
        for mode in ("ebc_comparison_dlrm", "ebc_comparison_scaling")
    ),
    *(
        Program(
            name=name.removesuffix(".ipynb"),
            folder=name,
            module=name,
            edits=tuple(("", *edit) for edit in edits),
        )
        for name, edits in (
            ("Torchrec_Introduction.ipynb", _NOTEBOOK_ON_CPU),
            ("TorchRec_Interactive_Tutorial_Notebook_OSS_version.ipynb", _NOTEBOOK_ON_CPU[2:]),
        )
    ),
    *(
        Program(
            name=f"torchrec_dlrm {title}",
            folder="torchrec_dlrm",
            module="torchrec_dlrm.dlrm_main",
            arguments=(*_DLRM, *arguments),
            ranks=(1, 2),
            needs=("torchmetrics", "pyre_extensions", "iopath"),
        )
        for title, arguments in (
            ("(SGD)", ("--num_embeddings", "100")),
            ("--adagrad", ("--num_embeddings", "100", "--adagrad")),
            (
                "--interaction_type dcn",
                _words(
                    "--num_embeddings 100 --interaction_type dcn --dcn_num_layers 2"
                    " --dcn_low_rank_dim 8 --print_sharding_plan --print_lr"
                ),
            ),
            (
                "--interaction_type projection",
                _words(
                    "--num_embeddings 100 --interaction_type projection"
                    " --interaction_branch1_layer_sizes 16,16"
                    " --interaction_branch2_layer_sizes 16,16"
                ),
            ),
            (
                "--multi_hot_sizes",
                _words(
                    f"--num_embeddings_per_feature {_SIZES} --multi_hot_sizes {_MANY_HOT}"
                    " --multi_hot_distribution_type uniform --validation_freq_within_epoch 10"
                    " --lr_warmup_steps 5 --lr_decay_start 8 --lr_decay_steps 10"
                ),
            ),
        )
    ),
    *(
        Program(
            name=name,
            folder="torchrec_dlrm",
            module="torchrec_dlrm.tests.test_dlrm_main",
            tests=True,
            edits=edits,
            needs=("torchmetrics", "pyre_extensions", "iopath"),
        )
        for name, edits in (
            ("torchrec_dlrm/tests", ()),
            # With the program's rate of 15 the test of DCN soon has infinite weights.
            (
                "torchrec_dlrm/tests, learning rate 0.01",
                (("dlrm_main.py", r"default=15\.0", "default=0.01"),),
            ),
        )
    ),
    *(
        Program(
            name=f"dlrm_v2 {backend}",
            folder=_MLPERF,
            root=_MLPERF,
            module="program_driver",
            driver=_MLPERF_DRIVER.format(backend=backend, cls=cls, call=call, end=end),
        )
        for backend, cls, call, end in (
            (
                "backend_pytorch_native",
                "BackendPytorchNative",
                "backend.predict(batches)",
                "",
            ),
            (
                "backend_dist_pytorch_native",
                "BackendDistPytorchNative",
                "backend.predict([[batch] * 8 for batch in batches], [0, 1, 2])",
                "backend.predict(None, None)",
            ),
        )
    ),
    *(
        Program(
            name=f"dlrm_v2 main.py --scenario {scenario}, {ranks} ranks",
            folder=_MLPERF.removesuffix("/python"),
            root=_MLPERF,
            module="program_driver",
            driver=_MLPERF_MAIN_DRIVER.format(scenario=scenario, ranks=ranks),
            edits=(
                # numpy 2.3 took the private name away.
                (
                    "python/multihot_criteo.py",
                    r"_read_array_header\(\s*zf\.fp, version\)",
                    "read_array_header_1_0(zf.fp)",
                ),
            ),
            needs=("mlperf_loadgen", "sklearn"),
        )
        for scenario in ("Offline", "Server")
        for ranks in (1, 2)
    ),
)
