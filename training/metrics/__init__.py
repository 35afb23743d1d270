"""How good predictions are: of a whole evaluation, and of a training while it runs.

Of a whole evaluation, over arrays of numpy, each with a clustered standard error:

* `tessera.training.metrics.binary`: AUC, log loss, normalised entropy, calibration, accuracy, curves;
* `tessera.training.metrics.regression`: squared and absolute errors, R squared;
* `tessera.training.metrics.ranking`: GAUC, recall@k and NDCG@k, of the rows inside each group;
* `tessera.training.metrics.estimate`: standard errors of all of them, clustered, and of the difference
  of two models on the same rows.

A metric that is not defined for its rows is NaN, never an error.

While a training runs, over tensors on their device, on all ranks, since it began and of a window of the
newest examples, under the names and keys of ``torchrec.metrics``:

* `tessera.training.metrics.metric_module`: all metrics of a training as one module, made by
  ``generate_metric_module`` from a `tessera.training.metrics.metrics_config.MetricsConfig`;
* `tessera.training.metrics.rec_metric`: a metric of some tasks, and the base classes of one's own;
* `tessera.training.metrics.throughput`: examples per second;
* ``ne``, ``auc``, ``auprc``, ``gauc``, ``accuracy``, ``calibration``, ``ctr``, ``mse``, ``mae``, ``ndcg``,
  ``precision``, ``recall``, ``weighted_avg``: a metric each. Most are functions of sums (`sums`); AUC and AUPRC
  hold the window's examples (`rows`), which `ranked` ranks;
* `tessera.training.metrics.states` reduces states over ranks, `tessera.training.metrics.window` sums the
  newest batches.
"""
