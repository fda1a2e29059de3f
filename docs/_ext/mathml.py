"""Formulas as MathML, which browsers draw by themselves: nothing is fetched and nothing runs."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert


def visit(self: Any, node: Any) -> None:
    """Write a formula, within a line or on lines of its own."""
    block = isinstance(node, nodes.math_block)
    self.body.append(convert(node.astext().strip(), display="block" if block else "inline"))
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (visit, None), (visit, None))
    return {"parallel_read_safe": True}
