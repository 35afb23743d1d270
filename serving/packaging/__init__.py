"""From a trained model to one servable file.

The files are the steps, in their order:

* `options` (what the user chooses); `find` and `inputs` (what is in a module, and what it takes);
* `tables/` chooses each table's type and place and stores it as rows;
* `embedding` swaps a trained model's tables, `packed_collections` any module's, for the
  backends' operators in `lookups/`;
  `dense` swaps a module's dense layers;
* `predict` (with `same_bits`, answers that do not depend on the batch) or `module_predict` give the
  model the package's six inputs;
* `trace`, `pack` and `script` make it TorchScript: `servable` and `module_servable` run the steps
  up to here;
* `evaluate` measures the loss, `type_report` compares types; `write/` chooses the golden inputs and
  writes the file; `package` and `module_package` run it all.

`FORMAT.md` beside this folder describes the file.
"""
