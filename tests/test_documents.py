"""What the documents promise is run: code blocks, the example, and the table of equations."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import revit

ROOT = Path(__file__).parents[1]


def code_blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if code_blocks(path)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_code_of_the_documents_runs(page, tmp_path, monkeypatch, capsys):
    """The blocks of a page are one program: later ones use what earlier ones have made."""
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in code_blocks(page):
        exec(compile(block, page.name, "exec"), names)
    assert "Traceback" not in capsys.readouterr().out


def test_api_page_is_made_from_the_docstrings():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from write_api import api_page
    finally:
        sys.path.pop(0)
    assert (ROOT / "docs/api.md").read_text() == api_page(), "stale: run python docs/write_api.py"


def test_every_page_and_picture_of_the_site_is_there():
    """The menu names all pages, and no page links to nothing."""
    menu = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    named = set(re.findall(r"'([\w/]+\.md)'", str(menu)))
    pages = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    assert named == set(pages)
    for name, text in pages.items():
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            assert (ROOT / "docs" / target).exists(), f"{name} links to {target}"


def test_readme_parameter_counts():
    """The sizes that the README states, from the models themselves."""
    stated = {"revit_tiny": ("p4", 1, 44e3), "revit_small": ("p4", 1, 95e3), "revit_base": ("p4m", 3, 1.15e6)}
    stated |= {
        "revit_hier_tiny": ("p4m", 3, 2.8e6),
        "revit_hier_small": ("p4m", 3, 11.1e6),
        "revit_hier_medium": ("p4m", 3, 19.4e6),
    }
    for name, (group, in_chans, count) in stated.items():
        model = revit.create_model(name, group=group, in_chans=in_chans)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(count, rel=0.02), name
    others = [name for name in revit.list_models("revit") if "_seg_" not in name]  # `tests/models/test_segmentation.py`
    assert all(name.removesuffix("_paper") in {*stated, "revit_hier_base"} for name in others)


def test_conventions_name_real_things():
    """Every function and class in the equation table is defined in the file named beside it."""
    table = (ROOT / "docs/conventions.md").read_text().split("## Shapes")[0]
    named = re.findall(r"`(\w+)`[^`|;]*? in `((?:revit|tests)/[\w/]+\.py)`", table)
    assert len(named) >= 8
    for name, path in named:
        assert re.search(rf"^(?:def|class) {name}\b", (ROOT / path).read_text(), flags=re.MULTILINE), f"{name} in {path}"
    for equation in ("**7**", "**8**", "**9**", "**10**", "**11**"):
        assert equation in table


def test_conventions_parameter_counts():
    text = (ROOT / "docs/conventions.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \(.*?\| `(create_model\(.*?\))` \|$", text, flags=re.MULTILINE)
    assert len(rows) == 6
    for count, call in rows:
        model = eval(call.replace("create_model", "revit.create_model"), {"revit": revit})
        assert sum(p.numel() for p in model.parameters()) == int(count.replace(",", "")), call


def run_example(*arguments, example="turning_features"):
    command = [sys.executable, ROOT / f"examples/{example}.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_example_prints_the_audit_and_draws(tmp_path):
    result = run_example("--group", "p4", "--out", tmp_path / "figures")
    assert result.returncode == 0, result.stderr
    ours = re.search(r"revit_small +(\S+) +(\S+) +(\S+) +100.00 %", result.stdout)
    paper = re.search(r"revit_small_paper +(\S+)", result.stdout)
    assert all(float(error) < 5e-5 for error in ours.groups()) and float(paper[1]) > 1e-3
    assert (tmp_path / "figures/turning_features.png").stat().st_size > 10_000


def test_example_of_masks_turns_them(tmp_path):
    result = run_example("--images", "12", "--epochs", "1", "--group", "z2m", "--out", tmp_path, example="segmentation")
    assert result.returncode == 0, result.stderr
    errors = re.findall(r"largest difference (\S+) +same class at 100.00%", result.stdout)
    assert len(errors) == 2 and all(float(error) <= 1e-10 for error in errors)
    assert "mean IoU" in result.stdout and (tmp_path / "data/masks/11.png").is_file()


def test_example_of_a_network_of_your_own():
    result = run_example("--images", "4", example="own_network")
    assert result.returncode == 0, result.stderr
    plain, ours, deployed = (float(error) for error in re.findall(r"largest relative change (\S+)", result.stdout))
    assert plain > 1e-2 and max(ours, deployed) < 5e-6
    assert result.stdout.count("same prediction 100.00%") == 2


@pytest.mark.parametrize("arguments", [("--group", "q9"), ("--out", __file__)])
def test_example_refuses_bad_input_in_one_line(arguments):
    result = run_example(*arguments)
    assert result.returncode == 2 and result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1


COMMANDS = [
    line.strip()
    for document in ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
    for block in re.findall(r"```(?:bash)?\n(.*?)```", (ROOT / document).read_text(), flags=re.DOTALL)
    for line in block.splitlines()
    if " -m revit " in line or line.startswith("revit ")
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_documents_exist(line, capsys):
    """Every option that is shown is in the help of its command, and every recipe that is named is there."""
    from revit.cli import main
    from revit.training.recipe import list_recipes

    words = re.split(r" -m revit |^revit ", line.split(" > ")[0])[1].split()
    commands = words[: 2 if words[0] == "benchmark" or words[1:2] == ["pack"] else 1]
    with pytest.raises(SystemExit, match="0"):
        main([*commands, "--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in words if word.startswith("--")), line
    if words[0] == "train" and words[1].isidentifier():
        assert words[1] in list_recipes()


def test_training_page_lists_all_datasets():
    from revit.data import list_datasets

    table = (ROOT / "docs/training.md").read_text().split("## Data")[1]
    assert set(re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)) == set(list_datasets())


def test_tables_are_made_from_the_result_files():
    """`python benchmarks/tables.py` writes them; a number that no result file backs fails here."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from tables import TABLES, updated

    for table in TABLES:
        path, text = updated(table)
        assert path.read_text() == text, f"{table} is stale: run python benchmarks/tables.py"
    marked = [
        name
        for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for name in re.findall(r"<!-- table: (\w+) -->", path.read_text())
    ]
    assert sorted(marked) == sorted(TABLES)


def test_the_page_of_results_is_made_from_the_result_files():
    from revit.reproduce.document import results_page

    assert (ROOT / "docs/results.md").read_text() == results_page(ROOT / "results"), "stale: run python benchmarks/tables.py"


def test_reproduction_names_real_things_and_every_item():
    """All 71 items of the checklist, each with a state; functions are where the table says, commands exist."""
    text = (ROOT / "docs/reproduction.md").read_text()
    rows = re.findall(r"^\| (\d[\d, ]*) .*\|(.*)\|(.*)\|$", text, flags=re.MULTILINE)
    numbers = [int(n) for items, _, _ in rows for n in re.findall(r"\d+", items)]
    assert sorted(numbers) == list(range(1, 72))
    assert all(re.search(r"\b(obtained|runnable)\b", state) for _, _, state in rows)
    for name, path in re.findall(r"`(\w+)` in `((?:revit|tests)/[\w/]+\.py)`", text):
        assert re.search(rf"^(?:def|class) {name}\b", (ROOT / path).read_text(), flags=re.MULTILINE), f"{name} in {path}"
    for table in ("1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12"):
        assert f"| Table {table}," in text
