"""The report of a run: what it says, also if some files are absent, and that it can be read on a phone."""

import base64
import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from unittest import mock
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from limits import HANG_SECONDS
from places import ZERO2
from report_case import HOSTILE, SETS, STEPS, by_context, change, evaluation, figures, started, write_json, write_run
from tiny_run import conversations, make_target, metrics, write_recipe

from eagle3.console import Console
from eagle3.draft.interchange import read_exported
from eagle3.errors import UserError
from eagle3.jobs.train import train
from eagle3.recipe.loading import load_recipe
from eagle3.recipe.schema import Recipe
from eagle3.reporting.advice import advise
from eagle3.reporting.charts import charts, estimated_curve
from eagle3.reporting.plot import MOST_POINTS, Plot, drawn, thinned
from eagle3.reporting.record import read_run
from eagle3.reporting.report import write_card, write_report, write_up
from eagle3.training.run_folder import RunFolder

CHARTS = {"total_loss", "held_out", "loss", "acceptance", "learning_rate", "gradient_norm"}
CHARTS |= {"positions", "contexts", "pay_off", "throughput", "memory", "lengths"}
VOID = {"meta", "img", "br"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """Collects every element with its attributes, and the text outside style and script. Fails if tags do not close in
    order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, text):
        if not {"style", "script"} & {*self.open}:
            self.text += text

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "mine")


def rewrite(run, *more, change_record=lambda record: None):
    """Change each record of metrics.jsonl, and append more."""
    records = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    for record in records:
        change_record(record)
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in [*records, *more]), encoding="utf-8")


def change_recipe(run, **sections):
    recipe = yaml.safe_load(run.recipe.read_text(encoding="utf-8")) | sections
    run.recipe.write_text(yaml.safe_dump(recipe), encoding="utf-8")


def render(folder):
    """The page without its drawings, which take longer."""
    with mock.patch("eagle3.reporting.plot.image", lambda plot, form: b""):
        write_report(folder.path)
    return Page(folder.report.read_text(encoding="utf-8"))


def test_the_page_has_the_runs_numbers_and_every_chart_in_it_and_as_a_file(run):
    assert write_report(run.path) == run.report
    page = Page(run.report.read_text(encoding="utf-8"))
    for number in ("2.77", "2.80", "800k", "320k supervised", "98.70%", "untrained 1.00", "10,100", "TTT", "8,192"):
        assert number in page.text or any(number in chart["alt"] for chart in page.all("img")), number
    for definition in (
        "each weighted 0.8 times the one before, summed",
        "Each TTT step's own loss, without a weight",
        "Tokens produced per pass of the target, if the held-out answers were decoded greedily",
        "Probability that sampling at temperature 1 accepts the draft of each TTT step",
    ):
        assert definition in page.text
    assert {path.stem for path in run.charts.glob("*.png")} == CHARTS and len(page.all("img")) == len(CHARTS)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in run.charts.glob("*.png"))
    for chart in page.all("img"):
        drawing = base64.b64decode(chart["src"].removeprefix("data:image/svg+xml;base64,"))
        assert ElementTree.fromstring(drawing).tag.endswith("svg") and b"<script" not in drawing
    assert run.report.stat().st_size < 2_000_000


def test_a_curve_goes_through_the_runs_numbers(run):
    (plot,) = [plot for plot in charts(read_run(run.path)) if plot.name == "gradient_norm"]
    (axes,) = drawn(plot).axes
    (curve,) = axes.lines
    records = metrics(run.path)
    assert curve.get_xdata().tolist() == [record["step"] for record in records]
    assert curve.get_ydata().tolist() == [record["gradient_norm"] for record in records]
    assert axes.get_yscale() == "log" and axes.get_ylabel() == "norm"


def test_the_key_numbers_are_there_to_be_pasted(run):
    write_report(run.path)
    text = run.summary.read_text(encoding="utf-8")
    assert text in render(run).text
    cells = [re.split(r" ?\| ?", line)[1:-1] for line in text.splitlines()]
    assert cells[0] == ["mine", ""] and cells[1] == ["---", "---"] and {len(row) for row in cells} == {2}
    rows = dict(cells[2:])
    assert rows["target"].startswith("acme/tiny-8B ") and rows["draft"].startswith("123M parameters")
    assert rows["steps"] == "400 of 400" and rows["tokens seen"] == "800k, 320k supervised"
    assert rows["acceptance length"].startswith("2.77 ") and "1.00" in rows["acceptance length"]
    assert rows["decoding speed"].startswith("104.7 tokens/s, 157.9 without the draft: 0.66 times as fast")
    assert "own.jsonl" in rows["data"] and "/home" not in text and rows["peak memory, first rank"].startswith("2.4 GiB")


def test_a_run_with_hardly_any_numbers_has_its_summary_too(run):
    change(run.run, versions={"torch": f"a | b {HOSTILE}"})
    for path in (run.metrics, run.evaluation, run.by_context):
        path.unlink()
    page = render(run)
    assert r"| versions | torch a \| b \<script\>alert(1)\</script\> |" in page.text
    assert "acceptance length |" not in page.text and len(page.all("img")) == 1  # of the sample lengths


def test_the_page_is_well_formed_and_loads_nothing(run):
    page, text = render(run), run.report.read_text(encoding="utf-8")
    assert not page.all("link") and "url(" not in text and "@import" not in text
    for _, attributes in page.elements:
        assert attributes.get("src", "data:").startswith("data:") and not {"href", "xlink:href"} & {*attributes}
        assert not any(name.startswith("on") for name in attributes)
    assert all(len(chart["alt"]) > 20 for chart in page.all("img"))
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:" and not page.all("script")
    assert len(page.all("h1")) == 1 and len(page.all("main")) == 1 and page.all("html") == [{"lang": "en"}]


def test_the_page_has_a_row_for_each_prompt_set_and_none_without(run):
    assert "By prompt set" not in render(run).text
    change(run.evaluation, sets=[*SETS, SETS[1] | {"name": HOSTILE}])
    words = " ".join(render(run).text.split())
    assert "By prompt set, greedy" in words and "mt-bench2.902.80 to 3.002.92809001.500.800.600.400.10" in words
    assert HOSTILE not in run.report.read_text(encoding="utf-8")


def test_text_from_data_is_escaped_wherever_it_stands(run):
    change_recipe(run, model={"target": HOSTILE})
    change(run.run, versions={"torch": HOSTILE})
    page = render(run)
    assert HOSTILE not in run.report.read_text(encoding="utf-8")
    # in an example's tokens and its prompt (twice each), a reason, the recipe, a version; the header has the hub's id
    assert page.text.count(HOSTILE) >= 2 + 2 + 1 + 1 + 1


def test_accepted_rejected_and_own_tokens_are_told_apart_after_a_prompt_that_stands_there_once(run):
    """What a prompt's summary shows of it is hidden while the whole is shown."""
    text = html.unescape(render(run) and run.report.read_text(encoding="utf-8"))
    answer = "<b>A</b><ins> red</ins><ins> square</ins><ins> on</ins><del>↵</del><b> grey</b>"
    assert text.count(answer) == text.count('<span class="opening">') == text.count('<pre class="tokens">') == 2
    assert "details[open] > summary .opening { display: none }" in text


@pytest.mark.parametrize("name", ["recipe", "metrics", "run", "evaluation", "by_context", "config", "all but recipe"])
def test_what_a_run_folder_lacks_is_named_and_the_rest_is_shown(run, name):
    paths = [run.metrics, run.run, run.evaluation, run.by_context, run.export / "config.json", run.recipe]
    lacking = paths[:-1] if name == "all but recipe" else [path for path in paths if path.name.startswith(name)]
    for path in lacking:
        path.unlink()
    page = render(run)
    for path in lacking:
        assert f"{path.relative_to(run.path)}: " in page.text
    assert len(page.all("img")) >= 3 or len(lacking) > 1


def test_numbers_that_are_not_finite_leave_gaps(run):
    unknown = {"loss": None, "step_losses": [None] * 4, "tokens_per_second": None, "memory_gib": None}
    unmeasured = {"acceptance_length": None, "accuracy": [None] * 4}

    def lose(record):
        held_out = record["kind"] == "held_out"
        record |= unmeasured if held_out and record["step"] == STEPS else unknown if record["step"] <= 50 else {}

    skipped = {"step": 9, "kind": "skipped", "gradient_norm": None, "samples": ["ab"]}
    rewrite(run, skipped, change_record=lose)
    with run.metrics.open("a", encoding="utf-8") as file:
        file.write('{"step": 10, "ki')  # cut off by a kill
    change(run.by_context, contexts=[by_context([2, 2, 2, 2, 2])["contexts"][0] | {"interval": None}])
    page = render(run)
    assert len(page.all("img")) == len(CHARTS) and "nan" not in page.text
    assert read_run(run.path).exported["step"] == 300
    # 350 steps of 2,000 tokens at 4,000 a second or so
    assert read_run(run.path).pace.seconds == pytest.approx(175, rel=0.05)
    with run.metrics.open("a", encoding="utf-8") as file:
        file.write("\n")  # so no kill cut it off
    with pytest.raises(UserError, match=r"metrics\.jsonl:\d+: damaged"):
        read_run(run.path)


@pytest.mark.parametrize("loss", [3e38, -3e38, 0.0, 1e-38])
def test_numbers_of_a_run_gone_wrong_are_drawn_too(run, loss):
    wrong = {"loss": loss, "gradient_norm": abs(loss)}
    rewrite(run, change_record=lambda record: record.update(wrong if record["step"] == 8 else {}))
    assert len(render(run).all("img")) == len(CHARTS)
    for plot in charts(read_run(run.path)):
        for axes in drawn(plot).axes:
            assert all(np.isfinite(axes.get_ylim())) and all(np.isfinite(line.get_ydata()).any() for line in axes.lines)


def test_the_draft_is_described_by_the_step_that_was_exported_not_by_the_best(run):
    record = read_run(run.path)
    assert record.exported["step"] == STEPS, "the best, if none was exported"
    assert estimated_curve(record).y.tolist() == pytest.approx([2.8, 2.75, 2.7, 2.7, np.nan], nan_ok=True)
    rewrite(run, *({"step": step, "kind": "exported"} for step in (400, 200)))  # of two, the later one lies there
    assert read_run(run.path).exported["step"] == 200
    assert "at step 200" in render(run).text


def test_passwords_in_the_recipe_stay_out_of_the_page(run):
    change_recipe(
        run,
        target={"backend": "sglang", "servers": ["http://ann:hunter2@host:30000"]},
        data={"train": ["https://ghp_hunter2@host/own.jsonl"]},
        # YAML breaks this line
        hidden_states={"path": "https://host/states?version=3&token=hunter2" + "\u00e9hunter2" * 20},
    )
    write_card(run.path)
    page = render(run)
    assert all("hunter2" not in path.read_text(encoding="utf-8") for path in (run.report, run.card))
    assert "http://***@host:30000" in page.text and "https://***@host/own.jsonl" in page.text
    assert "https://host/states?version=***&token=***" in page.text


def test_only_their_owner_reads_the_passwords_of_a_recipe_and_run_json_has_none(tmp_path):
    url = "https://host/states?token=secret"
    for path, private in ((None, False), (url, True)):
        recipe = Recipe.model_validate(
            {"model": {"target": "demo"}, "hidden_states": {"path": path}, "output": {"dir": tmp_path / str(private)}}
        )
        folder = RunFolder(recipe.output.dir)
        folder.hold("node", print)
        folder.begin(recipe, False, folder.identify(False), {}, print)
        folder.write_run({"why": f"{path}: not there", "processes": [1, None]})
        assert (folder.recipe.stat().st_mode & 0o077 == 0) == private
        assert folder.check(recipe, "yes"), "what is kept is what the recipe says"
        folder.close()
    assert folder.run.read_text(encoding="utf-8").count("token=***: not there") == 1


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("metrics.jsonl", "\n", "\n{\n", ":2: damaged"),
        ("metrics.jsonl", '"loss": ', '"loss": "x", "was": ', r":1: damaged \(loss: .* a valid number, not 'x'\)"),
        ("metrics.jsonl", "{", "\udcc3{", r":1: damaged \('utf-8' codec can't decode .*\); remove that line"),
        ("recipe.yaml", "model", "\udcff", ": not valid YAML .* fix the file"),
        ("evaluation.json", "2.77", "3.77", ": damaged"),
        ("evaluation.json", '"digest"', '"signed"', ": damaged"),
        ("run.json", "0.987", "0.787", ": damaged"),
        ("export/config.json", '_size": 4096', '_size": null', ": hidden_size is null, not a number of 1 or more; fix"),
    ],
)
def test_what_is_damaged_or_was_changed_is_refused_with_its_file_and_line(refused, run, file, old, new, message):
    path = run.path / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8", errors="surrogateescape")
    assert re.search(re.escape(file) + message, refused("report.py", run.path))


def test_a_result_of_another_kind_or_with_another_key_is_refused(refused, run):
    change(run.evaluation, draft_digest=3)
    message = "evaluation.json: damaged (draft_digest: Input should be a valid string, not 3"
    assert message in refused("report.py", run.path)
    shutil.copy(run.by_context, run.evaluation)
    assert "evaluation.json: damaged" in refused("report.py", run.path)


def test_a_result_of_another_draft_or_target_is_named_and_not_shown_until_it_is_judged_again(report, run, tmp_path):
    other = write_run(tmp_path / "other", steps=3)
    change(other.export / "config.json", max_position_embeddings=4096)
    for name in ("evaluation.json", "by_context.json"):
        shutil.copy(other.path / name, run.path / name)
    code, _, error = report(run.path)
    assert code == 0 and error.count("\n") == 2
    text, card = run.report.read_text(encoding="utf-8"), run.card.read_text(encoding="utf-8")
    for name in ("evaluation.json", "by_context.json"):
        assert f"{name}: is of the draft runs/mine/export, not of this run" in html.unescape(text) and name in error
    assert "Acceptance length2.77" not in Page(text).text.replace("\n", "") and "2.77" not in card
    write_json(run.evaluation, evaluation() | {"target_digest": 32 * "1"})
    judged = read_run(run.path)
    assert not judged.evaluation and len(judged.foreign) == 2 and "of the target acme/tiny-8B" in judged.foreign[0]
    write_json(run.evaluation, evaluation())
    write_json(run.by_context, by_context([2.9, 2.8, 2.8, 2.7, 2.7]))
    assert read_run(run.path).foreign == () and "2.77" in render(run).text


def test_what_is_in_the_way_of_the_report_is_said_in_a_line(refused, run):
    run.charts.write_text("mine", encoding="utf-8")
    assert f"error: {run.charts}" in refused("report.py", run.path)
    run.charts.unlink()
    run.report.mkdir()
    assert "is a directory; move away" in refused("report.py", run.path)


def test_the_page_has_acceptance_by_context_in_numbers(run):
    page = render(run)
    for text in ("By context, greedy", "2.60 to 2.80", "draft 2", "8k"):
        assert text in page.text, text
    words = " ".join(page.text.split())
    pays = "drafting pays at all judged contexts (batch 1), nowhere (batch 4)"
    assert f"estimated for 2 x h100 by data sheet; {pays}" in words
    (chart,) = (each["alt"] for each in page.all("img") if each["alt"].startswith("Speed-up by context"))
    for text in ("estimated, batch 4 from 1.00 at 512 to 0.50 at 8k", "measured, batch 1 from 2.00 at 512"):
        assert text in chart


def test_the_options_of_one_run_and_of_a_comparison_are_not_mixed(refused, run):
    for arguments in ([run.path, run.path], [run.path, "--out", run.path], [run.path, "--compare"]):
        refused("report.py", *arguments)


def test_without_matplotlib_the_launcher_says_how_to_install_it(refused, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    assert 'pip install -e ".[report]"' in refused("report.py", run.path)


def test_long_curves_are_drawn_by_the_means_of_equal_runs():
    steps = np.arange(1, 2 * MOST_POINTS + 1, dtype=float)
    values = np.stack((steps, np.where(steps % 2 == 0, np.nan, 7.0)), axis=1)
    few, means = thinned(steps, values)
    assert len(few) == MOST_POINTS
    assert (few == np.arange(1.5, 2 * MOST_POINTS, 2)).all()
    assert (means[:, 0] == few).all() and (means[:, 1] == 7).all()


def test_nothing_looks_wrong_in_a_good_run_nor_in_a_fall_that_chance_explains(run):
    assert advise(read_run(run.path)) == []
    write_json(run.by_context, by_context([2.9, 2.8, 2.5, 2.4, 2.2], half=0.4))
    assert advise(read_run(run.path)) == []


def _with_started(run, **train):
    described = started()
    described["data"]["train"] |= train
    write_json(run.run, described)


def _prepared(truncated=0, **dropped):
    return {"rows": 1000, "truncated": truncated, "empty_answers": 0, "dropped": {}, **dropped}


def _rising(record):
    if record["kind"] == "held_out" and record["step"] == STEPS:
        record["loss"] += 2


def _diverging(record):
    if record["kind"] == "train":
        record["loss"] = 5.0 + record["step"]


COVERED = {"size": 100, "target_size": 4000, "coverage": 0.949}
LEARNT_NOTHING = figures(8, 100, 2.7, [0.8, 0.5, 0.3, 0.1])
LEFT_OUT = _prepared(20, dropped={"empty": 31}, kinds={"empty": "too_long"})
FALLING = by_context([2.9, 2.8, 2.5, 2.4, 1.9])
TROUBLES = {
    "supervised share": (lambda run: _with_started(run, tokens=100_000_000), "4.0%", "data.train"),
    "supervised tokens": (lambda run: _with_started(run, tokens=9000, supervised=4000), "4,000", "data.train"),
    "coverage": (lambda run: change(run.run, vocabulary=COVERED), "94.9%", "model.draft.vocab_size"),
    "left out": (lambda run: _with_started(run, prepared=LEFT_OUT), "31 were dropped", "data.too_long"),
    "held-out loss": (lambda run: rewrite(run, change_record=_rising), "at step 300", "training.epochs"),
    "skipped": (lambda run: rewrite(run, {"step": 9, "kind": "skipped"}), "1 of 400", "training.skip_above_norm"),
    "held out": (lambda run: change(run.evaluation, yielded=1900), "1.90 in decoding", "data.train"),
    "untrained": (lambda run: change(run.evaluation, untrained=LEARNT_NOTHING), "2.70", "training.max_steps"),
    "diverged": (lambda run: rewrite(run, change_record=_diverging), "to 385", "training.learning_rate"),
    "lossless": (lambda run: change(run.evaluation, mismatches=2), "2 of 24", "model.target_dtype"),
    "context": (lambda run: write_json(run.by_context, FALLING), "1.90 at 8k", "model.draft.rope_parameters"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_looks_wrong_is_told_with_its_number_and_the_key_to_change(run, trouble):
    damage, number, key = TROUBLES[trouble]
    damage(run)
    (advice,) = advise(read_run(run.path))
    assert number in advice.finding and key in advice.keys
    page = render(run)
    assert advice.finding in page.text and f"{key}: " in page.text


def test_a_single_point_is_told_in_a_sentence_and_is_no_chart(run):
    change(run.by_context, contexts=by_context([2.9] * 5)["contexts"][:1], pay_off=[])
    few = {"verifications_by_context": [0] * 5}
    rewrite(run, change_record=lambda record: record.update(few if "contexts" in record else {}))
    plots = {plot.name: plot for plot in charts(read_run(run.path))}
    assert not isinstance(plots["contexts"], Plot) and "2.90 at 512" in plots["contexts"].why
    assert isinstance(plots["positions"], Plot) and isinstance(plots["lengths"], Plot)


def test_a_speed_below_one_is_explained_and_one_above_is_not(run):
    change(run.evaluation, seconds_speculative=20.0, seconds_plain=29.0)
    fast = render(run).text
    change(run.evaluation, seconds_speculative=20.0, seconds_plain=9.0)
    slow = render(run).text
    assert "0.45x" in slow and "below 1x" in slow and "below 1x" not in fast


def test_nobody_is_told_to_do_what_is_done_or_what_no_key_does(run):
    """Every turn to be supervised by default, and the demo to use more text."""
    _with_started(run, tokens=9000, supervised=400)
    assert "data.supervise" not in advise(read_run(run.path))[0].keys
    change_recipe(run, data={"supervise": "last_turn"}, model={"target": "demo"})
    (advice,) = advise(read_run(run.path))
    assert "supervise every turn" in advice.change and "data.supervise" in advice.keys


def test_what_was_left_out_is_answered_by_its_reasons_alone(run):
    remedies = {
        "malformed": ("Malformed rows", {"data.malformed"}),
        "too_long": ("raise the length", {"data.max_length", "data.too_long"}),
        "unusable": ("nothing to learn from", {"data.unusable", "data.chat_template"}),
    }
    for kind, (remedy, keys) in remedies.items():
        _with_started(run, prepared=_prepared(dropped={"a reason": 60}, kinds={"a reason": kind}))
        (advice,) = advise(read_run(run.path))
        assert remedy in advice.change and set(advice.keys) == keys
    _with_started(run, prepared=_prepared(60, dropped={"a reason": 9}, kinds={"a reason": "malformed"}))
    (advice,) = advise(read_run(run.path))
    assert {"data.malformed", "data.max_length"} <= set(advice.keys) and "unusable" not in advice.change


def test_the_section_on_data_says_what_was_left_out_and_what_an_epoch_has_of_each_source(run):
    left_out = {"malformed row (unknown role)": 310}
    prepared = _prepared(dropped=left_out, kinds=dict.fromkeys(left_out, "malformed")) | {"empty_answers": 4711}
    source = {"source": f"data/{HOSTILE}.jsonl", "available": 5000, "used": 12500, "tokens": 770_000}
    _with_started(run, prepared=prepared, sources=[source | {"supervised": 98_765}])
    page = render(run).text
    assert "4,711" in page and "Dropped (training): 310 for malformed row (unknown role)." in page
    assert "What an epoch has of each source" in page and "5,00012,500770,00098,765" in re.sub(r"\s", "", page)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed here")
@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_does_not_scroll_sideways(run, tmp_path, width):
    """In a frame of this width, whose widths become the title of the page around it."""
    change(run.run, versions={"a-package": "x" * 300})
    change_recipe(run, tracking={"wandb_project": "y" * 400})
    render(run)
    page = run.report.read_text(encoding="utf-8").replace("<details", "<details open")
    outer = tmp_path / "frame.html"
    frame = f'''<!doctype html><meta charset="utf-8"><title></title>
        <iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(page)}"></iframe>
        <script>onload = () => {{
          const root = document.querySelector("iframe").contentDocument.scrollingElement;
          document.title = root.clientWidth + " " + root.scrollWidth; }};</script>'''
    outer.write_text(frame, encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1600,1000"]
    command = [BROWSER, *options, f"--user-data-dir={tmp_path / 'c'}", "--dump-dom", outer.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True).stdout
    visible, whole = map(int, re.search(r"<title>(.*)</title>", dom)[1].split())
    assert whole <= visible == width


@pytest.fixture(scope="module")
def trained(tmp_path_factory, topology):
    """A real run of four steps, with one conversation that is too long, and half of the others twice an epoch; and its
    recipe."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(
        folder,
        make_target(folder / "target"),
        data={"max_length": 100, "too_long": "drop"},
        training={"max_steps": 4},
        evaluation={"conversations": 1, "every": 2},
    )
    rows = conversations(40)
    rows[3]["messages"][1]["content"] *= 9
    data = folder / "conversations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shares = [f"data.train=[{{path: {data}, weight: 1.5}}]"]
    assert train(load_recipe(recipe, shares), ZERO2, topology, console=Console(speaks=False), finish=write_up)
    return load_recipe(recipe, shares)


def test_a_run_writes_down_what_it_is_made_of(trained):
    folder = RunFolder(trained.output.dir)
    record = json.loads(folder.run.read_text(encoding="utf-8"))
    train_set, held_out = record["data"]["train"], record["data"]["held_out"]
    prepared = train_set["prepared"]
    assert (prepared["rows"], prepared["kept"], prepared["truncated"]) == (40, 39, 0)
    assert list(prepared["dropped"].values()) == [1] and prepared["empty_answers"] == 0
    (source,) = train_set["sources"]
    assert source["available"] + held_out["samples"] == 39
    assert (train_set["samples"], train_set["tokens"]) == (source["used"], source["tokens"])
    assert source["used"] == round(1.5 * source["available"])
    for part in (train_set, held_out):
        assert sum(part["lengths"]["counts"]) == part["samples"]
        assert 0 < part["supervised"] < part["tokens"] <= part["samples"] * part["longest"]
    tensors = read_exported(folder.export)  # which the card beside it does not disturb
    assert record["draft"]["parameters"] == sum(tensor.numel() for tensor in tensors.weights.values())
    assert record["memory"]["estimate_gib"] > 0 and record["steps"] == 4 and not record["continues"]
    assert "/" not in json.dumps(record["target"]) and record["target"]["hub_id"] is None


def test_a_run_ends_with_its_report_and_its_card(trained):
    folder = RunFolder(trained.output.dir)
    page = Page(folder.report.read_text(encoding="utf-8"))
    assert len(page.all("img")) == len(CHARTS - {"contexts", "pay_off"})  # its few positions say nothing by context
    judged = json.loads(folder.evaluation.read_text(encoding="utf-8"))
    assert f"{judged['acceptance_length']:.2f}" in page.text and "Acceptance length" in page.text
    assert f"{judged['acceptance_length']:.2f}" in folder.card.read_text(encoding="utf-8")


def test_a_judge_that_refuses_costs_no_report(trained, topology, monkeypatch):
    folder = RunFolder(trained.output.dir)
    folder.report.unlink()
    folder.card.unlink()
    exports = read_run(folder.path).exports

    def refuse(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    monkeypatch.setattr("eagle3.jobs.evaluate.judge_export", refuse)
    with pytest.raises(UserError, match=r"out of memory on cpu \(CUDA.*\); .* launchers/evaluate\.py"):
        train(trained, ZERO2, topology, "yes", console=Console(speaks=False), finish=write_up)
    assert folder.report.exists() and folder.card.exists()
    assert read_run(folder.path).exports == (*exports, exports[-1])


def test_a_resumed_run_describes_its_later_start_and_tells_of_other_kernels(trained, topology, capsys):
    folder = RunFolder(trained.output.dir)
    before = json.loads(folder.run.read_text(encoding="utf-8"))
    pinned = trained.model_copy(update={"training": trained.training.model_copy(update={"kernels": "plain"})})
    assert train(pinned, ZERO2, topology, "yes")
    after = json.loads(folder.run.read_text(encoding="utf-8"))
    assert after["continues"] and after["started"] >= before["started"]
    assert after["data"] == before["data"] and len(metrics(folder.path)) == 4
    assert (before["kernels"]["full"], after["kernels"]["full"]) == ("cpu", "plain")
    told = "kernels have changed since step 4, so rounding differs (full blocks of attention: cpu, now plain, "
    assert told in capsys.readouterr().err


def test_a_report_that_cannot_be_made_is_told_and_raises_nothing(trained, capsys, monkeypatch):
    folder = RunFolder(trained.output.dir)
    folder.report.unlink()
    folder.report.mkdir()
    write_up(folder.path, Console(speaks=True))
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: no report")]
    assert f"launchers/report.py {folder.path}" in warning
    folder.report.rmdir()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_up(folder.path, Console(speaks=True))
    (notice,) = [line for line in capsys.readouterr().out.splitlines() if "no report" in line]
    assert 'pip install -e ".[report]"' in notice and f"launchers/report.py {folder.path}" in notice
    assert not folder.report.exists() and folder.card.exists()
