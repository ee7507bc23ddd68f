"""Names that someone made up, in a report and on the terminal: they are shown, and nothing obeys them."""

from __future__ import annotations

import html.parser
import json
import os
import shlex
import subprocess
import sys
import urllib.parse
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pytest

from onefold.checkpoint.format.manifest import Manifest, ParamRecord
from onefold.checkpoint.format.storage import Storage
from onefold.cli.main import main
from onefold.cli.sample import _shown
from onefold.cli.screen import Screen
from onefold.errors import visible
from onefold.train.report.page import POLICY, command, link
from tests.checkpoint.drive import save
from tests.checkpoint.test_hostile import signed
from tests.harness.patience import PATIENCE_S
from tests.train.browser import BROWSER, needs_browser
from tests.train.written import facts_of, write_profile, write_run

NAMES = {
    "script": "<script>document.title='PWNED'</script>",
    "image": "<img src=x onerror=\"document.title='PWNED'\">",
    "attribute": "\"' onmouseover='document.title=1' x=\"",
    "end of everything": "</title></style></svg></pre></code></body><h1>x</h1><script>document.title='PWNED'</script>",
    "window title": "\x1b]0;PWNED\x07",
    "clear": "\x1b[2J\x1b[H\x9b31m",
    "line": "w\nonefold: PWNED\r\nw",
    "bidi": "\u202eDENWP\u2066",
    "markup": "[red]w[/red] [link=https://example.org]w[/link] \\[bold]w[/bold]",
    "math": "$\\frac{1}{$ $x_2$",
    "bytes": "w\udcff\udc80\x00",
    "style": "</style><style>*{display:none}</style>",
    "entity": "&lt;script&gt; &amp; &#60;",
}
BAD_BYTES = (b"\x1b", b"\x9b", b"\x07", b"\r", b"\x00", "\u202e".encode(), "\u2066".encode())


class Elements(html.parser.HTMLParser):
    """Every element of a page, with its attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile_run(run: Path, names: Sequence[str]) -> Path:
    """Wherever a run folder can hold a name, the next of these."""
    name = cycle(names)
    facts = facts_of(3)
    facts["model"] |= {"name": next(name)}
    facts |= {key: next(name) for key in ("stage_why", "precision", "device")}
    facts["data"] |= {key: next(name) for key in ("source", "left_out", "tokenizer")}
    facts["environment"] |= {"torch": next(name), next(name): next(name), "onefold": next(name)}
    for row in facts["placement"]:
        row |= {key: next(name) for key in ("unit", "optimizer", "gradients", "parameters")}
    facts["plan"]["traffic"] = facts["plan"]["traffic"] | {next(name): 5, next(name): 6}
    rows = write_run(run, steps=4)
    (run / "facts.json").write_text(json.dumps(facts | {"stage": next(name)}))
    warnings = [{"step": 3, "rank": 0, "kind": next(name), "message": next(name)} for _ in names]
    (run / "warnings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in warnings))
    (run / "config.toml").write_bytes("\n".join(f"# {one}" for one in names).encode("utf-8", "replace"))
    for key in ("traffic", "memory"):
        rows[-1][key] = rows[-1][key] | {next(name): 7, next(name): 8}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_profile(run)
    profile = json.loads((run / "profile" / "summary.json").read_text())
    for rank in profile:
        rank["device"] = next(name)
        for step in rank["steps"]:
            step["exposed_ns"] = {next(name): {next(name): 9_000_000}}
    (run / "profile" / "summary.json").write_text(json.dumps(profile))
    return run


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    run = hostile_run(tmp_path_factory.mktemp("hostile") / "run", list(NAMES.values()))
    assert main(["report", str(run)]) == 0
    return run


def test_names_in_a_report_are_text_and_add_no_element(hostile, tmp_path):
    plain = hostile_run(tmp_path / "run", [f"name{number}" for number in range(len(NAMES))])
    assert main(["report", str(plain)]) == 0
    page = (hostile / "report.html").read_bytes()
    found, wanted = Elements(page.decode()), Elements((plain / "report.html").read_text())
    in_charts = {"text", "g", "use", "path", "defs", "tspan"}  # how many depends on the length of a label
    tags = [[tag for tag, _ in one.found if tag not in in_charts] for one in (found, wanted)]
    assert tags[0] == tags[1]
    assert not any(key.startswith("on") for _, attributes in found.found for key in attributes)
    assert [bad for bad in BAD_BYTES if bad in page] == []
    shown = [visible(name, also="\n\t") for name in NAMES.values()]
    assert [name for name in shown if name not in found.text] == [], "each is there to be read"
    assert POLICY in page.decode()


FOLDERS = [
    "javascript:document.title='PWNED'", "<svg onload=alert(1)>", "a\x1b]0;PWNED\x07", "a\nb", "a' ; touch PWNED ; '",
    '"><img src=x onerror=alert(1)>', "\udcff", "#x", "?x", "-rf", "$(touch PWNED)", "data:text/html,x",
]  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_any_name_is_linked_and_quoted(name):
    (tag, attributes), *others = Elements(link(f"{name}/report.html", "its own report")).found
    assert tag == "a" and others == [] and attributes.keys() == {"href"}
    parsed = urllib.parse.urlsplit(attributes["href"] or "")
    assert (parsed.scheme, parsed.netloc, parsed.query, parsed.fragment) == ("", "", "", "")
    assert os.fsdecode(urllib.parse.unquote_to_bytes(attributes["href"] or "")) == f"{name}/report.html"
    (tag, _), *others = Elements(command("sample", name, "--prompt", "def ")).found
    assert tag == "code" and others == []
    said = shlex.split(Elements(command("sample", name, "--prompt", "def ")).text)
    assert said == ["onefold", "sample", visible(name), "--prompt", "def "], "a shell sees no second command"


def test_a_comparison_of_folders_with_odd_names_leads_to_their_pages(tmp_path, capfdbinary):
    runs = tmp_path / "runs"
    for name in (FOLDERS[0], "\udcff\x1b[2J"):
        write_run(runs / name, steps=3, warnings=0)
    assert main(["report", str(runs)]) == 0
    page = Elements((runs / "report.html").read_text())
    links = [attributes["href"] or "" for tag, attributes in page.found if tag == "a"]
    pages = [link for link in links if not link.startswith("#")]
    assert len(pages) == 2 and not any(":" in link for link in pages)
    assert all((runs / os.fsdecode(urllib.parse.unquote_to_bytes(link))).is_file() for link in pages)
    out, err = capfdbinary.readouterr()
    assert [bad for bad in BAD_BYTES if bad in (runs / "report.html").read_bytes() + out + err] == []


@needs_browser
@pytest.mark.parametrize("policy", [POLICY, ""], ids=["as written", "without its policy"])
def test_no_name_runs_in_a_browser(hostile, tmp_path, policy):
    """Also without the policy that forbids scripts: names are escaped, and the policy is a second lock. A name that
    runs sets the page's title."""
    page, before = tmp_path / "page.html", (hostile / "report.html").read_text()
    page.write_text(before.replace(POLICY, policy))
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    after = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S).stdout
    title = Elements(before[before.index("<title>") : before.index("</title>") + 8]).text
    assert Elements(after[after.index("<title>") : after.index("</title>") + 8]).text == title
    assert not {"script", "img"} & {tag for tag, _ in Elements(after).found}


# -- the terminal ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hostile_checkpoint(tmp_path) -> Path:
    """Its manifest says what an attacker can make it say, with a right digest."""
    path = save(Storage(), tmp_path / "run", 1)
    rows = json.loads((path / "manifest.json").read_text())
    rows["about"] = {name: name for name in NAMES.values() if name.isascii()} | {"torch\n\x1b[2J": "2\nfaked: line"}
    rows["extra"] = list(NAMES.values())
    (path / "manifest.json").write_bytes(signed(rows))
    return path


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_inspect_writes_no_byte_that_a_terminal_obeys(hostile_checkpoint, arguments, capfdbinary):
    assert main(["inspect", str(hostile_checkpoint), *arguments]) == 0
    out, err = capfdbinary.readouterr()
    assert [bad for bad in BAD_BYTES if bad in out + err] == []
    assert not any(line.startswith((b"faked", b"onefold: PWNED")) for line in out.splitlines())
    assert b"[red]w[/red]" in out, "markup is shown, not obeyed"


def test_a_tensor_name_with_markup_is_shown_as_it_is(tmp_path, capfdbinary):
    path = save(Storage(), tmp_path, 1)
    rows = json.loads((path / "manifest.json").read_text())
    name = "\\[red]w[/red][link=x]y"
    for record in rows["records"]:
        record["also"] = [name]
    (path / "manifest.json").write_bytes(signed(rows))
    assert isinstance(Manifest.from_json((path / "manifest.json").read_bytes(), "it").records[0], ParamRecord)
    assert main(["inspect", str(path)]) == 0
    assert name.encode() in capfdbinary.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "verify-checkpoint", "report", "sample", "export"])
@pytest.mark.parametrize("name", ["\x1b]0;PWNED\x07", "w\nonefold: PWNED", "\udcff\udc80", "\u202ex"])
def test_an_error_line_is_one_line_whatever_the_path(tmp_path, command, name, capfdbinary):
    more = [str(tmp_path / "out")] if command == "export" else []
    assert main([command, str(tmp_path / name), *more]) == 2
    out, err = capfdbinary.readouterr()
    assert out == b"" and err.startswith(b"onefold: ") and err.count(b"\n") == 1
    assert [bad for bad in BAD_BYTES if bad in err] == []


@pytest.mark.parametrize("name", ["\x1b[2Jrun", "\udcffrun", "[red]run"])
def test_whole_checkpoints_of_odd_names_are_verified_inspected_and_exported(tmp_path, name, capfdbinary):
    run = tmp_path / name
    save(Storage(), run, 1)
    for verb, *flags in (["verify-checkpoint"], ["inspect"], ["verify-checkpoint", "--json"], ["inspect", "--json"]):
        assert main([verb, str(run), *flags]) == 0
    assert main(["export", str(run), str(run / "out")]) == 0
    out, err = capfdbinary.readouterr()
    assert err == b"" and [bad for bad in BAD_BYTES if bad in out] == []


def test_the_screen_of_a_run_shows_names_and_obeys_none(capfdbinary):
    facts = facts_of(3)
    facts["model"]["name"] = facts["data"]["source"] = facts["data"]["left_out"] = "".join(NAMES.values())
    screen = Screen(10)
    screen.began(facts, 0)
    screen.warned([0], NAMES["clear"], NAMES["window title"] + NAMES["markup"])
    screen.ended()
    out, _ = capfdbinary.readouterr()
    assert [bad for bad in BAD_BYTES if bad in out] == [] and out.count(b"\n") == 4
    assert b"[red]w[/red]" in out


def test_what_a_model_writes_is_not_obeyed():
    """A model can be trained to write escape sequences; its run may be someone else's."""
    assert (
        _shown("def f():\n\treturn '\x1b]0;PWNED\x07\r\u202e'") == "def f():\n\treturn '\\x1b]0;PWNED\\x07\\r\\u202e'"
    )


def test_an_argument_that_is_no_text_ends_in_one_line_of_a_real_process(tmp_path):
    command = [sys.executable.encode(), b"-m", b"onefold.cli.main", b"report", os.fsencode(tmp_path) + b"/\xff\x1b[2J"]
    ran = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert (ran.returncode, ran.stdout, ran.stderr.count(b"\n")) == (2, b"", 1), ran.stderr
    assert b"\\udcff\\x1b[2J is no run folder" in ran.stderr
