"""The page of `moe-opt report`: what it holds, that it needs nothing else, and what is refused."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from dataclasses import replace

import pytest

from megatron_moe_opt.cli.bench.measured_layer import FACTS, conditions, times_table, traffic_table
from megatron_moe_opt.cli.bench.predicted import Predicted
from megatron_moe_opt.cli.bench.recorded_step import RecordedStep
from megatron_moe_opt.cli.bench.saved_report import read_report, write_report
from megatron_moe_opt.cli.report.page import headline, render_page, write_page
from megatron_moe_opt.errors import ConfigurationError
from tests.unit.report_cases import STAGES, Page, made_report, migration_step, mpmoe_step


@pytest.fixture(scope="module")
def page():
    return Page(render_page(made_report()))


def test_it_holds_the_numbers_as_they_are_printed(page):
    report = made_report()
    for table in (times_table(report), traffic_table(report)):
        assert table.title in page.texts
        cells = [*table.headers, *(cell for row in table.rows for cell in row)]
        places = [index for index in range(len(page.cells)) if page.cells[index : index + len(cells)] == cells]
        assert len(places) == 1, table.title
    for line in conditions(report):
        assert line in page.texts
    for fact in ("node0", "NETBOX_INTER_BITS=200000000", "zipf", "2.13.0"):
        assert fact in page.texts


def test_it_holds_what_was_predicted_and_what_was_not(page):
    rows = [page.cells[index : index + 4] for index in range(len(page.cells))]
    assert ["alltoall", "744.0", "731.0", "+1.8%"] in rows
    assert ["monta:O3x4", "377.0", "401.0", "-6.0%"] in rows
    assert ["mpmoe:4:S3", "490.0", "452.0", "+8.4%"] in rows
    assert "Predicted to be fastest: monta:O3x4. Measured to be fastest of those predicted: monta:O3x4." in page.texts
    assert ": expert tensor parallelism 4 cuts experts, which do not travel in parts" in page.texts
    assert "prediction-chart" in [attributes.get("id") for _, attributes in page.elements]

    other = Page(render_page(made_report(predicted=Predicted())))
    assert "prediction-chart" not in [attributes.get("id") for _, attributes in other.elements]
    assert any(text.startswith("Nothing was predicted.") for text in other.texts)
    none = Page(render_page(made_report(predicted=Predicted(missing={"alltoall": "no expert was measured"}))))
    assert ": no expert was measured" in none.texts
    assert not any(text.startswith("Nothing was predicted.") for text in none.texts)


def test_experts_that_travel_have_a_lane_beside_the_schedules():
    page = Page(render_page(made_report(recorded={"expert-migration": migration_step()})))
    (summary,) = {text for text in page.texts if text.startswith("expert-migration. Rank 2: ")}
    assert summary == (
        "expert-migration. Rank 2: 8.0 ms in 1. hop out, level 0; "
        "2. hop back, level 0. Busy ms: "
        "inter 4.0, compute 4.0, experts 3.0. Overlap 0%."
    )
    titles = [text for text in page.texts if text.startswith("all_gather of chunk 0: ")]
    assert titles == ["all_gather of chunk 0: 1.000 to 4.000 ms, 16384 bytes"]


def test_timelines_have_a_bar_for_every_op(page):
    report = made_report()
    ops = [len(step.whole(name).spans) for name, step in report.recorded.items()]
    assert sum(" of chunk " in text and " ms" in text for text in page.texts) == sum(ops) > 100
    assert "alltoall. Rank 0: 950.0 ms in the layer, by its stages." in page.texts
    nothing = Page(render_page(made_report(recorded=report.recorded | {"alltoall": RecordedStep(0, ())})))
    assert "Nothing was recorded of: alltoall." in nothing.texts
    captions = [text for text in page.texts if text.startswith("monta:O3x4. Rank 3: ")]
    seconds = sum(one.seconds for one in report.recorded["monta:O3x4"].timelines)
    assert captions[-1].startswith(
        f"monta:O3x4. Rank 3: {seconds * 1e3:.1f} ms in 1. monta O3 dispatch, 4 chunk(s); 2. "
    )
    without = Page(render_page(made_report(recorded={})))
    assert "Nothing was recorded." in "".join(without.texts)


def test_a_whole_step_has_its_stages_and_the_schedules_where_they_ran():
    """Stock's step is as long as its layer; ours too, however short its schedules are."""
    stock = RecordedStep(0, (), STAGES).whole("alltoall")
    assert stock.seconds == pytest.approx(0.95)
    assert [(one.name, round(one.start, 6), round(one.end, 6)) for one in stock.parts] == [
        ("forward", 0.0, 0.42), ("backward", 0.45, 0.95),
    ]  # fmt: skip
    kinds = [(one.op.kind.value, round(one.start, 6), round(one.end, 6)) for one in stock.spans]
    assert kinds == [
        ("permute", 0.0, 0.01), ("all_to_all", 0.01, 0.2), ("compute", 0.2, 0.25), ("all_to_all", 0.25, 0.4),
        ("permute", 0.4, 0.42), ("permute", 0.45, 0.46), ("all_to_all", 0.46, 0.6), ("gradient", 0.6, 0.7),
        ("all_to_all", 0.7, 0.9), ("permute", 0.9, 0.95),
    ]  # fmt: skip
    of_ours = tuple(replace(one, began=1.0) for one in mpmoe_step(2, "none").timelines[:1])
    ours = RecordedStep(0, of_ours, STAGES).whole("mpmoe:2")
    assert len(ours.spans) == len(of_ours[0].spans) + 4  # rows on the rank; experts are in the schedule
    assert ours.seconds == pytest.approx(0.95) and ours.parts == stock.parts


def test_memory_and_balance(page):
    assert {"61.4 MB", "48 MB", "33.1 MB", "120 MB"} <= set(page.texts)
    assert ": largest 3100, least 310, max over mean 3.03" in page.texts
    assert ": largest 5040, least 3152, max over mean 1.23" in page.texts
    assert {"expert 0: 3100 rows", "rank 7: 3152 rows"} <= set(page.texts)
    nobody_tells = [replace(result, peak_memory_bytes=None) for result in made_report().results]
    assert "This system does not tell." in Page(render_page(made_report(results=tuple(nobody_tells)))).texts


def test_one_rank_sends_nothing():
    results = tuple(replace(result, traffic=(), wire_limit=None) for result in made_report().results)
    assert "Nothing is sent between ranks." in Page(render_page(made_report(results=results))).texts


def test_it_needs_nothing_else(page):
    """No script, no image, no font; links lead to places in the page."""
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "image")
        assert "src" not in attributes and not any(name.startswith("on") for name in attributes)
        for name in ("href", "xlink:href", "aria-labelledby"):
            if attributes.get(name, "").startswith("data:application/json;base64,"):
                trace = json.loads(b64decode(attributes[name].partition(",")[2]))
                assert {"all_to_all", "copy"} <= {event.get("cat") for event in trace["traceEvents"]}
            elif name in attributes:
                assert attributes[name].removeprefix("#") in ids
        if "clip-path" in attributes:
            assert attributes["clip-path"].removeprefix("url(#").removesuffix(")") in ids
    styles = "".join(page.texts)
    assert "@import" not in styles and "url(" not in styles and "http" not in styles


def test_it_is_read_at_400_pixels(page):
    """Its rules say so: what is wider than a narrow window scrolls in its own frame, and long words are broken."""
    (css,) = (text for text in page.texts if "max-width: 1080px" in text)
    screen = css[: css.index("@media print")]
    for rule in (
        ".wide { overflow-x: auto; }",
        "figure { overflow-x: auto; }",
        "h1, h3, p, li, figcaption { overflow-wrap: anywhere; }",
        ".pair { display: flex; flex-wrap: wrap;",
    ):
        assert rule in screen
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements
    inside, frames = [], {"svg": "figure", "table": "div"}
    for tag, attributes in page.elements:
        if tag == "figure" or (tag == "div" and attributes.get("class") == "wide"):
            inside.append(tag)
        elif tag in frames:
            assert inside[-1] == frames[tag]
    fixed = [int(px) for px in re.findall(r"(?<!max-)width: (\d+)px", screen) if int(px) > 400]
    assert fixed == [760]  # of the window from which facts stand in two columns


def test_pictures_have_titles_and_tables_headers(page):
    images = [attributes for tag, attributes in page.elements if tag == "svg" and attributes.get("role") == "img"]
    assert len(images) == 1 + 1 + 3 + 2 + 1 + 2  # times, predictions, timelines, links, memory, balance
    assert all("aria-labelledby" in attributes for attributes in images)
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in page.elements if tag == "th")
    assert ("html", {"lang": "en"}) in page.elements


HOSTILE = "</title><script>alert(1)</script>\"'&amp;"


def test_hostile_names_are_escaped():
    report = made_report()
    settings = replace(report.settings, routing=f"trace:{HOSTILE}", profile=HOSTILE)
    object.__setattr__(settings, "dispatchers", (*settings.dispatchers, HOSTILE))
    results = (*report.results, replace(report.results[1], dispatcher=HOSTILE))
    changes = {
        "settings": settings,
        "results": results,
        "environment": report.environment | {"host": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}},
        "predicted": Predicted({HOSTILE: 1.0}, {HOSTILE: HOSTILE}),
        "recorded": {HOSTILE: report.recorded["monta:O3x4"]},
    }
    text = render_page(made_report(**changes))
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.elements}
    assert page.cells.count(HOSTILE) == 3  # a row of times and one of predictions, a column of traffic
    assert "alert(1)" in text and "<script" not in text


@pytest.mark.parametrize(
    ("ratios", "sentence"),
    [
        ((1.2, 1.1), "None was faster than alltoall: mpmoe took 1.10 of alltoall's time (1.05-1.15)"),
        (
            (1.2, 0.98),
            "None can be told from alltoall: mpmoe took 0.98 of alltoall's time (0.93-1.03); more --steps may tell",
        ),
        (  # one that certainly is comes before one that may be faster
            ((0.8, 0.85, 1.1), 0.9),
            "mpmoe took 0.90 of alltoall's time (0.85-0.95), 2.00 times its wire limit",
        ),
        ((1.2, 0.75), "mpmoe took 0.75 of alltoall's time (0.70-0.80), 2.00 times its wire limit"),
    ],
)
def test_headline(ratios, sentence):
    report = made_report()
    ours = [
        replace(
            report.results[1], dispatcher=name, seconds=(0.375,),
            ratios=ratio if isinstance(ratio, tuple) else (ratio - 0.05, ratio, ratio + 0.05),
        )
        for name, ratio in zip(("monta", "mpmoe"), ratios, strict=True)
    ]  # fmt: skip
    assert headline(replace(report, results=(report.results[0], *ours))) == sentence


def test_what_is_written_is_read_again(tmp_path):
    """Every field, recorded ops among them; and the medians and verdicts that the table shows stand beside."""
    file, page = tmp_path / "layer.json", tmp_path / "report.html"
    recorded = {"expert-migration": migration_step()}
    report = made_report(recorded=made_report().recorded | recorded)
    write_report(file, report)
    assert read_report(file) == report
    content = json.loads(file.read_text())
    assert content["balance"]["of_expert"][0] == 3100 and content["predicted"]["seconds"]["monta:O3x4"] == 0.377
    assert [entry["verdict"] for entry in content["results"][1:3]] == ["faster", "faster"]
    with pytest.raises(ConfigurationError, match="is the file of the benchmark, which it would replace: name another"):
        write_page(file, file)
    for _ in range(2):  # again over the old page
        write_page(file, page)
    assert page.read_text() == render_page(report)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content.update(format="x"), "line 1: not a file of moe-opt bench -o: measure with"),
        (lambda content: content.update(version=0), "version 0 cannot be read"),
        (lambda content: content["nodes"].pop("node_of"), "nodes: node_of is missing"),
        (lambda content: content["settings"].update(tokens="x"), 'settings.tokens: "x" is not an integer of at least'),
        (lambda content: content["settings"].update(tp=True), "settings.tp: true is not an integer of at least 0"),
        (lambda content: content["settings"].update(dtype=1), "settings.dtype: 1 is not of type str"),
        *(
            (lambda content, name=name: content["environment"].pop(name), rf"line \d+, environment: {name} is missing")
            for name in FACTS
        ),
        (lambda content: content["results"][0].update(seconds=[float("nan")]), "seconds.0.: NaN is not above 0"),
        (lambda content: content["results"][0]["seconds"].append(-1), r"results.0..seconds.5.: -1 is not above 0 and"),
        (lambda content: content["results"][1].update(ratios=[0]), "ratios.0.: 0 is not above 0 and finite"),
        (lambda content: content["results"][1].update(ratios=[]), "ratios: nothing was measured"),
        (lambda content: content["results"][1]["wire_limit"].update(seconds=0), "wire_limit.seconds: 0 is not above 0"),
        (lambda content: content["results"][1]["traffic"][0].update(bytes=10**400), "bytes: .* is more than 64 bits"),
        (lambda content: content["results"][2].update(output_difference=10**400), "output_difference: .* not finite"),
        (lambda content: content["predicted"]["seconds"].update(alltoall=0.0), "seconds.alltoall: 0.0 is not above 0"),
        (lambda content: content.update(results=[]), "results: nothing was measured"),
        (lambda content: content["balance"].update(of_rank=[0, 0]), "balance.of_rank: nothing was measured"),
        (lambda content: content["recorded"].update(monta=1), "recorded.monta: 1 is not an object"),
    ],
)
def test_other_files_are_refused(tmp_path, change, sentence):
    file = tmp_path / "layer.json"
    write_report(file, made_report(recorded={}))
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match=sentence):
        write_page(file, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
