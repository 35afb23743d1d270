"""Print a script that completes commands, flags and choices of tessera in bash.

    source <(tessera completion bash)

in ~/.bashrc, or once into a file of /etc/bash_completion.d.  File names are completed where a flag takes a
value of its own and where a word does not begin with a dash.  The script holds the flags of this version;
print it again after an upgrade.

Exit status: 0; 2 the shell is not one of these.
"""

from __future__ import annotations

import argparse
import shlex

_SCRIPT = """# Completion of tessera {version} in bash.
_tessera() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} words=
  if ((COMP_CWORD == 1)); then
    words={commands}
  else
    case "${{COMP_WORDS[1]}} $before" in
{choices}
    esac
    if [[ -z $words && $word == -* ]]; then
      case ${{COMP_WORDS[1]}} in
{flags}
      esac
    fi
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _tessera tessera
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``tessera completion``."""
    parser.add_argument("shell", choices=("bash",), help="the shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Print the script; see the module's docstring."""
    del args
    # tessera.cli finds this module by its name.
    import tessera  # noqa: PLC0415
    from tessera.cli import COMMANDS, command_parser  # noqa: PLC0415

    flags, choices = [], []
    for name in COMMANDS:
        actions = command_parser(name)[1]._actions  # noqa: SLF001 - argparse shows its flags nowhere else
        long = [flag for action in actions for flag in action.option_strings if flag[:2] == "--"]
        flags.append(f"        {name}) words={shlex.quote(' '.join(long))} ;;")
        for action in actions:
            known = _choices_of(action)
            patterns = [f'"{name} {flag}"' for flag in action.option_strings or [name]]
            if known:
                words = shlex.quote(" ".join(known))
                choices.append(f"      {' | '.join(patterns)}) words={words} ;;")
    print(
        _SCRIPT.format(
            version=tessera.__version__,
            commands=shlex.quote(" ".join(COMMANDS)),
            choices="\n".join(choices),
            flags="\n".join(flags),
        ),
        end="",
    )
    return 0


def _choices_of(action: argparse.Action) -> list[str]:
    """The words that an action takes: argparse's, or those that its metavar shows as {a,b}."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    shown = action.metavar if isinstance(action.metavar, str) else ""
    return shown[1:-1].split(",") if shown.startswith("{") and shown.endswith("}") else []
