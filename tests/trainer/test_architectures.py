"""The architectures under ``model:``: which are known, what they refuse, and that they train."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from tessera.cli import main
from tessera.errors import UserError
from tessera.training import KeyedJaggedTensor, ModelConfig, build_ranking_model
from tessera.training.config import ExperimentConfig, load_config
from tessera.training.models.architectures.dlrm import DLRMConfig
from tessera.training.models.terms import FactorizationMachine
from tessera.training.trained import load_trained
from tessera.training.trainer import train
from tests.trainer.tiny_runs import write_criteo

OLD_DLRM = {  # the section as versions before the registry wrote it into a run folder
    "arch": "dlrm",
    "embedding_dim": 4,
    "dense_layers": [8],
    "over_layers": [8],
    "dcn_num_layers": 3,
    "dcn_low_rank_dim": 64,
    "rows": 50,
    "pooling": "sum",
    "hashing": "murmur3",
    "out_of_range": "clamp",
    "tables": {},
    "dense_missing": "indicator",
    "dropout": 0.2,
    "embedding_init": None,
}

FACTORY = """
import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.tables = inputs.collection()
        width = inputs.dense_columns + sum(feature.dim for feature in inputs.features)
        self.hidden = nn.Linear(width, hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, dense, sparse):
        both = torch.cat([dense, self.tables(sparse).values()], dim=1)
        return self.head(torch.relu(self.hidden(both)))


def wide(inputs, hidden=4):
    return Wide(inputs, hidden)


def fails(inputs):
    return {}["x"]


def no_module(inputs):
    return None
"""


def model_of(tmp_path, text, overrides=()):
    path = tmp_path / "config.yaml"
    path.write_text(f"data: {{format: criteo, path: a.tsv}}\nmodel: {text}\n")
    return load_config(path, overrides).model


@pytest.fixture
def wide_module(tmp_path, monkeypatch):
    """A module `my_wide` in the working directory."""
    (tmp_path / "my_wide.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder is put on it
    yield
    sys.modules.pop("my_wide", None)


def test_the_tag_chooses_and_its_default_is_dlrm(tmp_path):
    assert type(model_of(tmp_path, "{rows: 5}")) is DLRMConfig
    chosen = model_of(tmp_path, "{arch: dlrm_dcn, dcn_num_layers: 2}")
    assert (chosen.arch, chosen.dcn_num_layers) == ("dlrm_dcn", 2)
    assert ModelConfig(arch="dlrm_dcn", dcn_num_layers=2) == chosen


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{arch: deepfn}", r"config.yaml:2: .*arch is 'deepfn'; .* did you mean deepfm\?"),
        (
            "{arch: dlrm, dcn_num_layers: 2}",
            "2: model.dcn_num_layers: arch dlrm has no such key, dlrm_dcn has; leave it out",
        ),
        ("{arch: deepfm, ower_layers: [2]}", "did you mean model.over_layers"),
        ("{arch: 3}", "arch is '3'"),
        ("{arch: deepfm, tables: {a: {dim: 3}}}", "arch deepfm needs one size"),
        ("{factory: nothing}", "factory is 'nothing'; give pkg.module:function"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        model_of(tmp_path, text)


def test_a_resolved_config_of_before_the_registry_is_read(tmp_path):
    plain = {"data": {"format": "criteo", "path": ["a.tsv"]}, "model": OLD_DLRM}
    config = ExperimentConfig.from_plain(plain, name="old")
    assert config.model == ModelConfig(
        embedding_dim=4, dense_layers=(8,), over_layers=(8,), rows=50, dropout=0.2
    )
    assert ExperimentConfig.from_plain(config.to_plain(), name="new") == config


def test_a_factorization_machine_is_the_sum_over_pairs():
    vectors = torch.randn(3, 4, 5, dtype=torch.float64)
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(4) for j in range(i)]
    torch.testing.assert_close(FactorizationMachine()(vectors), torch.stack(pairs).sum(0)[:, None])


def test_deepfm_is_the_sum_of_its_parts():
    model = build_ranking_model(
        ModelConfig(arch="deepfm", embedding_dim=4, rows=9, hashing="modulo"), ["x"], ["a", "b"]
    ).eval()
    first, deep = model.arch.first_order, model.arch.sparse_arch
    assert len(model.collections()) == 2
    with torch.no_grad():
        for bag in first.embedding_bag_collection.embedding_bags.values():
            bag.weight.copy_(torch.randn_like(bag.weight))
    kjt = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([3, 12, 5]), lengths=torch.tensor([1, 1, 0, 1], dtype=torch.int32)
    )
    dense = torch.randn(2, 1)
    encoded = model.encoder(dense, 2)
    rows = model.hasher(kjt)
    weights = [bag.weight[:, 0] for bag in first.embedding_bag_collection.embedding_bags.values()]
    expected = first.dense(encoded).squeeze(1)
    expected = expected + torch.stack([weights[0][3], weights[0][3] + weights[1][5]])
    vectors = torch.cat([model.arch.dense_arch(encoded).unsqueeze(1), deep(rows)], dim=1)
    expected = expected + model.arch.over_arch(vectors.flatten(1)).squeeze(1)
    expected = expected + FactorizationMachine()(vectors).squeeze(1)
    torch.testing.assert_close(model(dense, kjt), expected)


def test_deepfm_trains_resumes_and_loads(tiny_yaml, tmp_path):
    config = load_config(tiny_yaml, ["model.arch=deepfm"])
    whole = train(config, tmp_path / "whole", progress=False)
    steps = iter(range(100))
    cut = tmp_path / "cut"
    assert train(config, cut, progress=False, should_stop=lambda: next(steps) > 20).final is None
    assert train(config, cut, resume=True, progress=False).final == {
        **whole.final,
        "evaluation_samples_per_second": pytest.approx(0, abs=1e9),
    }
    trained = load_trained(whole.folder)
    names = [name for name, _ in trained.model.named_parameters() if "first_order" in name]
    assert len(names) == 27  # 26 tables and the dense weights
    assert any(trained.model.get_parameter(name).abs().sum() > 0 for name in names[:26])


def test_a_module_of_the_users_is_trained_from_yaml(wide_module, tmp_path, capsys):
    write_criteo(tmp_path / "clicks.tsv", rows=300)
    (tmp_path / "my.yaml").write_text(
        "data: {format: criteo, path: clicks.tsv, workers: 0}\n"
        "model: {factory: 'my_wide:wide', arguments: {hidden: 3}, output_layers: [head], rows: 20}\n"
        "train: {batch_size: 32, threads: 1, metric: log_loss}\n"
        "run: {tensorboard: false}\n"
    )
    assert main(["train", "--config", "my.yaml", "--out", "run", "--quiet"]) == 0
    assert (tmp_path / "run" / "report.html").exists()
    trained = load_trained(tmp_path / "run")
    assert trained.model.arch.hidden.out_features == 3
    assert trained.model.logit_layers() == {"arch.head": (0,)}
    capsys.readouterr()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factory": "no_such_module:f"}, "no_such_module cannot be imported"),
        ({"factory": "my_wide:wade"}, "my_wide has no function wade; it has .*wide"),
        ({"factory": "my_wide:fails"}, r"fails at .*my_wide.py:\d+ in fails: .* KeyError: 'x'"),
        ({"factory": "my_wide:wide", "arguments": {"no": 1}}, "unexpected keyword argument 'no'"),
        ({"factory": "my_wide:no_module"}, "returned a NoneType; return a torch.nn.Module"),
        ({"factory": "my_wide:wide", "output_layers": ("tail",)}, "name one of hidden, head"),
    ],
)
def test_a_factory_that_does_not_work_is_refused(wide_module, fields, message):
    with pytest.raises(UserError, match=re.compile(message)):
        build_ranking_model(ModelConfig(**fields), ["x"], ["a"])
