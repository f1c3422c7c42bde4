"""The house: which room may import which, what an import costs, and that no room outgrows its purpose."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in ("app", "workers")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__init__.py"
}
MAY_IMPORT_OF_WORKERS = {f"workers.{room}" for room in "arrays curve errors launch memory ring wire".split()}
TORCH = "agent loop model items forward parts collect encode rounds stream probe models.digits models.train_digits"
ONLY_IN = {
    "torch": {f"workers.{room}" for room in TORCH.split()},
    "pickle": {"workers.encode"},
    "fastapi": {"app.main", "app.ops", "app.v2"},
    "zmq": {"app.host", "app.queue", *(f"workers.{room}" for room in "curve nodes queue shards loop watch".split())},
}


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, `from x import y` as x and as x.y."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(path: Path) -> set[str]:
    return {name for name in imports(path) if name in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    for other in ours(MODULES[module]):
        if module.startswith("workers"):
            assert other.startswith("workers"), f"{module} imports {other}"
        elif other.startswith("workers"):
            assert other in MAY_IMPORT_OF_WORKERS, f"{module} imports {other}"
    for library, rooms in ONLY_IN.items():
        used = any(name.split(".")[0] == library for name in imports(MODULES[module]))
        assert not used or module in rooms, f"{module} imports {library}"


def test_no_import_goes_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' > '.join([*path, module])}"
        if module not in done:
            for other in ours(MODULES[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", MODULES)
def test_a_module_opens_with_what_lives_there_and_stays_small(module: str) -> None:
    text = MODULES[module].read_text()
    assert ast.get_docstring(ast.parse(text)), f"{module} has no opening sentence"
    assert len(text.splitlines()) <= 420, f"{module} has outgrown one purpose"
    assert MODULES[module].name not in ("utils.py", "common.py", "helpers.py")


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("app.main", ["torch"]),
        ("app.cli", ["torch", "fastapi", "zmq", "uvicorn", "httpx"]),
        ("app.client", ["torch", "fastapi", "zmq", "uvicorn", "pydantic"]),
        ("app.infer_files", ["torch", "fastapi", "zmq", "uvicorn", "pydantic"]),
        ("workers.launch", ["torch", "zmq"]),
    ],
)
def test_an_import_loads_no_more_than_it_needs(module: str, unwanted: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
