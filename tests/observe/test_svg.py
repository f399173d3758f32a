"""Hand-made SVG: well-formed, escaped, to scale."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_entrain.observe.svg import covering_ticks, drawing, number, tag, text, ticks
from lightning_entrain.observe.svg_figures import spread_figure, timeline_figure
from lightning_entrain.schedule.timeline import Timeline, TimelineRow
from lightning_entrain.schedule.types import Action

NS = "{http://www.w3.org/2000/svg}"


def test_markup_is_escaped():
    made = drawing(10, 5, [text(1, 2, "<&>")], title='a "quote" & <b>', description="", key="k")
    root = ET.fromstring(made)
    assert root.find(f"{NS}title").text == 'a "quote" & <b>'
    assert root.find(f"{NS}text").text == "<&>"
    assert root.get("viewBox") == "0 0 10 5"
    assert root.get("aria-labelledby") == "k-t k-d"


def test_numbers_are_short():
    assert [number(x) for x in (1.0, 1.25, 0.004, -0.001, 100.0)] == ["1", "1.25", "0", "0", "100"]
    assert tag("rect", x=1.0, class_="a", stroke_width=None) == '<rect x="1" class="a"/>'


@given(st.floats(1e-6, 1e9), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_ticks_are_round_and_within(largest, num):
    found = ticks(largest, num)
    assert found[0] == 0
    assert found[-1] <= largest * (1 + 1e-6)
    assert len(found) <= num + 1
    assert found[-1] + (found[1] if len(found) > 1 else largest * 2) > largest * (1 - 1e-6)


def boxes(svg, *classes):
    found = [e for e in ET.fromstring(svg).iter(f"{NS}rect") if e.get("class") in classes]
    return [(float(e.get("x")), float(e.get("width"))) for e in found]


def test_timelines_are_to_scale():
    actions = ["0F0", "1F0", "1B0", "0B0"]
    times = [(0, 10), (10, 20), (20, 40), (40, 60)]
    rows = [
        TimelineRow(Action.parse(a).stage, Action.parse(a), *t)
        for a, t in zip(actions, times, strict=True)
    ]
    timeline = Timeline(rows=tuple(sorted(rows, key=lambda r: (r.rank, r.start_ms))), num_ranks=2)
    svg = timeline_figure(timeline, num_encoder_stages=1, scale_ms=120, title="t", key="k")
    (first,), (last,) = boxes(svg, "ef"), boxes(svg, "lb")
    assert last[0] - first[0] == pytest.approx(2 * first[1], abs=0.02)
    assert last[1] == pytest.approx(2 * first[1], abs=0.02)
    titles = [e.text for e in ET.fromstring(svg).iter(f"{NS}title")]
    assert titles[1] == "0F0: 0.00 to 10.00 ms"
    assert "The step takes 60.0 ms" in svg
    assert "50 %, 50 %" in svg


def test_bars_have_the_heights_of_their_times():
    svg = spread_figure([1.0, 2.0, 4.0], module="llm", scale_ms=8, title="t", key="k")
    heights = [float(e.get("height")) for e in ET.fromstring(svg).iter(f"{NS}rect")]
    assert heights == pytest.approx([17, 34, 68], abs=0.02)
    assert "mean 2.33 ms" in svg
    empty = spread_figure([], module="llm", scale_ms=0, title="t", key="k")
    assert not list(ET.fromstring(empty).iter(f"{NS}rect"))


def test_covering_ticks_hold_all_values_between_them():
    assert covering_ticks(0.0, 59.0) == [0.0, 20.0, 40.0, 60.0]
    assert covering_ticks(-0.3, 0.9) == [-0.5, 0.0, 0.5, 1.0]
    assert covering_ticks(3.0, 3.0) == [3.0, 3.25, 3.5, 3.75, 4.0]
