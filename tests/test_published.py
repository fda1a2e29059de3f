"""What a release shows elsewhere: its addresses, its README on PyPI, and its conda recipe."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.published import main, published, read_project

ROOT = Path(__file__).parent.parent
PLACE = "https://github.com/owner/name"

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="reads TOML")
needs_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a published tree has its addresses")


def filled_in(tree: Path) -> Path:
    """A copy of the files that are changed, with an address."""
    shutil.copy(ROOT / "README.md", tree)
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count("\nrepository = ") == 1
    (tree / "pyproject.toml").write_text(re.sub("\nrepository = .*", f'\nrepository = "{PLACE}"', text))
    return tree


@needs_toml
@pytest.mark.parametrize("given", ["", "https://github.com/<owner>/<name>", f"{PLACE}/"])
def test_an_address_that_was_not_filled_in_is_refused_with_what_to_write(given: str) -> None:
    with pytest.raises(
        ValueError, match=r"fill in `repository` of \[tool.batchopt\].* https://github.com/<owner>/<name>"
    ):
        read_project(f'[tool.batchopt]\nrepository = "{given}"')


def test_links_and_pictures_lead_into_the_repository_and_code_stays() -> None:
    page = "[a](docs/a.md#b) [c](#d)\n![e](f.png)\n[g](https://h.i)\n```md\n[j](k)\n```\n[l\nm](./n)[![o](p)](q)\n"
    blob, raw = f"{PLACE}/blob/v1.2.3", f"{PLACE}/raw/v1.2.3"
    expected = (
        f"[a]({blob}/docs/a.md#b) [c](#d)\n![e]({raw}/f.png)\n[g](https://h.i)\n```md\n[j](k)\n```\n"
        f"[l\nm]({blob}/n)[![o]({raw}/p)]({blob}/q)\n"
    )
    assert published(page, PLACE, "1.2.3") == expected


@needs_toml
@needs_checkout
def test_a_release_has_whole_addresses(tmp_path: Path) -> None:
    import tomllib

    tree = filled_in(tmp_path)
    main(str(tree), "1.2.3")
    project: dict[str, Any] = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Changelog"] == f"{PLACE}/blob/v1.2.3/CHANGELOG.md"
    assert "\npip install batchopt " in (tree / "README.md").read_text()
    prose = re.sub(r"^```.*?^```$", "", (tree / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)|(?:src|href|srcset)=\"([^\"]+)", prose)
    assert len(links) > 5 and not [link for pair in links for link in pair if link and "://" not in link]


@needs_toml
@needs_checkout
def test_the_recipe_has_the_dependencies_of_the_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sdist = filled_in(tmp_path) / "batchopt-1.2.3.tar.gz"
    sdist.write_bytes(b"content")
    main(str(tmp_path), "1.2.3", str(sdist))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert f"sha256: {hashlib.sha256(b'content').hexdigest()}" in lines and 'version: "1.2.3"' in lines
    assert "url: https://pypi.org/packages/source/b/batchopt/batchopt-1.2.3.tar.gz" in lines
    dependencies = read_project((tmp_path / "pyproject.toml").read_text())["project"]["dependencies"]
    for one in dependencies:
        name, lowest = one.split(">=")
        assert f"- {'pytorch' if name == 'torch' else name} >={lowest}" in lines
