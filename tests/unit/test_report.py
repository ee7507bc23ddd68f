"""What reports look like."""

from onefold.comm.meter import Flow
from onefold.observe.reports import TrafficReport


def test_columns_stay_apart_however_much_there_is():
    for size in (7, 20_149_084_160, 10**15):
        flow = Flow(calls=1, sent_bytes=size)
        lines = str(TrafficReport({("reduce", "reduce-scatter"): flow}, {"reduce": size})).splitlines()
        assert lines[1].split() == ["reduce", f"{size:,}", f"{size:,}"]
        assert lines[0].index("planned") + len("planned") == len(lines[1])
