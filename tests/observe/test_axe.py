"""axe-core finds nothing on any page, in light and dark, on a phone and on a desktop.

A check for developers, left out where Chromium or axe-core is missing: `npm pack axe-core`, unpack
`package/axe.min.js`, and set AXE_JS to its path.
"""

from __future__ import annotations

import pytest

from lightning_entrain.observe.compare_page import compare_page
from lightning_entrain.observe.report import report_page
from lightning_entrain.observe.run_page import run_page
from lightning_entrain.observe.run_record import RunRecord
from tests.observe.browser import audit, needs_axe
from tests.observe.test_report import comparison
from tests.observe.test_run_page import record

__all__ = ["comparison"]


@pytest.fixture(scope="module")
def pages(comparison):
    run = record()
    run.idle = [[5.0, 1.0, 1.0, 1.0] for _ in run.idle]
    return {
        "run": run_page(run),
        "bare run": run_page(RunRecord()),
        "runs compared": compare_page([run, run, RunRecord(name="empty")]),
        "policies simulated": report_page(comparison),
    }


@needs_axe
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_axe_finds_nothing(pages, width, dark, tmp_path):
    for name, page in pages.items():
        found = audit(page, tmp_path, width=width, dark=dark)
        assert found["violations"] == [], name
        assert found["passes"] > 10
        assert (found["dark"], found["width"]) == (dark, width)
        assert found["needed"] <= width, f"{name} scrolls sideways"


@needs_axe
def test_a_page_with_faults_is_found_out(tmp_path):
    page = (
        "<!doctype html><html><head><title>t</title></head><body><main><h1>t</h1>"
        '<p style="color:#ccc;background:#fff">pale</p><img src="data:,"></main></body></html>'
    )
    found = audit(page, tmp_path, width=375, dark=False)
    rules = {violation["rule"] for violation in found["violations"]}
    assert rules >= {"color-contrast", "html-has-lang", "image-alt"}
