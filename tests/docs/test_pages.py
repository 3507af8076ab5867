"""Pages: their links lead to files, and each rule comes with its reason and its test."""

import re
from pathlib import Path

from trainer import errors

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("trainer/**/*.md")]
RULES = [ROOT / "docs" / f"{name}.md" for name in ("step", "communication", "data", "checkpoints", "launch")]


def test_links_lead_to_files() -> None:
    links = [
        (page, link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s#]+)|^\[[^\]]+\]: (\S+)$", page.read_text(), flags=re.MULTILINE)
    ]
    local = [(page, one or other) for page, (one, other) in links if "://" not in one + other]
    assert not [f"{page.relative_to(ROOT)}: {link}" for page, link in local if not (page.parent / link).exists()]


def test_labels_of_links_are_defined_and_used() -> None:
    for page in RULES:
        text = page.read_text()
        defined = set(re.findall(r"^\[(\w+)\]: ", text, flags=re.MULTILINE))
        assert defined == set(re.findall(r"\[(test_\w+)\](?!:)", text)), page.name


def test_each_rule_comes_with_its_reason_and_its_test() -> None:
    rules = [(page.name, block) for page in RULES for block in page.read_text().split("\n\n") if block[:2] == "**"]
    assert len(rules) > 50
    order = re.compile(r"\*\*.*\bReason\b.*\bTest:\s.*\.", flags=re.DOTALL)
    assert not [f"{name}: {block}" for name, block in rules if not order.fullmatch(block)]


def test_the_table_of_exit_codes_is_that_of_the_source() -> None:
    named = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE)
    assert {int(code) for code in rows} == named | {0, 1, 130}
