"""The examples of docs/attach.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "attach.md"


def test_every_example_of_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(names["cells"]) == 2
