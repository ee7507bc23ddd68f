"""The whole page: as one file that needs nothing else, or with its form, style and script beside it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from urllib.parse import urlencode

from onefold.planner.page.form import written
from onefold.planner.page.results import results, text
from onefold.planner.page.view import View
from onefold.version import VERSION

LIVE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)


def part(name: str) -> str:
    """page.css or page.js."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def alone(view: View) -> str:
    """A file that needs nothing else: no script, no other file, no address. A browser runs and loads nothing in it."""
    style = part("page.css")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
    end = f"Made by Onefold {text(VERSION)}: onefold plan --page."
    return _page(view.title, head, f'<main class="alone">{results(view, live=False)}<footer>{end}</footer></main>')


def live(values: Mapping[str, str], found: View | None, message: str) -> str:
    """The page that a server sends: a form, and the results for the values in it, or why there are none."""
    shown = results(found, live=True) if found is not None else ""
    spoken = " ".join(found.sentences) if found is not None else message
    head = '<link rel="stylesheet" href="page.css"><script src="page.js" defer></script>'
    query = text(urlencode({name: value for name, value in values.items() if value}))
    body = f"""<div class="columns">
<form method="get" action="" aria-label="What is to be planned">
<p class="brand">Onefold plan</p>
<p id="said" role="status" aria-live="polite">{text(spoken)}</p>
{written(values)}<noscript><button>Plan</button></noscript>
<p class="note"><a id="save" href="page.html?{query}" download="plan.html">Save this view as a file</a></p>
</form>
<main id="results">{shown}</main>
</div>"""
    return _page(found.title if found is not None else "Onefold plan", head, body)


def _page(title: str, head: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{text(title)}</title>{head}</head>\n<body>{body}</body></html>\n'
    )
