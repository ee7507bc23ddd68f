"""The pages of the API are what the docstrings say, leave no public name out, and explain every setting."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

import onefold
from tests.harness import fresh_ranks
from tools import api_reference

SETTINGS = (onefold.Zero, onefold.Precision, onefold.Offload, onefold.LossScale)


def test_the_pages_are_what_the_docstrings_say() -> None:
    assert api_reference.main(["--check"]) == 0


def page_after_an_optimizer() -> tuple[bool, str]:
    onefold.init()
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    onefold.Muon(onefold.shard(torch.nn.Sequential(*layers), stage=1))
    return "step" in vars(onefold.Muon), api_reference.page()


def test_a_page_does_not_depend_on_what_ran_before_it() -> None:
    """torch sets an inherited `step` on the class of every optimizer that is made."""
    [ended] = fresh_ranks(1, page_after_an_optimizer)  # once another optimizer was made, torch does not set it
    was_set, page = ended.value
    assert was_set and page == api_reference.PAGE.read_text()


def test_every_public_name_is_under_one_task() -> None:
    names = [name for task in api_reference.TASKS for name in task.names]
    assert sorted(names) == sorted(onefold.__all__)


def test_every_public_name_of_the_frameworks_is_under_one_task_and_explained_with_an_example() -> None:
    for package in ("onefold.hf", "onefold.lightning"):
        pytest.importorskip({"onefold.hf": "transformers", "onefold.lightning": "lightning"}[package])
        module = importlib.import_module(package)
        names = [f"onefold.{name}" for task in api_reference.FRAMEWORKS for name in task.names]
        assert sorted(n for n in names if n.startswith(package)) == sorted(f"{package}.{n}" for n in module.__all__)
        assert all(">>> " in (getattr(module, name).__doc__ or "") for name in module.__all__)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.__name__)
def test_every_setting_has_a_default_and_an_explanation(settings: type) -> None:
    fields = list(api_reference.Source(settings).fields())
    assert fields
    assert [field.name for field in fields if not (field.default and field.text)] == []


def test_what_is_left_out_as_internal_is_there() -> None:
    for name, members in api_reference.INTERNAL.items():
        if "." not in name or importlib.util.find_spec(name.partition(".")[0]):
            assert members <= set(vars(api_reference.public(name)))


def test_a_page_that_differs_is_named_with_its_line_and_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, other = tmp_path / "api.md", ["--frameworks-page", str(tmp_path / "api-frameworks.md")]
    assert api_reference.main(["--page", str(page), *other]) == 0
    assert page.read_text() == api_reference.PAGE.read_text()
    page.write_text(page.read_text().replace("`prefetch: int", "`prefetch: float"))
    edited = page.read_text()
    assert api_reference.main(["--check", "--page", str(page), *other]) == 1
    said = capsys.readouterr().err
    assert '-- `prefetch: float | Literal["auto"] = 1`:' in said and '+- `prefetch: int | Literal["auto"] = 1`:' in said
    assert "api.md is not what the docstrings say; run `python -m tools.api_reference`" in said
    assert page.read_text() == edited


def test_signatures_and_examples_are_as_they_were_written() -> None:
    page = api_reference.page()
    assert "onefold.shard(model: ModelT, zero: Zero | None = None, /, **fields: Any) -> ModelT\n" in page
    assert "onefold.full_parameters(model: nn.Module, write: bool = False) -> ContextManager[None]\n" in page
    assert "    shard_bytes: int = 5000000000,\n" in page, "a constant by its value"
    assert "- `bucket_bytes: int = 128 << 20`:\n" in page, "a default as it was written"
    assert "- `load_notes" not in page, "internal"
    assert page.count("```pycon\n>>> import ") == page.count("```pycon\n"), "each example imports what it needs"
