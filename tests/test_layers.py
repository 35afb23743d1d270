"""The import table of docs/architecture.md, held against the source; and help for every flag.

Imports are read from the syntax tree, so that those inside functions and under TYPE_CHECKING
count as well: an import that only sometimes runs is still a dependency.
"""

import argparse
import ast
import functools
import graphlib
import importlib
from pathlib import Path

import pytest

from tessera.cli import COMMANDS
from tests.statements import statements

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "training", "serving")
# A version, an error type, YAML in bounds, how many CPUs there are, files that are whole or not there, which releases
# go together, calls of users' own code, engines that work on partitions, and how pages look: of ours they import one
# another.
FOUNDATION = (
    "tessera",
    "tessera.bounded_yaml",
    "tessera.cpus",
    "tessera.durable",
    "tessera.engines",
    "tessera.errors",
    "tessera.partitions",
    "tessera.partitions_on_ray",
    "tessera.plots",
    "tessera.releases",
    "tessera.report_page",
    "tessera.users_code",
)

# What every other folder of serving/ is built on.
SERVING_BASE = ("tessera.serving.protocol", "tessera.serving.package")

# What the modules below a prefix may import of ours, besides themselves and the foundation.
# The longest matching prefix counts; a module of ours that matches none is an error.
MAY_IMPORT = {
    "tessera": ("tessera.cli",),
    "tessera.kernels": (),
    "tessera.training": ("tessera.kernels",),
    "tessera.serving.protocol": (),
    "tessera.serving.package": ("tessera.kernels",),
    "tessera.serving.inspect": ("tessera.kernels", *SERVING_BASE),
    "tessera.serving.repository": ("tessera.kernels", *SERVING_BASE),
    "tessera.serving.commits": ("tessera.kernels", "tessera.serving.repository", *SERVING_BASE),
    "tessera.serving.server": (
        "tessera.kernels",
        "tessera.serving.commits",
        "tessera.serving.repository",
        *SERVING_BASE,
    ),
    "tessera.serving.client": ("tessera.kernels", *SERVING_BASE),
    "tessera.serving.capacity": ("tessera.kernels", "tessera.training", *SERVING_BASE),
    "tessera.serving.engine": ("tessera.serving.client",),
    "tessera.serving.packaging": (
        "tessera.kernels",
        "tessera.training",
        "tessera.serving.commits",
        "tessera.serving.inspect",
        "tessera.serving.repository",
        *SERVING_BASE,
    ),
    "tessera.serving.offline": (
        "tessera.kernels",
        "tessera.training",
        "tessera.serving.client",
        "tessera.serving.inspect",
        "tessera.serving.packaging",
        *SERVING_BASE,
    ),
    "tessera.serving.commands": ("tessera.kernels", "tessera.serving"),
    # Measurements look at everything.
    "tessera.serving.bench": ("tessera.kernels", "tessera.training", "tessera.serving"),
}


def below(module, prefix):
    return module == prefix or module.startswith(prefix + ".")


@functools.cache
def parsed(path):
    """The syntax tree of a file, which several tests walk and none changes."""
    return ast.parse(path.read_text())


def imports_of(tree, module, *, is_package=False):
    """(line, dotted name) of everything that ``module`` with this syntax tree imports."""
    found = []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                keep = len(module.split(".")) - node.level + is_package
                base = ".".join([*module.split(".")[:keep], *([base] if base else [])])
            # `from tessera import serving` imports tessera.serving.
            names = [f"{base}.{a.name}" for a in node.names] if base == "tessera" else [base]
            found += [(node.lineno, name) for name in names]
    return found


def violations(tree, module, *, is_package=False):
    """What ``module`` imports of ours and may not, as ``line N: name``."""
    owner = max((p for p in MAY_IMPORT if below(module, p)), key=len)
    inside_folder = any(below(module, f"tessera.{folder}") for folder in FOLDERS)
    assert owner != "tessera" or not inside_folder, f"say in MAY_IMPORT what {module} may import"
    wrong = []
    for line, name in imports_of(tree, module, is_package=is_package):
        if name.split(".")[0] in FOLDERS:
            wrong.append(f"line {line}: {name} (write tessera.{name})")
        if name.split(".")[0] != "tessera" or name in FOUNDATION:
            continue
        if name.rpartition(".")[0] == "tessera" and name.rpartition(".")[2] not in {
            *FOLDERS,
            "bounded_yaml",
            "cli",
            "durable",
            "engines",
            "errors",
            "partitions",
            "partitions_on_ray",
            "users_code",
        }:
            continue  # a name in tessera/__init__.py
        own = owner != "tessera" and below(name, owner)
        if not own and not any(below(name, prefix) for prefix in MAY_IMPORT[owner]):
            wrong.append(f"line {line}: {name}")
    return wrong


def our_modules():
    paths = list((ROOT / "tessera").glob("*.py"))
    for folder in FOLDERS:
        paths += (ROOT / folder).rglob("*.py")
    for path in sorted(paths):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        names = [*(() if parts[0] == "tessera" else ("tessera",)), *parts]
        yield path, ".".join(names[:-1] if is_package else names), is_package


MODULES = list(our_modules())


def test_there_is_something_to_check():
    names = {module for _, module, _ in MODULES}
    assert {"tessera.cli", "tessera.serving.package.schema", "tessera.serving.client"} <= names
    assert len(names) > 30


def test_imports_follow_the_table():
    wrong = {
        module: found
        for path, module, is_package in MODULES
        if module != "tessera.serving"
        and (found := violations(parsed(path), module, is_package=is_package))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "room", ["tessera.serving.package", "tessera.serving.inspect", "tessera.serving.packaging"]
)
def test_the_files_of_a_room_import_in_no_circle(room):
    inside = {module for _, module, _ in MODULES if below(module, room)}
    graph = {
        module: [
            name
            for _, name in imports_of(parsed(path), module, is_package=is_package)
            if name in inside
        ]
        for path, module, is_package in MODULES
        if module in inside
    }
    assert any(graph.values())
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises on a circle
    if room == "tessera.serving.package":
        assert order.index(f"{room}.schema") < order.index(f"{room}.manifest")


# The folders and files of training/ and, in the place of training/distributed/, its rooms: each
# may import itself and what stands before it.
TRAINING_ORDER = (
    "lazy_names",
    "field_checks",
    "average_config",
    "first_order_config",
    "variants",
    "metrics",
    "config_source",
    "typed_config",
    "streamable",
    "pt2",
    "fbgemm",
    "fbgemm_operators",
    "sparse",
    "modules",
    "optim",
    "quant",
    "distributed.comm",
    "distributed.plan",
    "distributed.travel",
    "distributed.tables",
    "distributed.sharding",
    "distributed.collections",
    "distributed.pools",
    "distributed.model_tracker",
    "distributed.inference",
    "distributed.planner",
    "distributed.model",
    "distributed.utils",
    "distributed.train_pipeline",
    "distributed.checkpoint",
    "fx",
    "inference",
    "transforms",
    "models",
    "data",
    "datasets",
    "test_utils",
    "trackers",
    "config",
    "config_reference",
    "trainer",
    "comparison",
    "tuning",
    "trained",
    "conversion",
    "bench",
    "commands",
)


def forwarded_names(tree):
    """Name -> home in the modules that only forward names; empty for any other module."""
    _, *statements = tree.body  # its docstring
    homes = {}
    for statement in statements:
        lazily = isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
        for inner in statement.body if lazily else [statement]:
            if isinstance(inner, ast.ImportFrom):
                homes |= {alias.asname: inner.module for alias in inner.names if alias.asname}
            elif not ast.unparse(inner).endswith(("lazy_names(__name__)", "offer_operators()")):
                return {}
    return homes


@functools.cache
def forwarded():
    """TorchRec's module paths, and the packages that import their names when they are asked for: module -> names."""
    return {
        module: names
        for path, module, _ in MODULES
        if below(module, "tessera.training") and (names := forwarded_names(parsed(path)))
    }


def imports_below(prefix):
    """Module below ``prefix`` -> the modules below it that it imports, in functions as well."""
    modules = {module for _, module, _ in MODULES if below(module, prefix)}
    graph = {}
    for path, module, _ in MODULES:
        imported = set()
        for node in statements(parsed(path)) if module in modules else ():
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module}: write the full name in line {node.lineno}"
                # `from package import module` imports the module.
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= full & modules
                if not full <= modules:
                    imported.add(node.module)
        if module in modules:
            graph[module] = (imported & modules) - {module}
    return graph


def place_in_training(module):
    name = module.removeprefix("tessera.training.")
    places = [place for place, room in enumerate(TRAINING_ORDER) if below(name, room)]
    assert len(places) == 1, f"say in TRAINING_ORDER where {module} stands"
    return places[0]


def arrows_back(graph):
    """(importing, imported) where the imported module stands later than the importing one, or
    is one that only forwards names (which only measurements use, as programs of users do)."""
    return [
        (module, name)
        for module, imported in sorted(graph.items())
        if module not in forwarded()
        for name in sorted(imported)
        if (name in forwarded() and not below(module, "tessera.training.bench"))
        or (name not in forwarded() and place_in_training(name) > place_in_training(module))
    ]


def circle(graph):
    """Some modules of ``graph`` that import one another in a circle, in order; [] if none do."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_training_imports_no_later_room():
    graph = imports_below("tessera.training")
    assert len(graph) > 150
    assert arrows_back(graph) == []
    assert {place_in_training(m) for m in graph if m not in forwarded()} == set(
        range(len(TRAINING_ORDER))
    )


def test_no_modules_import_in_a_circle():
    assert circle(imports_below("tessera")) == []


def test_the_checks_see_an_arrow_back_and_a_circle():
    room = "tessera.training.distributed"
    assert arrows_back({f"{room}.tables.x": {f"{room}.sharding.x", f"{room}.comm.x"}}) == [
        (f"{room}.tables.x", f"{room}.sharding.x")
    ]
    assert arrows_back({f"{room}.tables.x": {f"{room}.types"}}) == [
        (f"{room}.tables.x", f"{room}.types")
    ]
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_forwarded_names_are_those_of_the_modules_that_define_them():
    assert len(forwarded()) > 25
    for path, homes in forwarded().items():
        forwarding = importlib.import_module(path)
        assert set(homes) <= set(dir(forwarding))
        for name, home in homes.items():
            module = importlib.import_module(home)
            assert getattr(forwarding, name) is getattr(module, name)
            # sparse.jagged_tensor registers the types that it offers.
            if below(home, "tessera") and not below(home, "tessera.training.sparse.jagged_tensor"):
                # The home defines the name: it does not forward it in turn.
                tree = parsed(Path(module.__file__))
                assert name in defined(tree), f"{home} does not define {name}"


def defined(tree):
    """The names that a module's own statements define at its top level."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
    return names


def test_packages_that_hold_layers_import_none_of_them():
    # serving/ offers the packager's API by name, for type checkers here and when it is asked for;
    # tests/client holds that importing it brings no torch.
    offered = {"kernels": [], "serving": ["inputs", "package"]}
    for name, modules in offered.items():
        tree = parsed(ROOT / name / "__init__.py")
        ours = [n for _, n in imports_of(tree, f"tessera.{name}") if below(n, "tessera")]
        assert ours == [f"tessera.serving.packaging.{module}" for module in modules]
        at_import = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [
            n for node in at_import for _, n in imports_of(node, "x") if below(n, "tessera")
        ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tessera.kernels.x", "from tessera.training import y"),
        ("tessera.training.x", "def f():\n    import tessera.serving.package.schema"),
        ("tessera.training.x", "from tessera import serving"),
        ("tessera.training.x", "from ..serving import schema"),
        ("tessera.serving.client.x", "from tessera.serving.server import y"),
        ("tessera.serving.server.x", "from tessera.serving.client import y"),
        ("tessera.serving.client.x", "if TYPE_CHECKING:\n    import tessera.training.config"),
        ("tessera.serving.package.schema", "from tessera.serving.client.arrays import y"),
        (
            "tessera.serving.package.loading",
            "from tessera.serving.packaging.tables.quantize import y",
        ),
        ("tessera.serving.commands.x", "import tessera.training"),
        ("tessera.cli", "import tessera.serving.commands.serve"),
        ("tessera.kernels.x", "import training"),
        ("tessera.serving.client.x", "from kernels.libraries import y"),
    ],
)
def test_the_check_sees_a_wrong_import(module, source):
    assert len(violations(ast.parse(source), module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tessera.kernels.x", "from tessera.errors import UserError"),
        ("tessera.kernels.x", "from tessera.kernels.y import z"),
        ("tessera.training.x", "from tessera import __version__"),
        ("tessera.training.x", "from . import y"),
        ("tessera.serving.package.loading", "from tessera.serving.package.runner import Runner"),
        ("tessera.serving.packaging.x", "from tessera.training.models import ranking"),
        ("tessera.cli", "import tessera\nfrom tessera.errors import UserError"),
        ("tessera.__main__", "import trainingwheels\nfrom tessera.cli import main"),
    ],
)
def test_the_check_lets_a_right_import_pass(module, source):
    assert violations(ast.parse(source), module) == []


def outside_files():
    for folder in ("tests", "load_tests", "examples"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_nobody_imports_the_bare_folders():
    paths = list(outside_files())
    assert len(paths) > 400
    wrong = {
        str(path.relative_to(ROOT)): names
        for path in paths
        if (names := bare_folders(ast.parse(path.read_text()), path.stem))
    }
    assert wrong == {}
    assert bare_folders(ast.parse("def f():\n    from training import x"), "y") == ["training"]


def bare_folders(tree, module):
    """What is imported of our folders by names that are another project's."""
    return [name for _, name in imports_of(tree, module) if name.split(".")[0] in FOLDERS]


COMMAND_FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("commands/*.py"))


@pytest.mark.parametrize("path", COMMAND_FILES, ids=lambda path: path.stem)
def test_commands_import_torch_only_when_run(path):
    for node in parsed(path).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [name for _, name in imports_of(node, "x")]
            assert not {name.split(".")[0] for name in names} & {"torch", "fbgemm_gpu"}


def flags(name):
    """(parser, its actions other than --help) of a sub-command."""
    parser = argparse.ArgumentParser(prog=name)
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    actions = [a for a in parser._actions if not isinstance(a, argparse._HelpAction)]
    assert actions
    return parser, actions


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_flag_has_help(name):
    parser, actions = flags(name)
    assert [a.dest for a in actions if not (a.help or "").strip()] == []
    parser.format_help()  # raises where help has a wrong %-format


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_flag_says_its_default(name):
    parser, actions = flags(name)
    in_required_group = {
        id(action)
        for group in parser._mutually_exclusive_groups
        if group.required
        for action in group._group_actions
    }
    optional = [
        action
        for action in actions
        if action.option_strings and not action.required and id(action) not in in_required_group
    ]
    assert [a.dest for a in optional if a.nargs != 0 and "default" not in a.help.lower()] == []
