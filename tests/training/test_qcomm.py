"""Codecs of communication: within their stated bounds, alone and inside every collective."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.training.distributed import comm_ops
from tessera.training.distributed.comm.transport import decode_pieces, encode_pieces
from tessera.training.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from tessera.training.distributed.types import CommOp, QuantizedCommCodec
from tests.training.ranks import rank_device, run_on_ranks

WIDTHS = {"fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "mx4": 0.5}
KINDS = [CommType(name) for name in WIDTHS]


def config_of(kind, row_dim=None):
    name = {
        CommType.FP8: "fp8_quantize_dim",
        CommType.INT8: "int8_quantize_dim",
        CommType.MX4: "mx4_quantize_dim",
    }.get(kind)
    if kind is CommType.MX4 and row_dim is not None:
        row_dim += row_dim % 2
    options = {} if name is None or row_dim is None else {name: row_dim}
    return QCommsConfig(forward_precision=kind, backward_precision=kind, **options)


def bound(kind, flat, row_dim, *, forward=True):
    """The table of the module's documentation, per number."""
    size = flat.abs()
    if kind is CommType.FP16:
        return torch.maximum(size * 2.0**-11, torch.tensor(2.0**-25))
    if kind is CommType.BF16:
        return size * 2.0**-8 + 1e-38
    if kind is CommType.MX4:
        row_dim += row_dim % 2
    padded = torch.cat([flat, flat[-1:].expand(-flat.numel() % row_dim)]).view(-1, row_dim)
    if kind is CommType.FP8:
        relative, steps = (2.0**-4, 2.0**-10 / 448) if forward else (2.0**-3, 2.0**-17 / 57344)
        largest = padded.abs().amax(1, keepdim=True).expand(-1, row_dim).flatten()[: flat.numel()]
        # The scale and the product with it are rounded to float32.
        return torch.maximum(size * relative, largest * steps) + size * 2.0**-22 + 1e-38
    if kind is CommType.MX4:
        largest = padded.abs().amax(1, keepdim=True).expand(-1, row_dim).flatten()[: flat.numel()]
        return torch.maximum(size / 5, largest / 14) * (1 + 2.0**-22) + 1e-38
    low, high = padded.amin(1, keepdim=True), padded.amax(1, keepdim=True)
    row = (high - low) / 510 + torch.maximum(low.abs(), high.abs()) * 2.0**-21
    return row.expand(-1, row_dim).flatten()[: flat.numel()] + 1e-38


NUMBERS = st.floats(-6e4, 6e4, width=32, allow_subnormal=False)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    forward=st.booleans(),
    numbers=st.lists(NUMBERS, min_size=1, max_size=50),
    row_dim=st.integers(1, 20),
)
def test_a_round_trip_stays_within_the_bound(kind, forward, numbers, row_dim):
    codecs = get_qcomm_codecs(config_of(kind, row_dim))
    codec = codecs.forward if forward else codecs.backward
    flat = torch.tensor(numbers)
    encoded = codec.encode(flat)
    assert encoded.dtype == codec.quantized_dtype()
    assert encoded.shape == (codec.calc_quantized_size(flat.numel()),)
    decoded = codec.decode(encoded)
    assert decoded.dtype == torch.float32
    error = (decoded[: flat.numel()] - flat).abs()
    assert (error <= bound(kind, flat, row_dim, forward=forward)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_per_number(kind):
    codec = get_qcomm_codecs(config_of(kind, 64)).forward
    header = {CommType.FP8: 4, CommType.INT8: 8, CommType.MX4: 1}.get(kind, 0)
    nbytes = codec.calc_quantized_size(640) * codec.quantized_dtype().itemsize
    assert nbytes == 640 * WIDTHS[kind.value] + 10 * header


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_ones_and_nothing_are_exact(kind):
    codec = get_qcomm_codecs(config_of(kind)).backward
    for flat in (torch.zeros(40), torch.ones(40), torch.full((7,), -1.5), torch.empty(0)):
        assert torch.equal(codec.decode(codec.encode(flat))[: flat.numel()], flat)


@given(lengths=st.lists(st.integers(0, 9), max_size=5), kind=st.sampled_from(KINDS))
def test_pieces_are_encoded_each_for_itself(lengths, kind):
    codec = get_qcomm_codecs(config_of(kind, 4)).forward
    flat = torch.randn(sum(lengths))
    encoded = encode_pieces(codec, flat, lengths)
    sizes = [codec.calc_quantized_size(length) for length in lengths]
    alone = [codec.encode(piece) for piece in flat.split(lengths)]
    for part, piece in zip(encoded.split(sizes), alone, strict=True):
        assert torch.equal(part, piece)
    decoded = decode_pieces(codec, encoded, lengths, torch.float32)
    expected = [codec.decode(e)[:n] for e, n in zip(alone, lengths, strict=True)]
    assert torch.equal(decoded, torch.cat([torch.empty(0), *expected]))


@pytest.mark.parametrize("mode", [None, 0, 1, 2, 4])
def test_mx4_has_the_bytes_of_fbgemm(mode):
    from fbgemm_gpu.quantize_utils import RoundingMode, fp32_to_mx4, mx4_to_fp32

    torch.manual_seed(0)
    rows = torch.randn(200, 16) * torch.exp2(torch.randint(-100, 100, (200, 1)))
    rows[0], rows[1, 3], rows[2] = 0, 0, torch.tensor([0.25, 1.25, 2.5, 5, -5, -7, 6, 3.5] * 2)
    config = QCommsConfig(CommType.MX4, mx4_quantize_dim=16, mx4_rounding_mode=mode)
    codec = get_qcomm_codecs(config).forward
    encoded = codec.encode(rows)
    theirs = fp32_to_mx4(rows, 16, rounding_mode=RoundingMode(2 if mode is None else mode))
    assert torch.equal(encoded, theirs.flatten())
    assert torch.equal(codec.decode(encoded), mx4_to_fp32(theirs, 16).flatten())


def test_the_exponent_of_mx4_may_be_rounded_at_random():
    config = QCommsConfig(CommType.MX4, mx4_quantize_dim=2, mx4_rounding_mode=3)
    codec = get_qcomm_codecs(config).forward
    # The exponent is one more as often as 1.75 and a number below .5 are at least 2: then 1.25 becomes 1.
    decoded = codec.decode(codec.encode(torch.tensor([1.75, 0.625]).repeat(2000))).view(-1, 2)
    assert set(decoded[:, 0].tolist()) == {1.5, 2.0}
    assert 800 < int((decoded[:, 0] == 2.0).sum()) < 1200


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_mx4_does_not_hide_what_is_not_finite(value):
    codec = get_qcomm_codecs(config_of(CommType.MX4, 4)).forward
    decoded = codec.decode(codec.encode(torch.tensor([1.0, value, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0])))
    assert decoded[:4].isnan().all()
    assert torch.equal(decoded[4:], torch.ones(4))


def test_gradients_may_have_the_fp8_of_vectors():
    config = QCommsConfig(backward_precision=CommType.FP8, fp8_bwd_uses_143=True)
    vectors = get_qcomm_codecs(QCommsConfig(forward_precision=CommType.FP8)).forward
    numbers = torch.randn(64)
    assert torch.equal(get_qcomm_codecs(config).backward.encode(numbers), vectors.encode(numbers))


@pytest.mark.parametrize("kind", KINDS)
def test_codecs_need_no_padding(kind):
    codec = get_qcomm_codecs(config_of(kind)).forward
    assert codec.padded_size(torch.zeros(3, 5), [5, 7], 0, codec.create_context()) == (5, 0)
    assert codec.padded_size(torch.zeros(15), [5, 7], 0) == (15, 0)


def test_a_loss_scale_saves_small_gradients():
    tiny = torch.full((4,), 1e-8)
    plain = get_qcomm_codecs(QCommsConfig(backward_precision=CommType.FP16)).backward
    scaled = get_qcomm_codecs(
        QCommsConfig(backward_precision=CommType.FP16, backward_loss_scale=1024.0)
    ).backward
    assert torch.equal(plain.decode(plain.encode(tiny)), torch.zeros(4))
    torch.testing.assert_close(scaled.decode(scaled.encode(tiny)), tiny, rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward_loss_scale": 2.0}, "forward_loss_scale is 2.0, but the precision is fp32"),
        ({"fp8_quantize_dim": 8, "forward_precision": CommType.INT8}, "precision is fp32 and int8"),
        ({"int8_quantize_dim": 0, "forward_precision": CommType.INT8}, "give a positive number"),
        ({"fp8_quantize_dim_bwd": 8, "forward_precision": CommType.FP8}, "serves fp8 only"),
        ({"fp8_bwd_uses_143": True, "forward_precision": CommType.FP8}, "serves fp8 only"),
        ({"mx4_quantize_dim": 7, "forward_precision": CommType.MX4}, "give an even number"),
        ({"mx4_rounding_mode": 5, "forward_precision": CommType.MX4}, "one of FBGEMM's modes"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QCommsConfig(**options)


def test_the_registry():
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    registry = get_qcomm_codecs_registry(config)
    assert set(registry) == {op.name for op in CommOp}
    some = get_qcomm_codecs_registry(config, [CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL])
    assert list(some) == ["SEQUENCE_EMBEDDINGS_ALL_TO_ALL"]
    assert some["SEQUENCE_EMBEDDINGS_ALL_TO_ALL"].forward.quantized_dtype() == torch.float16
    assert some["SEQUENCE_EMBEDDINGS_ALL_TO_ALL"].backward.quantized_dtype() == torch.bfloat16
    assert get_qcomm_codecs_registry(QCommsConfig()) is None
    assert type(get_qcomm_codecs(None).forward) is QuantizedCommCodec


def _round_trip(codec, tensor):
    """What one rank's piece becomes on its way."""
    flat = codec.decode(codec.encode(tensor))[: tensor.numel()]
    return flat.view(tensor.shape).to(tensor.dtype)


def _collectives(kind, row_dim, dtype):
    rank, world, device = dist.get_rank(), dist.get_world_size(), rank_device()
    codecs = get_qcomm_codecs(config_of(kind, row_dim))
    batches, dims = [3, 0, 2, 1][:world], [4, 3, 0, 5][:world]
    inputs = [torch.randn(sum(batches), d).to(dtype) for d in dims]
    partial = [torch.randn(sum(batches), 3).to(dtype) for _ in range(world)]
    first = sum(batches[:rank])
    rows = slice(first, first + batches[rank])

    # The CPU's and the GPU's float32 differ by rounding at most.
    close = {"rtol": 2e-6, "atol": 2e-6} if device.type == "cuda" else {"rtol": 0, "atol": 0}

    own = inputs[rank].to(device).requires_grad_()
    out = comm_ops.alltoall_pooled(own, batches, dims, codecs=codecs).wait()
    assert out.dtype == dtype
    parts = [_round_trip(codecs.forward, tensor[rows]) for tensor in inputs]
    torch.testing.assert_close(out.detach().cpu(), torch.cat(parts, 1), **close)
    factors = [torch.randn(b, sum(dims)).to(dtype) for b in batches]
    (out * factors[rank].to(device)).sum().backward()
    before = sum(dims[:rank])
    columns = slice(before, before + dims[rank])
    gradient = torch.cat(
        [_round_trip(codecs.backward, f[:, columns].contiguous()) for f in factors]
    )
    torch.testing.assert_close(own.grad.cpu(), gradient / world, **close)

    own = partial[rank].to(device).requires_grad_()
    out = comm_ops.reduce_scatter_v_pooled(own, batches, codecs=codecs).wait()
    total = sum(_round_trip(codecs.forward, tensor[rows]).float() for tensor in partial)
    torch.testing.assert_close(out.detach().cpu(), total.to(dtype), **close)
    (out * 2).sum().backward()
    assert torch.equal(own.grad.cpu(), torch.full((sum(batches), 3), 2 / world).to(dtype))

    own = torch.full((2, 3), rank + 1.0, device=device, dtype=dtype, requires_grad=True)
    out = comm_ops.all_gather_base_pooled(own, codecs=codecs).wait()
    expected = [_round_trip(codecs.forward, torch.full((2, 3), r + 1.0)) for r in range(world)]
    torch.testing.assert_close(out.detach().cpu(), torch.cat(expected).to(dtype), **close)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("world", [1, 2, 4])
def test_collectives_send_what_the_codec_makes_of_each_piece(world):
    if world == 1:
        run_on_ranks(1, _nothing_is_encoded_alone)
        return
    for kind in KINDS:
        for row_dim in (3, 7):  # the pieces are whole rows, or not
            run_on_ranks(world, _collectives, kind, row_dim, torch.float32)
    run_on_ranks(world, _collectives, CommType.INT8, 7, torch.float16)


def _nothing_is_encoded_alone():
    codecs = get_qcomm_codecs(config_of(CommType.INT8))
    own = torch.randn(3, 4, device=rank_device())
    out = comm_ops.alltoall_pooled(own, [3], [4], codecs=codecs).wait()
    assert torch.equal(out, own)
