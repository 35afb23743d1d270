"""deploy/slurm/train.sbatch with programs in place of Slurm's; deploy/slurm/play_job.py goes through it with a Slurm of its own."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.deploy.manifests import DEPLOY
from tests.patience import PATIENCE_S

SCRIPT = DEPLOY / "slurm/train.sbatch"
OF_A_JOB = {
    "SLURM_JOB_ID": "30017",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_GPUS_ON_NODE": "2",
}
# One torchrun on each of two nodes, both on this machine; scancel signals them, as it does on their nodes.
SRUN = """
echo "srun $*" >> calls
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do
  SLURM_NODEID=$node SLURMD_NODENAME=n$((node + 1)) "$@" & pids+=($!)
  echo $! >> tasks
done
status=0
for pid in "${pids[@]}"; do wait $pid || status=$?; done
exit $status
"""
SCONTROL = """
echo "scontrol $*" >> calls
case "$1 $2" in
  "show hostnames") printf 'n1\\nn2\\n' ;;
  "show node") echo "   NodeAddr=127.0.0.1 NodeHostName=$3" ;;
esac
"""
SCANCEL = 'echo "scancel $*" >> calls; kill -TERM $(cat tasks)'
# A run of two ranks that ends when it is told to, as tessera train does.
TORCHRUN = """
trap 'exit 130' TERM
mkdir -p run; touch run/config.yaml
printenv OMP_NUM_THREADS SRUN_CPUS_PER_TASK > threads
echo "torchrun $*" >> calls
[[ -e fails ]] && exit 7
while [[ ! -e ends ]]; do sleep 0.02; done
touch run/final.json
"""


@pytest.fixture
def job(tmp_path):
    """Starts the script as Slurm does, with the programs above and those of ``others``."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def start(*arguments, torchrun=TORCHRUN, **variables):
        programs = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "torchrun": torchrun}
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}")
            (folder / name).chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        return subprocess.Popen(
            ["bash", SCRIPT, *arguments],
            cwd=tmp_path,
            env=environment | OF_A_JOB | {"PATH": path} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def ended(process):
    """Exit status and what was printed."""
    said, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, said


def calls(folder, program):
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{program} ")]


def test_the_script_is_read_and_its_directives_are_sbatch_s():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    directives = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)(?:=(.*))?$", SCRIPT.read_text()))
    # Of the batch shell alone, which tells the ranks, and early enough for torchrun's 30 s and a checkpoint.
    whom, when = directives["signal"].split("@")
    assert (whom, int(when) >= 60) == ("B:USR1", True)
    assert directives.keys() >= {"requeue", "nodes", "time", "output"}
    assert directives["ntasks-per-node"] == "1"
    assert directives["open-mode"] == "append"


def test_one_torchrun_on_each_node(job, tmp_path):
    (tmp_path / "ends").touch()
    status, said = ended(job("a config.yaml", "run", "data.path=clicks.tsv"))
    assert status == 0, said
    (srun,) = calls(tmp_path, "srun")
    assert srun.startswith("--nodes=2 --ntasks-per-node=1 --wait=60 ")
    launched = sorted(calls(tmp_path, "torchrun"))
    rest = (
        " --nnodes=2 --nproc-per-node=2 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:20017"
        " --rdzv-id=30017.0 -m tessera train --config a config.yaml --out run data.path=clicks.tsv"
    )
    assert launched == [
        f"--local-addr=127.0.0.1 --rdzv-conf=is_host={first},read_timeout=600{rest}"
        for first in (0, 1)
    ]
    assert (tmp_path / "threads").read_text().split() == ["4", "8"]
    # It is not begun again once it is finished.
    assert ended(job("a config.yaml", "run")) == (0, "run is finished\n")
    assert len(calls(tmp_path, "srun")) == 1


def test_near_the_time_limit_the_ranks_save_and_the_job_goes_on_later(job, tmp_path):
    process = job("config.yaml", "run")
    wait_for(lambda: len(calls(tmp_path, "torchrun")) == 2)
    process.send_signal(signal.SIGUSR1)
    status, said = ended(process)
    assert status == 130, said
    assert calls(tmp_path, "scancel") == ["--signal=TERM 30017"]
    assert calls(tmp_path, "scontrol")[-1] == "requeue 30017"
    (tmp_path / "ends").touch()
    status, said = ended(job("config.yaml", "run", SLURM_RESTART_COUNT="1"))
    assert status == 0, said
    assert said == "going on with run (start 2 of this job)\n"
    last = calls(tmp_path, "torchrun")[-1]
    assert last.endswith("--rdzv-id=30017.1 -m tessera train --resume --out run")


def test_a_run_that_fails_or_is_ended_is_not_queued_again(job, tmp_path):
    (tmp_path / "fails").touch()
    assert ended(job("config.yaml", "run"))[0] == 7
    (tmp_path / "fails").unlink()
    process = job("config.yaml", "run")
    wait_for(lambda: len(calls(tmp_path, "torchrun")) == 4)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 130
    assert not [call for call in calls(tmp_path, "scontrol") if call.startswith("requeue")]
    assert ended(job("config.yaml")) == (
        2,
        "usage: sbatch train.sbatch CONFIG.yaml OUT [KEY=VALUE ...]\n",
    )


def wait_for(holds):
    for _ in range(int(PATIENCE_S / 0.02)):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("it never happened")


def test_two_nodes_of_torchrun_train_together(job, tmp_path):
    """The real torchrun, with a program in place of tessera that adds up over the ranks."""
    module = tmp_path / "tessera.py"
    module.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "ranks = torch.tensor([1.0 + dist.get_rank()])\n"
        "dist.all_reduce(ranks)\n"
        "said = f'sum {ranks.item()} of {dist.get_world_size()} on {os.environ[\"GROUP_RANK\"]}\\n'\n"
        "os.write(1, said.encode())\n"  # in one piece, as both ranks write into one pipe
        "dist.barrier()\n"
    )
    real = f'exec {sys.executable} -m torch.distributed.run "$@"'
    status, said = ended(
        job("c", "run", torchrun=real, RANKS_PER_NODE="1", PYTHONPATH=str(tmp_path))
    )
    assert status == 0, said
    assert sorted(re.findall(r"sum \S+ of \d on \d", said)) == [
        "sum 3.0 of 2 on 0",
        "sum 3.0 of 2 on 1",
    ]
