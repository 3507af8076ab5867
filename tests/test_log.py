"""Text of strangers in the log: it can't steer a terminal, nor forge a line."""

import logging

from trainer.errors import ConfigError, message
from trainer.log import Lines, Terminal, log, log_to_terminal, stop_log
from trainer.run_dir import LogFile

EVIL = "a\x1b[2Jb\nERROR forged\x07"


def test_one_place_makes_text_printable(capsys, tmp_path):
    log_to_terminal(0)
    try:
        log.warning("%s", EVIL)
        log.addHandler(file := LogFile(tmp_path / "log"))
        file.setFormatter(Lines("%(levelname)s %(message)s"))
        log.warning("%s", EVIL)
        try:
            raise ValueError(EVIL)
        except ValueError:
            log.log(logging.ERROR, "failed", exc_info=True)
    finally:
        stop_log()
    shown, kept = capsys.readouterr().out, (tmp_path / "log").read_text()
    assert shown.startswith("warning: a?[2Jb?ERROR forged?\n" * 2)
    assert kept.startswith("WARNING a?[2Jb?ERROR forged?\nERROR failed\nTraceback")
    assert not {"\x1b", "\x07"} & set(shown + kept)
    assert isinstance(Terminal().formatter, Lines)


def test_errors_too():
    assert message(ConfigError(f"trainer.run_dir={EVIL}")) == "echelon: trainer.run_dir=a?[2Jb?ERROR forged?"
    trace = message(ValueError(EVIL))
    assert "\x1b" not in trace and trace.startswith("ValueError")


def test_a_traceback_ends_without_a_line_break_and_its_place_follows_at_once():
    error = ValueError("a\n")
    assert message(error) == "ValueError: a"
    error.place = "in step 3"  # pyright: ignore[reportAttributeAccessIssue]
    assert message(error) == "ValueError: a\n  in step 3"
