"""The rules of the house, read off the source: who imports whom, who may use what, and how files are kept."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import pytest

pytestmark = pytest.mark.portable

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lib_merge"
HOST_ENTRY = "scripts.merge_tab"

# Lowest first. A room imports from the levels above its own line here, and from itself.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "lazy", "compiler", "events", "memory", "starting", "version", "wording"),
    ("choose",),
    ("kernels", "quant", "files", "adapters", "families", "blocks", "patterns", "matching"),
    ("buffers", "compiled", "crew", "devices", "report_charts", "pairs", "adapter_facts", "lora_tags", "values"),
    ("report_html",),
    ("recipe", "report", "job", "steps"),
    ("foreign",),
    (
        *("catalog", "presets", "dtype_rule", "inspection", "metadata", "ports", "settings", "tiles"),
        *("history", "lora_strengths", "rule_text", "channels", "decoding", "prediction", "repairs", "vae"),
    ),
    ("changes", "baking"),
    ("resolve", "contrast", "operands"),
    ("fused",),
    ("plan", "results", "differences"),
    ("worker",),
    ("engine", "watch"),
    ("execute",),
    ("lora", "fold"),
    ("merge", "verify", "analyze", "cluster", "demo", "samples"),
    ("host", "api"),
    ("cli", "ui", "webui"),
    ("app", "__main__", HOST_ENTRY),
)
LEVEL_OF = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}

# Upward imports that are meant; only inside a function, so that nothing loads before it is asked for.
EXCEPTIONS = {("cli", "app"): "the command `lib-merge app` starts it"}

TORCH_BELOW = {"lazy", "kernels", "adapters", "quant", "files"}
TORCH_ABOVE = {
    "baking",
    "buffers",
    "compiled",
    "fused",
    "operands",
    "ports",
    "crew",
    "devices",
    "contrast",
    "results",
    "values",
    "worker",
    "engine",
    "watch",
    "merge",
    "verify",
    "analyze",
    "lora",
    "fold",
}
USERS = {
    "torch": TORCH_BELOW | TORCH_ABOVE,
    "pandas": {"report", "ui"},
    "gradio": {"ui", "app", "webui", HOST_ENTRY},
    "modules": {"webui", HOST_ENTRY},
}
PRINTERS = {"cli", "__main__"}
MAX_LINES = 400

Place = Literal["top", "function", "typing"]


@dataclass(frozen=True)
class Import:
    """`from target import name`, or `import target` with name None."""

    target: str
    name: str | None
    line: int
    place: Place

    @property
    def names_torch(self) -> bool:
        """True for torch itself, for the lazy stand-in, and for what imports torch when it is imported."""
        if self.target == f"{PACKAGE}.lazy":
            return self.name == "torch"
        full = f"{self.target}.{self.name}"
        return self.target.split(".")[0] == "torch" or f"{full}.".startswith("safetensors.torch.")

    @property
    def is_lazy(self) -> bool:
        return self.target == f"{PACKAGE}.lazy"


@dataclass(frozen=True)
class Module:
    """One source file under its dotted name."""

    name: str
    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def room(self) -> str:
        """`files` for `lib_merge.files.sink`; `lib_merge` for the package itself."""
        return room_of(self.name)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(self._walk(self.tree, "top"))

    def _walk(self, node: ast.AST, place: Place) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno, place)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(self._absolute(node), alias.name, node.lineno, place)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                yield from self._walk(child, "typing")
            for child in node.orelse:
                yield from self._walk(child, place)
        else:
            inner: Place = "function" if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else place
            for child in ast.iter_child_nodes(node):
                yield from self._walk(child, inner)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        base = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*base, node.module] if node.module else base)

    def at(self, line: int) -> str:
        return f"{self.path}:{line}:"


def room_of(name: str) -> str:
    if name in (HOST_ENTRY, PACKAGE):
        return name
    return name.split(".")[1]


def inside(target: str) -> bool:
    return target in (HOST_ENTRY, PACKAGE) or target.startswith(f"{PACKAGE}.")


def imported_module(item: Import, known: set[str]) -> str:
    """Our module that it brings in; for `from lib_merge.files import header` that is the submodule."""
    full = f"{item.target}.{item.name}"
    is_room = item.target == PACKAGE and item.name in LEVEL_OF
    return full if full in known or is_room else item.target


# The rules: each takes all modules and returns what is wrong, one line each.


def check_levels(modules: Sequence[Module]) -> list[str]:
    """Every room has a level, imports go down only, and the package itself re-exports no user interface."""
    known = {module.name for module in modules}
    wrong = []
    for module in modules:
        if module.room not in LEVEL_OF and module.room != PACKAGE:
            wrong.append(f"{module.path}: '{module.room}' is not in LEVELS: give it a level")
            continue
        for item in module.imports:
            if inside(item.target):
                target = imported_module(item, known)
                problem = _direction_problem(module.room, item, target)
                if problem:
                    wrong.append(f"{module.at(item.line)} imports {target}{problem}")
    return wrong


def _direction_problem(room: str, item: Import, target: str) -> str:
    other = room_of(target)
    if other == room:
        return ""
    if other == PACKAGE:
        return f".{item.name}: take it from its own room"
    if other not in LEVEL_OF:
        return f": '{other}' is not in LEVELS: give it a level"
    if room == PACKAGE:
        eager = item.place == "top" and LEVEL_OF[other] >= LEVEL_OF["cli"]
        return " at the top: the library itself loads no user interface" if eager else ""
    if (room, other) in EXCEPTIONS:
        return " at the top: only inside a function" if item.place == "top" else ""
    if LEVEL_OF[other] < LEVEL_OF[room]:
        return ""
    return ", which is on the same level" if LEVEL_OF[other] == LEVEL_OF[room] else ", which is above it"


def check_cycles(modules: Sequence[Module]) -> list[str]:
    """No group of modules imports one another while they load."""
    known = {module.name for module in modules}
    edges = {}
    for module in modules:
        loaded = [item for item in module.imports if item.place == "top" and inside(item.target)]
        edges[module.name] = {imported_module(item, known) for item in loaded} & known
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo.extend(edges[name])
        reach[start] = seen
    groups = {
        tuple(sorted({other for other in reach[name] if name in reach[other]} | {name}))
        for name in edges
        if name in reach[name]
    }
    return [f"import cycle: {' <-> '.join(group)}" for group in sorted(groups)]


def check_users(modules: Sequence[Module]) -> list[str]:
    """torch, pandas, gradio and a host's `modules` are imported only where they belong."""
    wrong = []
    for module in modules:
        for item in module.imports:
            for library, rooms in USERS.items():
                is_it = item.names_torch if library == "torch" else item.target.split(".")[0] == library
                if is_it and module.room not in rooms:
                    wrong.append(f"{module.at(item.line)} {module.room} may not import {library}")
            if item.names_torch and not item.is_lazy and item.place == "top":
                instead = f"write `from {PACKAGE}.lazy import torch`"
                wrong.append(f"{module.at(item.line)} imports torch at the top: {instead}")
    return wrong


def check_prints(modules: Sequence[Module]) -> list[str]:
    """Only the command line prints."""
    return [
        f"{module.at(node.lineno)} print() in {module.room}"
        for module in modules
        if module.room not in PRINTERS
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def check_docstrings(modules: Sequence[Module]) -> list[str]:
    """Every module has a docstring; that of a room's `__init__` has two sentences."""
    wrong = []
    for module in modules:
        text = ast.get_docstring(module.tree)
        if not text:
            wrong.append(f"{module.path}: no docstring")
        elif module.is_package and module.room != PACKAGE and (count := sentences(text)) != 2:
            wrong.append(f"{module.path}: {count} sentence(s) instead of two: what lives here, what may not")
    return wrong


def sentences(text: str) -> int:
    """How many sentences a docstring has; `e.g. this` and `header.py` end none."""
    return len(re.findall(r"[.!?]['\"`)]*(?=\s+[\"'`(]*[A-Z]|\s*$)", text))


def check_lengths(modules: Sequence[Module]) -> list[str]:
    """No file is too long to be read in one sitting."""
    counts = [(module.path, len(module.source.splitlines())) for module in modules]
    return [f"{path}: {count} lines, more than {MAX_LINES}" for path, count in counts if count > MAX_LINES]


RULES = (check_levels, check_cycles, check_users, check_prints, check_docstrings, check_lengths)


# The rules on our own source.


def own_modules() -> list[Module]:
    paths = sorted(ROOT.joinpath(PACKAGE).rglob("*.py"))
    entry = ROOT.joinpath(*HOST_ENTRY.split(".")).with_suffix(".py")
    paths += [entry] if entry.exists() else []
    modules = []
    for path in paths:
        relative = path.relative_to(ROOT)
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        modules.append(Module(name, relative.as_posix(), path.read_text(encoding="utf-8")))
    return modules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_own_source(rule):
    modules = own_modules()
    assert f"{PACKAGE}.errors" in {module.name for module in modules}
    wrong = rule(modules)
    assert not wrong, "\n".join(["", *dict.fromkeys(wrong)])


# The rules on small sources made to break them.


def fake(files: dict[str, str]) -> list[Module]:
    """Modules of the package from `{"files/sink.py": source}`; `scripts/` stands beside it."""
    modules = []
    for path, source in files.items():
        full = path if path.startswith("scripts/") else f"{PACKAGE}/{path}"
        name = full.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        modules.append(Module(name, full, source))
    return modules


def test_going_down_is_fine():
    modules = fake({
        "__init__.py": "from .merge import merge\ndef f():\n    from lib_merge import app",
        "errors.py": "",
        "lazy.py": "if TYPE_CHECKING:\n    import torch\nelse:\n    torch = None",
        "files/__init__.py": "from lib_merge.files.sink import Sink",
        "files/sink.py": "from lib_merge.errors import FileError\nfrom . import header",
        "files/header.py": "from ..errors import FileError\nfrom lib_merge import version",
        "plan.py": "from lib_merge import adapters, families",
        "merge.py": "from lib_merge.lazy import torch\nfrom lib_merge import files, plan",
        "cli.py": "print('yes')\ndef app():\n    from lib_merge.app import launch",
        "app.py": "import gradio as gr\nfrom lib_merge import cli",
        "scripts/merge_tab.py": "from lib_merge import webui",
    })  # fmt: skip
    imports = (check_levels, check_cycles, check_users, check_prints)
    assert [line for rule in imports for line in rule(modules)] == []


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("files/sink.py", "from lib_merge.plan import Plan", "imports lib_merge.plan, which is above it"),
        ("files/sink.py", "from ..plan import Plan", "imports lib_merge.plan, which is above it"),
        ("recipe.py", "from lib_merge import plan", "imports lib_merge.plan, which is above it"),
        ("plan.py", "def f():\n    import lib_merge.merge", "plan.py:2: imports lib_merge.merge, which is"),
        ("plan.py", "if TYPE_CHECKING:\n    from .host import Host", "lib_merge.host, which is above it"),
        ("ui/tab.py", "import scripts.merge_tab", "imports scripts.merge_tab, which is above it"),
        ("adapters/lora.py", "from ..families import sdxl", "families, which is on the same level"),
        ("ui/tab.py", "from lib_merge import webui", "lib_merge.webui, which is on the same level"),
        ("helpers.py", "", "'helpers' is not in LEVELS: give it a level"),
        ("utils/__init__.py", "", "'utils' is not in LEVELS: give it a level"),
        ("plan.py", "import lib_merge.helpers", "'helpers' is not in LEVELS: give it a level"),
        ("plan.py", "from lib_merge import bake", "lib_merge.bake: take it from its own room"),
        ("__init__.py", "from lib_merge.cli import main", "lib_merge.cli at the top: the library itself"),
        ("cli.py", "from lib_merge import app", "imports lib_merge.app at the top: only inside a function"),
    ],
)
def test_levels_are_kept(path, source, said):
    wrong = check_levels(fake({path: source}))
    assert len(wrong) == 1
    assert said in wrong[0]


def test_a_cycle_is_reported_once_with_its_members():
    modules = fake({
        "files/a.py": "from lib_merge.files import b",
        "files/b.py": "class Late:\n    from lib_merge.files.c import thing",
        "files/c.py": "try:\n    from . import a\nexcept ImportError:\n    pass",
        "files/d.py": "from lib_merge.files import a",
    })  # fmt: skip
    assert check_cycles(modules) == ["import cycle: " + " <-> ".join(f"lib_merge.files.{x}" for x in "abc")]


def test_a_cycle_through_a_package_is_reported():
    modules = fake({
        "kernels/__init__.py": "from lib_merge.kernels.ties import ties",
        "kernels/ties.py": "from lib_merge.kernels import register",
    })  # fmt: skip
    assert check_cycles(modules) == ["import cycle: lib_merge.kernels <-> lib_merge.kernels.ties"]


@pytest.mark.parametrize("place", ["def f():", "if TYPE_CHECKING:"])
def test_an_import_that_waits_makes_no_cycle(place):
    modules = fake({"files/a.py": "from . import b", "files/b.py": f"{place}\n    from . import a"})
    assert check_cycles(modules) == []


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("kernels/ties.py", "import torch", "imports torch at the top: write `from lib_merge.lazy import"),
        ("files/pickles.py", "from torch.nn import functional", "imports torch at the top"),
        ("files/a.py", "try:\n    import torch\nexcept ImportError:\n    pass", "imports torch at the top"),
        ("files/a.py", "from safetensors import torch as st", "imports torch at the top"),
        ("files/a.py", "import safetensors.torch", "imports torch at the top"),
        ("plan.py", "def f():\n    import torch", "plan may not import torch"),
        ("recipe.py", "from lib_merge.lazy import torch", "recipe may not import torch"),
        ("families/sdxl.py", "if TYPE_CHECKING:\n    import torch", "families may not import torch"),
        ("merge.py", "def f():\n    import pandas as pd", "merge may not import pandas"),
        ("report.py", "from gradio import Blocks", "report may not import gradio"),
        ("scripts/merge_tab.py", "import pandas", "scripts.merge_tab may not import pandas"),
        ("ui/tab.py", "from modules import shared", "ui may not import modules"),
        ("host.py", "def f():\n    import modules.sd_models", "host.py:2: host may not import modules"),
    ],
)
def test_libraries_stay_where_they_belong(path, source, said):
    wrong = check_users(fake({path: source}))
    assert len(wrong) == 1
    assert said in wrong[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/ties.py", "from lib_merge.lazy import torch"),
        ("kernels/ties.py", "if TYPE_CHECKING:\n    import torch"),
        ("files/pickles.py", "def f():\n    import torch"),
        ("files/sink.py", "import safetensors"),
        ("report.py", "import pandas"),
        ("ui/tab.py", "import gradio, pandas"),
        ("webui.py", "from modules import shared"),
    ],
)
def test_libraries_may_be_used_at_home(path, source):
    assert check_users(fake({path: source})) == []


def test_printing_is_reported():
    modules = fake({"merge.py": "def f():\n    print('done')", "__main__.py": "print('fine')"})
    assert check_prints(modules) == ["lib_merge/merge.py:2: print() in merge"]


def test_missing_docstrings_are_reported():
    modules = fake({
        "plan.py": "x = 1",
        "files/__init__.py": '"""One sentence about header.py, e.g. its reader."""',
        "kernels/__init__.py": '"""One. Two!\n\nThree."""',
        "quant/__init__.py": '"""Codes to numbers and back, each way.\n\nNothing here opens a file."""',
    })  # fmt: skip
    assert check_docstrings(modules) == [
        "lib_merge/plan.py: no docstring",
        "lib_merge/files/__init__.py: 1 sentence(s) instead of two: what lives here, what may not",
        "lib_merge/kernels/__init__.py: 3 sentence(s) instead of two: what lives here, what may not",
    ]


def test_long_files_are_reported():
    modules = fake({"plan.py": "x = 1\n" * MAX_LINES, "merge.py": "x = 1\n" * (MAX_LINES + 1)})
    assert check_lengths(modules) == [f"lib_merge/merge.py: {MAX_LINES + 1} lines, more than {MAX_LINES}"]
