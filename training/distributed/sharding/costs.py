"""What a strategy makes a rank look up and send in a step.

With ``B`` samples a rank, ``W`` ranks, ``L`` ids a sample (all features of the table), ``F``
features and ``f`` the fraction of the table's rows that a shard holds:

=================  ======================  ===========================  =========================
strategy           ids looked up per rank  vectors computed per rank    vectors sent per rank
=================  ======================  ===========================  =========================
`to_the_holders`   ``B W L f``             ``B W F``                    all, to the other ranks
`summed_on_hosts`  ``B W L f``             ``B W F`` partial sums       summed inside the host,
                                                                        then ``B W F / local``
`replicated`       ``B L``                 ``B F``                      none; the gradient of the
                                                                        whole table instead
=================  ======================  ===========================  =========================

Without pooling a vector is computed and sent for each id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the ranks are given in a step, for one table and one of its shards."""

    batch_size: int  # samples per rank
    ranks: int
    ranks_per_host: int
    ids_per_sample: float  # of all features of the table together
    features: float  # that the table serves; bags of a sample, where it has several of a feature
    rows_share: float  # of the table's rows in the shard, 0 to 1
    is_pooled: bool  # whether a bag has one vector; otherwise each id has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the rank of one shard does in a step."""

    ids: float  # looked up
    vectors: float  # computed
    sent_vectors: float  # to ranks of the whole world, forward and backward
    # Whether all ``vectors`` are sent within the host before, to be added up.
    summed_on_host: bool = False
    # Whether no ids and vectors travel, but the gradient of the whole shard.
    averages_gradient: bool = False


def to_the_holders(step: Step) -> Traffic:
    """Ids go to the ranks that hold their rows, and each of these answers all ranks."""
    ids = step.batch_size * step.ranks * step.ids_per_sample * step.rows_share
    if not step.is_pooled:
        return Traffic(ids=ids, vectors=ids, sent_vectors=ids)
    # An empty block of rows still takes part in a sum, with zeros.
    vectors = float(step.batch_size * step.features) * step.ranks
    return Traffic(ids=ids, vectors=vectors, sent_vectors=vectors)


def summed_on_hosts(step: Step) -> Traffic:
    """`to_the_holders`, the vectors of a host's ranks added up before they leave it."""
    traffic = to_the_holders(step)
    if not step.is_pooled:
        return traffic
    sent = traffic.vectors / step.ranks_per_host
    return replace(traffic, sent_vectors=sent, summed_on_host=True)


def replicated(step: Step) -> Traffic:
    """Every rank looks its own samples up."""
    ids = step.batch_size * step.ids_per_sample
    bags = float(step.batch_size * step.features)
    return Traffic(
        ids=ids,
        vectors=bags if step.is_pooled else ids,
        sent_vectors=0.0,
        averages_gradient=True,
    )
