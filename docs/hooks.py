"""Let pages link to files of the repository outside docs/: mkdocs copies these into the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()\.\./([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add every file that a page links to, and the pictures of the reports."""
    pages = [Path(config.docs_dir, file.src_uri) for file in files.documentation_pages()]
    found = {name for page in pages for _, name in LINK.findall(page.read_text("utf-8"))}
    for name in list(found):
        place = ROOT / name
        if place.suffix == ".md":
            found |= {
                str((place.parent / picture).relative_to(ROOT))
                for picture in re.findall(r"\]\((\w[\w./-]*\.png)\)", place.read_text("utf-8"))
                if (place.parent / picture).is_file()
            }
    for name in sorted(found):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links at the copies; a page of the repository itself links from its own root."""
    if page.file.generated_by:  # CONTRIBUTING.md, reports
        return re.sub(r"\]\((?!https?:)(?:docs/)([\w-]+\.md)", r"](\1", markdown)
    return LINK.sub(r"\1\2", markdown)
