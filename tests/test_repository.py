"""Promises about the repository itself: its tree, its boundaries, its documents and the cost of importing it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "isomerge"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

FAMILIES = (
    "llama|mistral|qwen|gemma|olmo|gpt2|gpt_?neox|roberta|deberta|distilbert|modernbert|albert|electra|bert|bart|deit|vit|"
    "t5|mixtral|dinov2|dinov3|siglip|whisper|swin|convnext|resnet"
)
# `vit_attention` and `ViTConfig` name a family; `invite` and `Liberty` do not.
FAMILY = re.compile(rf"(?:(?<![A-Za-z])|(?<=[a-z])(?=[A-Z]))(?i:{FAMILIES})(?![a-z])")
# The demo trains one particular small model; nothing in it serves the library.
ALLOWED = {"demonstration": {"ViTConfig", "ViTForImageClassification"}}


def tree_lines() -> dict[str, str]:
    """The parts of src/isomerge as the README's tree names them, with what it says of each."""
    block = re.search(r"```\nsrc/isomerge/\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md has no tree of src/isomerge/"
    lines = re.findall(r"^  (\S+)\s+(\S.*)$", block[1], re.MULTILINE)
    return dict(lines)


def test_the_tree_of_the_readme_is_the_tree_on_disk() -> None:
    parts = tree_lines()
    named = {name.rstrip("/") for name in parts if name.endswith("/")}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert named == folders
    for name in parts:
        assert (PACKAGE / name).exists(), name


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield line, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield line, node.name
        elif isinstance(node, ast.alias):
            yield line, node.asname or node.name.rpartition(".")[2]


def test_only_architectures_know_a_model_family() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE)
        if part.parts[0] == "architectures":
            continue
        allowed = ALLOWED.get(part.parts[0].removesuffix(".py"), set())
        for line, name in identifiers(ast.parse(path.read_text())):
            if FAMILY.search(name) and name not in allowed:
                found.append(f"{part}:{line} {name}")
    assert not found


@pytest.mark.parametrize(
    ("name", "is_family"),
    [(name, True) for name in ("vit_head", "ViTConfig", "load_llama", "AutoBert", "T5", "GPTNeoXModel", "qwen3_norm")]
    + [(name, False) for name in ("invite", "Liberty", "activity", "split", "options")],
)
def test_the_family_pattern_tells_names_from_words(name: str, is_family: bool) -> None:
    assert bool(FAMILY.search(name)) is is_family


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_no_machine_paths(path: Path) -> None:
    assert not re.search(r"(?<![\w.])/(work|root|home|tmp)\b", path.read_text())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def imported_by(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter holds after running the code."""
    heavy = {"torch", "transformers", "matplotlib", "ray", "scipy", "sklearn"}
    code += f"\nimport sys; print('loaded:', *sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("loaded:")[2].split())


def test_importing_isomerge_imports_nothing_heavy() -> None:
    assert imported_by("import isomerge") == set()


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['isomerge', 'align', '--help']\nfrom isomerge.cli import main\n"
    assert imported_by(code + "try: main()\nexcept SystemExit: pass") == set()


def test_the_version_is_the_same_everywhere() -> None:
    import isomerge

    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared and isomerge.__version__ == declared[1]
    assert f"[{declared[1]}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {declared[1]}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_readme_counts_the_methods_that_there_are() -> None:
    from isomerge.merging.data_methods import ALL_METHODS

    counts = re.findall(r"(\d+) (?:\[methods\]|methods,)", (ROOT / "README.md").read_text())
    assert counts == [str(len(ALL_METHODS))]


def test_nothing_is_loaded_with_code_of_its_own_unasked() -> None:
    """Left out, transformers asks on the terminal, and takes a yes from standard input. A class that a file names may
    bring code where the user allows it; a class that is chosen already has no use for any."""
    calls = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "from_pretrained":
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                by_file = ast.unparse(node.func.value).startswith("Auto")
                expected = "remote_code_allowed()" if by_file else "False"
                assert given.get("trust_remote_code") == expected, f"{path}:{node.lineno}"
                calls.append(by_file)
    assert set(calls) == {True, False}


def test_every_config_becomes_a_class_in_one_place() -> None:
    """There its wishes for kernels, which transformers would fetch from a hub and run, are left out."""
    users = [path.name for path in sorted(PACKAGE.rglob("*.py")) if "config_class.from_dict(" in path.read_text()]
    assert users == ["stock_classes.py"]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_source_is_in_the_grammar_of_the_oldest_python(path: Path) -> None:
    """That pyproject.toml allows; newer statements would fail at import there."""
    least = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert least is not None
    assert (
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, int(least[1]))).body or not path.stat().st_size
    )


def test_calls_that_only_some_systems_have_stay_in_one_module() -> None:
    """So that hiding them there shows what another system would do."""
    calls = r"os\.(pread|preadv|pwrite|pwritev|posix_\w+|sched_\w+|fsync|sysconf|getuid)\b|fcntl|getrusage|[\"\']/proc"
    named = {
        f"{path.relative_to(PACKAGE)}: {found[0]}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "system.py" and (found := re.search(calls, path.read_text(encoding="utf-8")))
    }
    assert not named


def test_a_class_name_means_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
