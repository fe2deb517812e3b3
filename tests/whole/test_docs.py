"""The documentation: the site builds without a broken link, its reference is complete, and the guide's code works."""

import ast
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from thinned import thinned

import autotp

ROOT = Path(__file__).parents[2]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
FOLDERS = [path for package in ("autotp", "passes", "costmodel") for path in (ROOT / package).rglob("__init__.py")]
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "NO_MKDOCS_2_WARNING": "1",
    "COLUMNS": "200",
}
#: A fenced block: its language, its title if it has one, and its content.
BLOCK = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def run(command, folder):
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def shown(page):
    """The text of a page, without markup."""
    text = re.sub(r"<(script|style|nav).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split())


@pytest.mark.slow
def test_the_site_builds_and_its_reference_is_whole(tmp_path):
    # Not --quiet: messages that are not printed do not count as warnings.
    run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)], ROOT)
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert not [name for name, page in pages.items() if "<!-- made:" in page]
    assert not list(tmp_path.rglob("*.py"))
    reference = pages["reference/autotp.html"]
    words = shown(reference)
    for name in autotp.__all__:
        assert f'id="autotp.{name}"' in reference, f"{name} is not in docs/reference/autotp.md"
        value = getattr(autotp, name)
        first = "" if name == "FAMILIES" else value.__doc__.split("\n\n")[0]
        said = " ".join(re.sub(r"``?(.*?)``?", r"\1", first).split())
        assert said in words, f"{name}: {said!r}"
    commands = pages["reference/cli.html"]
    for command in ("plan", "topology", "sweep", "explain", "calibrate", "trace", "verify", "inspect", "diff", "reprice"):
        assert f'<h2 id="{command}">' in commands
    assert {"--pin", "--save", "--dot", "--families"} <= set(shown(commands).split())


@pytest.mark.parametrize("file", ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))])
def test_relative_links_lead_somewhere(file):
    """As on GitHub, where no site is built."""
    text = re.sub(r"^```.*?^```", "", (ROOT / file).read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if not ((ROOT / file).parent / link.partition("#")[0]).exists()]
    assert not missing


@pytest.mark.parametrize("file", FOLDERS, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_what_a_folder_says_is_in_it_is_there_and_nothing_else(file):
    sources = {path.stem: path.read_text() for path in file.parent.glob("*.py") if path.stem != "__main__"}
    said = re.findall(r"(?<!`)`([\w.]+)`(?!`)", ast.get_docstring(ast.parse(sources.pop("__init__"))))
    modules = sources.keys() | {path.parent.name for path in file.parent.glob("*/__init__.py")}
    assert modules <= {part for name in said for part in name.split(".")}
    defined = re.findall(r"^ *(?:class|def) (\w+)", "\n".join(sources.values()), re.MULTILINE)
    assert {name for name in said if "." not in name} <= modules | set(defined)


def blocks(page):
    """(language, title, text) of a page's files, scripts and commands, and as ``text`` the output of the last command."""
    words, end, found = page.read_text(), 0, []
    for block in BLOCK.finditer(words):
        if block[1] != "text" or not words[end : block.start()].strip():
            found.append(block.groups())
        end = block.end()
    return found


def said(printed):
    """Lines, up to an ellipsis, without what differs between runs: spaces, planning times, hashes, rounding."""
    differs = r"[┃│]|\bin [\d.]+ m?s\b|\b[0-9a-f]{16}\b|\b[\d.]+e-\d+"
    lines = (" ".join(re.sub(differs, " ", line).split()) for line in printed.splitlines())
    return [line.partition("...")[0].rstrip() for line in lines if line and line != "..."]


@pytest.mark.exact
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [*GUIDE, ROOT / "docs" / "papers.md"], ids=lambda page: page.stem)
def test_what_the_guide_shows_works(page, tmp_path):
    """Runs every file, script and command of a page, in order, in a folder with the guide's model.

    The output that the page shows below a command is what the command prints.
    """
    printed = ""
    model = next(text for _, title, text in blocks(ROOT / "docs" / "guide" / "first-plan.md") if title == "model.py")
    (tmp_path / "model.py").write_text(model)
    for language, title, text in blocks(page):
        if title:
            (tmp_path / title).write_text(text)
        elif language == "python":
            printed = run([sys.executable, "-c", text], tmp_path)
        elif language == "sh":
            printed = run(["bash", "-euo", "pipefail", "-c", text], tmp_path) if "benchmarks." not in text else ""
        elif language == "text" and printed:
            given = said(printed)
            assert said(text), f"{page.name} shows nothing below a command"
            missing = [line for line in said(text) if not any(other.startswith(line) for other in given)]
            assert not missing, f"{page.name} shows what is not printed:\n" + "\n".join(missing) + f"\n\n{printed}"


@pytest.mark.parametrize(
    "program", thinned((text for _, _, text in blocks(ROOT / "docs" / "upstream.md")), 3, whole=True), ids=range(3)
)
def test_a_kernel_that_needs_care_still_does(program, tmp_path):
    """If it fails, torch is fixed: the rule's `misreads` and the page's section can be removed."""
    assert float(run([sys.executable, "-c", program], tmp_path)) > 1e-6
