"""The losses of each training pipeline beside those of TorchRec's pipeline of the same name.

    python training/bench/pipelines_versus_torchrec.py [--world-size 2] [--batches 9]

The same model with the same weights takes the same batches through both libraries' pipelines, on CPUs
and gloo, each library in processes of its own.  TorchRec must be installed.  Some of its pipelines need
a GPU; the table says what they raise.  The exit status is 1 if losses differ by more than `RTOL`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import math
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import distributed as dist
from torch import multiprocessing, nn

RTOL = 1e-5  # float32, sums in another order
LIBRARIES = ("torchrec", "tessera.training")
ROWS, DIM, BATCH = 50, 8, 16
TABLES = ("clicks", "views")
DEVICE = torch.device("cpu")

Losses = list[float]


class Library:
    """Names of one of the libraries, by TorchRec's module paths."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __call__(self, module: str, name: str) -> Any:
        """What the library has under a path and a name."""
        return getattr(importlib.import_module(f"{self._package}.{module}"), name)

    def pipeline(self, name: str) -> Any:
        """A pipeline's class."""
        return self("distributed.train_pipeline.train_pipelines", name)


class Model(nn.Module):
    """Ids go through a module without weights, then to a pooled collection and a layer."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        config = library("modules.embedding_configs", "EmbeddingBagConfig")
        self.fold = Fold(library)
        self.tables = library("modules.embedding_modules", "EmbeddingBagCollection")(
            tables=[
                config(
                    name=f"t_{name}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name]
                )
                for name in TABLES
            ]
        )
        self.over = nn.Linear(DIM * len(TABLES), 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, twice."""
        vectors = self.tables(self.fold(batch.ids)).values()
        loss = nn.functional.binary_cross_entropy_with_logits(
            self.over(vectors).squeeze(1), batch.labels
        )
        return loss, loss.detach()


class Fold(nn.Module):
    """Ids of 64 bits to rows."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self._kjt = library("sparse.jagged_tensor", "KeyedJaggedTensor")

    def forward(self, ids: Any) -> Any:
        """The same bags of rows."""
        return self._kjt(ids.keys(), ids.values() % ROWS, lengths=ids.lengths())


def batches(library: Library, count: int) -> Iterator[Any]:
    """This rank's batches, the same for each library."""
    kjt = library("sparse.jagged_tensor", "KeyedJaggedTensor")
    generator = torch.Generator().manual_seed(dist.get_rank())

    class Batch(library("streamable", "Pipelineable")):  # type: ignore[misc]
        def __init__(self, ids: Any, labels: torch.Tensor) -> None:
            self.ids, self.labels = ids, labels

        def to(self, device: torch.device, non_blocking: bool = False) -> Any:  # noqa: FBT001, FBT002 - as of torch.Tensor
            return Batch(
                self.ids.to(device, non_blocking=non_blocking),
                self.labels.to(device, non_blocking=non_blocking),
            )

        def record_stream(self, stream: torch.Stream) -> None:
            """There is one stream."""

    for _ in range(count):
        lengths = torch.randint(0, 4, (len(TABLES) * BATCH,), generator=generator)
        values = torch.randint(0, 2**40, (int(lengths.sum()),), generator=generator)
        labels = torch.randint(0, 2, (BATCH,), generator=generator).float()
        yield Batch(kjt(list(TABLES), values, lengths=lengths), labels)


def model_and_optimizer(library: Library) -> tuple[Any, torch.optim.Optimizer]:
    """The sharded model with weights that depend on their place alone, and the dense optimizer."""
    torch.manual_seed(0)
    model = Model(library)
    sharder = library("distributed.embeddingbag", "EmbeddingBagCollectionSharder")(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    )
    plan = library("distributed.sharding_plan", "construct_module_sharding_plan")(
        model.tables,
        {
            "t_clicks": library("distributed.sharding_plan", "table_wise")(
                rank=dist.get_world_size() - 1, compute_kernel="fused"
            ),
            "t_views": library("distributed.sharding_plan", "row_wise")(compute_kernel="fused"),
        },
        sharder,
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    parallel = library("distributed.model_parallel", "DistributedModelParallel")(
        model,
        device=DEVICE,
        plan=library("distributed.types", "ShardingPlan")({"tables": plan}),
        sharders=[sharder],
    )
    for name, parameter in parallel.named_parameters():
        if "over" in name:
            parameter.data.copy_(torch.arange(parameter.numel()).sin().view_as(parameter))
    for value in parallel.state_dict().values():
        for shard in value.local_shards() if hasattr(value, "local_shards") else []:
            rows, columns = (
                torch.arange(size, dtype=torch.float32) + offset
                for size, offset in zip(
                    shard.metadata.shard_sizes, shard.metadata.shard_offsets, strict=True
                )
            )
            shard.tensor.copy_((rows[:, None] * 17 + columns * 3).sin())
    dense = [p for name, p in parallel.named_parameters() if "over" in name]
    return parallel, torch.optim.SGD(dense, lr=0.5)


def plain(library: Library, count: int) -> Losses:
    """A plain loop."""
    model, optimizer = model_and_optimizer(library)
    losses = []
    for batch in batches(library, count):
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(output))
    return losses


def drained(pipeline: Any, source: Iterator[Any]) -> Losses:
    """All losses of a pipeline."""
    losses = []
    with contextlib.suppress(StopIteration):
        while True:
            losses.append(float(pipeline.progress(source)))
    return losses


def pipelined(name: str, **options: Any) -> Callable[[Library, int], Losses]:
    """A pipeline of this name and these arguments."""

    def run(library: Library, count: int) -> Losses:
        model, optimizer = model_and_optimizer(library)
        model.train(not name.startswith("Eval"))
        pipeline = library.pipeline(name)(model, optimizer, DEVICE, **options)
        return drained(pipeline, batches(library, count))

    return run


def hybrid(library: Library, count: int) -> Losses:
    """Training steps of the pipeline that can also evaluate."""
    model, optimizer = model_and_optimizer(library)
    kind = library(
        "distributed.train_pipeline.experimental_pipelines", "TrainEvalHybridPipelineBase"
    )
    pipeline = kind(model, optimizer, DEVICE, pipeline_postproc=True)
    return drained(pipeline, batches(library, count))


def compiled(library: Library, count: int) -> Losses:
    """The pipeline that compiles; the step of compiling is past the last batch."""
    config = library("distributed.train_pipeline", "TorchCompileConfig")(compile_on_iter=count + 1)
    return pipelined("TrainPipelinePT2", compile_configs=config)(library, count)


def accumulated(library: Library, count: int) -> Losses:
    """Dense gradients of three batches make a step."""
    model, optimizer = model_and_optimizer(library)
    pipeline = library.pipeline("TrainPipelineSparseDist")(model, optimizer, DEVICE)
    config = library("distributed.train_pipeline", "GradientAccumulationConfig")(num_steps=3)
    wrapper = library("distributed.train_pipeline", "GradientAccumulationWrapper")
    return drained(wrapper(pipeline, optimizer, model, config), batches(library, count))


class CPUStream(torch.cpu.Stream):
    """A stream that says where it is, as TorchRec's stages ask."""

    device = DEVICE


def staged(library: Library, count: int) -> Losses:
    """Stages that copy and send ids."""
    model, optimizer = model_and_optimizer(library)
    stage = library("distributed.train_pipeline.pipeline_stage", "PipelineStage")
    stream = CPUStream()
    sdd = library("distributed.train_pipeline", "SparseDataDistUtil")(model, stream)
    pipeline = library.pipeline("StagedTrainPipeline")(
        [
            stage("copy", lambda batch: batch.to(DEVICE), stream),
            stage("ids", sdd.start_sparse_data_dist, stream, sdd.wait_sdd_fill_callback),
        ],
        compute_stream=stream,
    )
    source, losses = batches(library, count), []
    while (batch := pipeline.progress(source)) is not None:
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(output))
    return losses


CASES: dict[str, Callable[[Library, int], Losses]] = {
    "a plain loop": plain,
    "TrainPipelineBase": pipelined("TrainPipelineBase"),
    "TrainPipelineSparseDist": pipelined("TrainPipelineSparseDist"),
    "TrainPipelineSparseDist(pipeline_postproc)": pipelined(
        "TrainPipelineSparseDist", pipeline_postproc=True
    ),
    "TrainPipelineSparseDistLite": pipelined("TrainPipelineSparseDistLite", pipeline_postproc=True),
    "PrefetchTrainPipelineSparseDist": pipelined("PrefetchTrainPipelineSparseDist"),
    "TrainPipelineFusedSparseDist": pipelined("TrainPipelineFusedSparseDist"),
    "TrainPipelineSemiSync": pipelined("TrainPipelineSemiSync", start_batch=2),
    "TrainPipelineSemiSync(stash_gradients)": pipelined(
        "TrainPipelineSemiSync", start_batch=2, stash_gradients=True
    ),
    "TrainPipelinePT2": compiled,
    "TrainEvalHybridPipelineBase": hybrid,
    "EvalPipelineSparseDist": pipelined("EvalPipelineSparseDist", pipeline_postproc=True),
    "EvalPipelineFusedSparseDist": pipelined("EvalPipelineFusedSparseDist"),
    "GradientAccumulationWrapper": accumulated,
    "StagedTrainPipeline": staged,
}


def let_cpu_streams_pass() -> None:
    """Let streams of the CPU be recorded, and be what is current.

    Some of TorchRec's pipelines record streams on a CPU, too, and ask for a GPU's current stream where
    they have none of their own; torch refuses both, and there is nothing to wait for.
    """
    torch.Tensor.record_stream = lambda _tensor, _stream: None  # type: ignore[method-assign,assignment]
    torch.cuda.current_stream = lambda _device=None: torch.cpu.current_stream()  # type: ignore[assignment,return-value]


def work(
    rank: int, world: tuple[int, int], cases: tuple[str, list[str]], count: int, out: Any
) -> None:
    """One rank of pipelines until one raises; ``world``: ranks and port; ``cases``: library and names."""
    world_size, port = world
    package, names = cases
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), MASTER_ADDR="localhost"
    )
    os.environ.update(MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    let_cpu_streams_pass()
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    for name in names:
        try:
            out.put((rank, CASES[name](Library(package), count)))
        except Exception as error:  # noqa: BLE001, PERF203 - the table says what was raised
            out.put((rank, f"{type(error).__name__}: {error}".splitlines()[0][:60]))
            break  # the other ranks may be in a collective
    out.close()
    out.join_thread()
    os._exit(0)


def losses_of(
    package: str, names: list[str], world_size: int, count: int
) -> dict[str, list[Losses] | str]:
    """By pipeline the losses of all ranks, or what one of them raised."""
    found: dict[str, list[Losses] | str] = {}
    while len(found) < len(names):  # anew after one that raised
        found.update(_until_error(package, names[len(found) :], world_size, count))
    return found


def _until_error(
    package: str, names: list[str], world_size: int, count: int
) -> dict[str, list[Losses] | str]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    ranks = [
        context.Process(target=work, args=(rank, (world_size, port), (package, names), count, out))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    found: dict[str, list[Losses] | str] = {}
    arrived: list[list[Losses]] = [[] for _ in ranks]
    try:
        while len(found) < len(names):
            rank, outcome = out.get(timeout=300)
            if isinstance(outcome, str):
                found[names[len(found)]] = outcome
                break
            arrived[rank].append(outcome)
            if all(len(of_rank) > len(found) for of_rank in arrived):
                place = len(found)
                found[names[place]] = [of_rank[place] for of_rank in arrived]
    finally:
        for rank in ranks:
            rank.terminate()
            rank.join()
    return found


def difference(first: list[Losses], second: list[Losses]) -> float:
    """The largest relative difference of losses; infinite for other numbers of losses."""
    if [len(losses) for losses in first] != [len(losses) for losses in second]:
        return math.inf
    pairs = [
        pair
        for one, other in zip(first, second, strict=True)
        for pair in zip(one, other, strict=True)
    ]
    return max((abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in pairs), default=0.0)


def main() -> None:
    """Compare, print a table, end with status 1 for a difference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=2, help="ranks; default 2")
    parser.add_argument("--batches", type=int, default=9, help="batches of each rank; default 9")
    parser.add_argument("--only", help="part of the names of the pipelines to run; default all")
    flags = parser.parse_args()
    if importlib.util.find_spec("torchrec") is None:
        sys.exit(
            "TorchRec is not installed here; pip install torchrec, in an environment of its own"
        )
    differs = False
    print("| pipeline | ranks | losses | largest relative difference |\n| --- | --- | --- | --- |")
    names = [name for name in CASES if not flags.only or flags.only in name]
    of_theirs, of_ours = (
        losses_of(package, names, flags.world_size, flags.batches) for package in LIBRARIES
    )
    for name in names:
        theirs, ours = of_theirs[name], of_ours[name]
        if isinstance(ours, str):
            differs, result = True, f"Tessera raises {ours}"
        elif isinstance(theirs, str):
            result = f"TorchRec raises {theirs}"
        else:
            most = difference(theirs, ours)
            differs |= most > RTOL
            result = f"{most:.1e}"
        count = "-" if isinstance(ours, str) else sum(len(losses) for losses in ours)
        print(f"| `{name}` | {flags.world_size} | {count} | {result} |", flush=True)
    sys.exit(int(differs))


if __name__ == "__main__":
    main()
