"""Which operators a package's graph may call: pure computation on tensors, numbers and lists.

Nothing here writes a file, reads one, prints, changes a setting of the process, starts a thread, draws
random numbers or looks at gradients (`aten::warn` is the one exception: it writes a line to stderr).  A model
that needs more says so at every place that loads it: ``--allow-op NAME``.

`tessera.serving.package.generate` makes the C++ reader's list of this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_LOOKUPS = """
fbgemm::asynchronous_complete_cumsum
fbgemm::int_nbit_split_embedding_codegen_lookup_function
mkldnn::_linear_pointwise mkldnn::_reorder_linear_weight
tessera::cross_layer tessera::cross_layer_fp8 tessera::dense_steps tessera::dot_interaction
tessera::linear tessera::linear_bf16 tessera::linear_fp8 tessera::linear_thin tessera::lookup
tessera::lookup_partly_shared tessera::lookup_rows
"""

_LANGUAGE = """
prim::Constant prim::DictConstruct prim::GetAttr prim::If prim::ListConstruct prim::ListUnpack
prim::Loop prim::NumToTensor prim::RaiseException prim::TupleConstruct prim::TupleIndex
prim::TupleSlice prim::TupleUnpack prim::Uninitialized prim::abs prim::data prim::device prim::dtype
prim::is_cuda prim::is_nested prim::isinstance prim::layout prim::max prim::min prim::requires_grad
prim::tolist prim::type prim::unchecked_cast prim::unchecked_unwrap_optional
aten::Bool aten::Float aten::FloatImplicit aten::Int aten::IntImplicit aten::ScalarImplicit
aten::__and__ aten::__contains__ aten::__derive_index aten::__getitem__ aten::__is__ aten::__isnot__
aten::__not__ aten::__or__ aten::__range_length aten::__lshift__ aten::__rshift__ aten::__xor__
aten::_set_item aten::append aten::ceil aten::clear aten::copy aten::count aten::degrees aten::dict
aten::endswith aten::extend aten::find aten::floor aten::format aten::get aten::hash aten::index
aten::insert aten::is_autocast_enabled aten::is_floating_point aten::is_grad_enabled aten::items
aten::join aten::keys aten::len aten::list aten::lower aten::ord aten::percentFormat aten::pop
aten::radians aten::replace aten::reverse aten::setdefault aten::sorted aten::split aten::startswith
aten::str aten::strip aten::update aten::upper aten::values aten::warn
aten::is_complex aten::is_contiguous aten::is_nonzero aten::is_same_size aten::is_signed
aten::item aten::numel aten::size aten::stride aten::sym_size aten::dim aten::device
"""

_MAKE = """
aten::arange aten::as_tensor aten::clone aten::contiguous aten::cpu aten::detach aten::empty
aten::empty_like aten::eye aten::fill aten::full aten::full_like aten::lift_fresh aten::linspace
aten::logspace aten::new_empty aten::new_full aten::new_ones aten::new_zeros aten::ones
aten::ones_like aten::scalar_tensor aten::tensor aten::to aten::type_as aten::zeros aten::zeros_like
aten::alias aten::positive aten::complex aten::tril_indices aten::triu_indices
"""

_SHAPE = """
aten::as_strided aten::atleast_1d aten::atleast_2d aten::atleast_3d aten::block_diag
aten::broadcast_tensors aten::broadcast_to aten::cat aten::chunk aten::column_stack aten::concat
aten::concatenate aten::constant_pad_nd aten::diag aten::diag_embed aten::diagonal aten::dsplit
aten::dstack aten::expand aten::expand_as aten::flatten aten::flip aten::fliplr aten::flipud aten::gather
aten::hsplit aten::hstack aten::index_add aten::index_copy aten::index_fill aten::index_put
aten::index_select aten::masked_fill aten::masked_scatter aten::masked_select aten::meshgrid
aten::moveaxis aten::movedim aten::narrow aten::nonzero aten::pad aten::permute aten::ravel
aten::repeat aten::repeat_interleave aten::reshape aten::reshape_as aten::roll aten::rot90
aten::scatter aten::scatter_add aten::scatter_reduce aten::select aten::select_scatter aten::slice
aten::slice_scatter aten::split_with_sizes aten::squeeze aten::stack aten::swapaxes aten::swapdims
aten::t aten::take aten::take_along_dim aten::tensor_split aten::tile aten::transpose aten::tril
aten::triu aten::unbind aten::unflatten aten::unfold aten::unsqueeze aten::view aten::view_as
aten::vsplit aten::vstack aten::where aten::reflection_pad1d aten::replication_pad1d
"""

_ELEMENTWISE = """
aten::abs aten::absolute aten::acos aten::acosh aten::add aten::addcdiv aten::addcmul aten::asin
aten::asinh aten::atan aten::atan2 aten::atanh aten::bitwise_and aten::bitwise_left_shift
aten::bitwise_not aten::bitwise_or aten::bitwise_right_shift aten::bitwise_xor aten::bucketize
aten::clamp aten::clamp_max aten::clamp_min aten::clip aten::copysign aten::cos aten::cosh
aten::deg2rad aten::digamma aten::div aten::divide aten::eq aten::erf aten::erfc aten::erfinv aten::exp
aten::exp2 aten::expm1 aten::float_power aten::floor_divide aten::floordiv aten::fmax aten::fmin
aten::fmod aten::frac aten::ge aten::greater aten::greater_equal aten::gt aten::heaviside aten::hypot
aten::i0 aten::isclose aten::isfinite aten::isin aten::isinf aten::isnan aten::ldexp aten::le aten::lerp
aten::less aten::less_equal aten::lgamma aten::log aten::log10 aten::log1p aten::log2 aten::logaddexp
aten::logical_and aten::logical_not aten::logical_or aten::logical_xor aten::logit aten::lt
aten::maximum aten::minimum aten::mul aten::multiply aten::nan_to_num aten::ne aten::neg
aten::negative aten::not_equal aten::pow aten::rad2deg aten::real aten::reciprocal aten::remainder
aten::round aten::rsqrt aten::rsub aten::searchsorted aten::sgn aten::sigmoid aten::sign aten::sin
aten::sinc aten::sinh aten::sqrt aten::square aten::sub aten::subtract aten::tan aten::tanh
aten::true_divide aten::trunc aten::xlogy
"""

_REDUCE = """
aten::all aten::allclose aten::amax aten::amin aten::aminmax aten::any aten::argmax aten::argmin
aten::argsort aten::bincount aten::count_nonzero aten::cummax aten::cummin aten::cumprod aten::cumsum
aten::diff aten::equal aten::histc aten::logcumsumexp aten::logsumexp aten::max aten::mean aten::median
aten::min aten::mode aten::msort aten::nanmean aten::nanmedian aten::nansum aten::norm aten::prod
aten::quantile aten::segment_reduce aten::sort aten::std aten::std_mean aten::sum aten::sum_to_size
aten::topk aten::kthvalue aten::unique_consecutive aten::unique_dim aten::_unique2 aten::var
aten::var_mean aten::frobenius_norm aten::linalg_norm aten::linalg_vector_norm aten::dist aten::cdist
aten::cosine_similarity aten::pairwise_distance aten::trapezoid
"""

_PRODUCTS = """
aten::addbmm aten::addmm aten::addmv aten::addr aten::baddbmm aten::bilinear aten::bmm aten::chain_matmul
aten::cross aten::dot aten::einsum aten::inner aten::kron aten::linalg_matmul aten::linear aten::matmul
aten::mm aten::mv aten::outer aten::tensordot aten::vdot aten::_addmm_activation aten::trace
"""

_LAYERS = """
aten::_native_multi_head_attention aten::_transformer_encoder_layer_fwd aten::adaptive_avg_pool1d
aten::adaptive_max_pool1d aten::avg_pool1d aten::avg_pool2d aten::batch_norm aten::celu aten::conv1d
aten::conv2d aten::conv_transpose1d aten::dropout aten::elu aten::embedding aten::embedding_bag
aten::feature_dropout aten::gelu aten::glu aten::group_norm aten::gru aten::gru_cell aten::hardshrink
aten::hardsigmoid aten::hardswish aten::hardtanh aten::instance_norm aten::layer_norm aten::leaky_relu
aten::log_sigmoid aten::log_softmax aten::lstm aten::lstm_cell aten::max_pool1d aten::max_pool2d
aten::mish aten::native_layer_norm aten::one_hot aten::prelu aten::relu aten::relu6 aten::rms_norm
aten::rnn_relu aten::rnn_relu_cell aten::rnn_tanh aten::rnn_tanh_cell aten::scaled_dot_product_attention
aten::selu aten::silu aten::softmax aten::softplus aten::softshrink
aten::threshold aten::_pack_padded_sequence aten::_pad_packed_sequence
aten::nested_to_padded_tensor
"""

_IN_PLACE = """
aten::abs_ aten::add_ aten::addcdiv_ aten::addcmul_ aten::addmm_ aten::baddbmm_ aten::bitwise_and_
aten::bitwise_not_ aten::bitwise_or_ aten::bitwise_xor_ aten::ceil_ aten::celu_ aten::clamp_
aten::clamp_max_ aten::clamp_min_ aten::clip_ aten::copy_ aten::cos_ aten::cumprod_ aten::cumsum_
aten::div_ aten::dropout_ aten::elu_ aten::eq_ aten::erf_ aten::exp_ aten::expm1_ aten::fill_
aten::fill_diagonal_ aten::floor_ aten::floor_divide_ aten::fmod_ aten::ge_ aten::gelu_ aten::gt_
aten::hardsigmoid_ aten::hardswish_ aten::hardtanh_ aten::index_add_ aten::index_copy_
aten::index_fill_ aten::index_put_ aten::le_ aten::leaky_relu_ aten::lerp_ aten::log1p_ aten::log_
aten::logical_and_ aten::logical_not_ aten::logical_or_ aten::lt_ aten::masked_fill_
aten::masked_scatter_ aten::mish_ aten::mul_ aten::nan_to_num_ aten::ne_ aten::neg_ aten::pow_
aten::reciprocal_ aten::relu6_ aten::relu_ aten::remainder_ aten::round_ aten::rsqrt_ aten::scatter_
aten::scatter_add_ aten::scatter_reduce_ aten::selu_ aten::sigmoid_ aten::sign_ aten::silu_ aten::sin_
aten::sqrt_ aten::square_ aten::squeeze_ aten::sub_ aten::t_ aten::tanh_ aten::threshold_
aten::transpose_ aten::tril_ aten::triu_ aten::true_divide_ aten::trunc_ aten::unsqueeze_ aten::zero_
"""

ALLOWED_OPERATORS = frozenset(
    " ".join(
        [
            *(_LOOKUPS, _LANGUAGE, _MAKE, _SHAPE, _ELEMENTWISE, _REDUCE, _PRODUCTS, _LAYERS),
            _IN_PLACE,
        ]
    ).split()
)
"""Every operator that a graph may call without ``--allow-op``."""

_METHODS = {"prim::CallMethod", "prim::CallFunction"}


def refused_operator(module: Any, more: Iterable[str] = ()) -> str | None:
    """The first name, in alphabetical order, that is not on the list; None where all are.

    Looks at every method of a scripted module with everything that it calls; nothing of it runs.

    Args:
        module: a `torch.jit.ScriptModule`.
        more: operators that are allowed beside `ALLOWED_OPERATORS`.
    """
    allowed = ALLOWED_OPERATORS.union(more)
    methods = module._c._method_names()  # noqa: SLF001 - TorchScript's own list
    found: set[str] = set()
    for method in methods:
        graph = module._c._get_method(method).inlined_graph  # noqa: SLF001 - a node lives as long as its graph
        _collect(graph, found)
    return min(found - allowed, default=None)


def _collect(block: Any, found: set[str]) -> None:
    """Add the kinds of a graph's or block's nodes, those of graphs inside of them included."""
    for node in block.nodes():
        found.add(node.kind())
        for inner in node.blocks():
            _collect(inner, found)
        for name in node.attributeNames():
            kind = node.kindOf(name)
            for graph in node.gs(name) if kind == "gs" else [node.g(name)] if kind == "g" else []:
                _collect(graph, found)


def refusal(name: str) -> str:
    """Why a package that calls ``name`` is refused, and what to do."""
    if name in _METHODS:
        return (
            f"calls a method that is only known when it runs ({name}), which no package may; "
            "package the model without interfaces and classes of torch.classes"
        )
    return (
        f"calls the operator {name}, which is not on the list of those that packages may call; "
        f"if you trust the package, add --allow-op {name}"
    )
