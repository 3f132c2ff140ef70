"""The report shows the run's curves and responses, and never takes a response for HTML."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.observe.metrics import REQUIRED_KEYS, MetricsWriter
from braidrl.observe.recorded_rows import write_rollouts
from braidrl.observe.report import MOST_STEPS, Sample, best_and_worst, sample_groups, spread, write_report
from braidrl.observe.rollouts import rollout_path
from tests.observe.made_up import STAGES, before_training, make_run, metrics_of
from tests.tiny import Workshop

EVIL = "<script>alert('owned')</script></pre>&amp; 7"


class Outline(HTMLParser):
    """Collects unclosed elements, scripts and visible text."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts = 0
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "first", 20, EVIL)
    write_report(folder)
    return folder


def report(run: Path) -> str:
    """Return the page without plotly.js, which is embedded completely."""
    html = (run / "report.html").read_text()
    assert get_plotlyjs() in html
    return html.replace(get_plotlyjs(), "")


def outline(run: Path) -> Outline:
    parser = Outline()
    parser.feed(report(run))
    parser.close()
    return parser


def test_page_is_self_contained(run: Path) -> None:
    html = report(run)
    assert not re.search(r'(src|href)="|url\((?!#)|@import|https?://', html)
    assert outline(run).open == []


def test_the_reference_answer_stands_beside_each_sample(run: Path) -> None:
    samples = [sample for group in sample_groups(run) for sample in group.samples]
    assert samples and {sample.answer for sample in samples} <= {str(i) for i in range(4)}
    assert "reference answer" in write_report(run).read_text()


def test_response_text_is_escaped(run: Path) -> None:
    html = report(run)
    assert "<script>alert" not in html
    assert html.count("&lt;script&gt;alert(&#39;owned&#39;)&lt;/script&gt;&lt;/pre&gt;&amp;amp; 7") >= MOST_STEPS
    page = outline(run)
    assert page.scripts == html.count('<figure class="card chart">') + 2


def test_every_metric_has_a_curve(run: Path) -> None:
    html = report(run)
    drawn = "".join(re.findall(r"<figcaption>.*?</figcaption>", html, re.DOTALL))
    short = {key.partition("/")[2] for key in REQUIRED_KEYS} - {""}
    for name in (*short, *STAGES, "avg@8", "pass@8"):
        assert name in drawn, name
    assert all(f"{title}<" in drawn for title in ("Utilisation", "Memory", "Weight updates"))
    charts = [json.loads(result) for result in re.findall(r'<script type="application/json">(.*?)</script>', html)]
    assert sum(len(chart["traces"]) for chart in charts) >= len(REQUIRED_KEYS) - 2
    assert [len(chart["traces"]) for chart in charts if chart["stacked"]] == [len(STAGES)]


def test_headline_numbers_go_from_first_to_last(run: Path) -> None:
    html = (run / "report.html").read_text()
    assert "0.31 → 0.86" in html
    assert "step 0 to 20" in html
    rewards = [metrics_of(step)["reward/mean"] for step in range(1, 21)]
    assert f"{sum(rewards[:5]) / 5:.3g} → {sum(rewards[-5:]) / 5:.3g}" in html


def test_unknown_metric_is_shown_too(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write(metrics_of(step) | {"my/own metric": step})
    writer.close()
    html = write_report(tmp_path).read_text()
    assert "Other metrics (1)" in html and "my/own metric" in html


def test_report_works_with_one_step_one_evaluation_or_none(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    assert "No step has been written yet" in write_report(tmp_path).read_text()
    writer.write(before_training({"eval/test/avg@8": 0.5}))
    assert "at step 0" in write_report(tmp_path).read_text()
    writer.write(metrics_of(1))
    writer.close()
    write_rollouts(rollout_path(tmp_path, 1), Rows({}), [], [])
    assert "1 step, " in write_report(tmp_path).read_text()


def test_a_run_without_generation_shows_no_rollout_curve(workshop: Workshop) -> None:
    supervised = workshop.run(
        "sft", flow="sft", rollout={"samples_per_prompt": 1}, trainer={"steps": 1, "rows_per_update": 4}
    )
    html = report(supervised)
    drawn = "".join(re.findall(r"<figcaption>.*?</figcaption>", html, re.DOTALL))
    assert "loss/actor" in drawn and "tokens/trained" in drawn
    for title in (
        "Reward",
        "Response length",
        "Groups without a signal",
        "Staleness",
        "KL from",
        "Clipped",
        "generated",
    ):
        assert title not in drawn, title


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the folder of a run"):
        write_report(tmp_path)


def test_the_same_held_out_prompts_are_followed_over_time(run: Path) -> None:
    followed = {group.prompt: group.samples for group in sample_groups(run) if group.prompt is not None}
    assert list(followed) == ["2 + 5 = ?", "a"]
    assert [sample.step for sample in followed["a"]] == [5, 10, 15, 20]
    assert followed["a"][0].response == f"{EVIL} (5)"
    assert followed["a"][0].finish_reason == "length"


def test_training_shows_the_first_best_and_the_first_worst_row() -> None:
    samples = [Sample(1, "p", str(i), score, None, None) for i, score in enumerate((0.0, 1.0, -1.0, 1.0, -1.0))]
    assert [sample.response for sample in best_and_worst(samples)] == ["1", "2"]
    assert [sample.response for sample in best_and_worst(samples[1:2])] == ["1"]
    assert best_and_worst([]) == []


def test_steps_are_spread_from_first_to_last() -> None:
    assert spread(range(1, 101), 6) == [1, 21, 41, 60, 80, 100]
    assert spread([3, 4], 6) == [3, 4]
