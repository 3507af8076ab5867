"""The documentation site: a strict build, links that lead somewhere, nothing loaded from elsewhere, two schemes."""

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support import browser, checkout
from support.cli import ROOT

from scripts import site_pages

pytest.importorskip("mkdocs")
pytestmark = pytest.mark.slow  # .ci/run builds the site, too
QUIET = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement
LOADS = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}


def build(folder: Path, out: Path) -> "subprocess.CompletedProcess[str]":
    # With --quiet a strict build fails at nothing.
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    return subprocess.run(words, cwd=folder, env=QUIET, capture_output=True, text=True, timeout=120)


class Page(HTMLParser):
    """What a page loads, where it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        if tag in LOADS and given.get(LOADS[tag]) and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given[LOADS[tag]])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def parsed(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


def test_nothing_is_loaded_from_elsewhere(site: Path, parsed: dict[Path, Page]) -> None:
    assert not {load for page in parsed.values() for load in page.loads if urlsplit(load).netloc}
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import )[\"']?https?:[^)\"']*", styles)


def test_every_link_leads_to_a_file_and_an_anchor(site: Path, parsed: dict[Path, Page]) -> None:
    wrong = []
    for path, page in parsed.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("javascript:") or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (parts.fragment and parts.fragment not in parsed[target].anchors | {""}):
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert not wrong, "\n".join(wrong)


def test_every_page_and_card_is_in_the_navigation_and_the_search(site: Path, parsed: dict[Path, Page]) -> None:
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    searched = {entry["location"].partition("#")[0] or "index.html" for entry in found}
    places = {place.replace(".md", ".html") for place in site_pages.pages().values()}
    assert len(places) > 50
    assert not places - searched
    assert not places - {link.partition("#")[0] for link in parsed[site / "index.html"].links} - {"index.html"}


def test_a_list_keeps_what_belongs_to_an_item() -> None:
    text = "- one\n  more\n\n  ```bash\n  ls\n  ```\n1. two\n   - three\n\nfree\n  text"
    expected = "- one\n    more\n\n    ```bash\n    ls\n    ```\n1. two\n    - three\n\nfree\n  text"
    assert site_pages.indent(text) == expected


@pytest.mark.slow
@pytest.mark.parametrize("text", ["# Stray\n", "[gone](gone.md)\n", "[gone](design.md#gone)\n"])
def test_a_stray_page_and_a_broken_link_fail_the_build(text: str, tmp_path: Path) -> None:
    checkout.copy(tmp_path)
    page = "stray.md" if "Stray" in text else "plan.md"
    with (tmp_path / "docs" / page).open("a") as file:
        file.write(f"\n{text}")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert page in done.stdout + done.stderr


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.skipif(not browser.CHROMIUM, reason="no chromium")
def test_pages_and_search_in_a_browser(site: Path, address: str) -> None:
    """Nothing is asked of another host, no page is wider than the screen, and the search finds a callback."""
    with browser.opened() as tab:
        for page in ("index.html", "choose.html", "composition.html", "api.html", "callbacks/shard.html"):
            for width, dark in ((1400, False), (390, True)):
                tab.visit(f"{address}/{page}", width, dark=dark)
                assert not tab.errors, (page, tab.errors)
                assert tab.run("document.documentElement.scrollWidth") <= width, (page, width)
                scheme = tab.run("document.body.getAttribute('data-md-color-scheme')")
                assert scheme == ("slate" if dark else "default"), page
                assert hosts(tab) == {urlsplit(address).netloc}, tab.requests
                tab.run("localStorage.clear()")  # which keeps the scheme
        tab.visit(f"{address}/index.html", 1400)
        tab.run("document.querySelector('.md-search__input').focus()")
        tab.call("Input.insertText", text="powersgd")
        found = "document.querySelectorAll('.md-search-result__item').length"
        tab.run(f"new Promise((done) => {{ const look = () => {found} ? done(1) : setTimeout(look, 50); look() }})")
        assert "grad_compress" in tab.run("document.querySelector('.md-search-result__list').textContent")
        assert hosts(tab) == {urlsplit(address).netloc}, tab.requests


@pytest.mark.slow
@pytest.mark.skipif(not browser.CHROMIUM, reason="no chromium")
def test_the_search_answers_newcomers_questions(address: str) -> None:
    """Each question of the page, typed as keywords, leads there or to the page that explains it."""
    answers = questions((ROOT / "docs" / "how_do_i.md").read_text())
    assert len(answers) >= 40
    missed = {}
    with browser.opened() as tab:
        tab.visit(f"{address}/index.html", 1400)
        tab.run("document.querySelector('.md-search__input').focus()")
        for words, pages in answers.items():
            found = search(tab, words)
            if not pages & set(found[:3]):
                missed[words] = found[:3]
    assert not missed, "\n".join(f"{words}: {found}" for words, found in missed.items())


def questions(page: str) -> dict[str, set[str]]:
    """Return the keywords of each question, and the pages that answer it."""
    found = {}
    for part in page.split("\n## ")[1:]:
        heading, _, text = part.partition("\n")
        words = re.sub(
            r"How do I|\b(a|an|the|my|own|or|with|it|on|to|of|that|does|is|into|from)\b|[?:,&()`]", " ", heading
        )
        links = re.findall(r"\]\((?!http)([^)#]+)", text)
        pages = {re.sub(r"^(?:\.\./trainer/.*?([a-z_]+)(?:/README)?|(\w+))\.md$", place, link) for link in links}
        found[" ".join(words.split())] = {"how_do_i.html", *pages}
    return found


def place(link: re.Match[str]) -> str:
    return f"callbacks/{link[1]}.html" if link[1] else f"{link[2]}.html"


def search(tab: browser.Tab, words: str) -> list[str]:
    """Type words into the site's search; return the pages that it lists, best first."""
    box, item = "document.querySelector('.md-search__input')", "document.querySelectorAll('.md-search-result__link')"
    tab.run(f"{box}.focus(); {box}.value = {json.dumps(words)}; {box}.dispatchEvent(new Event('keyup'))")
    tab.run(
        f"new Promise((done) => {{ let before = '', turns = 0; const look = () => {{"
        f" const now = [...{item}].map((each) => each.href).join();"
        f" if ((now && now === before) || ++turns > 20) done(1); else {{ before = now; setTimeout(look, 100); }} }};"
        " setTimeout(look, 400) })"
    )
    links: list[str] = tab.run(f"[...{item}].map((each) => each.href)")
    return list(dict.fromkeys(urlsplit(link).path.lstrip("/") for link in links))


def hosts(tab: browser.Tab) -> set[str]:
    return {urlsplit(each).netloc for each in tab.requests if each.startswith("http")}
