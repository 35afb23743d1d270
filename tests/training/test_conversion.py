"""Checkpoints of TorchRec and of Tessera, converted: names, orders and shapes by construction, and errors.

`test_conversion_torchrec.py` trains with TorchRec itself where it is installed.
"""

import itertools
import pickle

import pytest
import torch

from tessera.cli import main
from tessera.training import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tessera.training.conversion.content import Content, ConversionError
from tessera.training.conversion.convert import converted
from tessera.training.conversion.layers import pair_places
from tessera.training.distributed.checkpoint import read_checkpoint, save_checkpoint
from tessera.training.models.dlrm import DLRM, DLRM_DCN

FIRST = "over_arch.model.0._mlp.0._linear.weight"
TABLE = "sparse_arch.embedding_bag_collection.embedding_bags.t1.weight"
DIM = 4


def tables():
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(10, DIM, name="t1", feature_names=["f1", "f3"]),
            EmbeddingBagConfig(6, DIM, name="t2", feature_names=["f2"]),
        ]
    )


def dlrm():
    torch.manual_seed(3)
    return DLRM(tables(), 3, [5, DIM], [6, 1])


def as_torchrec_has_it(state):
    """Our DLRM's state dict with the columns of its pairs moved one by one: (0, 1), (0, 2), ... of TorchRec."""
    vectors, weight = 4, state[FIRST]
    ours = [(i, j) for i in range(vectors) for j in range(i)]
    theirs = list(itertools.combinations(range(vectors), 2))
    moved = weight.clone()
    for place, (i, j) in enumerate(theirs):
        moved[:, DIM + place] = weight[:, DIM + ours.index((j, i))]
    return {**state, FIRST: moved}


def test_pairs_of_three_vectors():
    # Ours: (1, 0), (2, 0), (2, 1); TorchRec's: (0, 1), (0, 2), (1, 2).  Of four the orders differ.
    assert pair_places(3).tolist() == [0, 1, 2]
    assert pair_places(4).tolist() == [0, 1, 3, 2, 4, 5]


def test_a_dlrm_scores_as_before_when_it_comes_back(tmp_path, capsys):
    model = dlrm()
    theirs = as_torchrec_has_it(model.state_dict())
    assert not torch.equal(theirs[FIRST], model.state_dict()[FIRST])
    torch.save(theirs, tmp_path / "theirs.pt")
    args = ["convert-checkpoint", str(tmp_path / "theirs.pt"), "--to", "tessera"]
    assert main([*args, "--out", str(tmp_path / "ours.pt")]) == 0
    assert "1 entries are converted, 9 stay as they are" in capsys.readouterr().out
    loaded = DLRM(tables(), 3, [5, DIM], [6, 1])
    loaded.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True))
    ids = KeyedJaggedTensor(
        ["f1", "f2", "f3"], torch.tensor([1, 2, 5, 9]), lengths=torch.tensor([1, 0, 1, 1, 0, 1])
    )
    dense = torch.rand(2, 3)
    assert torch.equal(loaded(dense, ids), model(dense, ids))
    # And back, to the same bits.
    back = ["convert-checkpoint", str(tmp_path / "ours.pt"), "--to", "torchrec"]
    assert main([*back, "--out", str(tmp_path / "back.pt")]) == 0
    returned = torch.load(tmp_path / "back.pt", weights_only=True)
    assert returned.keys() == theirs.keys()
    assert all(torch.equal(returned[name], theirs[name]) for name in theirs)


def test_names_of_a_cross_network_of_low_rank():
    ours = DLRM_DCN(
        tables(), 3, [5, DIM], [6, 1], dcn_num_layers=2, dcn_low_rank_dim=3
    ).state_dict()
    result, lines = converted(Content(model=ours), "torchrec")
    cross = "inter_arch.crossnet"
    assert torch.equal(result.model[f"{cross}.W_kernels.1"], ours[f"{cross}._w.1.weight"])
    assert torch.equal(result.model[f"{cross}.V_kernels.0"], ours[f"{cross}._v.0.weight"])
    assert torch.equal(result.model[f"{cross}.bias.1"], ours[f"{cross}._w.1.bias"])
    # The layer above a cross network has no pairs.
    assert torch.equal(result.model[FIRST], ours[FIRST])
    assert sum(line.changed for line in lines) == 6
    back, _ = converted(result, "tessera")
    assert back.model.keys() == ours.keys()
    # The biases of a cross network with full matrices have TorchRec's names already.
    full = {"crossnet.kernels.0": torch.rand(4, 4), "crossnet.bias.0": torch.rand(4, 1)}
    assert converted(Content(model=full), "tessera")[0].model.keys() == full.keys()


def states_of_theirs(blocks=1):
    numbers = torch.arange(10.0 * blocks)
    dense = torch.rand(6, 10)
    return {
        TABLE: {"t1.momentum1": numbers},
        FIRST: {"step": torch.tensor(2.0), "exp_avg": dense},
    }


def test_states_have_our_names_and_the_layers_order():
    model = dlrm().state_dict()
    result, _ = converted(Content(model=model, states=states_of_theirs()), "tessera")
    assert list(result.states[TABLE]) == ["momentum1"]
    assert result.columns == {}
    moved = as_torchrec_has_it({FIRST: result.states[FIRST]["exp_avg"]})[FIRST]
    back, _ = converted(result, "torchrec")
    assert torch.equal(moved, back.states[FIRST]["exp_avg"])
    assert list(back.states[TABLE]) == ["t1.momentum1"]


def test_one_number_for_each_row_and_block_of_columns():
    model = dlrm().state_dict()
    result, _ = converted(Content(model=model, states=states_of_theirs(blocks=2)), "tessera")
    state = result.states[TABLE]["momentum1"]
    assert state.shape == (10, 2)
    assert state[3].tolist() == [3.0, 13.0]
    assert result.columns == {TABLE: [0, 2, 4]}
    back, _ = converted(result, "torchrec")
    assert torch.equal(back.states[TABLE]["t1.momentum1"], torch.arange(20.0))
    # Where the blocks begin is known from a folder.
    uneven = Content(model=model, states=states_of_theirs(blocks=2), columns={TABLE: [0, 1, 4]})
    assert converted(uneven, "tessera")[0].columns == {TABLE: [0, 1, 4]}


def test_a_part_of_a_combined_optimizer_may_have_a_name():
    states = {
        f"dense.{FIRST}": states_of_theirs()[FIRST],
        f"tables.{TABLE}": states_of_theirs()[TABLE],
    }
    result, _ = converted(Content(model=dlrm().state_dict(), states=states), "tessera")
    assert list(result.states) == [f"dense.{FIRST}", f"tables.{TABLE}"]
    assert list(result.states[f"tables.{TABLE}"]) == ["momentum1"]


@pytest.mark.parametrize("second", ["exp_avg_sq", "momentum2"])
def test_adam_on_tables_needs_the_count_of_steps(second):
    states = {TABLE: {"t1.momentum1": torch.rand(10, DIM), f"t1.{second}": torch.rand(10, DIM)}}
    content = Content(model=dlrm().state_dict(), states=states)
    with pytest.raises(ConversionError, match=r"counts steps.*give --step"):
        converted(content, "tessera")
    result, _ = converted(content, "tessera", step=7)
    assert int(result.states[TABLE]["step"]) == 7
    assert torch.equal(result.states[TABLE]["momentum2"], states[TABLE][f"t1.{second}"])
    back, _ = converted(result, "torchrec")
    assert list(back.states[TABLE]) == ["t1.momentum1", "t1.exp_avg_sq"]
    assert any("step 7" in text and "set_optimizer_step" in text for text in back.left_out)


def test_what_cannot_be_converted_is_told():
    model = dlrm().state_dict()
    wide = {**model, FIRST: torch.rand(6, 12)}
    with pytest.raises(
        ConversionError, match=r"\[6, 12\].*12 columns are not the 4.*--keep-columns"
    ):
        converted(Content(model=wide), "tessera")
    kept, _ = converted(Content(model=wide), "tessera", keep_columns=True)
    assert torch.equal(kept.model[FIRST], wide[FIRST])
    short = {TABLE: {"t1.momentum1": torch.rand(13)}}
    with pytest.raises(ConversionError, match=r"'t1.momentum1'.*\[13\].*\[10, 4\].*--only-model"):
        converted(Content(model=model, states=short), "tessera")
    other = {TABLE: {"t1.prev_iter": torch.rand(10)}}
    with pytest.raises(ConversionError, match=r"'t1.prev_iter'.*not here.*--only-model"):
        converted(Content(model=model, states=other), "tessera")
    both = Content(model=model, states=states_of_theirs(2), cut_both_ways=frozenset([TABLE]))
    with pytest.raises(ConversionError, match=r"blocks of rows and columns.*--only-model"):
        converted(both, "tessera")
    twice = {"c.W_kernels.0": torch.rand(2, 1), "c._w.0.weight": torch.rand(2, 1)}
    with pytest.raises(ConversionError, match=r"two entries would become 'c._w.0.weight'"):
        converted(Content(model=twice), "tessera")


def run(capsys, *arguments):
    status = main(["convert-checkpoint", *map(str, arguments)])
    return status, capsys.readouterr()


def test_a_checkpoint_of_ours_becomes_a_folder_and_comes_back(tmp_path, capsys):
    model = dlrm()
    save_checkpoint(tmp_path / "ours", model=model, extra={"epoch": 3})
    status, said = run(capsys, tmp_path / "ours", "--to", "torchrec", "--out", tmp_path / "theirs")
    assert status == 0, said.err
    assert "left out: epoch" in said.out
    status, said = run(capsys, tmp_path / "theirs", "--to", "tessera", "--out", tmp_path / "again")
    assert status == 0, said.err
    again = read_checkpoint(tmp_path / "again").model
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    status, said = run(capsys, tmp_path / "again", "--to", "tessera", "--out", tmp_path / "no")
    assert status == 2
    assert "is a checkpoint of Tessera's already; give --to torchrec" in said.err


def test_a_dictionary_of_state_dicts(tmp_path, capsys):
    theirs = as_torchrec_has_it(dlrm().state_dict())
    saved = {"net": theirs, "optim": {"state": states_of_theirs(), "param_groups": []}, "epoch": 2}
    torch.save(saved, tmp_path / "theirs.pt")
    out = tmp_path / "ours.pt"
    status, said = run(capsys, tmp_path / "theirs.pt", "--to", "tessera", "--out", out)
    assert status == 2
    assert "none of model, model_state_dict" in said.err
    assert "give --model-key with one of its keys: net, optim, epoch" in said.err
    keyed = [tmp_path / "theirs.pt", "--to", "tessera", "--model-key", "net"]
    status, said = run(capsys, *keyed, "--dry-run")
    assert status == 0
    assert not out.exists()
    assert f"{TABLE}: t1.momentum1 [10] -> {TABLE}: momentum1 [10]" in said.out
    assert f"{TABLE} [10, 4]: as it is" in said.out
    assert "left out: settings of the optimizers (param_groups)" in said.out
    assert "left out: epoch" in said.out
    assert run(capsys, *keyed, "--out", out)[0] == 0
    found = torch.load(out, weights_only=True)
    assert list(found) == ["model", "optimizer"]
    assert list(found["optimizer"]["state"][TABLE]) == ["momentum1"]
    status, said = run(capsys, *keyed, "--out", out)
    assert status == 2
    assert "is there already; give another name or --overwrite" in said.err
    assert run(capsys, *keyed, "--out", out, "--overwrite", "--only-model")[0] == 0
    assert FIRST in torch.load(out, weights_only=True)


def test_a_part_is_taken_and_put_under_another_name(tmp_path, capsys):
    state = {
        f"module.{name}": value for name, value in as_torchrec_has_it(dlrm().state_dict()).items()
    }
    torch.save({**state, "other": torch.zeros(1)}, tmp_path / "theirs.pt")
    args = [tmp_path / "theirs.pt", "--to", "tessera", "--out", tmp_path / "ours.pt"]
    status, said = run(capsys, *args, "--take", "module.", "--put", "model.")
    assert status == 0
    assert "left out: other: it is not below module." in said.out
    found = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert torch.equal(found[f"model.{FIRST}"], dlrm().state_dict()[FIRST])
    status, said = run(capsys, *args, "--overwrite", "--take", "net.")
    assert status == 2
    assert "no entry's name begins with it; the first one is 'module." in said.err


class Evil:
    """Would run code when it is unpickled."""

    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Evil(), "is refused"),
        ([torch.zeros(1)], "holds a list; give a state dict"),
        ({"model": {"a": torch.zeros(1)}, "optim": {"state": {0: {}}}}, "are numbered"),
        ({"model": {"a": torch.zeros(1)}, "optim": 3}, "'optim' of"),
        ({"model": {"a": 3}}, "entry 'a' of 'model' of"),
        ({"model": 3}, "'model' of"),
    ],
)
def test_files_that_are_no_checkpoints_are_refused(tmp_path, capsys, content, message):
    torch.save(content, tmp_path / "file.pt")
    status, said = run(capsys, tmp_path / "file.pt", "--to", "tessera", "--dry-run")
    assert status == 2
    assert message in said.err
    assert said.err.count("\n") == 1
    assert "run\n" not in said.out


def test_damaged_files_and_wrong_flags(tmp_path, capsys):
    (tmp_path / "file.pt").write_bytes(b"PK damaged")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Evil()))
    for name, message in (
        ("file.pt", ""),
        ("folder", "is refused"),
        ("missing", "No such file"),
    ):
        status, said = run(capsys, tmp_path / name, "--to", "tessera", "--dry-run")
        assert status == 2
        assert message in said.err
        assert "run\n" not in said.out
    source = tmp_path / "file.pt"
    for flags, message in (
        (["--to", "tessera"], "give --out with what to write, or --dry-run"),
        (["--to", "torchrec", "--dry-run", "--step", "3"], "TorchRec keeps no count of steps"),
        (["--to", "tessera", "--dry-run", "--step", "-1"], "0 or more"),
    ):
        status, said = run(capsys, source, *flags)
        assert status == 2
        assert message in said.err
