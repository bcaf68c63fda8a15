"""The house: who may import whom, and what each module says it offers."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("activities", "cli", "contracts", "workers", "workflows")
MODULES: Final = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    # Alembic's own scripts: it runs them, nobody imports them.
    if "migrations" not in path.parts or path.name == "__init__.py"
)


def body_of(module: str) -> list[ast.stmt]:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text()).body


def defined_in(module: str) -> set[str]:
    """The public classes and functions of a module, less those that are only commands of `redrive`."""
    found: set[str] = set()
    for statement in body_of(module):
        match statement:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if not any(".command(" in ast.unparse(decorator) for decorator in statement.decorator_list):
                    found.add(statement.name)
            case _:
                pass
    return {name for name in found if not name.startswith("_")}


def declared_by(module: str) -> list[str]:
    for statement in body_of(module):
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names = ast.literal_eval(value)
                assert isinstance(names, list)
                return names
            case _:
                pass
    return []


@pytest.mark.parametrize("module", MODULES)
def test_a_module_offers_what_it_says_and_says_what_it_offers(module: str) -> None:
    declared = declared_by(module)
    assert len(set(declared)) == len(declared)
    loaded = importlib.import_module(module)
    for name in declared:
        assert not name.startswith("_")
        assert hasattr(loaded, name), f"{module}.{name} is offered, but not there"
    assert loaded.__doc__, f"{module} does not say what it is"


@pytest.mark.parametrize("module", MODULES)
def test_what_others_import_from_a_module_is_what_it_offers(module: str) -> None:
    for statement in ast.walk(ast.Module(body_of(module), [])):
        if isinstance(statement, ast.ImportFrom) and statement.module in MODULES:
            offered = declared_by(statement.module)
            for name in (alias.name for alias in statement.names):
                assert name in offered or f"{statement.module}.{name}" in MODULES, f"{statement.module}.{name}"


@pytest.mark.parametrize("module", [module for module in MODULES if declared_by(module)])
def test_every_public_class_and_function_is_offered(module: str) -> None:
    assert defined_in(module) <= set(declared_by(module))


def test_the_names_offered_are_sorted() -> None:
    # RUF022: constants, then classes, then the rest, each in its natural order.
    done = run("-m", "ruff", "check", "--select", "RUF022", "--no-cache", *PACKAGES)
    assert done.returncode == 0, done.stdout


def test_arrows_go_one_way() -> None:
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_importing_what_workflows_need_brings_nothing_that_touches_the_world() -> None:
    banned = ("aiohttp", "sqlite3", "aiosql", "jsonschema", "structlog", "typer", "rich")
    code = "import sys, contracts.runs, contracts.dead_letters, contracts.dispatch, workflows.graph"
    done = run("-c", f"{code}; print([name for name in {banned!r} if name in sys.modules])")
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
