"""The Python server: requests in over gRPC, scores out.

The folders are the request's way through the program; cpp_server/src has the same:

    front/         what answers on the ports
      grpc_front       bytes in; the only file that knows gRPC; hang_up ends its connections,
                       send_buffer bounds what is on its way to a client
      message_receiver bounds what messages hold while they are being received
      unpacking        compressed messages, with a bound
      predict_service  one call from its bytes to its answer; counts how it ended
      wire_protocol    what differs between Predict and ModelInfer
      admission        which calls may come in; byte_budget: what they may hold
      kserve_metadata, health_service, status_page
      http_front       the HTTP port's pages; http_connections: who may hold it, and how long
    request/       bytes -> checked arrays; nothing unchecked gets past the decoders
    batching/      checked requests -> scores
      batch_scheduler  ties the others together, on the event loop's thread
      parts            a request larger than a batch is cut into parts, its scores joined
      request_queue    bounded; priority, then arrival; what nobody waits for is dropped
      policy           when to cut a batch: a pure function of (state, now)
      workers          inference threads: merge -> forward (Runner) -> split
      merger           many jagged requests -> one feature-major batch, in memory used again
    model/         loaded packages, served models, and the registry that finds them by name
    follow/        commits of a version's log: read by a process of its own (commit_reader), put in between
                   passes (followed_model)
    metrics/       what is counted, and the page that shows it
    server         the life of it all: ports, loading, readiness, drain
    supervisor     several processes that are one server: ports, loading, forking, replacing, drain
    worker_process what they do: a server each, and one for the HTTP port's pages; forked,
                   shared_slots: how they begin, and what they tell one another
    background     a server on a thread of its own, or in a process of its own

Threads: the event loop's thread owns everything but the workers' own buffers, so there are no
locks.  A worker gets a list of requests through a queue and gives back one outcome through
``call_soon_threadsafe``, once per batch.  Short passes of models whose requests come one by one are computed by the
event loop itself (``batching/policy.py``): handing them over would take longer.

A free worker takes whatever is queued; ``max_delay_us`` is 0 unless it is set, because waiting for
more requests costs more than it brings as soon as requests queue by themselves.
"""
