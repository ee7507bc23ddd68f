"""What the records of a hang say together, in three lines: what was found, who is behind it, who waits for what."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from onefold.comm.hang_record import MAIN, NAME, Call, HangRecord, LinkRecord
from onefold.cost.text import format_bytes
from onefold.errors import ConfigError, OnefoldError
from onefold.settings.limited import read_json

MOST_NAMED = 4
LIBRARIES = ("/torch/", "/onefold/", "/threading.py", "<frozen ")  # parts of the names of files that are not the user's
WAITING = "/onefold/comm/"  # a stack that goes through it waits for a message


def read_records(folder: Path) -> list[HangRecord]:
    """The records that ranks have written to a folder, or to the folder `records` in it, in rank order."""
    for place in (folder, folder / "records"):
        if found := sorted(place.glob(NAME.format("*"))):
            return sorted(map(read_record, found), key=lambda record: record.rank)
    raise ConfigError(
        f"{folder} has no records of a hang ({NAME.format('…')}); ranks write them when a message does not complete: "
        f"`onefold train` on GPUs to --out, all others to the folder in ONEFOLD_RECORDS, if that is set"
    )


def read_record(path: Path) -> HangRecord:
    """One rank's record. Anyone may have written it: what is no record raises."""
    try:
        said: dict[str, Any] = read_json(path)
        links = tuple(
            LinkRecord(name, tuple(ranks), issued, last, tuple((n, text, age) for n, text, age in unfinished))
            for name, ranks, issued, last, unfinished in said.pop("links")
        )
        stacks = {thread: tuple(Call(*call) for call in calls) for thread, calls in said.pop("stacks").items()}
        return HangRecord(links=links, stacks=stacks, **said)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise OnefoldError(f"{path} is no record of a hang: {type(error).__name__}: {error}") from error


def explain(records: Sequence[HangRecord]) -> list[str]:
    """The three lines."""
    first = min(records, key=lambda record: record.at_s)
    written = {record.rank for record in records}
    silent = list(islice((rank for rank in range(first.world) if rank not in written), MOST_NAMED + 1))
    late = [record for record in records if not _waits(record)]
    waiting = [record for record in records if _waits(record)]
    if silent:
        they = ("have", "they have ended or are") if len(silent) > 1 else ("has", "it has ended or is")
        who = f"{_names(silent)} {they[0]} written no record: {they[1]} stopped; look at the output there first"
    elif late:
        who = "; ".join(f"{_named(one)} waits for no message, it is in {_place(one)}" for one in late[:MOST_NAMED])
    else:
        who = "every rank waits for a message: look at the network between them, and at their devices"
    memory = f"resident {_spread([record.resident_bytes for record in records])}"
    if any(record.device_bytes for record in records):
        memory += f", on the device {_spread([record.device_bytes for record in records])}"
    waits = "; ".join(f"{_named(one)} waits for {_message(one)}, in {_place(one)}" for one in waiting[:MOST_NAMED])
    more = f"; {len(waiting) - MOST_NAMED} more wait" if len(waiting) > MOST_NAMED else ""
    found = re.sub(r"(^rank \d+: )|( \(found by rank \d+\)$)", "", first.finding)
    return [f"found: {found}", f"behind it: {who}", f"the others: {waits or 'none'}{more}; memory: {memory}"]


def _waits(record: HangRecord) -> bool:
    in_message = any(WAITING in call.file for call in record.stacks.get(MAIN, ()))
    return in_message or any(link.unfinished for link in record.links)


def _message(record: HangRecord) -> str:
    """The oldest message that has not completed."""
    oldest = [(link.unfinished[0], link.name) for link in record.links if link.unfinished]
    if not oldest:
        return "a message"
    (number, label, age_s), link = max(oldest, key=lambda one: one[0][2])
    return f"{label} (message {number} on the link {link}) for {age_s:.1f} s"


def _place(record: HangRecord) -> Call | str:
    """The innermost line of the user's own code in the main thread."""
    calls = record.stacks.get(MAIN, ())
    own = tuple(call for call in calls if not any(part in call.file for part in LIBRARIES))
    return (own or calls)[-1] if calls else "no main thread"


def _named(record: HangRecord) -> str:
    return f"rank {record.rank} ({record.host})"


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_NAMED])) + ", …" * (len(ranks) > MOST_NAMED)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _spread(numbers: Sequence[int]) -> str:
    least, most = format_bytes(min(numbers)), format_bytes(max(numbers))
    return least if least == most else f"{least} to {most}"
