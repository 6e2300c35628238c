"""New records of a growing file of JSON lines, such as the ``metrics.jsonl`` of a training."""

import json
from contextlib import suppress
from typing import Any, Dict, List, Optional, Tuple

from slipway.common.files import AnyPath, open_regular


def read_new_records(
    path: AnyPath, start: Optional[int] = None, limit: int = 1 << 20
) -> Tuple[List[Dict[str, Any]], int]:
    """Return the JSON objects of the whole lines from an offset on, and the offset after them.

    Other lines are skipped. An unreadable file has no new records; one that became shorter is read anew.

    Parameters
    ----------
    start
        The offset that the call before returned; ``None`` skips the present content.
    limit
        Bytes to read at most; a longer line is skipped.
    """
    try:
        with open_regular(path) as stream:
            size = stream.seek(0, 2)
            start = size if start is None else start if start <= size else 0
            stream.seek(start)
            chunk = stream.read(limit)
    except OSError:
        return [], start or 0
    # The last line may still be written.
    end = chunk.rfind(b"\n") + 1 or len(chunk) // limit * limit
    records = []
    for line in chunk[:end].splitlines():
        with suppress(ValueError, RecursionError):
            record = json.loads(line.decode("utf-8"))
            if isinstance(record, dict):
                records.append(record)
    return records, start + end
