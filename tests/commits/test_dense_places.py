"""What a live commit takes for the dense part without tracing is, bit for bit, what tracing gives."""

import pytest
import torch

from tessera.errors import UserError
from tessera.serving.packaging.commits.dense_places import find_places
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.servable import make_servable
from tessera.training.config import ExperimentConfig
from tessera.training.data.criteo_format import COLUMNS
from tessera.training.models.ranking import build_ranking_model
from tessera.training.transforms.preprocessor import FittedSizes

SMALL = {"rows": 20, "embedding_dim": 8, "dense_layers": [20, 8], "over_layers": [33]}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({"arch": "dlrm"}, {}),
        (
            {"arch": "dlrm_dcn", "dcn_num_layers": 1, "dcn_low_rank_dim": 4},
            {"device": "cuda", "dense_dtype": "bf16"},
        ),
        ({"arch": "deepfm", "batch_norm": True}, {"dense_dtype": "bf16"}),
    ],
)
def test_records_are_filled_as_they_are_traced(model, options):
    plain = {"data": {"format": "criteo", "path": "x"}, "model": {**SMALL, **model}}
    config = ExperimentConfig.from_plain(plain, name="c").model

    def make():
        return build_ranking_model(
            config,
            COLUMNS.dense_names,
            COLUMNS.sparse_names,
            labels=COLUMNS.label_names,
            transforms=COLUMNS.transforms(),
            sizes=FittedSizes(),
            device="cpu",
        ).eval()

    tables = make().state_dict()

    def traced(dense):
        own = make()
        own.load_state_dict({**tables, **dense})
        made = make_servable(ranking_source(own, COLUMNS), PackageOptions(name="m", **options))
        named = [*made.scripted.named_parameters(), *made.scripted.named_buffers()]
        return {
            name: value.detach().contiguous().view(-1)
            for name, value in named
            if value.numel() and value.dtype != torch.uint8  # the tables
        }

    chance = torch.Generator().manual_seed(1)

    def drawn():
        return {
            name: torch.rand(value.shape, generator=chance) * 0.2 + 0.01
            if name.startswith("arch.") and value.is_floating_point()
            else value
            for name, value in tables.items()
            if "embedding_bags" not in name
        }

    first, later = drawn(), drawn()
    places = find_places(traced, first, traced(first))
    assert places is not None
    assert_same_bits(places.filled(later), traced(later))


def rearranged(dense):
    """Records as passes make them: transposed and padded, in another type, constants among them."""
    weight = torch.nn.functional.pad(dense["arch.w"].t(), (0, 3), value=0.0)
    bias = torch.cat([dense["arch.b"], torch.full((2,), 7.0)])
    return {"data/0": weight.flatten(), "data/1": bias.bfloat16(), "data/2": torch.arange(3)}


def drawn(seed, rows=70):
    chance = torch.Generator().manual_seed(seed)
    return {
        "arch.w": torch.randn(rows, 300, generator=chance),
        "arch.b": torch.zeros(5) if seed else torch.randn(5, generator=chance),
        "preprocessor.means": torch.ones(4),
    }


def test_weights_are_found_where_they_lie():
    first = drawn(0)  # 21,005 weights: their numbers have three digits
    places = find_places(rearranged, first, rearranged(first))
    for seed in (1, 2):
        assert_same_bits(places.filled(drawn(seed)), rearranged(drawn(seed)))
    # What else a model holds must be as it was.
    assert places.filled({**drawn(1), "preprocessor.means": torch.zeros(4)}) is None
    # Weights that are equal, or 0 as padding is, are told apart all the same.
    zeros = {name: torch.zeros_like(value) for name, value in first.items()}
    zeros["preprocessor.means"] = first["preprocessor.means"]
    places = find_places(rearranged, zeros, rearranged(zeros))
    assert_same_bits(places.filled(drawn(2)), rearranged(drawn(2)))


def test_what_is_made_of_several_weights_is_not_found():
    first = drawn(0, rows=2)

    def product(dense):
        return {"data/0": dense["arch.w"].flatten() * dense["arch.b"][0]}

    def doubled(dense):
        return {"data/0": dense["arch.w"].flatten() * 2}

    def fails(dense):
        if dense is not first:
            raise UserError("the module fails on the sample batch")
        return doubled(dense)

    for made in (product, doubled, fails):
        assert find_places(made, first, made(first)) is None
