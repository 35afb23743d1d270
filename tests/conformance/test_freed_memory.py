"""What a pass has freed is there for the next one: an even load of large requests has next to no page faults."""

from pathlib import Path

from tests.conformance.conformance_harness import RunningServer

WARM_UP, COUNTED = 30, 60
MOST_FAULTS = 60
"""The most of a request.  There were 550 to 2,500 where the end of an arena went back to the system with each pass; what is
left comes from messages of other sizes and from the interpreter."""


def faults_of(process):
    """Page faults of the process without a read of a disk."""
    return int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[7])


def test_an_even_load_has_few_page_faults(kind, package, draw_with):
    with RunningServer(kind, "--model", package, "--workers", 1) as server:
        message = draw_with(max_bag=200).samples(400)
        for _ in range(WARM_UP):
            server.predict(message)
        before = faults_of(server.process)
        for _ in range(COUNTED):
            server.predict(message)
        assert (faults_of(server.process) - before) / COUNTED < MOST_FAULTS
