"""Jagged sequences as tensors of one length, and what models of sequences do with them.

Shapes: ``B`` samples, ``N`` ids in all their bags, ``T`` places of a sequence, ``D`` columns of a
vector.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.training.modules.batch_norm import BatchNorm
from tessera.training.sparse.jagged_tensor import JaggedTensor


def latest(vectors: JaggedTensor, places: int) -> tuple[Tensor, Tensor]:
    """The last entries of every bag, at the right end of as many places for each.

    What a sample is given does not depend on the other samples.

    Args:
        vectors: ``[N, D]`` float32 in ``B`` bags, the latest entry of each bag last.
        places: ``T``; earlier entries of a longer bag are left out.

    Returns:
        ``[B, T, D]`` with zeros in the places that no entry has, and ``[B, T]`` float32, 1 in those
        that have one, else 0.
    """
    values, offsets = vectors.values(), vectors.offsets()
    ends = offsets[1:].unsqueeze(1)
    rows = ends - places + torch.arange(places, device=values.device).unsqueeze(0)
    known = rows >= offsets[:-1].unsqueeze(1)
    # Places without an entry look a row of zeros up, which is put before the others.
    rows = (rows + 1) * known
    padded = nn.functional.embedding(rows, nn.functional.pad(values, (0, 0, 1, 0)))
    return padded, known.to(torch.float32)


def pooled(vectors: JaggedTensor, places: int, *, mean: bool) -> Tensor:
    """The sum or mean of the last ``places`` entries of every bag, ``[B, D]``; zeros of none."""
    padded, known = latest(vectors, places)
    total = padded.sum(dim=1)
    if not mean:
        return total
    return total / known.sum(dim=1, keepdim=True).clamp(min=1.0)


class Dice(nn.Module):
    """``p(s) s + (1 - p(s)) a s``, where ``p`` is the sigmoid of ``s`` standardised over the batch.

    A PReLU whose bend lies where the data are.  Source: Zhou et al., "Deep Interest Network for
    Click-Through Rate Prediction" (2018), section 5.3.  In evaluation the mean and the variance are
    moving averages of training's.

    Args:
        columns: columns of the input, each with an ``a`` of its own.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.norm = BatchNorm(columns, eps=1e-8, affine=False)
        self.alpha = nn.Parameter(torch.zeros(columns))

    def forward(self, s: Tensor) -> Tensor:
        """``[B, columns]`` to the same shape."""
        share = torch.sigmoid(self.norm(s))
        result: Tensor = share * s + (1.0 - share) * self.alpha * s
        return result


class CandidateAttention(nn.Module):
    """DIN's local activation unit: what a user did, weighted by how it bears on a candidate.

    ``sum over j of a(e_j, v) e_j``, where ``a`` is an MLP over ``[e_j, v, e_j - v, e_j * v]`` with
    one output.  As in the paper the weights are not normalised, so that their sum tells how strong
    the interest is.  Source: Zhou et al. (2018), section 4.3.

    Args:
        columns: ``D``.
        layer_sizes: hidden layers of ``a``, each with a PReLU.
    """

    def __init__(self, columns: int, layer_sizes: list[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, size in zip([4 * columns, *layer_sizes], layer_sizes, strict=False):
            layers += [nn.Linear(width, size), nn.PReLU()]
        self.unit = nn.Sequential(*layers, nn.Linear([4 * columns, *layer_sizes][-1], 1))

    def forward(self, history: Tensor, known: Tensor, candidate: Tensor) -> Tensor:
        """``[B, T, D]``, ``[B, T]`` (0 where nothing is) and ``[B, D]`` to ``[B, D]``."""
        beside = candidate.unsqueeze(1).expand_as(history)
        pairs = torch.cat([history, beside, history - beside, history * beside], dim=2)
        weights = self.unit(pairs) * known.unsqueeze(2)
        total: Tensor = (weights * history).sum(dim=1)
        return total


class SelfAttention(nn.Module):
    """Scaled dot products of every place with those before it and itself, in several heads.

    Source: Vaswani et al., "Attention is all you need" (2017), section 3.2.

    Args:
        columns: ``D``.
        heads: into how many parts the columns are cut; divides ``D``.
    """

    def __init__(self, columns: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self._width = columns // heads
        self.query = nn.Linear(columns, columns)
        self.key = nn.Linear(columns, columns)
        self.value = nn.Linear(columns, columns)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        """The attended values.

        Args:
            x: ``[B, T, D]``, from which queries, keys and values are made.
            allowed: ``[B, T, T]`` float32, 1 where a place (in the second dimension) may look at
                another (in the third), else 0.  One that may look at none gets zeros.

        Returns:
            ``[B, T, D]``.
        """
        outputs = []
        queries, keys, values = self.query(x), self.key(x), self.value(x)
        for head in range(self._heads):
            part = slice(head * self._width, (head + 1) * self._width)
            products = torch.matmul(queries[:, :, part], keys[:, :, part].transpose(1, 2))
            scores = products * self._width**-0.5 - 1e9 * (1.0 - allowed)
            weights = torch.softmax(scores, dim=2) * allowed
            outputs.append(torch.matmul(weights, values[:, :, part]))
        return torch.cat(outputs, dim=2)


class SequenceBlock(nn.Module):
    """One block of SASRec: self-attention, then two layers at each place by itself.

    Each half ``g`` is ``x + Dropout(g(LayerNorm(x)))``.

    Source: Kang and McAuley, "Self-Attentive Sequential Recommendation" (2018), section III.

    Args:
        columns: ``D``.
        heads: of the attention.
        dropout: of what each half adds, while training.
    """

    def __init__(self, columns: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(columns)
        self.attention = SelfAttention(columns, heads)
        self.norm = nn.LayerNorm(columns)
        self.first = nn.Linear(columns, columns)
        self.second = nn.Linear(columns, columns)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        """``[B, T, D]`` to the same shape; for ``allowed``, see `SelfAttention`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), allowed))
        hidden = torch.relu(self.first(self.norm(x)))
        result: Tensor = x + self.dropout(self.second(hidden))
        return result


class SequenceTransformer(nn.Module):
    """SASRec's encoder: what the latest place of a history says after some blocks.

    Source: Kang and McAuley (2018).  Places are counted from the latest one; a place sees those
    before it and itself.

    Args:
        columns: ``D``.
        places: ``T``.
        blocks: how many.
        heads: of each block's attention.
        dropout: of the places' inputs and in the blocks, while training.
    """

    def __init__(
        self, columns: int, places: int, *, blocks: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(places, columns) * 0.02)
        self.register_buffer("causal", torch.ones(places, places).tril(), persistent=False)
        self.causal: Tensor
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(SequenceBlock(columns, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(columns)

    def forward(self, history: Tensor, known: Tensor) -> Tensor:
        """``[B, T, D]`` and ``[B, T]`` (0 where nothing is) to ``[B, D]``; zeros of no history."""
        mask = known.unsqueeze(2)
        allowed = self.causal * known.unsqueeze(1)
        x = self.dropout(history + self.positions) * mask
        for block in self.blocks:
            x = block(x, allowed) * mask
        result: Tensor = self.norm(x[:, -1]) * known[:, -1:]
        return result
