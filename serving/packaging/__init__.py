"""From a trained model to one servable file.

The files are the steps, in their order:

* `options` (what the user chooses); `find` and `inputs` (what is in a module, and what it takes);
* `choose_types` with `weight_types`, `shard`, then `quantize` store the tables as rows;
* `embedding` swaps a trained model's tables, `packed_collections` any module's, for lookups by
  `lookup`'s backends: `tessera_backend` (`tessera_plan`, `sharded_lookup`, `sharded_rows`) or `fbgemm_backend`;
  `dense` swaps a module's dense layers;
* `predict` (with `same_bits`, answers that do not depend on the batch) or `module_predict` give the
  model the package's six inputs;
* `trace`, `pack` and `script` make it TorchScript: `servable` and `module_servable` run the steps
  up to here;
* `golden` chooses the recorded inputs, `evaluate` measures the loss, `type_report` compares types;
* `archive` with `stream` and `spill` writes the file; `package` and `module_package` run it all.

`FORMAT.md` beside this folder describes the file.
"""
