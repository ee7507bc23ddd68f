"""The page of a plan: the planner's own figures, served to this machine alone, and readable in a real browser."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import urlencode, urlsplit

import pytest
import tyro

import onefold
from onefold.cli.main import main
from onefold.cli.page import first_values, server_of
from onefold.cli.plan import PlanCommand
from onefold.cost.recommend import recommend
from onefold.cost.states import STATE_COSTS
from onefold.errors import ConfigError
from onefold.planner.page.form import FIELDS, read
from onefold.planner.page.script import Settings, fields, script
from onefold.planner.page.server import Server
from onefold.planner.page.timeline import timeline
from tests.harness.chromium import Chromium, needs_browser

ASKED = PlanCommand(model="llama-3.2-1b", ranks=8, hardware="h100-80")
FLAGS = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
TITLES = ["Memory by stage", "Memory over a step", "Tokens per second against GPUs", "Cost", "To copy"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with server_of(ASKED, ASKED.asked, 0) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


def get(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    """`path` is below the token, or absolute."""
    there = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    there.request(method, path if path.startswith("/") else f"/{server.token}/{path}", headers=headers)
    answer = there.getresponse()
    found = answer.status, answer.headers, answer.read().decode()
    there.close()
    return found


def asked(server: Server, **given: str) -> dict:
    status, _, body = get(server, f"plan?{urlencode({**first_values(ASKED), **given})}")
    return {"status": status, **json.loads(body)}


# -- what it shows -----------------------------------------------------------------------------------------------------


def test_the_page_answers_as_the_command_line_does(server):
    for given in ({}, {"ranks": "64", "hardware": "v100-32"}, {"tp": "2", "stage": "3", "batch": "2"}):
        found = asked(server, **given)
        plan = tyro.cli(PlanCommand, args=found["command"].split()[2:], config=FLAGS).answer().to_dict()
        plan = json.loads(json.dumps(plan))
        assert found["chosen"] == plan["chosen"] and found["recommendation"] == plan["recommendation"]
        assert found["sentences"][0] in found["html"]


def test_all_charts_and_tables_are_of_the_same_figures():
    for model, more in {
        "llama-3.2-1b": {"activations": "auto"}, "gpt2": {"ranks": 4, "tp": 2, "micro_batches": 4},
        "gpt-tiny": {"ranks": 2, "hardware": "laptop"}, "gpt2-1.5b": {"ranks": 4, "hardware": "v100-32", "batch": 2},
    }.items():  # fmt: skip
        view = dataclasses.replace(ASKED, model=model, **more).view()
        for bar in view.bars:
            assert sum(bar.parts.values()) == bar.peak_bytes
        chosen = next(bar for bar in view.bars if bar.chosen)
        assert (chosen.batch, chosen.peak_bytes) == (view.plan.chosen.batch, view.plan.chosen.peak_bytes)
        assert view.timeline is not None
        assert view.timeline.fullest.total + view.plan.chosen.margin_bytes == view.plan.chosen.peak_bytes
        if not more.get("micro_batches"):
            assert view.timeline.seconds == pytest.approx(view.plan.chosen.step_s)
        if view.plan.recommendation.fits and not view.plan.chosen.label.endswith("units"):
            here = [p for curve in view.curves if curve.chosen for p in curve.points if p.ranks == view.plan.ranks]
            assert here[0].tokens_per_s == pytest.approx(view.plan.chosen.tokens_per_s)
            assert here[0].gpu_hours == pytest.approx(view.gpu_hours)
            assert here[0].batch == view.plan.chosen.batch


def test_memory_over_a_step_never_exceeds_the_peak_and_reaches_it_for_every_choice():
    question = dataclasses.replace(ASKED, model="gpt2", batch=2, ranks=4).question()
    for ranked in recommend(question):
        e = ranked.estimate
        found = timeline(e)
        assert found.fullest.total == e.peak_bytes - e.memory.margin
        assert [m.start_s for m in found.moments] == sorted(m.start_s for m in found.moments)
        assert found.seconds == pytest.approx(e.step_s)


def test_the_command_to_copy_has_numbers_as_people_write_them():
    found = PlanCommand(model="gpt2", tokens=3e11, node_link_gb=12.5, params=None).view().command
    assert found == "onefold plan --model gpt2 --node-link-gb 12.5 --tokens 300000000000"


def test_the_python_to_copy_is_made_of_settings_that_shard_takes():
    question = dataclasses.replace(ASKED, batch=1).question()
    for ranked in recommend(question):
        given = fields(ranked.estimate, Settings())
        zero = onefold.Zero(**{name: eval(value, {"onefold": onefold}) for name, value in given.items()})
        assert zero.stage == ranked.estimate.choice.stage and zero.activations == ranked.estimate.choice.activations


def test_the_python_to_copy_is_python_for_every_optimizer_and_mesh():
    for name in STATE_COSTS:
        asked = dataclasses.replace(ASKED, model="gpt2", optimizer=name, tp=2, ranks=8, replica=2, batch=1)
        code = script(recommend(asked.question())[0].estimate, Settings(optimizer=name))
        compile(code, name, "exec")
        assert "onefold.mesh(replica=2, shard=2, tp=2)" in code
    cut = dataclasses.replace(ASKED, model="gpt2", sequence=2, ranks=8, batch=1).view()
    assert "onefold.mesh(shard=4, sequence=2)" in cut.python


def test_a_stage_or_tier_that_is_asked_about_comes_first_with_what_would_be_better(capsys):
    best = dataclasses.replace(ASKED, stage=3, offload="host").answer().recommendation
    assert (best.stage, best.optimizer) == (3, "host")
    assert "it was asked for; stage 1 at batch " in best.reason
    assert main(["plan", "--model", "gpt2", "--ranks", "2", "--stage", "1", "--offload", "disk"]) == 2
    assert "is no choice of the plan" in capsys.readouterr().err


def test_a_slower_network_gives_less_throughput():
    speeds = [
        dataclasses.replace(ASKED, ranks=64, network_gb=rate).answer().chosen.tokens_per_s for rate in (0.1, None)
    ]
    assert speeds[0] < speeds[1]


def test_compiled_blocks_are_faster_and_in_what_is_copied():
    form = {**first_values(ASKED), "hardware": "h200"}
    plain, compiled = (ASKED.asked(read({**form, "compile": said})) for said in ("", "yes"))
    assert compiled.plan.chosen.tokens_per_s > plain.plan.chosen.tokens_per_s
    assert "--compile" in compiled.command and "compile=True" in compiled.python
    assert "ompile" not in plain.command + plain.python


# -- who may ask -------------------------------------------------------------------------------------------------------


def test_only_this_machine_with_the_token_and_the_servers_own_name_is_answered(server):
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32
    assert get(server, "page.css")[0] == 200
    for path in ("/", "/plan", f"/{server.token[:-1]}/", f"/{'x' * 32}/page.css", "//", "*", "http://[", "/%ff"):
        assert get(server, path)[0] in (400, 404), path
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", f"0.0.0.0:{server.server_port}"):
        assert get(server, "page.css", Host=host)[0] == 421, host
    assert get(server, "page.css", Host=f"localhost:{server.server_port}")[0] == 200
    assert get(server, "page.js", method="POST")[0] == 501
    assert get(server, "page.js", method="HEAD")[2] == ""
    assert get(server, "../../etc/passwd")[0] == get(server, "server.py")[0] == 404
    assert get(server, "plan?" + "ranks=1&" * 200)[0] == 400


def test_a_browser_is_told_to_load_and_send_nothing_elsewhere(server):
    _, headers, _ = get(server, "page.js")
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'", "data:"}
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"ranks": "many"}, "ranks", "ranks='many' is not a whole number"),
        ({"ranks": "0"}, "ranks", "ranks=0 is not a positive whole number"),
        ({"model": "gpt-17"}, "model", "model 'gpt-17' is unknown"),
        ({"model": "/no/config.json"}, "", "is not there"),
        ({"tp": "3"}, "", "8 ranks is not a multiple of tp"),
        ({"tp": "4", "model": "qwen2.5-0.5b"}, "heads", "cannot be cut over tp=4"),
        ({"batch": "-1"}, "batch", "batch=-1 is not a whole number"),
        ({"activations": "partition"}, "activations", "tp=1 has none"),
        ({"precision": "fp16", "master": "split"}, "master", "needs compute='bf16'"),
        ({"tokens": "nan"}, "tokens", "is not a positive number"),
        ({"memory_gb": "-4"}, "memory_gb", "is not a positive number"),
        ({"precision": "fp8"}, "precision", "'fp8' is unknown"),
        ({"by": "shape"}, "params", "which model?"),
        ({"nonsense": "1"}, "", "is no field"),
    ],
)
def test_what_cannot_be_is_the_planners_message_and_its_field(server, given, field, said):
    found = asked(server, **given)
    assert found["status"] == 422 and said in found["error"] and found["field"] == field


def test_every_field_is_a_setting_of_the_command():
    names = {field.name for field in dataclasses.fields(PlanCommand)}
    assert FIELDS.keys() - {"by"} <= names
    with pytest.raises(ConfigError):
        read({"model": "x" * 1000})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "99999"], "--port 99999 is not a port"),
        (["--config", "nowhere"], "--serve is for shapes"),
        (["--model", "gpt-17", "--page", "out.html"], "model 'gpt-17' is unknown"),
        (["--page", "out.png"], "is not an .html file"),
        (["--page", "/proc/nowhere/out.html"], "cannot be written"),
        (["--port", "1"], "--port is the port of --serve"),
    ],
)
def test_bad_settings_are_one_line(arguments, said, capsys):
    serve = ["--serve"] if "--page" not in arguments and arguments != ["--port", "1"] else []
    model = [] if {"--model", "--config"} & set(arguments) else ["--model", "gpt2"]
    assert main(["plan", *model, *arguments, *serve]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_a_port_in_use_is_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["plan", "--model", "gpt2", "--serve", "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use; give another" in capsys.readouterr().err


# -- the file ----------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Every tag and attribute of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_a_page_as_a_file_needs_nothing_else_and_no_name_becomes_markup(tmp_path, capsys):
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    (folder / "config.json").write_text(json.dumps(config))
    out = tmp_path / "deep" / "plan.html"
    assert main(["plan", "--model", str(folder), "--ranks", "2", "--hardware", "laptop", "--page", str(out)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"wrote {out} (") and "Choose " in said.out
    page = out.read_text()
    found = Tags(page)
    assert not {"script", "img", "iframe", "form", "input", "button"} & set(found.tags)
    assert not {"style", "src", "onclick", "srcset"} & {name for name, _ in found.attributes}
    assert {value for name, value in found.attributes if name == "href"} == {"data:,"}
    assert re.findall(r"https?:|@import|url\(", page) == []
    assert re.search(r"default-src 'none'; style-src 'sha256-[\w+/=]+'", page)


def test_a_bare_count_and_a_rehearsed_config_have_pages_too(tmp_path, capsys):
    out = tmp_path / "count.html"
    assert main(["plan", "--params", "7.5e9", "--ranks", "64", "--page", str(out)]) == 0
    page = out.read_text()
    assert "Activations are not counted" in page and "Memory over a step" not in page


# -- in a browser ------------------------------------------------------------------------------------------------------

UNLABELLED = """[...document.querySelectorAll("input, select, button")].filter(box =>
  !box.labels?.length && !box.getAttribute("aria-label") && !box.innerText).length"""
LAID_OUT = """({
  width: innerWidth, scroll: document.scrollingElement.scrollWidth,
  titles: [...document.querySelectorAll("h2")].map(h => h.innerText),
  charts: [...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect().width).filter(w => w > 0),
  least: Math.min(...[...document.querySelectorAll("svg text")].map(t => t.getBoundingClientRect().height)
    .filter(h => h > 0)),
  unnamed: document.querySelectorAll("svg:not([aria-label])").length,
  crossed: [...document.querySelectorAll("line.memory")].filter(mark => {
    const of = mark.getBoundingClientRect();
    return [...mark.parentNode.querySelectorAll("text")].map(t => t.getBoundingClientRect()).some(
      t => t.left < of.right && of.left < t.right && t.top < of.bottom && of.top < t.bottom);
  }).length,
  tables: document.querySelectorAll("details table caption").length,
  paper: getComputedStyle(document.body).backgroundColor,
})"""
ANSWERED = """new Promise(done => {
  const look = () => Number(document.body.dataset.answered || 0) >= %d ? done(true) : setTimeout(look, 20);
  look();
})"""


@needs_browser
def test_a_browser_shows_it_at_any_width_by_day_and_night_and_asks_again_for_every_change(server, tmp_path):
    alone = tmp_path / "plan.html"
    assert main(["plan", "--model", "llama-3.2-1b", "--ranks", "8", "--hardware", "h100-80", "--page", str(alone)]) == 0
    with Chromium() as browser:
        for width, dark in ((1280, False), (390, True)):
            browser.look(width=width, dark=dark)
            for address in (server.address, alone.as_uri()):
                browser.open(address)
                seen = browser.ask(LAID_OUT)
                assert (seen["width"], seen["scroll"]) == (width, width)
                assert seen["titles"] == TITLES
                assert len(seen["charts"]) == 4 and min(seen["charts"]) > 250
                assert seen["least"] >= 9, "text in charts is too small to read"
                assert seen["unnamed"] == 0 and seen["tables"] == 3
                assert seen["crossed"] == 0, "the line of the device's memory crosses words"
                assert seen["paper"] == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
        browser.open(server.address)
        assert browser.ask(UNLABELLED) == 0

        # The slider by its keys: twice as many GPUs.
        browser.ask("document.querySelector('[data-for=ranks]').focus()")
        pressed = {"key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39}
        browser.call("Input.dispatchKeyEvent", type="keyDown", **pressed)
        browser.call("Input.dispatchKeyEvent", type="keyUp", **pressed)
        browser.ask(ANSWERED % 1)
        expected = dataclasses.replace(ASKED, ranks=16).view()
        assert browser.ask("form.elements.ranks.value") == "16"
        assert browser.ask("said.textContent") == " ".join(expected.sentences)
        assert browser.ask("document.querySelector('.choice').innerText") == expected.sentences[0]
        assert browser.ask("location.search").startswith("?by=name&model=llama-3.2-1b")
        assert browser.complaints == []

        # A mistake stands beside its field, is spoken, and is gone once it is mended.
        give = "form.elements.tp.value = '%s'; form.elements.tp.dispatchEvent(new Event('input', {bubbles: true}))"
        browser.open(server.address)
        browser.ask(give % 3)
        browser.ask(ANSWERED % 1)
        wrong = browser.ask("[document.getElementById('error-tp').innerText, said.textContent]")
        assert wrong[0] == wrong[1] and wrong[0].startswith("8 ranks is not a multiple of tp")
        assert browser.ask("form.elements.tp.getAttribute('aria-invalid')") == "true"
        browser.ask(give % 2)
        browser.ask(ANSWERED % 2)
        assert browser.ask("document.querySelectorAll('[aria-invalid]').length") == 0
        assert browser.ask("document.querySelector('.choice').innerText").startswith("Choose ")
        assert all("status of 422" in said for said in browser.complaints), "the policy refused something"
        own = [urlsplit(address).netloc for address in browser.requests if not address.startswith(("file:", "data:"))]
        assert set(own) == {f"127.0.0.1:{server.server_port}"}
