"""Flags that may also come from the environment or from a file.

A flag on the command line wins over the environment, that over the file of ``--config``, that over the
default.  One that may be given several times replaces the list of what it wins over; lists are not joined.

    flag               --max-batch-samples 256   --follow      --model a=1.pt --model b=2.pt
    environment        TESSERA_MAX_BATCH_SAMPLES=256           TESSERA_FOLLOW=true
                       TESSERA_MODEL=a=1.pt,b=2.pt
    FILE.yaml          max-batch-samples: 256    follow: true  model: [a=1.pt, b=2.pt]

The file is one mapping from flags' names without their dashes to values.  Values are read as the command
line's are, whatever YAML would make of them: ``port: 0x10`` is refused as ``--port 0x10`` is.  A flag without
a value is ``true`` or ``false``.  Relative paths start at the working directory, wherever the file is.

A variable that is empty counts as not there, and so does one whose value begins with ``tcp://``, ``udp://`` or ``sctp://``: Kubernetes gives
containers TESSERA_PORT=tcp://10.0.0.1:50051 where there is a Service named tessera.  A variable TESSERA_X
that no flag has is left alone, for other programs have theirs, unless it is one or two letters away from
one that a flag has: that is refused, as it would otherwise do nothing.

cpp_server/src/server/flag_sources.h has the same rules, and tests/server/flag_cases.json holds
both to one table of cases.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tessera.bounded_yaml import bounded_node
from tessera.errors import FieldError, UserError, edits, nearest
from tessera.serving.commands.flags import RefusedValue
from tessera.serving.repository.small_file import read_small_file

PREFIX = "TESSERA_"
_OF_KUBERNETES = ("tcp://", "udp://", "sctp://")
MAX_FILE_BYTES = 1 << 20
_NEAR_EDITS = 2
_WORDS = {"true": True, "1": True, "false": False, "0": False}
_WHOLE = re.compile(r"-?[0-9]+", re.ASCII)
_NUMBER = re.compile(
    r"-?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf|infinity|nan)",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True)
class _Flag:
    """What argparse was told of a flag before `FlagSources` took its default and its reader."""

    name: str
    option: str
    dest: str
    default: Any
    read: Callable[[str], Any]
    takes_value: bool
    constant: Any
    repeatable: bool


class FlagSources:
    """Reads the flags of one parser from all their sources.

    Make it when every flag is declared; it declares ``--config`` itself, and changes the parser so that
    it hands over the words of the command line as they are.  `complete` then makes values of them.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--config",
            metavar="FILE.yaml",
            help="a file with values of flags, by their names without dashes; a list for one that may be given "
            f"several times, true or false for one without a value. {PREFIX}<FLAG> in the environment is "
            f"such a value, too ({PREFIX}MAX_BATCH_SAMPLES=256; commas part those of a list). The command "
            "line wins over the environment, that over the file (default: none)",
        )
        self._flags: dict[str, _Flag] = {}
        for action in parser._actions:  # noqa: SLF001 - argparse shows its flags nowhere else
            if "--help" in action.option_strings or not action.option_strings:
                continue
            self._take(action)
        self._sources: dict[str, str] = {}

    def complete(self, args: argparse.Namespace, environment: Mapping[str, str]) -> None:
        """Put the value of every flag into ``args``, from wherever it comes, or its default.

        Raises:
            UserError: a value, variable or key that has to be changed; the line says where it stands.
        """
        self._sources = {}
        given = self._of_command_line(args)
        self._add(given, self._of_environment(environment))
        config = given.get("config")
        if config is not None:
            self._add(given, self._of_file(config[-1]))
        for flag in self._flags.values():
            words = given.get(flag.name)
            if words is None:
                setattr(args, flag.dest, flag.default)
            else:
                setattr(args, flag.dest, self._value(flag, words))

    def named(self, error: FieldError) -> UserError:
        """``error`` of a field with the place that its value came from."""
        for flag in self._flags.values():
            if flag.dest == error.field:
                return self._error(flag.name, error.value, error.remedy)
        return error

    def _take(self, action: argparse.Action) -> None:
        """Move what ``action`` knows of its value to a `_Flag`, and leave it the words alone."""
        default = action.default
        if action.help is not None:  # the default is about to go
            shown = action.help % {**vars(action), "prog": ""}
            action.help = shown.replace("%", "%%")
        option = action.option_strings[-1]
        name = option.removeprefix("--")
        self._flags[name] = _Flag(
            name=name,
            option=option,
            dest=action.dest,
            default=default,
            read=_reader(action),
            takes_value=action.nargs != 0,
            constant=action.const,
            repeatable=isinstance(action, argparse._AppendAction),  # noqa: SLF001 - see above
        )
        if action.choices is not None:
            action.metavar = action.metavar or "{" + ",".join(map(str, action.choices)) + "}"
            action.choices = None
        action.type = None
        action.default = argparse.SUPPRESS

    def _of_command_line(self, args: argparse.Namespace) -> dict[str, list[str]]:
        given = {}
        for flag in self._flags.values():
            if hasattr(args, flag.dest):
                words = getattr(args, flag.dest)
                given[flag.name] = words if flag.repeatable else [words]
                if not flag.takes_value:
                    given[flag.name] = ["true"]
                self._sources[flag.name] = flag.option
        return given

    def _of_environment(self, environment: Mapping[str, str]) -> dict[str, tuple[str, list[str]]]:
        variables = {_variable(name): name for name in self._flags}
        found = {}
        for variable, value in sorted(environment.items()):
            if not variable.startswith(PREFIX) or not value or value.startswith(_OF_KUBERNETES):
                continue
            name = variables.get(variable)
            if name is None:
                self._refuse_near(variable, variables)
                continue
            flag = self._flags[name]
            words = value.split(",") if flag.repeatable else [value]
            if "" in words:
                raise UserError(f"{variable} is {value!r}; give values with one comma between them")
            found[name] = (variable, words)
        return found

    def _refuse_near(self, variable: str, variables: Mapping[str, str]) -> None:
        bare = variable.removeprefix(PREFIX)
        near = nearest(bare, [known.removeprefix(PREFIX) for known in variables])
        if near and edits(bare, near) <= _NEAR_EDITS:
            raise UserError(
                f"{variable} is the variable of no flag; did you mean {PREFIX}{near}? Unset it otherwise"
            )

    def _of_file(self, path: str) -> dict[str, tuple[str, list[str]]]:
        found: dict[str, tuple[str, list[str]]] = {}
        for key, value in self._mapping(path):
            place = f"{path}:{key.start_mark.line + 1}"
            name = key.value
            if name == "config" or name not in self._flags:
                known = [flag.option for flag in self._flags.values() if flag.name != "config"]
                near = nearest(f"--{name}", known).removeprefix("--")
                remedy = f"did you mean {near}?" if near else "see --help"
                raise UserError(f"{place}: {name!r} is not a flag's name; {remedy}")
            source = f"{place}: {name}"
            if name in found:
                line = key.start_mark.line + 1
                raise UserError(f"{path}: {name} is given twice (line {line}); keep one of the two")
            found[name] = (source, _words(self._flags[name], source, value))
        return found

    def _mapping(self, path: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
        try:
            content = read_small_file(Path(path), MAX_FILE_BYTES)
            if content is None:
                raise self._error("config", repr(path), "there is no such file")
            node = bounded_node(content.decode(), aliases=False)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text; save it as such") from error
        except yaml.YAMLError as error:
            raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
        if node is None or (isinstance(node, yaml.ScalarNode) and _is_null(node)):
            return []
        if not isinstance(node, yaml.MappingNode) or any(
            not isinstance(key, yaml.ScalarNode) for key, _ in node.value
        ):
            raise UserError(f"{path}: expected keys such as 'port: 50051' at the top of the file")
        pairs: list[tuple[yaml.ScalarNode, yaml.Node]] = node.value
        return pairs

    def _add(self, given: dict[str, list[str]], more: Mapping[str, tuple[str, list[str]]]) -> None:
        for name, (source, words) in more.items():
            if name not in given:
                given[name] = words
                self._sources[name] = source

    def _value(self, flag: _Flag, words: list[str]) -> Any:
        if not flag.takes_value:
            if words[-1] not in _WORDS:
                raise self._error(flag.name, repr(words[-1]), "give true or false")
            return flag.constant if _WORDS[words[-1]] else flag.default
        try:
            values = [flag.read(word) for word in words]
        except RefusedValue as error:
            raise self._error(flag.name, error.shown, error.remedy) from error
        return values if flag.repeatable else values[-1]

    def _error(self, name: str, value: object, remedy: str) -> UserError:
        source = self._sources.get(name, f"--{name}")
        return UserError(f"{source} is {value}; {remedy}")


def _variable(name: str) -> str:
    return PREFIX + name.replace("-", "_").upper()


def _reader(action: argparse.Action) -> Callable[[str], Any]:
    """What makes a value of a word; it raises `RefusedValue`."""
    if action.choices is not None:
        choices = [str(choice) for choice in action.choices]
        return lambda word: _chosen(word, choices)
    if action.type is int:
        return _whole_number
    if action.type is float:
        return _number
    if action.type is None:
        return str
    assert callable(action.type)
    return action.type


def _chosen(word: str, choices: list[str]) -> str:
    if word not in choices:
        raise RefusedValue(repr(word), f"give {', '.join(choices[:-1])} or {choices[-1]}")
    return word


def _whole_number(word: str) -> int:
    if not _WHOLE.fullmatch(word) or not -(1 << 63) <= int(word) < 1 << 63:
        raise RefusedValue(repr(word), "give a whole number")
    return int(word)


def _number(word: str) -> float:
    if not _NUMBER.fullmatch(word):
        raise RefusedValue(repr(word), "give a number")
    return float(word)


def _words(flag: _Flag, source: str, node: yaml.Node) -> list[str]:
    """The words that a file's value stands for, as they are written."""
    if isinstance(node, yaml.SequenceNode) and flag.repeatable:
        return [word for item in node.value for word in _words_of_scalar(source, item)]
    return _words_of_scalar(source, node)


def _words_of_scalar(source: str, node: yaml.Node) -> list[str]:
    if isinstance(node, yaml.ScalarNode) and not _is_null(node):
        return [node.value]
    kind = "empty" if isinstance(node, yaml.ScalarNode) else "a mapping"
    if isinstance(node, yaml.SequenceNode):
        kind = "a list"
    raise UserError(f"{source} is {kind}; give one value, or leave it out")


def _is_null(node: yaml.ScalarNode) -> bool:
    return node.style is None and node.value in {"", "~", "null", "Null", "NULL"}
