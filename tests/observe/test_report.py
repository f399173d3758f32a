"""The report page stands alone, parses and says what it shows."""

import re
from html.parser import HTMLParser

import pytest
from hydra import compose, initialize_config_dir

from lightning_entrain.conf_path import conf_dir
from lightning_entrain.observe.report import report_page
from lightning_entrain.simulate_app import make_comparison, register_configs

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Reader(HTMLParser):
    """Checks nesting; collects tags, attributes and ids."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def comparison():
    register_configs()
    overrides = ["data.num_samples=400", "num_batches=1", "global_batch_size=128"]
    with initialize_config_dir(str(conf_dir() / "planning"), version_base="1.3"):
        config = compose("simulate", overrides=[*overrides, "policies=[fixed,dip,joint]"])
    return make_comparison(config, names={"model": "<model> & co", "data": "d"})


@pytest.fixture(scope="module")
def page(comparison):
    return report_page(comparison)


@pytest.fixture(scope="module")
def parsed(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def test_nothing_is_loaded(page, parsed):
    names = {name for name, _ in parsed.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for _, attributes in parsed.tags:
        assert not set(attributes) & {"src", "href", "xlink:href", "srcset", "onclick", "onload"}
    assert not re.search(r"url\(|@import|@font-face", page)
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}


def test_pictures_and_tables_can_be_read_out(parsed):
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    pictures = [a for name, a in parsed.tags if name == "svg" and "aria-hidden" not in a]
    assert len(pictures) == 1 + 3 * 3
    for attributes in pictures:
        assert attributes["role"] == "img"
        assert all(key in ids for key in attributes["aria-labelledby"].split())
    for name, attributes in parsed.tags:
        for key in (attributes.get("aria-labelledby") or "").split():
            assert key in ids, name
    tables = [name for name, _ in parsed.tags if name == "table"]
    assert len(tables) == 2 + 3
    scopes = [a.get("scope") for name, a in parsed.tags if name == "th"]
    assert set(scopes) == {"row", "col"}
    assert ("html", {"lang": "en"}) in parsed.tags
    assert sum(name == "h1" for name, _ in parsed.tags) == 1


def test_light_and_dark_have_the_same_colours(page):
    light, dark = re.findall(r":root\{([^}]*)\}", page)[:2]
    names = [set(re.findall(r"(--[a-z]+):", block)) for block in (light, dark)]
    assert names[0] == names[1]
    assert set(re.findall(r"var\((--[a-z]+)\)", page)) <= names[0]
    assert "prefers-color-scheme:dark" in page


def test_names_are_escaped_and_numbers_shown(page, parsed, comparison):
    assert "<model>" not in page
    text = " ".join(parsed.text)
    assert "<model> & co on d" in text
    for result in comparison.results:
        assert f"{result.iteration_ms:,.1f}" in text
        assert f"{result.encoder.std:.2f}" in text
    titles = re.findall(r"<rect class=\"[el][fbw]\"[^>]*><title>\d+[FBIW]", page)
    drawn = sum(len(own.timelines[own.slowest].rows) for own in comparison.results)
    assert len(titles) == drawn
