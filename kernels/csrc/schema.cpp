// The operators' schemas.  What each argument means is said once, in ../ops.py.
#include <torch/library.h>

TORCH_LIBRARY(tessera, m) {
  m.def(
      "lookup(Tensor weights, Tensor plan, Tensor indices, Tensor lengths, int width, "
      "Tensor? id_weights=None, Tensor? dense=None, Tensor(a!)? outside=None, "
      "bool offsets=False, ScalarType? dtype=None, int launch=0, float scale=1.0) -> Tensor");
  m.def(
      "lookup_out(Tensor weights, Tensor plan, Tensor indices, Tensor lengths, Tensor(b!) out, "
      "Tensor? id_weights=None, Tensor(a!)? outside=None, bool offsets=False, "
      "int launch=0) -> ()");
  m.def(
      "lookup_rows(Tensor weights, Tensor plan, Tensor indices, Tensor lengths, int width, "
      "Tensor(a!)? outside=None, bool offsets=False, ScalarType? dtype=None, "
      "int launch=0) -> Tensor");
  m.def(
      "lookup_shared(Tensor weights, Tensor plan, Tensor indices, Tensor lengths, "
      "Tensor sample_rows, Tensor(b!) out, Tensor? id_weights=None, Tensor(a!)? outside=None, "
      "bool offsets=False, int launch=0) -> ()");
  m.def(
      "lookup_partly_shared(Tensor weights, Tensor plan, Tensor indices, Tensor lengths, "
      "Tensor shared, Tensor sample_rows, int width, Tensor? id_weights=None) -> Tensor");
  m.def("dot_interaction(Tensor dense, Tensor sparse, bool upper=False) -> Tensor");
  m.def(
      "lookup_dot_interaction(Tensor weights, Tensor plan, Tensor indices, Tensor lengths, "
      "Tensor dense, Tensor? id_weights=None, Tensor(a!)? outside=None, bool offsets=False, "
      "bool upper=False, int launch=0) -> Tensor");
  m.def(
      "linear(Tensor input, Tensor weights, Tensor bias, int outputs, bool relu=False) -> Tensor");
  m.def(
      "linear_bf16(Tensor input, Tensor weights, Tensor bias, int outputs, bool relu=False) "
      "-> Tensor");
  m.def("cross_layer(Tensor x0, Tensor x, Tensor v, Tensor weight, Tensor bias) -> Tensor");
  m.def(
      "linear_fp8(Tensor input, Tensor weight, Tensor? bias, Tensor scales, bool relu=False, "
      "ScalarType? dtype=None) -> Tensor");
  m.def(
      "cross_layer_fp8(Tensor x0, Tensor x, Tensor v, Tensor weight, Tensor bias, Tensor scales) "
      "-> Tensor");
  m.def(
      "linear_thin(Tensor input, Tensor weight, Tensor bias, bool relu=False, "
      "ScalarType? dtype=None, float scale=1.0) -> Tensor");
  m.def("dot_interaction_bf16(Tensor dense, Tensor sparse) -> Tensor");
  m.def(
      "dot_interaction_bf16_backward(Tensor grad, Tensor dense, Tensor sparse) "
      "-> (Tensor, Tensor)");
  m.def("relu_backward_bf16(Tensor grad, Tensor output) -> (Tensor, Tensor)");
  m.def(
      "rows_of_ids(Tensor ids, Tensor offsets, Tensor rows, Tensor rules, Tensor outside) "
      "-> Tensor");
  m.def(
      "unpack_rows(Tensor words, int present, int first, int features, int count) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "pack_rows(Tensor table, Tensor rows, Tensor(a!) out, int present, int features, "
      "int[] ends) -> int[]");
  m.def("dense_steps(Tensor values, Tensor steps) -> Tensor");
  m.def("xxh64(Tensor bytes, Tensor offsets) -> Tensor");
  m.def(
      "find_ids(Tensor identities, Tensor ids, Tensor sizes, Tensor firsts, int first_row, "
      "int range, bool divides, int reserved, int probes) -> Tensor");
  m.def(
      "learn_ids(Tensor(a!) identities, Tensor ids, Tensor sizes, Tensor firsts, int first_row, "
      "int range, bool divides, int reserved, int probes, Tensor(b!)? last_hours=None, "
      "Tensor? hours=None, int hour=0, int now=0, bool oldest=False, Tensor? let_in=None) "
      "-> (Tensor, Tensor)");
  m.def(
      "exchange_rows(Tensor(a!) storage, Tensor rows, Tensor(b!) values, int offset, int stride) "
      "-> ()");
  m.def(
      "exchange_rows_of(Tensor(a!)[] storages, Tensor[] rows, Tensor(b!)[] values, int[] offsets, "
      "int[] strides) -> ()");
  m.def(
      "restore_rows(Tensor(a!)[] storages, Tensor[] rows, Tensor[] values, int[] offsets, "
      "int[] strides, int threads) -> ()");
  m.def(
      "touch_rows_of(Tensor[] storages, Tensor[] rows, Tensor[] values, int[] offsets, "
      "int[] strides) -> ()");
  m.def(
      "touch_rows_aside(Tensor[] storages, Tensor[] rows, Tensor[] values, int[] offsets, "
      "int[] strides, float share, float seconds) -> ()");
  m.def(
      "overlay_make(Tensor(a!)[] storages, Tensor[] rows, Tensor(b!)[] values, int[] offsets, "
      "int[] strides) -> int");
  m.def("overlay_keep(int overlay) -> bool");
  m.def(
      "overlay_make_aside(Tensor(a!)[] storages, Tensor[] rows, Tensor(b!)[] values, "
      "int[] offsets, int[] strides, float share, float seconds) -> int");
  m.def("overlay_show(int overlay) -> ()");
  m.def("overlay_show_beside(int overlay) -> ()");
  m.def("overlay_fits(int overlay) -> bool");
  m.def("overlay_look_up_to(int overlay) -> ()");
  m.def("overlay_take_back(int overlay) -> ()");
  m.def("overlay_write(int overlay) -> bool");
  m.def("overlay_write_aside(int overlay, float share, float seconds) -> ()");
  m.def("overlay_drop(int overlay) -> ()");
  m.def("page_marks(Tensor memory) -> Tensor");
  m.def("take_back_pages(Tensor(a!) memory, Tensor marks) -> bool");
  m.def("read_aside(Tensor(a!) out, int descriptor, int offset, float share) -> ()");
  m.def(
      "table_batch(Tensor[] dense, Tensor[] dense_present, Tensor[] ids, Tensor[] ids_present, "
      "Tensor[] list_values, Tensor[] list_weights, Tensor[] list_starts, Tensor[] list_lengths, "
      "int first, int rows, bool weighted) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "table_interleave(Tensor[] dense, Tensor[] dense_present, Tensor[] ids, "
      "Tensor[] ids_present, Tensor? rows, Tensor(a!) dense_out, Tensor(b!) ids_out, "
      "Tensor(c!) masks_out) -> ()");
  m.def(
      "table_batch_at(Tensor dense, Tensor ids, Tensor masks, Tensor[] list_values, "
      "Tensor[] list_weights, Tensor[] list_starts, Tensor[] list_lengths, Tensor rows, "
      "bool weighted) -> (Tensor, Tensor, Tensor, Tensor)");
}
