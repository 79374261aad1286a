"""Workflows, hooks, templates, the citation and the metadata are valid and refer to existing things."""

import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

import coupled_adam

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKE_TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
CLASSIFIED = [found[1] for line in PROJECT["classifiers"] if (found := re.fullmatch(r".* :: Python :: (3\.\d+)", line))]


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs(path: Path) -> list[dict[str, Any]]:
    return list(read(path)["jobs"].values())


def commands(path: Path) -> str:
    return "\n".join(step.get("run", "") for job in jobs(path) for step in job["steps"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_read_only_has_a_timeout_and_uses_existing_make_targets(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert {"push", "pull_request"} <= workflow[True].keys()  # YAML 1.1 reads the key `on` as true
    for job in jobs(path):
        assert 0 < job["timeout-minutes"] <= 60
        assert job["steps"][0]["uses"].startswith("actions/checkout@v")
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
    assert set(re.findall(r"\bmake ([a-z]+)", commands(path))) <= MAKE_TARGETS


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_follows_the_published_schema_of_its_format(schema: str, files: list[Path]) -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_workflows_test_every_python_version_in_the_metadata() -> None:
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert lowest == CLASSIFIED[0]
    by_name = {path.stem: path for path in WORKFLOWS}
    assert by_name.keys() == {"tests", "wheel", "docs"}
    for name in ("tests", "wheel"):
        [job] = jobs(by_name[name])
        assert job["strategy"]["matrix"]["python"] == CLASSIFIED
    assert "make test" in commands(by_name["tests"])
    assert 'coupled-adam" demo' in commands(by_name["wheel"])
    assert "make docs" in commands(by_name["docs"])


def test_hooks_need_no_network_and_use_tools_of_the_environment() -> None:
    [repository] = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    called = [hook["entry"].split()[0] for hook in repository["hooks"]]
    assert called == [f".venv/bin/{tool}" for tool in ("ruff", "ruff", "lint-imports", "mypy")]
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for tool in called:
        assert tool.replace(".venv/bin", "$(BIN)") in targets


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_the_fields_that_github_requires(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "title", "labels", "body"}
    kinds = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in form["body"]} <= kinds
    assert fields
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    for option in (option for field in fields for option in field["attributes"].get("options", [])):
        assert option["label"]


def test_the_citation_agrees_with_the_metadata_and_names_the_paper() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert (citation["title"], citation["license"]) == (PROJECT["name"], PROJECT["license"])
    assert str(citation["version"]) == coupled_adam.__version__
    assert citation["authors"] == PROJECT["authors"]
    assert citation["keywords"] == PROJECT["keywords"]
    [paper] = citation["references"]
    assert paper["url"] == PROJECT["urls"]["Paper"]
    assert [author["given-names"] for author in paper["authors"]] == ["Felix", "Tobias"]
    assert 2024 < paper["year"] <= date.today().year


def test_classifiers_are_known_and_agree_with_the_package() -> None:
    known = pytest.importorskip("trove_classifiers").classifiers
    assert set(PROJECT["classifiers"]) <= set(known)
    assert ("Typing :: Typed" in PROJECT["classifiers"]) == Path(coupled_adam.__file__).with_name("py.typed").is_file()


def test_the_guide_names_files_and_functions_that_exist() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = [word for span in re.findall(r"`([^`\n]+)`", guide) for word in span.split()]
    code += [word.rstrip(";") for block in re.findall(r"```sh\n(.*?)```", guide, re.DOTALL) for word in block.split()]
    named = {word for word in code if re.match(r"(src|tests|docs|\.github)/", word)} - {"docs/NAME.md"}
    assert len(named) > 30
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    assert set(re.findall(r"`?make ([a-z]+)\b", guide)) <= MAKE_TARGETS
    # A code name directly before or after a module belongs to it.
    pairs = re.findall(r"`(src/[\w/]+\.py)`: [^`]{0,40}`(\w+)`", guide)
    pairs += [(path, name) for name, path in re.findall(r"`(\w+)` in\s+`(src/[\w/]+\.py)`", guide)]
    assert len(pairs) > 5
    for path, name in pairs:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), (path, name)
