"""What a person reads on a terminal, in a log file and under --quiet."""

import io
import re
import sys
import time

import pytest
import torch
from limits import wait_until
from tiny_run import finish, launch, make_target, write_recipe

from eagle3.console import (
    PLAIN,
    RED,
    YELLOW,
    Console,
    Progress,
    Warned,
    data_size,
    memory_size,
    tell_error,
    waiting,
    without_passwords,
)
from eagle3.errors import UserError, run_command

STEP = (
    "step 1/420  loss 21.0495  acceptance 0.009  rate 1.36e-04  norm 41.685  1,478 tokens/s  0.7 GiB  4m20s left  "
    "0.51 0.42 0.33"
)
PROSE = "recipe: data names demo_answers, but model.target is 'other'; name conversations of yours, or leave them out"


def test_a_size_has_the_unit_that_fits_it():
    assert [data_size(size) for size in (512, 36_200, 3.3e6, 12.4e9, 2.4e15)] == [
        *("512 bytes", "36.2 kB", "3.3 MB", "12.4 GB", "2,400.0 TB")
    ]
    assert [memory_size(size) for size in (0, 1023, 1024, 2**20, 2.4 * 2**30)] == [
        *("0 bytes", "1023 bytes", "1.0 KiB", "1.0 MiB", "2.4 GiB")
    ]


class Clock:
    """A clock that only advances when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.setattr("eagle3.console.QUIET_SECONDS", 2.0)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


# Progress
# -----------------------------------------------------------------------------------------------------------------


def test_what_takes_less_than_two_seconds_says_nothing():
    clock, lines = Clock(), []
    with waiting(lines.append, "loading"):
        pass
    progress = Progress(lines.append, "reading", 100, "rows", clock)
    for _ in range(100):
        clock.now += 0.0199
        progress.advance()
    assert lines == []


def test_a_long_step_says_how_far_it_is_at_which_rate_what_is_left_and_its_end():
    clock, lines = Clock(), []
    progress = Progress(lines.append, "reading", 1000, "rows", clock)
    for second in range(1, 11):
        clock.now += 1.0
        progress.at(100 * second, extra=f"{second} errors")
    assert lines == [
        "reading: 200/1,000 rows, 2 errors, 100 rows/s, 0m08s left",
        "reading: 700/1,000 rows, 7 errors, 100 rows/s, 0m03s left",
        "reading: 1,000/1,000 rows, 10 errors, 100 rows/s, 0m10s in all",
    ]


def test_of_a_step_of_unknown_length_no_time_is_promised():
    clock, lines = Clock(), []
    progress = Progress(lines.append, "streaming", None, "rows", clock)
    for _ in range(4):
        clock.now += 1.5
        progress.advance()
    progress.end()
    assert lines == ["streaming: 2 rows, 0.67 rows/s", "streaming: 4 rows, 0.67 rows/s, 0m06s in all"]


def test_what_took_no_time_says_nothing_about_the_time_that_is_left():
    clock, lines = Clock(), []
    progress = Progress(lines.append, "asking", 1100, "rows", clock)
    clock.now += 10
    progress.at(1000, free=1000)
    clock.now += 10
    progress.at(1020, free=1000)
    assert lines == ["asking: 1,000/1,100 rows", "asking: 1,020/1,100 rows, 1 rows/s, 1m20s left"]


def test_a_day_takes_some_thousands_of_lines_and_is_never_silent_for_more_than_half_a_minute():
    clock, times = Clock(), []
    progress = Progress(lambda line: times.append(clock.now), "capturing", 10**9, "tokens", clock)
    for _ in range(24 * 60 * 60):
        clock.now += 1.0
        progress.advance()
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert times[0] == 102.0 and min(gaps) == 5.0 and max(gaps) <= 31.0 and 2500 < len(times) < 3000


def test_a_wait_is_told_of_when_it_lasts_and_when_it_is_over(monkeypatch):
    monkeypatch.setattr("eagle3.console.QUIET_SECONDS", 0.05)
    monkeypatch.setattr("eagle3.console.FIRST_GAP", 0.05)
    lines = []
    with waiting(lines.append, "loading"):
        wait_until(lambda: len(lines) >= 2)
    assert lines[0] == "loading" and re.fullmatch(r"loading: 0m\d\ds so far", lines[1])
    assert re.fullmatch(r"loading: took 0m\d\ds", lines[-1])
    lines.clear()
    with pytest.raises(ValueError), waiting(lines.append, "loading"):
        wait_until(lambda: lines)
        raise ValueError  # which will be reported; how long it took does not matter
    assert lines and not lines[-1].startswith("loading: took")


# Lines
# --------------------------------------------------------------------------------------------------------------------


def speak(quiet: bool = False) -> None:
    console = Console(speaks=True, quiet=quiet)
    console(STEP)
    console.warn(PROSE)
    console(Warned("from a function that can only say"))
    console.result("acceptance length 2.42")
    tell_error(PROSE)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", ""), ("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_gets_whole_lines_and_colours_unless_the_user_wants_none(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    speak()
    text = screen.getvalue()
    yellow, red, plain = ("", "", "") if value else (YELLOW, RED, PLAIN)
    assert f"] {STEP}\n" in text and f"{red}error:{plain} {PROSE}\n" in text
    assert f"{yellow}warning:{plain} {PROSE}\n{yellow}warning:{plain} from a function" in text
    assert ("\033" in text) == (not value)


def test_a_log_gets_whole_lines_and_no_escape_codes(capsys):
    speak()
    streams = capsys.readouterr()
    assert re.fullmatch(rf"\[ +0m\d\ds\] {re.escape(STEP)}\n\[ +0m\d\ds\] acceptance length 2.42\n", streams.out)
    assert streams.err == f"warning: {PROSE}\nwarning: from a function that can only say\nerror: {PROSE}\n"


def test_quiet_leaves_results_warnings_and_errors(capsys):
    speak(quiet=True)
    streams = capsys.readouterr()
    assert streams.out == "acceptance length 2.42\n" and streams.err.count("\n") == 3


def test_only_the_first_rank_speaks_but_every_rank_fails_aloud(capsys):
    console = Console(speaks=False)
    console("hello")
    console.result("42")
    console.warn("careful")
    tell_error("gone")
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err == "error: gone\n"


def test_text_that_would_control_the_terminal_is_escaped(capsys):
    """Titles and clipboards are set by OSC 0 and 52; then a cleared screen, C1 controls, a line that overwrites itself,
    text that runs backwards, half of a surrogate pair."""
    hostile = "\033]0;owned\a \033]52;c;cm0=\a \033[2J \x9b2J \x85 mine\ryours \u202eback \udc9b"
    console = Console(speaks=True)
    for say in (console, console.result, console.warn, tell_error):
        say(f"reading {hostile}\tnow")
    with pytest.raises(SystemExit):
        run_command(lambda: refuse(hostile))
    streams = capsys.readouterr()
    text = streams.out + streams.err
    assert text.count("\n") == 5 and text.count("\\x1b]52;c;cm0=\\x07") == 5 and text.count("\tnow") == 4
    assert "".join(text.split("\n")).replace("\t", "").isprintable()


def test_what_a_url_tells_of_its_user_is_never_printed(capsys):
    console = Console(speaks=True)
    console("reading http://ann:secret@host/a@b, then s3://token-secret@bucket/x and http://host/ann@home")
    console.warn("http://ann:sec@ret@host:8000")  # an @ that should have been %40
    tell_error('target.servers: ["https://ann:sec%40ret@host"]')
    with pytest.raises(SystemExit):
        run_command(refuse)
    streams = capsys.readouterr()
    assert "reading http://***@host/a@b, then s3://***@bucket/x and http://host/ann@home" in streams.out
    assert "sec" not in streams.out + streams.err and streams.err.count("***@host") == 3


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://h/x?token=abc&a=b for it", "see https://h/x?token=***&a=*** for it"),
        ("(https://h/x?X-Amz-Signature=a%2Bb==&flag),", "(https://h/x?X-Amz-Signature=***&***),"),
        ("https://ann:abc@h?sv=1;sig=a/b?c=d", "https://***@h?sv=***;sig=***"),
        ("https://h/cb#access_token=abc&state=1.", "https://h/cb#access_token=***&state=***."),
        ("https://h/x?YWJj== and https://h/y#YWJj", "https://h/x?*** and https://h/y#***"),
        ("'https://h/x?token=it''s'", "'https://h/x?token=***'"),
        ('{"url":"https://h/x?token=abc"}', '{"url":"https://h/x?token=***"}'),
        ("retries exceeded with url: /x?sig=abc (Caused by", "retries exceeded with url: /x?sig=*** (Caused by"),
        ("https://h/x?, what/why? a=b; #1 is c/d#2", "https://h/x?, what/why? a=b; #1 is c/d#2"),
    ],
)
def test_the_values_of_a_urls_query_and_fragment_are_never_printed(capsys, text, shown):
    assert without_passwords(text) == shown
    tell_error(text)
    assert capsys.readouterr().err == f"error: {shown}\n"


def test_masking_takes_no_longer_than_the_text_is_long():
    began = time.process_time()
    for text in ("://" * 50_000, "/a" * 50_000 + "?", "https://h?" + "a=b&" * 20_000, "?" * 100_000, "a" * 100_000):
        without_passwords(text)
    assert time.process_time() - began < 5  # processor seconds; it takes a tenth of one


def test_a_device_without_memory_is_one_line(capsys):
    def exhaust():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    with pytest.raises(SystemExit) as ended:
        run_command(exhaust)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: CUDA out of memory; end what else uses the device, or take a larger one\n"


def refuse(name: str = "http://ann:secret@host"):
    raise UserError(f"{name}: does not answer; start it")


# Launchers
# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    return write_recipe(folder, make_target(folder / "target"))


@pytest.mark.parametrize(
    ("name", "more", "green"), [("plan.py", ("--gpus", 1), "fits"), ("prepare.py", ("--preview", 1), "<|im_end|>")]
)
def test_what_launchers_print_has_colours_on_a_terminal(monkeypatch, launcher, recipe, name, more, green):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert launcher(name, "--recipe", recipe, *more)[0] == 0
    assert re.search(rf"\033\[32m[^\033]*{re.escape(green)}\033\[0m", screen.getvalue())


def test_a_quiet_launcher_prints_the_result_alone(recipe, tmp_path):
    command = (sys.executable, "launchers/prepare.py", "--recipe", str(recipe), f"data.cache_dir={tmp_path}", "--quiet")
    vocabulary = r"a draft vocabulary of 200 covers [\d.]+% of the supervised tokens\n"
    assert re.fullmatch(r"28 training samples, 12 held out\n" + vocabulary, finish(launch(*command)))
