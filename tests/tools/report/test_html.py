"""No text becomes HTML, wherever it stands."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from trainer.tools.report.html import Html, join, script_json, tag

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"' &amp; <!--"


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.values, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.values += [value for _, value in attrs]

    def handle_data(self, data) -> None:
        self.texts.append(data)


@given(st.one_of(st.just(HOSTILE), st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]))))
def test_texts_and_attributes_come_back_as_they_were(text):
    parsed = Parsed(tag("p", text, title=text))
    assert parsed.tags == ["p"] and parsed.values == [text] and "".join(parsed.texts) == text


def test_pieces_that_are_html_stay():
    assert tag("p", tag("b", "<"), None, Html("<br>"), 3) == "<p><b>&lt;</b><br>3</p>"
    assert tag("input", checked=True, disabled=False, value=None, data_run=1, class_="a") == (
        '<input checked data-run="1" class="a">'
    )
    assert join("<", Html("<i>")) == "&lt;<i>"


def test_json_can_not_end_its_script():
    text = script_json(f'["{HOSTILE[:20]}", "\u2028"]')
    assert not set("<>&\u2028") & set(text)
