"""Token lengths of a large set's records, kept between runs: counting them anew takes minutes."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from d2f.errors import OutputError
from d2f.files import make_folder, writing
from distill.data.data_config import Data
from distill.data.encode import Encoder

BROKEN = -1  # in place of a broken record's lengths
SMALL = 1000  # a set of fewer records is counted faster than a file is worth

Lengths = NDArray[np.int32]


class LengthsFile:
    """Lengths of prompt and response, int32 ``[records, 2]``, under the user's cache folder
    (`XDG_CACHE_HOME`), by the content of the data, of the tokenizer, and of what turns records
    into tokens. A folder that cannot be written is no error: the lengths are counted again."""

    def __init__(self, digest: str, data: Data, encoder: Encoder):
        backend = getattr(encoder.tokenizer, "backend_tokenizer", None)
        layout = None if data.layout is None else data.layout.model_dump()
        self.path: Path | None = None
        if backend is not None:
            # Everything that the counts depend on is in the name: what has changed finds no old
            # file.
            parts = [digest, backend.to_str(), str(encoder.tokenizer.chat_template), layout]
            key = json.dumps([*parts, data.chat_template, encoder.end_id, encoder.mask_id])
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            name = hashlib.sha256(key.encode()).hexdigest()[:32]
            self.path = cache / "d2f-toolkit" / "lengths" / f"{name}.npy"

    def read(self, records: int) -> Lengths | None:
        """What was kept, None where there is nothing that fits."""
        if self.path is None or records < SMALL:
            return None
        try:
            found = np.load(self.path)
        except (OSError, ValueError, EOFError):
            return None
        # A damaged or foreign file is counted as none.
        return found if found.shape == (records, 2) and found.dtype == np.int32 else None

    def write(self, lengths: Lengths) -> None:
        """Keep lengths, whole or not at all."""
        if self.path is None or len(lengths) < SMALL:
            return
        with suppress(OutputError):
            make_folder(self.path.parent)
            with writing(self.path) as file:
                np.save(file, lengths)
