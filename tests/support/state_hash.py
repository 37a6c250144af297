"""``python tests/support/state_hash.py FILE...`` prints the sha256 of a state exported as safetensors,
without any code of ours.

The hash covers all tensors of all files in order of their names: name, dtype and shape as JSON, then the raw
bytes, each preceded by its length.  How the tensors are spread over files does not matter; a name that occurs
twice is an error.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from safetensors import deserialize


def state_hash(files: Iterable[str | Path]) -> str:
    """Returns the hex sha256 of the tensors in ``files``.  Raises ValueError for a name that occurs twice, or
    if there is no tensor.
    """
    digest = hashlib.sha256()
    tensors = sorted(
        (item for file in files for item in deserialize(Path(file).read_bytes())), key=lambda item: item[0]
    )
    names = [name for name, _ in tensors]
    if not names or len(set(names)) != len(names):
        raise ValueError(
            f"no tensors, or twice the same: {sorted({name for name in names if names.count(name) > 1})}"
        )
    for name, tensor in tensors:
        about = json.dumps([name, tensor["dtype"], list(tensor["shape"])]).encode()
        for part in (about, tensor["data"]):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


if __name__ == "__main__":
    print(state_hash(sys.argv[1:]))
