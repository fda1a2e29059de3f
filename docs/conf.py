"""The site: `./scripts/docs` builds it into docs/_build, without a network."""

from __future__ import annotations

import ast
import html
import logging
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "workers"), str(ROOT / "docs" / "_ext")]

import batchopt  # noqa: E402

project, author, project_copyright = "batchopt", "the authors of batchopt", "the authors of batchopt"
version = release = batchopt.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "members",
    "mathml",
]
html_math_renderer = "mathml"
exclude_patterns = ["_build", "examples"]
templates_path: list[str] = []
default_role = "code"  # as docstrings write it

# Links into torch and NumPy need their inventories, which only a network has.
if os.environ.get("READTHEDOCS") or os.environ.get("BATCHOPT_DOCS_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "scipy": ("https://docs.scipy.org/doc/scipy", None),
    }

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
# The groups of arguments of a BatchOptimizer.
_GROUPS = "What f is", "Where it is evaluated", "How", "When something happens"
napoleon_custom_sections = [(name, "params_style") for name in _GROUPS]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

_ALONE = "|".join(path.stem for path in (ROOT / "docs" / "examples").glob("*.py"))  # programs of other pages

# libraries of other examples have the root logger show everything
logging.getLogger("tensorboard").setLevel(logging.WARNING)

# The gallery: scripts in the folders of docs/examples. A complete build runs them; `-D plot_gallery=0` does not.
sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "ignore_pattern": rf"^({_ALONE})\.py$",
    "filename_pattern": r"\.py$",
    "subsection_order": [f"examples/{name}" for name in ("physics", "statistics", "programs", "looking")],
    "within_subsection_order": "FileNameSortKey",
    "capture_repr": (),  # only what is printed
    "thumbnail_size": (480, 220),
    "doc_module": "batchopt",
    "reference_url": {"batchopt": None},  # names in the code lead to the reference
    "show_signature": False,
    "nested_sections": False,
    "write_computation_times": False,
}

# Files beside docs/, as the pages name them, and the pages that include them.
_INCLUDED = {name: f"{name.lower()}.md" for name in ("SECURITY", "CONTRIBUTING", "CHANGELOG")}


def link_included(app: object, name: str, source: list[str]) -> None:
    """Have links to files that the site includes lead to their pages."""
    for file, page in _INCLUDED.items():
        source[0] = source[0].replace(f"](../{file}.md", f"]({page}")


def print_refusals(app: object, name: str, source: list[str]) -> None:
    """Put the tables of what is refused, which the tests run, where a page asks for them."""
    module = ast.parse((ROOT / "tests" / "refusals.py").read_text())
    texts = {ast.unparse(part.targets[0]): part.value for part in module.body if isinstance(part, ast.Assign)}

    def table(found: re.Match[str]) -> str:
        rows = ["| call | error |", "|---|---|"]
        for line in ast.literal_eval(texts[found[1]]).strip().replace(" ->\n    ", " -> ").splitlines():
            call, error = line.replace("...", "…").replace("|", "\\|").split(" -> ", 1)
            rows.append(f"| ``{call.replace('build(', 'BatchOptimizer(')}`` | ``{error}`` |")
        return "\n".join(rows)

    source[0] = re.sub(r"<!-- refused: (\w+) -->", table, source[0])


def put_figure_first(app: object, name: str, source: list[str]) -> None:
    """Show the figure of an example before its code, too, where it was run."""
    figure = re.search(r"^\.\. image-sg:: .*\n(?: +.*\n)+", source[0], re.MULTILINE)
    if name.startswith("gallery/") and figure is not None:
        begin = "\n.. GENERATED FROM PYTHON SOURCE LINES"
        source[0] = source[0].replace(begin, f"\n{figure[0]}\n{begin}", 1)


def describe(app: object, name: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Give a page its first paragraph as the description that search engines show; links in chats show it, too."""
    first = None if doctree is None else next(doctree.findall(nodes.paragraph), None)
    text = batchopt.__doc__ or "" if first is None or name == "index" else first.astext()
    text = html.escape(textwrap.shorten(text, 200, placeholder=" ..."))
    kinds = 'name="description"', 'property="og:description"'
    tags = "".join(f'<meta {kind} content="{text}" />\n' for kind in kinds)
    context["metatags"] = context.get("metatags", "") + tags


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", put_figure_first)
    app.connect("html-page-context", describe)
    app.connect("source-read", link_included)
    app.connect("source-read", print_refusals)


html_theme = "furo"
html_favicon = "_static/favicon.svg"
pygments_dark_style = "github-dark"
html_title = f"batchopt {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
