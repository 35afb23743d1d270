"""Make the package that `gpu_bench.py` serves: MLPerf's DLRM-DCNv2, whole or with capped tables, for GPUs.

    python cpp_server/bench/mlperf_package.py MODEL.pt [--rows 400000] [--dtype int8b]
        [--device cuda] [--dense-dtype fp8] [--hashing none]

The shape is that of MLPerf Inference's dlrm-v2: 26 tables of dimension 128 with the Criteo 1TB rows
(capped at ``--rows``), bottom MLP 512-256-128, three cross layers of rank 512, top MLP
1024-1024-512-256-1, rows of ``--dtype``.  The weights are random numbers that repeat, so that the file can be
compressed for a journey (xz: 500 MB to 1.5 MB).  Needs no GPU.

``--rows 40000000`` leaves the tables whole: 204M rows, 26 GB in ``int8b``, which are written as they are stored.
That takes as much memory as the file has bytes.  MLPerf's data has rows for ids, which ``--hashing none`` takes as they
are.

The features' numbers of ids per sample, for ``gpu_bench.py --ids-per-bag``, are printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import torch

from tessera.serving.bench.large_package import write_repeated
from tessera.serving.packaging.options import PackageOptions
from tessera.training.models.architectures.dlrm_dcn import DLRMDCNConfig
from tessera.training.models.config import TableConfig
from tessera.training.models.ranking import RankingModel, build_ranking_model
from tessera.training.modules.choices import Hashing

# github.com/mlcommons/inference, recommendation/dlrm_v2.
ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956),
    *(405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152),
    *(12_973, 108, 36),
)
IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
DIM = 128
TABLE_PERIOD = 500  # rows
WEIGHT_PERIOD = 20_011  # numbers


def build(most_rows: int, hashing: Hashing) -> RankingModel:
    """The model with its repeating weights; its tables are on the device meta."""
    torch.manual_seed(0)
    names = [f"cat_{index}" for index in range(len(ROWS))]
    config = DLRMDCNConfig(
        embedding_dim=DIM,
        dense_layers=(512, 256),
        over_layers=(1024, 1024, 512, 256),
        dcn_num_layers=3,
        dcn_low_rank_dim=512,
        hashing=hashing,
        tables={
            name: TableConfig(rows=min(rows, most_rows))
            for name, rows in zip(names, ROWS, strict=True)
        },
        dense_missing="zero",
    )
    dense = [f"int_{index}" for index in range(13)]
    model = build_ranking_model(config, dense, names, device="meta").eval()
    numbers = torch.randn(WEIGHT_PERIOD)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_meta:
                continue
            repeats = weight.numel() // WEIGHT_PERIOD + 1
            flat = numbers.repeat(repeats)[: weight.numel()]
            inputs = weight.shape[-1] if weight.dim() > 1 else 64
            weight.copy_(flat.view_as(weight) / inputs**0.5)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the package to write")
    parser.add_argument(
        "--rows", type=int, default=400_000, help="most rows of a table (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda", help="kind of device (default cuda)")
    parser.add_argument("--dtype", default="int8", help="the tables' type (default int8)")
    parser.add_argument("--dense-dtype", default="fp32", help="fp32 (default), bf16 or fp8")
    parser.add_argument(
        "--hashing",
        choices=get_args(Hashing),
        default="murmur3",
        help="how an id becomes a row (default %(default)s)",
    )
    args = parser.parse_args()
    options = PackageOptions(
        name="dlrm", dtype=args.dtype, device=args.device, dense_dtype=args.dense_dtype
    )
    rows = torch.randn(TABLE_PERIOD, DIM) * 0.01
    write_repeated(build(args.rows, args.hashing), args.out, options, rows)
    print("--ids-per-bag", ",".join(map(str, IDS)))


if __name__ == "__main__":
    main()
