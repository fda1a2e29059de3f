"""A page of the reference for each member of `BatchOptimizer`, and links there from the tables that name them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from sphinx.addnodes import desc_signature

import batchopt

CLASS = batchopt.BatchOptimizer
MEMBERS = {name: inspect.getattr_static(CLASS, name) for name in dir(CLASS) if not name.startswith("_")}
TABLES = {"api/optimizer": "", "extending": "opt."}  # pages, and what members are written with there


def page(title: str, directive: str) -> str:
    """Return a page of one object."""
    return f"# {title}\n\n```{{eval-rst}}\n.. {directive}\n```\n"


def pages() -> dict[str, str]:
    """Return the page of the class, and that of each member, by its file's name."""
    found = {"BatchOptimizer": page("BatchOptimizer(...)", "autoclass:: batchopt.BatchOptimizer")}
    for name, member in MEMBERS.items():
        title, kind = (name, "property") if isinstance(member, property) else (f"{name}()", "method")
        found[name] = page(title, f"auto{kind}:: batchopt.BatchOptimizer.{name}")
    return found


def write_pages(app: Any) -> None:
    """Write them where they are missing or others."""
    folder = Path(app.srcdir) / "api" / "members"
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.glob("*.md"):
        if path.stem not in pages():
            path.unlink()


def link_members(app: object, name: str, source: list[str]) -> None:
    """Have the names in the first column of a page's tables lead to their pages."""
    if name not in TABLES:
        return
    folder = "api/members" if name == "extending" else "members"

    def linked(code: re.Match[str]) -> str:
        member = re.match(r"\w+", code[1].removeprefix(TABLES[name]))
        known = member is not None and code[1].startswith(TABLES[name]) and member[0] in MEMBERS
        return f"[{code[0]}]({folder}/{member[0]}.md)" if member is not None and known else code[0]

    def row(line: re.Match[str]) -> str:
        return re.sub(r"`([^`]+)`", linked, line[0])

    source[0] = re.sub(r"^\| `[^|]*\|", row, source[0], flags=re.MULTILINE)
    if name == "api/optimizer":
        entries = "\n".join(f"members/{entry}" for entry in pages())
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"


def name_definitions(app: object, doctree: Any) -> None:
    """Have `sphinx.ext.viewcode` look for a method that is inherited in the class that defines it; and give objects the
    anchors that its pages link back to, which take the module's first name for all that is in it."""
    for signature in doctree.findall(desc_signature):
        name = signature.get("fullname", "").removeprefix(f"{CLASS.__name__}.")
        for kind in CLASS.__mro__ if name in MEMBERS else ():
            if name in vars(kind):
                signature["module"], signature["fullname"] = kind.__module__, f"{kind.__name__}.{name}"
                signature["ids"].append(f"{kind.__module__}.{kind.__name__}.{name}")
                break
        anchor = f"batchopt.{signature.get('fullname')}"
        if signature.get("module", "batchopt") != "batchopt" and anchor not in signature["ids"]:
            signature["ids"].append(anchor)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("source-read", link_members)
    app.connect("doctree-read", name_definitions, priority=400)  # before viewcode
    return {"parallel_read_safe": True}
