"""The differences between the repository and a release: whole addresses, and a conda recipe; for `scripts/release`."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

# What a distribution is called by conda-forge, where that differs.
CONDA = {"torch": "pytorch"}
# How it is installed: from a checkout, and from PyPI.
INSTALLING = re.compile(r"^pip install -c constraints\.txt \. .*$", re.MULTILINE)
INSTALL = "pip install batchopt    # on Linux torch brings gigabytes of CUDA, unless its CPU build is there"
RECIPE = """\
package:
  name: {name}
  version: "{version}"

source:
  url: https://pypi.org/packages/source/{initial}/{name}/{sdist}
  sha256: {digest}

build:
  noarch: python
  number: 0
  script: python -m pip install . -vv --no-deps --no-build-isolation

requirements:
  host:
    - python {python}
    - pip
{build}
  run:
    - python {python}
{run}

test:
  imports:
    - {name}
  requires:
    - pip
  commands:
    - pip check

about:
  home: {repository}
  license: {license}
  license_file: LICENSE
  summary: {summary}

# conda-forge also asks for `extra: recipe-maintainers`, a list of accounts.
"""


def read_project(text: str) -> dict[str, Any]:
    """Return the tables of pyproject.toml. Raises `ValueError` unless the address of the repository is filled in."""
    import tomllib  # since Python 3.11

    found = tomllib.loads(text)
    repository = found["tool"]["batchopt"]["repository"]
    if not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]*\w", repository):
        raise ValueError(
            "pyproject.toml: fill in `repository` of [tool.batchopt], the address of the public repository, as "
            f"https://github.com/<owner>/<name>; it is {repository!r}"
        )
    return found


def published(page: str, repository: str, version: str) -> str:
    """Return Markdown that installs from PyPI, and whose relative links and pictures lead into the repository at the
    tag of the version, outside of blocks of code."""

    def whole(link: re.Match[str]) -> str:
        kind = "raw" if link["picture"] else "blob"
        return f"{link[0][: -len(link['target'])]}{repository}/{kind}/v{version}/{link['target'].removeprefix('./')}"

    relative = re.compile(r"(?P<picture>!\[[^\]]*)?\]\((?P<target>(?!#|[a-z]+:)[^)\s]+)")
    parts = re.split(r"(^```.*?^```$)", INSTALLING.sub(INSTALL, page), flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else relative.sub(whole, part) for part in parts)


def addresses(repository: str, version: str) -> str:
    """Return the table of pyproject.toml with the addresses that PyPI shows."""
    urls = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/v{version}/docs/index.md",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items())


def recipe(found: dict[str, Any], version: str, sdist: str, digest: str) -> str:
    """Return the meta.yaml of conda-build for an sdist on PyPI with this SHA-256."""
    project = found["project"]

    def listed(requirements: list[str]) -> str:
        pairs = [re.fullmatch(r"([\w.-]+)(.*)", one.replace(" ", "")) for one in requirements]
        return "\n".join(f"    - {CONDA.get(pair[1], pair[1])} {pair[2]}".rstrip() for pair in pairs if pair)

    return RECIPE.format(
        **{key: project[key] for key in ("name", "license")},
        **{"version": version, "sdist": sdist, "digest": digest, "initial": project["name"][0]},
        python=project["requires-python"],
        build=listed(found["build-system"]["requires"]),
        run=listed(project["dependencies"]),
        repository=found["tool"]["batchopt"]["repository"],
        summary=json.dumps(project["description"]),
    )


def main(tree: str, version: str = "", sdist: str = "") -> None:
    """Check the address; with a version, write whole ones into a copy of the tree; with its sdist, print a recipe."""
    path, readme = Path(tree, "pyproject.toml"), Path(tree, "README.md")
    found = read_project(path.read_text())
    if sdist:
        print(recipe(found, version, Path(sdist).name, hashlib.sha256(Path(sdist).read_bytes()).hexdigest()), end="")
    elif version:
        repository = found["tool"]["batchopt"]["repository"]
        path.write_text(path.read_text() + addresses(repository, version))
        readme.write_text(published(readme.read_text(), repository, version))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(f"release: {error}")
