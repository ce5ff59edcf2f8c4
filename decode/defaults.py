"""What the library and its commands take where nothing else was said."""

from __future__ import annotations

DEFAULT_MAX_NEW_TOKENS = 256
