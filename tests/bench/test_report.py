"""What a report's CSV says of requests that a replay cut short has sent."""

from __future__ import annotations

import csv
from pathlib import Path

from dualpace.bench.load import LoadRequest
from dualpace.bench.record import RequestRecord
from dualpace.bench.report import write_csv


def test_a_line_names_its_requests_place_in_the_load(tmp_path: Path) -> None:
    sent = [
        RequestRecord(LoadRequest(5, 4, 0.5 * index), 0.0, 1.0, 5, cut=True, index=index)
        for index in (0, 2, 5)
    ]
    write_csv(tmp_path / "r.csv", [(None, sent)])
    with (tmp_path / "r.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["index"], line["arrival_s"]) for line in lines] == [
        ("0", "0.0"), ("2", "1.0"), ("5", "2.5"),
    ]  # fmt: skip
