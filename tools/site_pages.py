"""A hook of mkdocs.yml: pages outside docs/ are on the site too, and links lead to where their targets stand there."""

from __future__ import annotations

import json
import re
from os.path import normpath, relpath
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "recipes/README.md": "recipes.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CITATION.cff": "citation.md",
    "docs/notebooks/routing.ipynb": "notebook.md",
}
"""Files that are no pages of docs/, and what they are called on the site."""
_SOURCES = {page: source for source, page in PAGES.items()}
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that stand elsewhere."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=_text(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Returns the text with links as the site has them; of links to other files of the repository their text stays."""
    at = page.file.src_uri
    source = _SOURCES.get(at, f"docs/{at}")
    blocks = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        block if block.startswith("```") else _LINK.sub(lambda link: _link(link, source, at), block) for block in blocks
    )


def _link(link: re.Match[str], source: str, page: str) -> str:
    text, target = link.groups()
    file, hash_, anchor = target.partition("#")
    if not file or re.match(r"\w+:", target):
        return link[0]
    path = normpath(Path(source).parent / file)
    on_site = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if on_site is None or not (ROOT / path).is_file():
        return text
    return f"[{text}]({relpath(on_site, Path(page).parent)}{hash_}{anchor})"


def _text(path: Path) -> str:
    """Returns a file as a page."""
    if path.suffix == ".md":
        return path.read_text()
    if path.suffix != ".ipynb":
        return f"# Citation\n\n```yaml\n{path.read_text()}```\n"
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"
