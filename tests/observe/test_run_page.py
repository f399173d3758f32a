"""The pages: self-contained, small, accessible, and without errors in a browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from lightning_entrain.observe.charts import Line, line_chart
from lightning_entrain.observe.compare_page import compare_page
from lightning_entrain.observe.run_page import run_page
from lightning_entrain.observe.run_record import RunRecord
from lightning_entrain.observe.style import RUN_STYLE as STYLE
from lightning_entrain.schedule.one_f_one_b import build_1f1b
from lightning_entrain.schedule.timeline import Timeline, TimelineRow
from lightning_entrain.schedule.types import Placement, RowCounts

VOID = {"meta", "link", "br"}


def record(num_replicas=1, num_microbatches=4, num_steps=20):
    placement = Placement.one_per_rank(2, 2)
    count = num_microbatches
    rows = RowCounts(
        encoder=(8,) * count, segments={(k, k): 2 for k in range(count)}, llm=(5,) * count
    )
    schedule = build_1f1b(placement, rows)
    timeline = Timeline.side_by_side(
        Timeline(
            rows=tuple(
                TimelineRow(rank, action, float(i), i + 0.9)
                for rank, own in enumerate(schedule.ranks)
                for i, action in enumerate(own)
            ),
            num_ranks=4,
        )
        for _ in range(num_replicas)
    )
    keys = ["train/loss", "throughput/tokens_per_sec", "pipeline/bubble_ratio"]
    keys += [f"variability/{part}{m}_cv" for m in ("encoder", "llm") for part in ("", "fixed_")]
    outcome = {"step_ms": 2.0, "encoder_cv": 0.1, "llm_cv": 0.2}
    return RunRecord(
        name="run <1>",
        policy="joint",
        schedule="1f1b",
        layout="2 + 2",
        num_steps=num_steps,
        environment={"torch": "2"},
        plan={"dp": 1, "stages": []},
        series={key: [(s, 1.0 / (s + 1)) for s in range(num_steps)] for key in keys},
        loads={"encoder": [[1.0, 2.0]] * count, "llm": [[2.0, 3.0]] * count},
        rank_names=[f"rank {r}" for r in range(timeline.num_ranks)],
        measured=timeline,
        simulated=timeline,
        idle=[[5.0, 1.0, 1.0, 1.0]] * timeline.num_ranks,
        policies={"this run": outcome, "fixed": {**outcome, "step_ms": 3.0}},
        num_compared=4,
        memory_gib=[1.0] * timeline.num_ranks,
        advice=["Do <this>."],
    )


class Checker(HTMLParser):
    """Structure of a page: nesting, names of pictures, order of headings, what it loads."""

    def __init__(self, text):
        super().__init__()
        self.open, self.problems, self.headings, self.ids = [], [], [], []
        self.feed(text)
        self.problems += [f"{tag} is not closed" for tag in self.open]

    def handle_startendtag(self, tag, attributes):
        self.check(tag, dict(attributes))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.check(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes something else")

    def check(self, tag, attributes):
        if tag == "script" or any(name.startswith("on") for name in attributes):
            self.problems.append(f"{tag} runs a script")
        for name in ("src", "href", "xlink:href"):
            value = attributes.get(name)
            if value and not value.startswith(("#", "data:")):
                self.problems.append(f"{tag} loads {value}")
        named = attributes.get("role") == "img" and attributes.get("aria-label")
        if tag == "svg" and attributes.get("aria-hidden") != "true" and not named:
            self.problems.append("a picture has no name")
        if tag == "th" and "scope" not in attributes:
            self.problems.append("a table heading has no scope")
        if attributes.get("tabindex") == "0" and not attributes.get("aria-label"):
            self.problems.append("a part to focus has no name")
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if "id" in attributes:
            self.ids.append(attributes["id"])


def check(text):
    found = Checker(text)
    assert found.problems == []
    assert found.headings[0] == 1
    assert found.headings.count(1) == 1
    steps = zip(found.headings, found.headings[1:], strict=False)
    assert all(b - a <= 1 for a, b in steps)
    assert len(set(found.ids)) == len(found.ids)
    assert '<html lang="en">' in text
    assert "<main" in text
    assert "nan" not in text.lower().replace("nano", "")
    return found


def test_structure_and_content():
    text = run_page(record())
    check(text)
    assert "Do &lt;this&gt;." in text
    assert "run &lt;1&gt;" in text
    assert "+50%" in text  # 3 ms over 2 ms
    for title in ("What would help", "Variability", "Load per microbatch", "Timeline", "Memory"):
        assert f"<h2>{title}</h2>" in text
    check(compare_page([record(), record(), RunRecord(name="empty")]))
    check(run_page(RunRecord()))


def test_title_and_environment_tell_what_was_trained():
    run = record()
    assert "<h1>run &lt;1&gt;</h1>" in run_page(run)
    run.environment |= {"model": "tiny", "data": "charts", "seed": "42"}
    text = run_page(run)
    assert "<h1>tiny on charts, assignment joint, run &lt;1&gt;</h1>" in text
    assert "<td>seed</td>" in text


def test_single_values_are_points_in_the_middle_and_rare_ones_are_not_joined():
    one = line_chart("A", [Line("a", [(7, 0.5)])], unit="")
    (x,) = re.findall(r'<circle class="f1" cx="([\d.]+)"', one)
    assert re.findall(r'<text x="([\d.]+)"[^>]*>7</text>', one) == [f"{float(x):g}"]
    assert not re.search(r">[68]</text>", one)
    rare = Line("measured", [(3, 0.5), (20, 0.25)], dots=True)
    two = line_chart("A", [Line("a", [(0, 1.0), (20, 1.0)]), rare], unit="")
    assert two.count('<circle class="f2"') == 3  # two points, and the key
    assert "line s2" not in two


def test_a_large_run_stays_below_a_megabyte():
    text = run_page(record(num_replicas=16, num_microbatches=64, num_steps=4096))
    check(text)
    assert len(text.encode()) < 1_000_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(scheme):
    """At least 4.5 to 1 for text, 3 to 1 for lines and bars, on cards (WCAG 2.2, AA)."""
    light, dark = STYLE.split("@media (prefers-color-scheme:dark)")
    found = dict(re.findall(r"--(\w+):\s*(#\w+)", light))
    if scheme == "dark":
        found.update(dict(re.findall(r"--(\w+):\s*(#\w+)", dark.split("}}")[0])))
    for name, least in [("ink", 4.5), ("soft", 4.5), ("one", 4.5)] + [
        (n, 3.0) for n in ("two", "three", "four")
    ]:
        for ground in ("card", "page"):
            assert contrast(found[name], found[ground]) >= least, (name, ground)


def contrast(a, b):
    def luminance(colour):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_browser_has_nothing_to_complain_and_phones_do_not_scroll_sideways(tmp_path):
    """A probe on the page reports its width; the console stays empty; no host is reachable."""
    probe = (
        "<script>document.title=document.documentElement.scrollWidth+' '+innerWidth+' '+"
        "[...document.querySelectorAll('svg[role=img]')].filter(s=>{const r=s"
        ".getBoundingClientRect();return r.width<1||r.height<1}).length</script>"
    )
    (tmp_path / "page.html").write_text(run_page(record()) + probe)
    for width in (500, 1280):  # headless Chromium is at least 500 wide
        done = subprocess.run(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--enable-logging=stderr",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={width},2000",
                "--dump-dom",
                f"file://{tmp_path / 'page.html'}",
            ],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "CONSOLE" not in done.stderr
        title = re.search("<title>(.*?)</title>", done.stdout)[1]
        content, window, invisible = map(int, title.split())
        assert content <= window
        assert invisible == 0
