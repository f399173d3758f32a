"""Pages in a real browser: axe-core's findings, where Chromium and axe-core are installed."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
AXE_JS = os.environ.get("AXE_JS", "")

needs_axe = pytest.mark.skipif(
    not (CHROMIUM and AXE_JS and Path(AXE_JS).is_file()),
    reason="needs Chromium, and AXE_JS with the path of axe-core's axe.min.js",
)

# The page stands in a frame as wide as the window that is tested: Chromium's own has a least width.
_FRAME = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Test</title></head>
<body style="margin:0"><iframe title="page" style="border:0;width:{width}px;height:{height}px"
srcdoc="{page}"></iframe><pre id="found"></pre><script>
addEventListener("message", event => {{
  document.getElementById("found").textContent = "FOUND" + btoa(event.data) + "END";
}});
</script></body></html>"""

_RUN = """<script>{axe}</script><script>
addEventListener("load", () => {{
  document.querySelectorAll("details").forEach(part => part.open = true);
  const place = node => node.html.slice(0, 200) + " " + node.failureSummary;
  const told = v => ({{rule: v.id, impact: v.impact, nodes: v.nodes.slice(0, 5).map(place)}});
  const tell = result => parent.postMessage(JSON.stringify({{
    violations: result.violations.map(told),
    passes: result.passes.length,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    width: innerWidth,
    needed: document.documentElement.scrollWidth,
  }}).replace(/[^ -~]/g, "?"), "*");
  axe.run(document, {{resultTypes: ["violations"]}}).then(tell);
}});
</script></body>"""


def audit(page: str, folder: Path, *, width: int, dark: bool) -> dict[str, Any]:
    """What axe-core finds on a page, with all its details unfolded.

    Args:
        page: HTML.
        folder: For the files of the test.
        width: Of the window, CSS pixels.
        dark: Whether the user asks for dark pages.

    Returns:
        ``violations`` (rule, impact, places), the number of ``passes``, whether the page was
        ``dark``, the window's ``width``, and the width that is ``needed``.
    """
    script = _RUN.format(axe=Path(AXE_JS).read_text(encoding="utf-8"))
    assert page.count("</body>") == 1
    page = page.replace("</body>", script)
    path = folder / "frame.html"
    path.write_text(_FRAME.format(width=width, height=900, page=html.escape(page)), "utf-8")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        f"--window-size={max(width, 600)},1000",
        "--virtual-time-budget=60000",
        "--dump-dom",
        path.as_uri(),
    ]
    text = subprocess.run(command, capture_output=True, text=True, timeout=100).stdout
    found = re.search(r"FOUND(.*?)END", text)
    assert found is not None, "axe-core did not end"
    result: dict[str, Any] = json.loads(base64.b64decode(found[1]))
    return result
