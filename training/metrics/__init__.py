"""How good predictions are: metrics over arrays of numpy, each with a clustered standard error.

* `tessera.training.metrics.binary`: AUC, log loss, normalised entropy, calibration, accuracy, curves;
* `tessera.training.metrics.regression`: squared and absolute errors, R squared;
* `tessera.training.metrics.ranking`: GAUC, recall@k and NDCG@k, of the rows inside each group;
* `tessera.training.metrics.estimate`: standard errors of all of them, clustered, and of the difference
  of two models on the same rows.

A metric that is not defined for its rows is NaN, never an error.
"""
