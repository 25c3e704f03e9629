"""Peak CPU memory of a piece of code, as torch's allocator reports it to the profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(run: Callable[[], object]) -> int:
    """Run `run` and return the largest number of bytes its CPU tensors held at one time.

    Counts from what was allocated at the start. Slow: it records every allocation.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            torch.empty(1)
            run()
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    memory = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    memory.sort(key=lambda event: event["ts"])
    totals = [event["args"]["Total Allocated"] for event in memory]
    return max(totals) - totals[0]
