"""The interop cases of gRPC that apply to a server of unary calls, by grpcio: ``grpcio_cases.py ADDRESS SMALL LARGE``.

SMALL and LARGE are files with Predict requests of one sample and of many.  It needs grpcio alone, of any version,
and so runs in environments without this project.  The first case that fails ends it.
"""

import asyncio
import pathlib
import sys
import threading

import grpc
import grpc.aio

PREDICT = "/predictor.Predictor/Predict"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST_SERVICES = b"\x3a\x00"
OTHER_MODEL = "no such 100% \N{GREEK SMALL LETTER ALPHA}"
WAIT_S = 60


def of_other_model(small):
    """Field 100, a string."""
    name = OTHER_MODEL.encode()
    return small + b"\xa2\x06" + bytes([len(name)]) + name


def expect(holds, *seen):
    if not holds:
        raise SystemExit(f"not as expected: {seen}")


def status_of(call, *arguments, **options):
    try:
        call(*arguments, timeout=options.pop("timeout", WAIT_S), **options)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def empty_unary(channel, _small, _large):
    expect(channel.unary_unary(CHECK)(b"", timeout=WAIT_S) == b"\x08\x01")


def small_unary(channel, small, _large):
    expect(len(channel.unary_unary(PREDICT)(small, timeout=WAIT_S)) > 0)


def large_unary(channel, small, large):
    call = channel.unary_unary(PREDICT)
    expect(len(call(large, timeout=WAIT_S)) > len(call(small, timeout=WAIT_S)))


def compressed_unary(channel, small, large):
    call = channel.unary_unary(PREDICT)
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        for content in (small, large):
            expect(len(call(content, compression=compression, timeout=WAIT_S)) > 0, compression)


def statuses(channel, small, _large):
    call = channel.unary_unary(PREDICT)
    code, text = status_of(call, of_other_model(small))
    expect(code is grpc.StatusCode.NOT_FOUND and OTHER_MODEL in text, code, text)
    code, text = status_of(call, b"\xff")
    expect(code is grpc.StatusCode.INVALID_ARGUMENT and text, code, text)
    for path in ("/predictor.Predictor/Other", "/no.Such/Method"):
        expect(status_of(channel.unary_unary(path), b"")[0] is grpc.StatusCode.UNIMPLEMENTED, path)


def custom_metadata(channel, small, _large):
    metadata = (("x-own", "value"), ("x-own-bin", bytes(range(256))), ("x-own", "x" * 4_000))
    expect(len(channel.unary_unary(PREDICT)(small, metadata=metadata, timeout=WAIT_S)) > 0)


def deadline(channel, small, large):
    """A stream without an end passes its deadline for certain; of calls of a millisecond some do.

    grpcio rounds a deadline up to whole milliseconds, in which a fast server answers a single call.
    """
    try:
        for answer in channel.unary_stream(WATCH)(b"", timeout=0.2):
            expect(answer == b"\x08\x01", answer)
        expect(False, "the watch ended by itself")
    except grpc.RpcError as error:
        expect(error.code() is grpc.StatusCode.DEADLINE_EXCEEDED, error)
    call = channel.unary_unary(PREDICT)
    futures = [call.future(large, timeout=1e-3) for _ in range(500)]
    codes = {future.code() for future in futures}
    expect(grpc.StatusCode.DEADLINE_EXCEEDED in codes, codes)
    expect(codes <= {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED}, codes)
    expect(len(call(small, timeout=WAIT_S)) > 0)


def cancelled(channel, small, large):
    call = channel.unary_unary(PREDICT)
    for _ in range(20):
        future = call.future(large, timeout=WAIT_S)
        expect(future.cancel() or future.done())
    expect(len(call(small, timeout=WAIT_S)) > 0)


def many_at_once(channel, small, _large):
    call = channel.unary_unary(PREDICT)
    futures = [call.future(small, timeout=WAIT_S) for _ in range(500)]
    expect(all(future.result() for future in futures))


def streams(channel, _small, _large):
    """Both sides in turn, then the client's end; a stream of the server alone that the client cancels."""
    asked, answered = threading.Semaphore(1), 0

    def questions():
        for _ in range(3):
            asked.acquire()
            yield LIST_SERVICES

    for answer in channel.stream_stream(REFLECT)(questions(), timeout=WAIT_S):
        expect(b"predictor.Predictor" in answer, answer)
        answered += 1
        asked.release()
    expect(answered == 3, answered)
    watch = channel.unary_stream(WATCH)(b"", timeout=WAIT_S)
    expect(next(watch) == b"\x08\x01")
    watch.cancel()


CASES = (
    *(empty_unary, small_unary, large_unary, compressed_unary, statuses, custom_metadata, deadline),
    *(cancelled, many_at_once, streams),
)


async def by_asyncio(address, small, large):
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(PREDICT)
        answers = await asyncio.gather(*(call(small, timeout=WAIT_S) for _ in range(200)))
        expect(all(answers))
        expect(len(await call(large, timeout=WAIT_S)) > 0)
        try:
            await call(of_other_model(small), timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            expect(error.code() is grpc.StatusCode.NOT_FOUND, error)


def main():
    address, *files = sys.argv[1:]
    small, large = (pathlib.Path(file).read_bytes() for file in files)
    with grpc.insecure_channel(address) as channel:
        for case in CASES:
            case(channel, small, large)
    asyncio.run(by_asyncio(address, small, large))
    sys.stdout.write(f"grpcio {grpc.__version__}: {len(CASES) + 1} cases\n")


if __name__ == "__main__":
    main()
