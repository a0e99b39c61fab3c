"""The example of docs/doctor.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from islandctl.fleet.checks.base import NodeCheck

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_the_check_of_the_page_is_one() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    assert issubclass(names["Fans"], NodeCheck)
    told = "FAN1 | 30h | ok | 29.1 | {} RPM\n"
    assert names["judge_fans"](told.format(4200)).level == "ok"
    assert names["judge_fans"](told.format(0)).level == "fail"
