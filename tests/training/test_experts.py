"""Mixtures of experts against the formulas of their papers, sample by sample."""

from __future__ import annotations

import pytest
import torch

from tessera.training.models.experts import PLE, MMoE, Towers


def mixed(gate, x, outputs):
    """``sum over e of softmax(W x)_e f_e(x)`` of one sample."""
    scores = [float(torch.dot(row, x)) for row in gate.logits.weight.detach()]
    shares = [2.718281828459045**score for score in scores]
    return sum(share / sum(shares) * output for share, output in zip(shares, outputs, strict=True))


def test_mmoe_is_its_papers_formula():
    # Ma et al. (2018), equations 5 to 7.
    model = MMoE(5, 3, experts=4, expert_sizes=[6, 2], dropout=0.0, batch_norm=False).double()
    x = torch.randn(7, 5, dtype=torch.float64)
    found = model(x)
    for label in range(3):
        for row in range(7):
            outputs = [f(x[row : row + 1])[0] for f in model.experts.experts]
            expected = mixed(model.gates[label], x[row], outputs)
            torch.testing.assert_close(found[label][row], expected)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_ple_is_its_papers_formula(levels):
    # Tang et al. (2020), equations 1 to 6: a label's gate looks at its own and the shared
    # experts, the shared gate at all of them; each is given what its own side had below.
    model = PLE(
        5,
        2,
        levels=levels,
        own_experts=2,
        shared_experts=3,
        expert_sizes=[4],
        dropout=0.0,
        batch_norm=False,
    ).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    found = model(x)
    for row in range(6):
        sides = [x[row]] * 3  # those of both labels, then the shared one
        for level in model.levels:
            own = [
                [f(side.unsqueeze(0))[0] for f in experts.experts]
                for side, experts in zip(sides[:2], level.own, strict=True)
            ]
            shared = [f(sides[2].unsqueeze(0))[0] for f in level.shared.experts]
            above = [
                mixed(level.gates[label], sides[label], own[label] + shared) for label in (0, 1)
            ]
            if level.shared_gate is not None:
                above.append(mixed(level.shared_gate, sides[2], own[0] + own[1] + shared))
            sides = above
        assert len(sides) == 2
        torch.testing.assert_close(found[0][row], sides[0])
        torch.testing.assert_close(found[1][row], sides[1])


def test_a_label_has_a_tower_of_its_own():
    towers = Towers(3, 2, [4], dropout=0.0, batch_norm=False)
    a, b = torch.randn(5, 3), torch.randn(5, 3)
    logits = towers([a, b])
    assert logits.shape == (5, 2)
    torch.testing.assert_close(logits[:, 1:], towers.towers[1](b))
    torch.testing.assert_close(towers([a, a])[:, 0], logits[:, 0])
