"""Names of files and experiments as MLflow can bear them."""

import hashlib
import re

_REFUSED = re.compile(r"[^\w/. -]|(?<=/)\.{1,2}(?=/|$)|(?<=/)(?=/)|/$")
MAX_KEY = 250
"""Characters of a tag's name that MLflow takes."""


def tag_key(name: str) -> str:
    """A tag's name, another one for every name: what MLflow refuses as `:hex:`, and the end of a long one as a digest."""
    key = _REFUSED.sub(lambda match: "".join(f":{ord(character):x}:" for character in match[0]) or "::", name)
    if len(key) <= MAX_KEY:
        return key
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{key[: MAX_KEY - len(digest) - 2].rstrip('/')}:{digest}:"
