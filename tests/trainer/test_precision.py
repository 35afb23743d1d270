"""``train.precision``: bfloat16 layers beside float32 ones, what stays float32, and what is refused."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch import nn

from tessera.errors import UserError
from tessera.kernels import ops
from tessera.training.config import load_config
from tessera.training.data.columns import LabelColumn
from tessera.training.modules.batch_norm import BatchNorm
from tessera.training.modules.mlp import MLP
from tessera.training.trained import load_trained
from tessera.training.trainer.graphs import RecordedForward
from tessera.training.trainer.logs import read_metrics
from tessera.training.trainer.losses import Losses
from tessera.training.trainer.precision import (
    NarrowPerceptron,
    check_precision,
    layers_in,
    prepare_layers,
    products_in,
)
from tessera.training.trainer.run import train
from tessera.training.trainer.run_folder import RunFolder
from tessera.training.trainer.step import LossLayer
from tests.trainer.test_resume import outcome, stop_after

CPU = torch.device("cpu")


def config_of(tiny_yaml, precision, *more):
    lines = [
        "train.epochs=1",
        "model.dropout=0",
        "model.batch_norm=true",
        "train.log_every_steps=1",
    ]
    return load_config(tiny_yaml, [*lines, f"train.precision={precision}", *more])


@pytest.fixture(scope="module")
def runs(tiny_yaml, tmp_path_factory):
    """A run of each precision that a CPU has."""
    folders = {name: tmp_path_factory.mktemp(name) / "run" for name in ("fp32", "bf16")}
    for name, out in folders.items():
        train(config_of(tiny_yaml, name), out, progress=False)
    return folders


def losses(out, split):
    rows = read_metrics(RunFolder(out).metrics)
    return torch.tensor([float(row["loss"]) for row in rows if row["split"] == split])


def test_bfloat16_stays_beside_float32(runs):
    # A layer's inputs, weights and outputs are each rounded by at most 2^-9 of themselves: three layers
    # change a logit by some nine of these of what its terms add up to, which is about 4 here.  No loss
    # changes by more than its logit does.
    bound = 9 * 2**-9 * 4
    for split in ("train", "valid"):
        wide, narrow = (losses(runs[name], split) for name in ("fp32", "bf16"))
        assert len(wide) == len(narrow) > 0
        assert not torch.equal(wide, narrow)
        assert float((wide - narrow).abs().max()) < bound


def test_all_that_is_kept_is_float32(runs):
    kept = outcome(runs["bf16"])["weights"]
    same = outcome(runs["fp32"])["weights"]
    models = [name for name in kept if name[1] == "model"]
    for name in models:
        types = {key: value[:2] for key, value in kept[name].items()}
        assert types == {key: value[:2] for key, value in same[name].items()}
        assert {dtype for dtype, _ in types.values()} == {"torch.float32"}
    assert models
    model = load_trained(runs["bf16"]).model
    assert not any("forward" in vars(part) for part in model.modules())  # as a package computes it


def test_a_stopped_run_goes_on_with_the_same_bits(runs, tiny_yaml, tmp_path):
    config, out = config_of(tiny_yaml, "bf16"), tmp_path / "run"
    assert train(config, out, progress=False, should_stop=stop_after(8)).status == "interrupted"
    with pytest.raises(UserError, match=r"differs .* in train\.precision"):
        train(config_of(tiny_yaml, "fp32"), out, resume=True, progress=False)
    train(config, out, resume=True, progress=False)
    assert outcome(out) == outcome(runs["bf16"])


class Small(nn.Module):
    """A norm, an MLP and a layer for the logits."""

    def __init__(self):
        super().__init__()
        self.norm = BatchNorm(13)
        self.mlp = MLP(13, [24])
        self.logits = nn.Linear(24, 1)

    def forward(self, x):
        normed = self.norm(x)
        hidden = self.mlp(normed)
        return normed, hidden, self.logits(hidden)


def prepared(precision, device=CPU):
    torch.manual_seed(0)
    model = Small()
    prepare_layers(model, precision, device, logit_layers=["logits"])
    return model


def test_logits_and_norms_stay_float32():
    x = torch.randn(32, 13)
    model = prepared("bf16")
    with layers_in("bf16", CPU):
        normed, hidden, logits = model(x)
    assert (normed.dtype, hidden.dtype, logits.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
    )
    assert torch.equal(logits, nn.functional.linear(hidden.float(), *model.logits.parameters()))
    logits.sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert prepared("fp32").state_dict().keys() == model.state_dict().keys()
    plain = prepared("fp32")
    assert not any("forward" in vars(part) for part in plain.modules())


def test_columns_of_zeros_change_no_result():
    """What GPUs are given for layers whose inputs are not multiples of 8, here on the CPU."""
    wide = prepared("fp32"), torch.randn(32, 13)
    padded = prepared("tf32", torch.device("cuda")), wide[1]
    results = []
    for model, x in (wide, padded):
        given = x.clone().requires_grad_()
        *_, logits = model(given)
        logits.square().sum().backward()
        results.append([logits, given.grad, *(parameter.grad for parameter in model.parameters())])
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    changed = [name for name, part in padded[0].named_modules() if "forward" in vars(part)]
    assert changed == ["mlp._mlp.0._linear"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layer_with_its_relu_and_its_gradients(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    ops.load()
    generator = torch.Generator().manual_seed(1)
    # Small whole numbers: every sum is exact until it is rounded to bfloat16.
    shapes = [(40, 13), (24, 13), (24,)]
    given = [
        torch.randint(-2, 3, shape, generator=generator).float().to(device).requires_grad_()
        for shape in shapes
    ]
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    found = NarrowPerceptron.apply(*given)
    expected = torch.relu(nn.functional.linear(*wide))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())
    grad = torch.randint(-2, 3, expected.shape, generator=generator).to(device)
    found.backward(grad.bfloat16())
    expected.backward(grad.double())
    for own, other in zip(given, wide, strict=True):
        assert own.grad.dtype == torch.float32
        assert torch.equal(own.grad, other.grad.bfloat16().float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_with_a_relu_are_one_on_a_gpu():
    model = prepared("bf16", torch.device("cuda")).cuda()
    changed = {name for name, part in model.named_modules() if "forward" in vars(part)}
    assert {"norm", "logits", "mlp._mlp.0"} <= changed
    with layers_in("bf16", torch.device("cuda")):
        _, hidden, logits = model(torch.randn(32, 13, device="cuda"))
    assert hidden.grad_fn.name() == "NarrowPerceptronBackward"
    logits.sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


def test_what_a_cpu_has_not_is_refused(tiny_yaml, tmp_path):
    with pytest.raises(
        UserError, match=r"train\.precision=tf32: it is for GPUs; give fp32 or bf16"
    ):
        train(config_of(tiny_yaml, "tf32"), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"bf16: this torch has no autocast for meta"):
        check_precision("bf16", torch.device("meta"))


def test_the_switch_of_products_is_put_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    with products_in("tf32"):
        assert matmul.allow_tf32
    assert matmul.allow_tf32 == before
    with products_in("bf16"):
        assert matmul.allow_tf32 == before


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def on_gpu(tiny_yaml, tmp_path_factory):
    """The losses of a run on a GPU; its first weights are not those of one on the CPU."""

    def run(precision, *more):
        out = tmp_path_factory.mktemp("gpu") / "run"
        train(config_of(tiny_yaml, precision, "train.device=cuda", *more), out, progress=False)
        return losses(out, "train")

    return run


@needs_gpu
@pytest.mark.gpu
def test_precisions_of_a_gpu_stay_beside_each_other(on_gpu):
    wide = on_gpu("fp32")
    for precision in ("tf32", "bf16"):
        narrow = on_gpu(precision)
        assert not torch.equal(wide, narrow)
        assert float((wide - narrow).abs().max()) < 9 * 2**-9 * 4


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_layers_compute_the_same(on_gpu, precision):
    # Only the order of sums differs, which under bf16 may change a rounding.
    bound = 1e-3 if precision == "fp32" else 9 * 2**-9 * 4
    # The last of the 20 batches is smaller and takes the layers as they are; norms are kept by both.
    own = on_gpu(precision, "train.batch_size=17")
    recorded = on_gpu(precision, "train.batch_size=17", "train.cuda_graphs=true")
    torch.testing.assert_close(recorded, own, rtol=0, atol=bound)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
def test_recorded_losses_and_gradients_have_the_same_bits(weighted):
    labels = (LabelColumn(name="a"), LabelColumn(name="b", task="regression"))
    losses = Losses(labels=labels, weights=(1.0, 0.5), positive_weights=(3.0, 1.0))
    own = partial(losses, reduction="mean")
    recorded = RecordedForward(LossLayer(own), contextlib.nullcontext)
    generator = torch.Generator().manual_seed(3)
    kept = []
    for rows in (40, 40, 7, 40):  # one of another size between them runs as it is
        outputs = torch.randn(rows, 2, generator=generator).cuda()
        wanted = (torch.rand(rows, 2, generator=generator) < 0.5).float()
        wanted[torch.rand(rows, 2, generator=generator) < 0.2] = torch.nan
        given = [wanted.cuda()]
        if weighted:
            given.append(torch.rand(rows, generator=generator).cuda())
        found = []
        for way in (own, recorded):
            x = outputs.clone().requires_grad_()
            loss = way(x, *given)
            (loss * 2).backward()
            found.append((loss.detach().clone(), x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        kept.append(float(found[0][0]))
    assert len(set(kept)) == len(kept)


def test_a_cpu_records_nothing(tiny_yaml):
    with pytest.raises(UserError, match=r"cuda_graphs=True: it is for GPUs"):
        config_of(tiny_yaml, "fp32", "train.cuda_graphs=true")
