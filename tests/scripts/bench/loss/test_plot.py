"""The plot has a line for each method, on logarithmic time."""

from xml.etree import ElementTree

import pytest

from scripts.bench.loss.plot import plot


def test_the_plot_is_xml_with_a_line_and_a_word_for_each_method() -> None:
    given = {"ddp": [(100.0, 8.0), (200.0, 6.0), (300.0, 5.0)], "dgc": [(10.0, 7.0), (20.0, 4.5), (30.0, 4.0)]}
    root = ElementTree.fromstring(plot("a <title>", given, time_s=30.0, loss=5.0))
    svg = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{svg}svg" and root.findtext(f"{svg}title") == "a <title>"
    words = {text.text for text in root.iter(f"{svg}text")}
    assert {*given, "seconds of training", "validation loss", "100"} <= words
    lines = [
        [tuple(map(float, point.split(","))) for point in each.attrib["points"].split()]
        for each in root.iter(f"{svg}polyline")
    ]
    assert list(map(len, lines)) == [3, 3]
    for line in lines:
        assert all(60 <= x <= 670 and 20 <= y <= 410 for x, y in line)
        assert line == sorted(line), "later is to the right, and a smaller loss is below"
    ddp, dgc = lines
    assert ddp[0][0] - dgc[0][0] == pytest.approx(ddp[1][0] - dgc[1][0], abs=0.2), "the same factor is the same way"
