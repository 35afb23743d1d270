"""One server on 1, 2, 4 ... GPUs, a copy of the model on each: what it answers.

    python cpp_server/bench/gpu_copies.py --package MODEL.pt --gpus 1,2,4 [--ids-per-bag 3,2,1,...]

A `tessera-server` for each number of GPUs is started, and `tessera-load` on the same machine keeps
requests in flight, as many for each GPU; the servers take turns, and medians over the rounds are
printed.  Besides the rates it prints the CPU time that server and client take for a request: both
share the host's cores, and more GPUs are of no use to a host that is busy with them.
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import urllib.request

from gpu_bench import WARM_UP_S, load, parser, server


def cpu_seconds_of_server(http_port: int) -> float:
    """CPU time that the server has taken."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics") as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith("process_cpu_seconds_total"):
                return float(line.split()[-1])
    raise RuntimeError("the server's metrics lack process_cpu_seconds_total")


def cpu_seconds_of_children() -> float:
    """CPU time of the processes that have ended: the clients."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--gpus", default="1,2,4", help="numbers of GPUs")
    flags.add_argument("--in-flight", type=int, default=32, help="requests in flight for each GPU")
    flags.add_argument("--rounds", type=int, default=5, help="turns of each server")
    args = flags.parse_args()
    counts = [int(count) for count in args.gpus.split(",")]
    rows: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    with contextlib.ExitStack() as stack:
        ports = {
            count: stack.enter_context(server(args, "--gpus", ",".join(map(str, range(count)))))
            for count in counts
        }
        for _ in range(args.rounds):
            for count in counts:
                port, http_port = ports[count]
                before = cpu_seconds_of_server(http_port), cpu_seconds_of_children()
                row = load(
                    *(args, port, "--samples", str(args.samples)),
                    *("--in-flight", str(args.in_flight * count)),
                    *("--connections", str(args.connections * count)),
                )
                spent = WARM_UP_S + args.seconds
                row["server_cpus"] = (cpu_seconds_of_server(http_port) - before[0]) / spent
                row["client_cpus"] = (cpu_seconds_of_children() - before[1]) / spent
                rows[count].append(row)
    medians = {
        count: {name: statistics.median(row[name] for row in own) for name in own[0]}
        for count, own in rows.items()
    }
    print("GPUs  samples/s  over one  p50 ms  p99 ms  batch  CPUs of server  of client")
    one = medians[counts[0]]["requests_per_second"] / counts[0]
    for count, row in medians.items():
        rate = row["requests_per_second"]
        print(
            f"{count:4} {rate * args.samples:10.0f} {rate / one:9.2f} {row['p50_ms']:7.2f} "
            f"{row['p99_ms']:7.2f} {row['batch_samples']:6.0f} {row['server_cpus']:15.1f} "
            f"{row['client_cpus']:10.1f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"rounds": rows, "medians": medians}, indent=1))


if __name__ == "__main__":
    main()
