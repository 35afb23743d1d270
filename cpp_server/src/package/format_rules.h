// Generated from serving/package by `make package-rules`; not to be edited.
//
// What a package may hold; the Python files say why.
// clang-format off
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

namespace tessera {

inline constexpr int kOldestFormatVersion = 3;
inline constexpr int kFormatVersion = 5;
inline constexpr std::uint64_t kMaxManifestBytes = 16777216;
inline constexpr std::ptrdiff_t kMaxManifestMarks = 400000;
inline constexpr int kCommitFormatVersion = 1;
inline constexpr std::int64_t kMaxCommitNumber = 99999999;
inline constexpr std::uint64_t kMaxCommitJsonBytes = 16777216;
inline constexpr std::ptrdiff_t kMaxCommitMarks = 400000;
inline constexpr std::int64_t kMaxPatchedRow = 4294967295;
inline constexpr std::uint64_t kMaxDirectoryBytes = 4194304;
inline constexpr std::uint64_t kMaxPickleBytes = 4194304;
inline constexpr std::uint64_t kMaxCodeBytes = 16777216;
inline constexpr std::size_t kMaxRemembered = 131072;
inline constexpr std::size_t kMaxOpcodes = 524288;
inline constexpr std::size_t kDictOpcodes = 16;
inline constexpr std::size_t kMaxPickleDepth = 1000;
inline constexpr double kDefaultLoadTimeoutS = 300.0;
inline constexpr double kMaxLoadTimeoutS = 86400.0;

// Bytes of one element, by the name of its storage.
inline constexpr std::array<std::pair<std::string_view, std::int64_t>, 12> kElementBytes = {{
    {"torch.ByteStorage", 1},
    {"torch.CharStorage", 1},
    {"torch.BoolStorage", 1},
    {"torch.Float8_e4m3fnStorage", 1},
    {"torch.Float8_e5m2Storage", 1},
    {"torch.ShortStorage", 2},
    {"torch.HalfStorage", 2},
    {"torch.BFloat16Storage", 2},
    {"torch.IntStorage", 4},
    {"torch.FloatStorage", 4},
    {"torch.LongStorage", 8},
    {"torch.DoubleStorage", 8},
}};

// What a pickle may name beside storages and the archive's own classes, sorted.
inline constexpr std::array<std::string_view, 8> kPickleNames = {
    "collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch.device",
    "torch.jit._pickle.build_boollist", "torch.jit._pickle.build_doublelist",
    "torch.jit._pickle.build_intlist", "torch.jit._pickle.build_tensorlist",
    "torch.jit._pickle.restore_type_tag",
};

// What a graph may call, sorted.
inline constexpr std::array<std::string_view, 552> kAllowedOperators = {
    "aten::Bool", "aten::Float", "aten::FloatImplicit", "aten::Int", "aten::IntImplicit",
    "aten::ScalarImplicit", "aten::__and__", "aten::__contains__", "aten::__derive_index",
    "aten::__getitem__", "aten::__is__", "aten::__isnot__", "aten::__lshift__", "aten::__not__",
    "aten::__or__", "aten::__range_length", "aten::__rshift__", "aten::__xor__",
    "aten::_addmm_activation", "aten::_native_multi_head_attention",
    "aten::_pack_padded_sequence", "aten::_pad_packed_sequence", "aten::_set_item",
    "aten::_transformer_encoder_layer_fwd", "aten::_unique2", "aten::abs", "aten::abs_",
    "aten::absolute", "aten::acos", "aten::acosh", "aten::adaptive_avg_pool1d",
    "aten::adaptive_max_pool1d", "aten::add", "aten::add_", "aten::addbmm", "aten::addcdiv",
    "aten::addcdiv_", "aten::addcmul", "aten::addcmul_", "aten::addmm", "aten::addmm_",
    "aten::addmv", "aten::addr", "aten::alias", "aten::all", "aten::allclose", "aten::amax",
    "aten::amin", "aten::aminmax", "aten::any", "aten::append", "aten::arange", "aten::argmax",
    "aten::argmin", "aten::argsort", "aten::as_strided", "aten::as_tensor", "aten::asin",
    "aten::asinh", "aten::atan", "aten::atan2", "aten::atanh", "aten::atleast_1d",
    "aten::atleast_2d", "aten::atleast_3d", "aten::avg_pool1d", "aten::avg_pool2d",
    "aten::baddbmm", "aten::baddbmm_", "aten::batch_norm", "aten::bilinear", "aten::bincount",
    "aten::bitwise_and", "aten::bitwise_and_", "aten::bitwise_left_shift", "aten::bitwise_not",
    "aten::bitwise_not_", "aten::bitwise_or", "aten::bitwise_or_", "aten::bitwise_right_shift",
    "aten::bitwise_xor", "aten::bitwise_xor_", "aten::block_diag", "aten::bmm",
    "aten::broadcast_tensors", "aten::broadcast_to", "aten::bucketize", "aten::cat",
    "aten::cdist", "aten::ceil", "aten::ceil_", "aten::celu", "aten::celu_", "aten::chain_matmul",
    "aten::chunk", "aten::clamp", "aten::clamp_", "aten::clamp_max", "aten::clamp_max_",
    "aten::clamp_min", "aten::clamp_min_", "aten::clear", "aten::clip", "aten::clip_",
    "aten::clone", "aten::column_stack", "aten::complex", "aten::concat", "aten::concatenate",
    "aten::constant_pad_nd", "aten::contiguous", "aten::conv1d", "aten::conv2d",
    "aten::conv_transpose1d", "aten::copy", "aten::copy_", "aten::copysign", "aten::cos",
    "aten::cos_", "aten::cosh", "aten::cosine_similarity", "aten::count", "aten::count_nonzero",
    "aten::cpu", "aten::cross", "aten::cummax", "aten::cummin", "aten::cumprod", "aten::cumprod_",
    "aten::cumsum", "aten::cumsum_", "aten::deg2rad", "aten::degrees", "aten::detach",
    "aten::device", "aten::diag", "aten::diag_embed", "aten::diagonal", "aten::dict",
    "aten::diff", "aten::digamma", "aten::dim", "aten::dist", "aten::div", "aten::div_",
    "aten::divide", "aten::dot", "aten::dropout", "aten::dropout_", "aten::dsplit",
    "aten::dstack", "aten::einsum", "aten::elu", "aten::elu_", "aten::embedding",
    "aten::embedding_bag", "aten::empty", "aten::empty_like", "aten::endswith", "aten::eq",
    "aten::eq_", "aten::equal", "aten::erf", "aten::erf_", "aten::erfc", "aten::erfinv",
    "aten::exp", "aten::exp2", "aten::exp_", "aten::expand", "aten::expand_as", "aten::expm1",
    "aten::expm1_", "aten::extend", "aten::eye", "aten::feature_dropout", "aten::fill",
    "aten::fill_", "aten::fill_diagonal_", "aten::find", "aten::flatten", "aten::flip",
    "aten::fliplr", "aten::flipud", "aten::float_power", "aten::floor", "aten::floor_",
    "aten::floor_divide", "aten::floor_divide_", "aten::floordiv", "aten::fmax", "aten::fmin",
    "aten::fmod", "aten::fmod_", "aten::format", "aten::frac", "aten::frobenius_norm",
    "aten::full", "aten::full_like", "aten::gather", "aten::ge", "aten::ge_", "aten::gelu",
    "aten::gelu_", "aten::get", "aten::glu", "aten::greater", "aten::greater_equal",
    "aten::group_norm", "aten::gru", "aten::gru_cell", "aten::gt", "aten::gt_",
    "aten::hardshrink", "aten::hardsigmoid", "aten::hardsigmoid_", "aten::hardswish",
    "aten::hardswish_", "aten::hardtanh", "aten::hardtanh_", "aten::hash", "aten::heaviside",
    "aten::histc", "aten::hsplit", "aten::hstack", "aten::hypot", "aten::i0", "aten::index",
    "aten::index_add", "aten::index_add_", "aten::index_copy", "aten::index_copy_",
    "aten::index_fill", "aten::index_fill_", "aten::index_put", "aten::index_put_",
    "aten::index_select", "aten::inner", "aten::insert", "aten::instance_norm",
    "aten::is_autocast_enabled", "aten::is_complex", "aten::is_contiguous",
    "aten::is_floating_point", "aten::is_grad_enabled", "aten::is_nonzero", "aten::is_same_size",
    "aten::is_signed", "aten::isclose", "aten::isfinite", "aten::isin", "aten::isinf",
    "aten::isnan", "aten::item", "aten::items", "aten::join", "aten::keys", "aten::kron",
    "aten::kthvalue", "aten::layer_norm", "aten::ldexp", "aten::le", "aten::le_",
    "aten::leaky_relu", "aten::leaky_relu_", "aten::len", "aten::lerp", "aten::lerp_",
    "aten::less", "aten::less_equal", "aten::lgamma", "aten::lift_fresh", "aten::linalg_matmul",
    "aten::linalg_norm", "aten::linalg_vector_norm", "aten::linear", "aten::linspace",
    "aten::list", "aten::log", "aten::log10", "aten::log1p", "aten::log1p_", "aten::log2",
    "aten::log_", "aten::log_sigmoid", "aten::log_softmax", "aten::logaddexp",
    "aten::logcumsumexp", "aten::logical_and", "aten::logical_and_", "aten::logical_not",
    "aten::logical_not_", "aten::logical_or", "aten::logical_or_", "aten::logical_xor",
    "aten::logit", "aten::logspace", "aten::logsumexp", "aten::lower", "aten::lstm",
    "aten::lstm_cell", "aten::lt", "aten::lt_", "aten::masked_fill", "aten::masked_fill_",
    "aten::masked_scatter", "aten::masked_scatter_", "aten::masked_select", "aten::matmul",
    "aten::max", "aten::max_pool1d", "aten::max_pool2d", "aten::maximum", "aten::mean",
    "aten::median", "aten::meshgrid", "aten::min", "aten::minimum", "aten::mish", "aten::mish_",
    "aten::mm", "aten::mode", "aten::moveaxis", "aten::movedim", "aten::msort", "aten::mul",
    "aten::mul_", "aten::multiply", "aten::mv", "aten::nan_to_num", "aten::nan_to_num_",
    "aten::nanmean", "aten::nanmedian", "aten::nansum", "aten::narrow", "aten::native_layer_norm",
    "aten::ne", "aten::ne_", "aten::neg", "aten::neg_", "aten::negative",
    "aten::nested_to_padded_tensor", "aten::new_empty", "aten::new_full", "aten::new_ones",
    "aten::new_zeros", "aten::nonzero", "aten::norm", "aten::not_equal", "aten::numel",
    "aten::one_hot", "aten::ones", "aten::ones_like", "aten::ord", "aten::outer", "aten::pad",
    "aten::pairwise_distance", "aten::percentFormat", "aten::permute", "aten::pop",
    "aten::positive", "aten::pow", "aten::pow_", "aten::prelu", "aten::prod", "aten::quantile",
    "aten::rad2deg", "aten::radians", "aten::ravel", "aten::real", "aten::reciprocal",
    "aten::reciprocal_", "aten::reflection_pad1d", "aten::relu", "aten::relu6", "aten::relu6_",
    "aten::relu_", "aten::remainder", "aten::remainder_", "aten::repeat",
    "aten::repeat_interleave", "aten::replace", "aten::replication_pad1d", "aten::reshape",
    "aten::reshape_as", "aten::reverse", "aten::rms_norm", "aten::rnn_relu",
    "aten::rnn_relu_cell", "aten::rnn_tanh", "aten::rnn_tanh_cell", "aten::roll", "aten::rot90",
    "aten::round", "aten::round_", "aten::rsqrt", "aten::rsqrt_", "aten::rsub",
    "aten::scalar_tensor", "aten::scaled_dot_product_attention", "aten::scatter",
    "aten::scatter_", "aten::scatter_add", "aten::scatter_add_", "aten::scatter_reduce",
    "aten::scatter_reduce_", "aten::searchsorted", "aten::segment_reduce", "aten::select",
    "aten::select_scatter", "aten::selu", "aten::selu_", "aten::setdefault", "aten::sgn",
    "aten::sigmoid", "aten::sigmoid_", "aten::sign", "aten::sign_", "aten::silu", "aten::silu_",
    "aten::sin", "aten::sin_", "aten::sinc", "aten::sinh", "aten::size", "aten::slice",
    "aten::slice_scatter", "aten::softmax", "aten::softplus", "aten::softshrink", "aten::sort",
    "aten::sorted", "aten::split", "aten::split_with_sizes", "aten::sqrt", "aten::sqrt_",
    "aten::square", "aten::square_", "aten::squeeze", "aten::squeeze_", "aten::stack",
    "aten::startswith", "aten::std", "aten::std_mean", "aten::str", "aten::stride", "aten::strip",
    "aten::sub", "aten::sub_", "aten::subtract", "aten::sum", "aten::sum_to_size",
    "aten::swapaxes", "aten::swapdims", "aten::sym_size", "aten::t", "aten::t_", "aten::take",
    "aten::take_along_dim", "aten::tan", "aten::tanh", "aten::tanh_", "aten::tensor",
    "aten::tensor_split", "aten::tensordot", "aten::threshold", "aten::threshold_", "aten::tile",
    "aten::to", "aten::topk", "aten::trace", "aten::transpose", "aten::transpose_",
    "aten::trapezoid", "aten::tril", "aten::tril_", "aten::tril_indices", "aten::triu",
    "aten::triu_", "aten::triu_indices", "aten::true_divide", "aten::true_divide_", "aten::trunc",
    "aten::trunc_", "aten::type_as", "aten::unbind", "aten::unflatten", "aten::unfold",
    "aten::unique_consecutive", "aten::unique_dim", "aten::unsqueeze", "aten::unsqueeze_",
    "aten::update", "aten::upper", "aten::values", "aten::var", "aten::var_mean", "aten::vdot",
    "aten::view", "aten::view_as", "aten::vsplit", "aten::vstack", "aten::warn", "aten::where",
    "aten::xlogy", "aten::zero_", "aten::zeros", "aten::zeros_like",
    "fbgemm::asynchronous_complete_cumsum",
    "fbgemm::int_nbit_split_embedding_codegen_lookup_function", "mkldnn::_linear_pointwise",
    "mkldnn::_reorder_linear_weight", "prim::Constant", "prim::DictConstruct", "prim::GetAttr",
    "prim::If", "prim::ListConstruct", "prim::ListUnpack", "prim::Loop", "prim::NumToTensor",
    "prim::RaiseException", "prim::TupleConstruct", "prim::TupleIndex", "prim::TupleSlice",
    "prim::TupleUnpack", "prim::Uninitialized", "prim::abs", "prim::data", "prim::device",
    "prim::dtype", "prim::is_cuda", "prim::is_nested", "prim::isinstance", "prim::layout",
    "prim::max", "prim::min", "prim::requires_grad", "prim::tolist", "prim::type",
    "prim::unchecked_cast", "prim::unchecked_unwrap_optional", "tessera::cross_layer",
    "tessera::cross_layer_fp8", "tessera::dense_steps", "tessera::dot_interaction",
    "tessera::linear", "tessera::linear_bf16", "tessera::linear_fp8", "tessera::linear_thin",
    "tessera::lookup", "tessera::lookup_partly_shared", "tessera::lookup_rows",
};

// The manifest's fields in each version of the format, the oldest first: a word, or an object with
// the kind of rule and what it needs.
inline constexpr std::array<std::string_view, 3> kManifestRules = {
    R"({"object": {"format_version": {"integer": [3, 5]}, "name": "text", "version": "text", )"
    R"("created": "text", "versions": {"object": {"tessera": "text", "torch": "text", "fbgemm": )"
    R"("text", "torch_min": "release", "torch_below": "release"}}, "backend": "text", )"
    R"("operator_libraries": {"list": "text"}, "schema": {"object": {"dense_features": {"list": )"
    R"("text"}, "dense_missing": {"one_of": ["nan", "refuse"]}, "dense_transform": "text", )"
    R"("features": {"list": {"object": {"name": "text", "group": {"one_of": ["id_list", )"
    R"("id_score_list"]}, "table": "text", "rows": {"integer": [1, 9223372036854775807]}, "dim": )"
    R"({"integer": [1, 9223372036854775807]}, "pooling": {"one_of": ["sum", "mean", "none"]}, )"
    R"("hashing": {"one_of": ["none", "modulo", "murmur3", "vocabulary"]}, "out_of_range": )"
    R"({"one_of": ["reject", "clamp", "hash"]}}}}, "outputs": {"list": {"object": {"name": )"
    R"("text", "width": {"integer": [1, 1048576]}}}}}}, "dtype": "text", "dense_dtype": )"
    R"({"one_of": ["fp32", "bf16", "fp8"]}, "tables": {"list": {"object": {"name": "text", )"
    R"("rows": {"integer": [1, 9223372036854775807]}, "dim": {"integer": [1, )"
    R"(9223372036854775807]}, "dtype": "text", "bytes": {"integer": [0, 9223372036854775807]}, )"
    R"("bytes_fp32": {"integer": [0, 9223372036854775807]}, "max_abs_error": {"number": [0, )"
    R"(1.7976931348623157e+308]}, "rmse": {"number": [0, 1.7976931348623157e+308]}, )"
    R"("relative_rmse": {"number": [0, 1.7976931348623157e+308]}}}}, "bytes_fp32": {"integer": )"
    R"([0, 9223372036854775807]}, "bytes_packaged": {"integer": [0, 9223372036854775807]}, )"
    R"("plan": {"object": {"num_shards": {"integer": [1, 4096]}, "placements": {"list": )"
    R"({"object": {"table": "text", "shard": {"integer": [0, 4095]}, "device": "text", )"
    R"("row_begin": {"integer": [0, 9223372036854775807]}, "row_end": {"integer": [0, )"
    R"(9223372036854775807]}, "column_begin": {"integer": [0, 9223372036854775807]}, )"
    R"("column_end": {"integer": [0, 9223372036854775807]}}}}}}, "device": {"one_of": ["cpu", )"
    R"("cuda"]}, "source": {"map": "text"}, "training_metrics": {"map": {"map": {"or_null": )"
    R"({"number": [-1.7976931348623157e+308, 1.7976931348623157e+308]}}}}, "evaluation": )"
    R"({"or_null": {"object": {"rows": {"integer": [0, 9223372036854775807]}, "fp32": {"object": )"
    R"({"auc": {"or_null": {"number": [-1.7976931348623157e+308, 1.7976931348623157e+308]}}, )"
    R"("normalised_entropy": {"or_null": {"number": [-1.7976931348623157e+308, )"
    R"(1.7976931348623157e+308]}}, "log_loss": {"or_null": {"number": [-1.7976931348623157e+308, )"
    R"(1.7976931348623157e+308]}}, "calibration": {"or_null": {"number": )"
    R"([-1.7976931348623157e+308, 1.7976931348623157e+308]}}}}, "packaged": {"object": {"auc": )"
    R"({"or_null": {"number": [-1.7976931348623157e+308, 1.7976931348623157e+308]}}, )"
    R"("normalised_entropy": {"or_null": {"number": [-1.7976931348623157e+308, )"
    R"(1.7976931348623157e+308]}}, "log_loss": {"or_null": {"number": [-1.7976931348623157e+308, )"
    R"(1.7976931348623157e+308]}}, "calibration": {"or_null": {"number": )"
    R"([-1.7976931348623157e+308, 1.7976931348623157e+308]}}}}, "max_abs_score_error": {"number":)"
    R"( [0, 1.7976931348623157e+308]}}}}, "golden": {"object": {"samples": {"integer": [0, )"
    R"(9223372036854775807]}, "atol": {"number": [0, 1.7976931348623157e+308]}, "rtol": )"
    R"({"number": [0, 1.7976931348623157e+308]}}}, "records": {"map": {"object": {"sha256": )"
    R"({"hex": 64}, "bytes": {"integer": [0, 9223372036854775807]}, "crc32": {"integer": [0, )"
    R"(4294967295]}, "chunks": {"list": {"hex": 64}}}}}, "signature": {"or_null": {"object": )"
    R"({"algorithm": {"one_of": ["ed25519"]}, "public_key": {"hex": 64}, "value": {"hex": )"
    R"(128}}}}}})",
    R"({"object": {"format_version": {"integer": [3, 5]}, "name": "text", "version": "text", )"
    R"("created": "text", "versions": {"object": {"tessera": "text", "torch": "text", "fbgemm": )"
    R"("text", "torch_min": "release", "torch_below": "release"}}, "backend": "text", )"
    R"("operator_libraries": {"list": "text"}, "schema": {"object": {"dense_features": {"list": )"
    R"("text"}, "dense_missing": {"one_of": ["nan", "refuse"]}, "dense_columns": {"list": )"
    R"("text"}, "string_hash": {"one_of": ["xxh64"]}, "features": {"list": {"object": {"name": )"
    R"("text", "group": {"one_of": ["id_list", "id_score_list"]}, "strings": "flag", "column": )"
    R"("text", "weights_column": "text", "many": "flag", "max_length": {"integer": [0, )"
    R"(9223372036854775807]}, "keep": {"one_of": ["first", "last"]}, "table": "text", "rows": )"
    R"({"integer": [1, 9223372036854775807]}, "dim": {"integer": [1, 9223372036854775807]}, )"
    R"("pooling": {"one_of": ["sum", "mean", "none"]}, "hashing": {"one_of": ["none", "modulo", )"
    R"("murmur3", "vocabulary"]}, "out_of_range": {"one_of": ["reject", "clamp", "hash"]}}}}, )"
    R"("outputs": {"list": {"object": {"name": "text", "width": {"integer": [1, 1048576]}}}}}}, )"
    R"("dtype": "text", "dense_dtype": {"one_of": ["fp32", "bf16", "fp8"]}, "tables": {"list": )"
    R"({"object": {"name": "text", "rows": {"integer": [1, 9223372036854775807]}, "dim": )"
    R"({"integer": [1, 9223372036854775807]}, "dtype": "text", "bytes": {"integer": [0, )"
    R"(9223372036854775807]}, "bytes_fp32": {"integer": [0, 9223372036854775807]}, )"
    R"("max_abs_error": {"number": [0, 1.7976931348623157e+308]}, "rmse": {"number": [0, )"
    R"(1.7976931348623157e+308]}, "relative_rmse": {"number": [0, 1.7976931348623157e+308]}}}}, )"
    R"("bytes_fp32": {"integer": [0, 9223372036854775807]}, "bytes_packaged": {"integer": [0, )"
    R"(9223372036854775807]}, "plan": {"object": {"num_shards": {"integer": [1, 4096]}, )"
    R"("placements": {"list": {"object": {"table": "text", "shard": {"integer": [0, 4095]}, )"
    R"("device": "text", "row_begin": {"integer": [0, 9223372036854775807]}, "row_end": )"
    R"({"integer": [0, 9223372036854775807]}, "column_begin": {"integer": [0, )"
    R"(9223372036854775807]}, "column_end": {"integer": [0, 9223372036854775807]}}}}}}, "device":)"
    R"( {"one_of": ["cpu", "cuda"]}, "source": {"map": "text"}, "training_metrics": {"map": )"
    R"({"map": {"or_null": {"number": [-1.7976931348623157e+308, 1.7976931348623157e+308]}}}}, )"
    R"("evaluation": {"or_null": {"object": {"rows": {"integer": [0, 9223372036854775807]}, )"
    R"("fp32": {"object": {"auc": {"or_null": {"number": [-1.7976931348623157e+308, )"
    R"(1.7976931348623157e+308]}}, "normalised_entropy": {"or_null": {"number": )"
    R"([-1.7976931348623157e+308, 1.7976931348623157e+308]}}, "log_loss": {"or_null": {"number": )"
    R"([-1.7976931348623157e+308, 1.7976931348623157e+308]}}, "calibration": {"or_null": )"
    R"({"number": [-1.7976931348623157e+308, 1.7976931348623157e+308]}}}}, "packaged": {"object":)"
    R"( {"auc": {"or_null": {"number": [-1.7976931348623157e+308, 1.7976931348623157e+308]}}, )"
    R"("normalised_entropy": {"or_null": {"number": [-1.7976931348623157e+308, )"
    R"(1.7976931348623157e+308]}}, "log_loss": {"or_null": {"number": [-1.7976931348623157e+308, )"
    R"(1.7976931348623157e+308]}}, "calibration": {"or_null": {"number": )"
    R"([-1.7976931348623157e+308, 1.7976931348623157e+308]}}}}, "max_abs_score_error": {"number":)"
    R"( [0, 1.7976931348623157e+308]}}}}, "golden": {"object": {"samples": {"integer": [0, )"
    R"(9223372036854775807]}, "atol": {"number": [0, 1.7976931348623157e+308]}, "rtol": )"
    R"({"number": [0, 1.7976931348623157e+308]}}}, "records": {"map": {"object": {"sha256": )"
    R"({"hex": 64}, "bytes": {"integer": [0, 9223372036854775807]}, "crc32": {"integer": [0, )"
    R"(4294967295]}, "chunks": {"list": {"hex": 64}}}}}, "signature": {"or_null": {"object": )"
    R"({"algorithm": {"one_of": ["ed25519"]}, "public_key": {"hex": 64}, "value": {"hex": )"
    R"(128}}}}}})",
    R"({"object": {"format_version": {"integer": [3, 5]}, "name": "text", "version": "text", )"
    R"("created": "text", "versions": {"object": {"tessera": "text", "torch": "text", "fbgemm": )"
    R"("text", "torch_min": "release", "torch_below": "release"}}, "backend": "text", )"
    R"("operator_libraries": {"list": "text"}, "schema": {"object": {"dense_features": {"list": )"
    R"("text"}, "dense_missing": {"one_of": ["nan", "refuse"]}, "dense_columns": {"list": )"
    R"("text"}, "dense_ranges": {"list": {"object": {"least": {"or_null": {"number": )"
    R"([-3.4028234663852886e+38, 3.4028234663852886e+38]}}, "most": {"or_null": {"number": )"
    R"([-3.4028234663852886e+38, 3.4028234663852886e+38]}}, "missing": {"number": [0, 1]}}}}, )"
    R"("other_columns": {"list": {"object": {"name": "text", "role": {"one_of": ["label", )"
    R"("weight", "timestamp", "group", "ignore"]}}}}, "string_hash": {"one_of": ["xxh64"]}, )"
    R"("features": {"list": {"object": {"name": "text", "group": {"one_of": ["id_list", )"
    R"("id_score_list"]}, "strings": "flag", "hex": "flag", "column": "text", "weights_column": )"
    R"("text", "separator": "text", "many": "flag", "max_length": {"integer": [0, )"
    R"(9223372036854775807]}, "keep": {"one_of": ["first", "last"]}, "table": "text", "rows": )"
    R"({"integer": [1, 9223372036854775807]}, "dim": {"integer": [1, 9223372036854775807]}, )"
    R"("pooling": {"one_of": ["sum", "mean", "none"]}, "hashing": {"one_of": ["none", "modulo", )"
    R"("murmur3", "vocabulary"]}, "vocabulary": {"or_null": {"integer": [0, )"
    R"(9223372036854775807]}}, "out_of_range": {"one_of": ["reject", "clamp", "hash"]}}}}, )"
    R"("outputs": {"list": {"object": {"name": "text", "width": {"integer": [1, 1048576]}}}}}}, )"
    R"("dtype": "text", "dense_dtype": {"one_of": ["fp32", "bf16", "fp8"]}, "tables": {"list": )"
    R"({"object": {"name": "text", "rows": {"integer": [1, 9223372036854775807]}, "dim": )"
    R"({"integer": [1, 9223372036854775807]}, "dtype": "text", "bytes": {"integer": [0, )"
    R"(9223372036854775807]}, "bytes_fp32": {"integer": [0, 9223372036854775807]}, )"
    R"("max_abs_error": {"number": [0, 1.7976931348623157e+308]}, "rmse": {"number": [0, )"
    R"(1.7976931348623157e+308]}, "relative_rmse": {"number": [0, 1.7976931348623157e+308]}}}}, )"
    R"("bytes_fp32": {"integer": [0, 9223372036854775807]}, "bytes_packaged": {"integer": [0, )"
    R"(9223372036854775807]}, "plan": {"object": {"num_shards": {"integer": [1, 4096]}, )"
    R"("placements": {"list": {"object": {"table": "text", "shard": {"integer": [0, 4095]}, )"
    R"("device": "text", "row_begin": {"integer": [0, 9223372036854775807]}, "row_end": )"
    R"({"integer": [0, 9223372036854775807]}, "column_begin": {"integer": [0, )"
    R"(9223372036854775807]}, "column_end": {"integer": [0, 9223372036854775807]}}}}}}, "device":)"
    R"( {"one_of": ["cpu", "cuda"]}, "source": {"map": "text"}, "training_metrics": {"map": )"
    R"({"map": {"or_null": {"number": [-1.7976931348623157e+308, 1.7976931348623157e+308]}}}}, )"
    R"("evaluation": {"or_null": {"object": {"rows": {"integer": [0, 9223372036854775807]}, )"
    R"("fp32": {"object": {"auc": {"or_null": {"number": [-1.7976931348623157e+308, )"
    R"(1.7976931348623157e+308]}}, "normalised_entropy": {"or_null": {"number": )"
    R"([-1.7976931348623157e+308, 1.7976931348623157e+308]}}, "log_loss": {"or_null": {"number": )"
    R"([-1.7976931348623157e+308, 1.7976931348623157e+308]}}, "calibration": {"or_null": )"
    R"({"number": [-1.7976931348623157e+308, 1.7976931348623157e+308]}}}}, "packaged": {"object":)"
    R"( {"auc": {"or_null": {"number": [-1.7976931348623157e+308, 1.7976931348623157e+308]}}, )"
    R"("normalised_entropy": {"or_null": {"number": [-1.7976931348623157e+308, )"
    R"(1.7976931348623157e+308]}}, "log_loss": {"or_null": {"number": [-1.7976931348623157e+308, )"
    R"(1.7976931348623157e+308]}}, "calibration": {"or_null": {"number": )"
    R"([-1.7976931348623157e+308, 1.7976931348623157e+308]}}}}, "max_abs_score_error": {"number":)"
    R"( [0, 1.7976931348623157e+308]}, "labels": {"map": {"object": {"task": {"one_of": )"
    R"(["binary", "regression"]}, "rows": {"integer": [0, 9223372036854775807]}, "fp32": {"map": )"
    R"({"or_null": {"number": [-1.7976931348623157e+308, 1.7976931348623157e+308]}}}, "packaged":)"
    R"( {"map": {"or_null": {"number": [-1.7976931348623157e+308, 1.7976931348623157e+308]}}}}}},)"
    R"( "members": {"map": {"map": {"map": {"or_null": {"number": [-1.7976931348623157e+308, )"
    R"(1.7976931348623157e+308]}}}}}}}}, "golden": {"object": {"samples": {"integer": [0, )"
    R"(9223372036854775807]}, "atol": {"number": [0, 1.7976931348623157e+308]}, "rtol": )"
    R"({"number": [0, 1.7976931348623157e+308]}}}, "records": {"map": {"object": {"sha256": )"
    R"({"hex": 64}, "bytes": {"integer": [0, 9223372036854775807]}, "crc32": {"integer": [0, )"
    R"(4294967295]}, "chunks": {"list": {"hex": 64}}}}}, "signature": {"or_null": {"object": )"
    R"({"algorithm": {"one_of": ["ed25519"]}, "public_key": {"hex": 64}, "value": {"hex": )"
    R"(128}}}}}})",
};

// The fields of a commit's last record, likewise.
inline constexpr std::string_view kCommitRules =
    R"({"object": {"format_version": {"integer": [1, 1]}, "model": "text", "version": {"integer":)"
    R"( [1, 9223372036854775807]}, "number": {"integer": [1, 99999999]}, "base": {"hex": 64}, )"
    R"("previous": {"hex": 64}, "newest_example_s": {"or_null": {"number": )"
    R"([-1.7976931348623157e+308, 1.7976931348623157e+308]}}, "created_s": {"number": )"
    R"([-1.7976931348623157e+308, 1.7976931348623157e+308]}, "step": {"or_null": {"integer": [0, )"
    R"(9223372036854775807]}}, "patches": {"list": {"object": {"record": "text", "table": "text",)"
    R"( "offset": {"integer": [0, 9223372036854775807]}, "stride": {"integer": [1, )"
    R"(9223372036854775807]}, "width": {"integer": [1, 9223372036854775807]}, "count": )"
    R"({"integer": [1, 4294967296]}, "rows": "text", "bytes": "text"}}}, "golden": {"object": )"
    R"({"samples": {"integer": [0, 9223372036854775807]}, "atol": {"number": [0, )"
    R"(1.7976931348623157e+308]}, "rtol": {"number": [0, 1.7976931348623157e+308]}}}, "records": )"
    R"({"map": {"object": {"sha256": {"hex": 64}, "bytes": {"integer": [0, 9223372036854775807]},)"
    R"( "crc32": {"integer": [0, 4294967295]}, "chunks": {"list": {"hex": 64}}}}}, "signature": )"
    R"({"or_null": {"object": {"algorithm": {"one_of": ["ed25519"]}, "public_key": {"hex": 64}, )"
    R"("value": {"hex": 128}}}}}})";

// Why a server stops at a commit.
inline constexpr std::array<std::string_view, 10> kCommitRefusals = {
    "base", "chain", "damaged", "fenced", "gap", "golden", "memory", "repeat", "schema",
    "unsigned",
};

}  // namespace tessera
