"""The Python server: requests in over gRPC, scores out.

The files are the request's way through the program::

    grpc_service   bytes in; the only file that knows gRPC
    predictor      one call from its bytes to its answer; counts how it ended
    decode         bytes -> checked views (wire, shared, jagged); nothing unchecked gets past it
    registry       which model the request asks for
    engine         ties the next four together, on the event loop's thread
      parts        a request larger than a batch is cut into parts, its scores joined
      queue        bounded; priority, then arrival; the dead are dropped, never computed
      batching     when to cut a batch: a pure function of (state, now)
      workers      inference threads: merge -> Runner -> split
        merge      many jagged requests -> one feature-major batch, in memory used again
    encode         scores -> bytes of the response

    http_server    metrics, probes, status page (status)
    server         the life of it all: ports, loading, readiness, drain
    background     a server on a thread of its own, or in a process of its own

Threads: the event loop's thread owns everything but the workers' own buffers, so there are no
locks.  A worker gets a list of requests through a queue and gives back one outcome through
``call_soon_threadsafe``, once per batch.

A free worker takes whatever is queued; ``max_delay_us`` is 0 unless it is set, because waiting
for company costs more than it brings as soon as requests queue by themselves.
"""
