"""What fusing brings on a GPU: lookup and DLRM's interaction, and hashing with the lookup.

    python -m tessera.kernels.bench.gpu_interaction [--out FILE.json]

26 tables of D = 128 with one id each (MLPerf's rows, capped at 4M), fresh ids every launch, all
contenders in every round.  "torch" stacks, multiplies and picks the pairs with torch's operators
behind our lookup; "two steps" are our two operators; "fused" is one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.kernels import ops
from tessera.kernels.bench.gpu_contenders import BOOK, ID_SETS, Launch, draw_ids, median_us
from tessera.kernels.bench.gpu_lookup import DIM, MLPERF_ROWS
from tessera.kernels.plan import IdRule
from tessera.kernels.row_types import BLOCK_INT8, INT8, RowType
from tessera.kernels.tables import FeatureLookup, TableRows, make_plan, pack_tables

ROWS = [min(rows, 4_000_000) for rows in MLPERF_ROWS]


def random_tables(weight_type: RowType, id_rule: IdRule) -> tuple[Tensor, Tensor]:
    """Weights and plan, on the GPU."""
    tables = []
    for rows in ROWS:
        scale = torch.rand(rows, 2, device="cuda").mul_(0.01).half()
        if weight_type is BLOCK_INT8:
            scale = torch.tensor(BOOK, device="cuda")
        data = torch.empty(rows, DIM, dtype=torch.uint8, device="cuda").random_(0, 256)
        tables.append(TableRows(data=data, weight_type=weight_type, dim=DIM, scale=scale))
    packed = pack_tables(tables)
    plan = make_plan(
        [
            FeatureLookup(table=place, out_column=DIM * f, id_rule=id_rule)
            for f, place in enumerate(packed.places)
        ]
    )
    return packed.weights, plan


def interaction_contenders(weight_type: RowType, batch: int) -> dict[str, Launch]:
    """Lookup and interaction three ways."""
    weights, plan = random_tables(weight_type, IdRule.NONE)
    hint = ops.launch_hint(plan)
    plan = plan.cuda()
    count = len(ROWS)
    sets = [torch.cat([draw_ids(r, batch, power_law=False) for r in ROWS]) for _ in range(ID_SETS)]
    offsets = torch.arange(count * batch + 1, dtype=torch.int32, device="cuda")
    dense = torch.randn(batch, DIM, device="cuda")
    first, second = torch.tril_indices(count + 1, count + 1, offset=-1, device="cuda").unbind()
    chosen = first * (count + 1) + second

    def pooled(k: int) -> Tensor:
        vectors: Tensor = torch.ops.tessera.lookup(
            weights, plan, sets[k], offsets, count * DIM, offsets=True, launch=hint
        )
        return vectors

    def by_torch(k: int) -> Tensor:
        vectors = torch.cat([dense, pooled(k)], dim=1).view(batch, count + 1, DIM)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([dense, products.index_select(1, chosen)], dim=1)

    contenders: dict[str, Launch] = {
        "torch": by_torch,
        "two steps": lambda k: torch.ops.tessera.dot_interaction(dense, pooled(k)),
        "fused": lambda k: torch.ops.tessera.lookup_dot_interaction(
            weights, plan, sets[k], offsets, dense, offsets=True, launch=hint
        ),
    }
    same = [contender(0) for contender in contenders.values()]
    if not torch.equal(same[1], same[2]):
        raise AssertionError("fused and two steps differ")
    torch.testing.assert_close(same[1], same[0], rtol=1e-3, atol=1e-2)
    return contenders


def hashing_contenders(batch: int) -> dict[str, Launch]:
    """Raw int64 ids: hashed by torch's operators before the lookup, or by the lookup."""
    count = len(ROWS)
    offsets = torch.arange(count * batch + 1, dtype=torch.int32, device="cuda")
    raw = [torch.randint(2**62, (count * batch,), device="cuda") for _ in range(ID_SETS)]
    rows = torch.tensor(ROWS, device="cuda").repeat_interleave(batch)
    weights, hashed = random_tables(BLOCK_INT8, IdRule.MODULO)
    plain = hashed.clone()
    plain[:, 10] = IdRule.NONE
    hints = {"rows": ops.launch_hint(plain), "hashed": ops.launch_hint(hashed)}
    plain, hashed = plain.cuda(), hashed.cuda()

    def call(plan: Tensor, ids: Tensor, hint: int) -> Any:
        return torch.ops.tessera.lookup(
            weights, plan, ids, offsets, count * DIM, offsets=True, dtype=torch.half, launch=hint
        )

    ready = [ids % rows for ids in raw]
    contenders: dict[str, Launch] = {
        "rows given": lambda k: call(plain, ready[k], hints["rows"]),
        "modulo by torch": lambda k: call(plain, raw[k] % rows, hints["rows"]),
        "modulo in the lookup": lambda k: call(hashed, raw[k], hints["hashed"]),
    }
    results = [contender(0) for contender in contenders.values()]
    if not all(torch.equal(results[0], other) for other in results[1:]):
        raise AssertionError("hashing gave other rows")
    return contenders


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    args = parser.parse_args()
    ops.load()
    torch.manual_seed(0)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(machine)
    results = []
    for batch in (16384, 2048):
        cases = {
            f"interaction {kind.name}": interaction_contenders(kind, batch)
            for kind in (INT8, BLOCK_INT8)
        }
        cases["hashing BLOCK_INT8"] = hashing_contenders(batch)
        for name, contenders in cases.items():
            times = median_us(contenders)
            results.append({"case": name, "batch": batch, "us": times})
            figures = "  ".join(f"{label} {value:.1f} us" for label, value in times.items())
            print(f"{name:<24} B={batch:<6} {figures}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
