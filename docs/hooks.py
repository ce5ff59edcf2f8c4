"""Let pages link to files of the repository outside docs/: mkdocs copies these into the site.

The README is the site's first page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"(\]\()\.\./([^)#\s]+)")
FROM_ROOT = re.compile(r"(\]\()(?!https?:|docs/|#)([^)#\s]+)")
FIGURE = re.compile(r'(?:src|srcset)="\.\./([^"]+)"')  # it leads there from a page of the site, too
PICTURE = re.compile(r"\]\((\w[\w./-]*\.png)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README, every file that a page links to, and the pictures of the reports."""
    readme = (ROOT / "README.md").read_text("utf-8")
    pages = [Path(config.docs_dir, file.src_uri) for file in files.documentation_pages()]
    texts = [page.read_text("utf-8") for page in pages]
    found = {name for text in texts for _, name in OUTSIDE.findall(text)}
    found |= {name for text in texts for name in FIGURE.findall(text)}
    found |= {name for _, name in FROM_ROOT.findall(readme)}
    for name in list(found):
        place = ROOT / name
        if place.suffix == ".md" and place.parent != ROOT:  # a report
            pictures = PICTURE.findall(place.read_text("utf-8"))
            found |= {str((place.parent / one).relative_to(ROOT)) for one in pictures}
    files.append(File.generated(config, "index.md", content=readme))
    for name in sorted(found):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links at where the files are in the site."""
    if page.file.generated_by:  # the README, CONTRIBUTING.md, reports
        return markdown.replace("](docs/", "](")
    return OUTSIDE.sub(r"\1\2", markdown)
