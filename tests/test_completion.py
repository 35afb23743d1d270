"""`tessera completion bash`, sourced by bash as a user's shell does."""

import shutil
import subprocess

import pytest

from tessera.cli import COMMANDS, main

# Completes the words given, the last of which is the one under the cursor.
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_tessera
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def completed(capsys, tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)

    def complete(*words):
        command = [bash, "-u", "-c", COMPLETE, "bash", str(script), "tessera", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.split()

    return complete


def test_what_bash_completes(completed):
    assert set(completed("")) == set(COMMANDS)
    assert completed("pa") == ["package-model"]
    assert completed("serve", "--max-batch-s") == ["--max-batch-samples"]
    assert completed("serve", "--log-level", "") == ["debug", "info", "warning", "error"]
    assert completed("serve", "--log-level", "w") == ["warning"]
    assert completed("completion", "") == ["bash"]
    assert "--out" in completed("package-model", "run", "--")
    # A path: bash's own completion of files takes over.
    assert completed("serve", "--model", "") == []
    assert completed("serve", "--model", "mod") == []
    assert completed("nosuch", "--") == []


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["pakage-model"], "did you mean package-model?"),
        (["completion", "bahs"], "did you mean bash?"),
        (["completion", "fish"], "see tessera completion --help"),
    ],
)
def test_an_unknown_word_is_told_the_nearest(capsys, words, remedy):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"; {remedy}")
