"""The operators inside TorchScript and exported graphs."""

from __future__ import annotations

import torch
from torch import nn

from tessera.kernels.row_types import INT8
from tessera.kernels.tables import FeatureLookup, make_plan, pack_tables
from tests.kernels.cases import random_table


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        packed = pack_tables([random_table(generator, 10, 16, INT8) for _ in range(3)])
        features = [
            FeatureLookup(table=place, out_column=16 * k) for k, place in enumerate(packed.places)
        ]
        self.register_buffer("weights", packed.weights)
        self.register_buffer("plan", make_plan(features))

    def forward(self, dense, indices, lengths):
        pooled = torch.ops.tessera.lookup(self.weights, self.plan, indices, lengths, 48)
        both = torch.ops.tessera.dot_interaction(dense, pooled)
        fused = torch.ops.tessera.lookup_dot_interaction(
            self.weights, self.plan, indices, lengths, dense
        )
        rows = torch.ops.tessera.lookup_rows(self.weights, self.plan[:1], indices, lengths[:1], 16)
        return both, fused, rows


def inputs(batch):
    lengths = torch.zeros(3 * batch, dtype=torch.int32)
    lengths[0] = 5
    return torch.randn(batch, 16), torch.arange(5), lengths


class WithoutRows(Model):
    def forward(self, dense, indices, lengths):
        pooled = torch.ops.tessera.lookup(self.weights, self.plan, indices, lengths, 48)
        fused = torch.ops.tessera.lookup_dot_interaction(
            self.weights, self.plan, indices, lengths, dense
        )
        return torch.ops.tessera.dot_interaction(dense, pooled), fused


def test_torchscript_serves_any_batch(tmp_path):
    model = Model()
    torch.jit.script(model).save(str(tmp_path / "m.pt"))
    loaded = torch.jit.freeze(torch.jit.load(str(tmp_path / "m.pt")).eval())
    for batch in (1, 2, 7):
        given = inputs(batch)
        assert all(torch.equal(a, b) for a, b in zip(loaded(*given), model(*given), strict=True))


def test_export_serves_any_batch():
    model = WithoutRows()

    # lengths come as [F, B] so that B is one symbol of the exported graph
    class Shaped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, dense, indices, lengths):
            return self.inner(dense, indices, lengths.flatten())

    def shaped(batch):
        dense, indices, lengths = inputs(batch)
        return dense, indices, lengths.view(3, batch)

    batch, count = torch.export.Dim("batch", min=2), torch.export.Dim("count", min=2)
    program = torch.export.export(
        Shaped(), shaped(4), dynamic_shapes=({0: batch}, {0: count}, {1: batch})
    ).module()
    for size in (2, 9):
        given = shaped(size)
        expected = Shaped()(*given)
        assert all(torch.equal(a, b) for a, b in zip(program(*given), expected, strict=True))


def test_schemas_and_shape_functions_hold():
    model = Model()
    dense, indices, lengths = inputs(4)
    args = (model.weights, model.plan, indices, lengths)
    checks = ("test_schema", "test_faketensor")
    ops = torch.ops.tessera
    counts = torch.zeros(3, dtype=torch.int64)
    torch.library.opcheck(ops.lookup.default, (*args, 48), test_utils=checks)
    torch.library.opcheck(
        ops.lookup.default,
        (*args, 48),
        {"outside": counts, "dtype": torch.float16},
        test_utils=checks,
    )
    torch.library.opcheck(ops.lookup_out.default, (*args, torch.zeros(4, 48)), test_utils=checks)
    torch.library.opcheck(
        ops.lookup_shared.default,
        (*args, torch.tensor([0, 3, 3]), torch.zeros(3, 48)),
        test_utils=checks,
    )
    torch.library.opcheck(
        ops.lookup_partly_shared.default,
        (*args, torch.zeros(3, dtype=torch.bool), torch.arange(4), 48),
        test_utils=checks,
    )
    torch.library.opcheck(
        ops.lookup_rows.default, (args[0], args[1][:1], indices, lengths[:1], 16), test_utils=checks
    )
    torch.library.opcheck(ops.lookup_dot_interaction.default, (*args, dense), test_utils=checks)
    torch.library.opcheck(
        ops.dot_interaction.default, (dense, torch.zeros(4, 48)), test_utils=checks
    )
